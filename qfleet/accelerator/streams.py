"""Queues of a device: work that goes on beside the work of the queue in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def has_streams(device: torch.device) -> bool:
    """Whether work can be queued side by side on a device, which the pipeline's fast parts need."""
    return device.type in ("cuda", "xpu")


def stream_of(device: torch.device, urgent: bool = False) -> torch.Stream:
    """A stream of its own, served before others where ``urgent``."""
    return torch.Stream(device=device, priority=-1 if urgent else 0)


_BESIDE: dict[tuple[torch.device, str], torch.Stream] = {}
"""Torch has few streams and hands them out in turn; with one per role, no two roles share one."""


class SideStream:
    """A second queue. Small kernels leave most of a GPU idle; two queues of them fill more of it.

    Memory stays safe without further bookkeeping, because every ``start`` waits for all that was
    queued before it, and whoever started something waits for it before the burst is over.
    Where a device has one queue only, or two are not ``worthwhile``, work is done on the spot.
    """

    def __init__(self, device: torch.device, role: str, worthwhile: bool = True) -> None:
        self._stream: torch.Stream | None = None
        if worthwhile and has_streams(device):
            if (device, role) not in _BESIDE:
                _BESIDE[device, role] = stream_of(device)
            self._stream = _BESIDE[device, role]

    def start(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Begin ``work``, after all that was queued so far. What comes back waits for its end.

        The waiting is the queue's, not the host's: of the queue in use when it is called.
        """
        if self._stream is None:
            result = work()
            return lambda: result
        device = self._stream.device
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with self._stream:
            result = work()
        done = torch.Event(device)
        done.record(self._stream)

        def wait() -> Result:
            torch.accelerator.current_stream(device).wait_event(done)
            return result

        return wait
