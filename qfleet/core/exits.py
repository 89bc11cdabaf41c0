"""The end of a process that cannot end as Python would end it: some thread never returns."""

from __future__ import annotations

import contextlib
import os
import sys

exit_code = 1
"""What ``end_now`` ends with; the command line sets it once it is known."""


def end_now() -> None:
    """End this process without waiting for a thread or calling what is registered for exits."""
    with contextlib.suppress(Exception):  # a broken pipe
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)
