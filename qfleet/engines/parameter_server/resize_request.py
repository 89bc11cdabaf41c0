"""Change the number of workers of a run in progress (``qfleet scale``).

The process that requests it and the run share only the run's folder. A request is a file there: the
run checks for it between turns of its loop, removes it, and writes an answer beside it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

from qfleet.config.config import Config
from qfleet.core.errors import QfleetError, UserError
from qfleet.core.files import atomic_write_text, read_text
from qfleet.engines.parameter_server.limits import count_workers
from qfleet.storage.checkpoint import has_checkpoint
from qfleet.storage.locks import is_locked
from qfleet.storage.vacancy import how_to_start_anew

FILE, ANSWER = ".workers", ".workers-answer"
LOOK_S = 0.1
WAIT_S = 120.0
"""Deadline of the answer: a run does not check for requests while it evaluates."""


def check_training(folder: Path, workers: int) -> None:
    """Raise UserError, with the command to start it, unless a run is training in the folder."""
    if is_locked(folder):
        return
    if has_checkpoint(folder / "checkpoints"):
        fix = f"continue with: qfleet resume {folder}"
    else:
        fix = f"it has no checkpoint, so start it again with: {how_to_start_anew(folder)}"
    raise UserError(f"no run is training in '{folder}'; {fix} --workers {max(workers, 1)}")


def workers_now(folder: Path, config: Config) -> int | None:
    """Return the workers by the last answer, or at the start; None if that was a refusal."""
    try:
        answer = read_text(folder / ANSWER)
    except FileNotFoundError:
        return config.workers
    except (OSError, ValueError):
        return None
    number = re.match(r"\d+", answer)
    return int(number[0]) if number is not None and answer == agreed(int(number[0])) else None


def ask(folder: Path, workers: int, wait_s: float = WAIT_S) -> None:
    """Write the request, and wait for the run's answer; raise UserError if it is a refusal."""
    check_training(folder, workers)
    request = folder / FILE
    try:
        (folder / ANSWER).unlink(missing_ok=True)
        atomic_write_text(request, str(workers))
    except OSError as error:
        raise UserError(
            f"cannot write the resize request in '{folder}': {error.strerror}"
        ) from None
    try:
        answer = _wait_for_answer(folder, wait_s)
    finally:
        # Remove it if the run has not; the request of another process stays.
        with contextlib.suppress(OSError, ValueError):
            if int(read_text(request)) == workers:
                request.unlink()
    if answer != agreed(workers):
        raise UserError(answer)


def _wait_for_answer(folder: Path, wait_s: float) -> str:
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            return read_text(folder / ANSWER)
        if not is_locked(folder):
            return f"the run in '{folder}' has ended meanwhile"
        time.sleep(LOOK_S)
    return f"the run in '{folder}' did not answer within {wait_s:g} s; is it stopped?"


def agreed(workers: int) -> str:
    return f"{count_workers(workers)} from now on"


def handle(folder: Path, resize: Callable[[int], None]) -> str | None:
    """Call ``resize`` if there is a request, and return the answer; None if there is none."""
    try:
        workers = int(read_text(folder / FILE))
        resize(workers)
        answer = agreed(workers)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, QfleetError) as error:
        answer = f"the request for other workers was refused: {error}"
    with contextlib.suppress(OSError):
        (folder / FILE).unlink(missing_ok=True)
        atomic_write_text(folder / ANSWER, answer)
    return answer


def forget(folder: Path) -> None:
    """Remove request and answer of an earlier process of this run."""
    for name in (FILE, ANSWER):
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)
