"""Closing of an environment: its errors are returned, and it has a deadline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from qfleet.core.errors import one_line
from qfleet.core.signals import FOREIGN_ERRORS, DeadlinePassed, deadline, raise_if_signal
from qfleet.envs.spaces import AnyEnv

CLOSE_S = 5.0
"""Seconds that the environments of a process may take to close."""


def close_env(env: AnyEnv, timeout_s: float = CLOSE_S) -> str | None:
    """Close an environment; return what went wrong, or None."""
    try:
        with deadline(timeout_s):
            env.close()
    except DeadlinePassed:
        return f"did not close within {timeout_s:.3g} s"
    except FOREIGN_ERRORS as error:
        raise_if_signal(error)
        return f"failed to close: {one_line(error)}"
    return None


@contextlib.contextmanager
def closed_on_error(env: AnyEnv) -> Iterator[None]:
    """Close the environment if the block raises, because its caller never gets it."""
    try:
        yield
    except BaseException:
        close_env(env)
        raise
