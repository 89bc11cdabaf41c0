"""CUDA graphs: device work is recorded once and replayed with one launch.

In: a function that launches kernels and never synchronises with the host. Out: a function that does
the same with one launch. Only CUDA (and ROCm, which torch calls CUDA too) can record; elsewhere,
and if a GPU refuses it, the function itself is returned, and ``why_not_recorded`` says why.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence

import torch

WARM_UPS = 3
"""Calls before recording, for lazy initialisation, library heuristics and compilation."""

_STREAMS: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_REFUSED: dict[tuple[torch.device, str], str] = {}
"""Why recordings of a role were refused, until ``why_not_recorded`` has reported it."""


def can_record(device: torch.device) -> bool:
    return device.type == "cuda"


def why_not_recorded(is_wanted: bool, device: torch.device, role: str) -> str | None:
    """Return why the newest recordings of this role were not made; None if they were."""
    if not is_wanted:
        return "as asked"
    if can_record(device):
        return _REFUSED.pop((device, role), None)
    return f"torch cannot record graphs on {device.type}"


def record(
    function: Callable[[], None],
    device: torch.device,
    generators: Sequence[torch.Generator],
    role: str,
) -> Callable[[], None]:
    """Record ``function`` as a graph and return the function that replays it.

    ``function`` is called a few times before, so the caller must undo its effects. ``generators``
    are the random generators that it draws from: every replay advances their state as a call would.
    Recordings of one ``role`` must not be replayed concurrently: matrix libraries keep one scratch
    buffer per stream that they were recorded on, and each role has one stream.
    """
    if not can_record(device):
        return function
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    if (device, role) not in _STREAMS:  # one per role: torch has few and assigns them in turn
        _STREAMS[device, role] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side = _STREAMS[device, role]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            function()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    try:
        # Thread-local, so that other threads may use the device in the meantime.
        with (
            _no_garbage_collection(),
            torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),
        ):
            function()
    except RuntimeError as error:  # by a driver, or by an operation that cannot be recorded
        # The state of a generator is that of a recording in progress; a copy of it is not.
        for generator in generators:
            generator.graphsafe_set_state(generator.clone_state())
        if isinstance(error, torch.OutOfMemoryError):
            raise
        _REFUSED[device, role] = str(error).partition("\n")[0]
        return function
    # Torch has set the generators' device memory on the side stream. On a busy device that may
    # happen after a first replay, on another stream, has set it to the values of that replay.
    torch.cuda.synchronize(device)
    return graph.replay


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector from freeing an earlier run's graph, which would end a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def seconds_per_call(function: Callable[[], None], device: torch.device, calls: int) -> float:
    """Return the device time of one call in seconds, the median over ``calls``."""
    times_s = []
    for _ in range(calls):
        start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times_s.append(start.elapsed_time(end) / 1e3)
    return sorted(times_s)[len(times_s) // 2]
