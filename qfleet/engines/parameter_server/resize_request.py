"""Another number of workers for a run in progress. In: a wish; out: a run that has so many.

Who asks and who trains share nothing but the run's folder. So a wish is a file there: the run looks
for it between its other duties, takes it away, and leaves an answer beside it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

from qfleet.config.config import Config
from qfleet.core.errors import QfleetError, UserError
from qfleet.core.files import atomic_write_text
from qfleet.engines.parameter_server.limits import several
from qfleet.storage.checkpoint import has_checkpoint
from qfleet.storage.rundir import is_locked
from qfleet.storage.vacancy import how_to_start_anew

FILE, ANSWER = ".workers", ".workers-answer"
LOOK_S = 0.1
WAIT_S = 120.0
"""How long a run may take to look: it does not while it evaluates."""


def check_training(folder: Path, workers: int) -> None:
    """Whether anybody is there to be asked for so many."""
    if is_locked(folder):
        return
    if has_checkpoint(folder / "checkpoints"):
        mend = f"go on with: qfleet resume {folder}"
    else:
        mend = f"it has no checkpoint, so start it anew with: {how_to_start_anew(folder)}"
    raise UserError(f"nobody trains in '{folder}'; {mend} --workers {max(workers, 1)}")


def workers_now(folder: Path, config: Config) -> int | None:
    """As last agreed in this sitting, or as it began; None if the last answer was a refusal."""
    try:
        said = (folder / ANSWER).read_text()
    except FileNotFoundError:
        return config.workers
    except (OSError, ValueError):
        return None
    number = re.match(r"\d+", said)
    return int(number[0]) if number is not None and said == agreed(int(number[0])) else None


def ask(folder: Path, workers: int, wait_s: float = WAIT_S) -> None:
    """Leave the wish, and wait until the run has answered."""
    check_training(folder, workers)
    wish, answer = folder / FILE, folder / ANSWER
    try:
        answer.unlink(missing_ok=True)
        atomic_write_text(wish, str(workers))
    except OSError as error:
        raise UserError(f"cannot leave a wish in '{folder}': {error.strerror}") from None
    try:
        said = _answer(folder, wait_s)
    finally:
        # Nobody waits for it any more; another's wish stays.
        with contextlib.suppress(OSError, ValueError):
            if int(wish.read_text()) == workers:
                wish.unlink()
    if said != agreed(workers):
        raise UserError(said)


def _answer(folder: Path, wait_s: float) -> str:
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            return (folder / ANSWER).read_text()
        if not is_locked(folder):
            return f"the run in '{folder}' has ended meanwhile"
        time.sleep(LOOK_S)
    return f"'{folder}' did not look for {wait_s:g} s; is it stopped?"


def agreed(workers: int) -> str:
    return f"{several(workers)} from now on"


def handle(folder: Path, resize: Callable[[int], None]) -> str | None:
    """Do what somebody wishes, if anybody does; what to tell of it."""
    wish = folder / FILE
    try:
        workers = int(wish.read_text())
        resize(workers)
        said = agreed(workers)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, QfleetError) as error:
        said = f"a wish for other workers was refused: {error}"
    with contextlib.suppress(OSError):
        wish.unlink(missing_ok=True)
        atomic_write_text(folder / ANSWER, said)
    return said


def forget(folder: Path) -> None:
    """What was wished of an earlier sitting is no wish of this one."""
    for name in (FILE, ANSWER):
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)
