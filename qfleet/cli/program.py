"""What all verbs share: an option, and an end that waits neither for threads nor for a GPU."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable

from qfleet.core import exits
from qfleet.core.errors import UserError
from qfleet.core.signals import mark_interrupts
from qfleet.storage.published import CACHE_DIR

THREADS_S = 3.0
"""Seconds that threads which an environment has left running have to end."""


def run_to_end(main: Callable[[], int]) -> int:
    """Run ``main`` as a program, which ends even if an environment has left threads."""
    mark_interrupts()
    try:
        exits.exit_code = main()
    except SystemExit as stop:  # by a signal
        exits.exit_code = stop.code if isinstance(stop.code, int) else 1
        raise
    finally:
        threads = set(threading.enumerate()) - {threading.main_thread()}
        has_threads = not all(thread.daemon for thread in threads)
        if has_threads:
            over = threading.Event()
            atexit.register(over.set)  # Python calls it once those threads have ended
            threading.Thread(target=_end, args=(over,), daemon=True).start()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and not has_threads:
        _leave_gpu()
    return exits.exit_code


def _leave_gpu() -> None:
    """End the program at once: Python would take up to 3 s, and no thread is left to wait for."""
    with contextlib.suppress(KeyError, AttributeError):  # if it was used; its processes end too
        atexit.unregister(sys.modules["torch._inductor.async_compile"].shutdown_compile_workers)
    with contextlib.suppress(Exception):  # a broken pipe
        atexit._run_exitfuncs()
    exits.end_now()


def _end(over: threading.Event) -> None:
    """End the program like Python, but without waiting for threads any longer."""
    if not over.wait(THREADS_S):
        with contextlib.suppress(Exception):  # a broken pipe
            atexit._run_exitfuncs()
        exits.end_now()


def take_cache_dir(argv: list[str]) -> list[str]:
    """Set the folder of local copies of URLs by ``--cache-dir``; return the other words."""
    for i, word in enumerate(argv):
        name, equals, folder = word.partition("=")
        if name == "--cache-dir":
            rest = argv[i + 1 :]
            folder = folder if equals else "".join(rest[:1])
            if not folder or folder.startswith("-"):
                raise UserError("--cache-dir needs a folder")
            os.environ[CACHE_DIR] = folder
            return argv[:i] + (rest if equals else rest[1:])
    return argv
