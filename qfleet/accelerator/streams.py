"""Device streams: work that runs concurrently with the work of the current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def has_streams(device: torch.device) -> bool:
    """Return whether a device has concurrent streams, which the pipeline's fast paths need."""
    return device.type in ("cuda", "xpu")


def stream_of(device: torch.device, urgent: bool = False) -> torch.Stream:
    """Return a new stream, with high priority if ``urgent``."""
    return torch.Stream(device=device, priority=-1 if urgent else 0)


@functools.cache
def _stream_for(device: torch.device, role: str) -> torch.Stream:
    """Return the stream of a role. Torch has few streams and assigns them in turn: with a new
    stream per ``SideStream``, two roles could share one."""
    del role
    return stream_of(device)


class SideStream:
    """A second stream. Small kernels leave most of a GPU idle; two streams use more of it.

    Memory stays valid without further bookkeeping (``Tensor.record_stream``), because every
    ``start`` waits for all work queued before it, and the caller waits for the result before the
    burst ends. If the device has no streams, or ``worthwhile`` is False, the work runs at once in
    the current stream.
    """

    def __init__(self, device: torch.device, role: str, worthwhile: bool = True) -> None:
        use_stream = worthwhile and has_streams(device)
        self._stream = _stream_for(device, role) if use_stream else None

    def start(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Start ``work`` after all work queued so far; return a function that waits for its end.

        The current stream waits, not the host: the stream that is current when that function is
        called.
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
