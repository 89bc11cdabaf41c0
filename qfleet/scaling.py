"""Another number of workers for a run in progress. In: a wish; out: a run that has so many.

Who asks and who trains share nothing but the run's folder. So a wish is a file there: the run looks
for it between its other duties, and takes it away when it has done what it says.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from qfleet.config import Config
from qfleet.errors import ConfigError, UserError
from qfleet.storage.rundir import atomic_write_text, is_locked

FILE = ".workers"
MOST_GROWTH = 4
"""How many times as many workers as it began with a run may have: servers keep calls for them."""
LOOK_S = 0.1
WAIT_S = 120.0
"""How long a run may take to look: it does not while it evaluates."""


def several(workers: int) -> str:
    return f"{workers} worker{'s' if workers != 1 else ''}"


def check(config: Config, workers: int) -> None:
    """Whether a run may have so many."""
    if config.engine != "parameter-server":
        raise ConfigError(
            f"a run on {config.engine} keeps its number of workers; only one on parameter-server "
            "takes others in"
        )
    most = MOST_GROWTH * config.workers
    if not 1 <= workers <= most:
        raise ConfigError(
            f"{workers} workers: a run that began with {config.workers} may have 1 to {most}; for "
            f"other numbers stop it, then: qfleet resume RUN --workers {max(workers, 1)}"
        )


def ask(folder: Path, workers: int, wait_s: float = WAIT_S) -> None:
    """Leave the wish, and wait until the run has seen it."""
    wish = folder / FILE
    if is_locked(folder):
        atomic_write_text(wish, str(workers))
        until_s = time.monotonic() + wait_s
        while time.monotonic() < until_s and is_locked(folder):
            if not wish.exists():
                return
            time.sleep(LOOK_S)
        is_taken = not wish.exists()
        wish.unlink(missing_ok=True)
        if is_taken:
            return
        if is_locked(folder):
            raise UserError(f"'{folder}' did not look for {wait_s:g} s; is it stopped?")
    raise UserError(
        f"nobody trains in '{folder}'; go on with: qfleet resume {folder} --workers {workers}"
    )


def heed(folder: Path, resize: Callable[[int], None]) -> str | None:
    """Do what somebody wishes, if anybody does; what to tell of it."""
    wish = folder / FILE
    try:
        text = wish.read_text()
    except OSError:
        return None
    try:
        resize(int(text))
        said = f"{several(int(text))} from now on"
    except (ValueError, ConfigError) as error:
        said = f"a wish for other workers was refused: {error}"
    forget(folder)
    return said


def forget(folder: Path) -> None:
    """What was wished of an earlier sitting is no wish of this one."""
    with contextlib.suppress(OSError):
        (folder / FILE).unlink(missing_ok=True)
