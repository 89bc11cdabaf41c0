"""torch's process-wide settings: set for a run, and restored at its end."""

from __future__ import annotations

import torch

from qfleet.agent.devices import is_image
from qfleet.core.cores import usable_cores
from qfleet.core.errors import ConfigError
from qfleet.core.types import EnvSpec


class TorchSettings:
    """The process-wide settings when it was made; ``restore`` sets them again."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._mkldnn = bool(torch.backends.mkldnn.enabled)
        self._precision = torch.get_float32_matmul_precision()
        self._cudnn = (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark)

    def restore(self) -> None:
        torch.set_num_threads(self._threads)
        torch.backends.mkldnn.set_flags(self._mkldnn)  # type: ignore[no-untyped-call]
        torch.set_float32_matmul_precision(self._precision)
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = self._cudnn


def set_threads(threads: int, spec: EnvSpec) -> None:
    """Set torch's threads; 0: all cores for images, at most 2 for small networks.

    Small networks gain nothing from more than two threads and lose on many cores. OMP_NUM_THREADS
    and the cores of this process (taskset) are an upper limit: torch has as many threads now.
    """
    cores = usable_cores()
    if threads > 4 * cores:
        raise ConfigError(f"threads must be ≤ {4 * cores} (4 per core), got {threads}")
    automatic = min(torch.get_num_threads(), cores if is_image(spec) else 2)
    torch.set_num_threads(threads or automatic)
    # oneDNN's product with a transposed operand takes half as long again as the BLAS's own at the
    # size of small MLPs (ARM: 224 against 156 µs for 64×256×256). Convolutions do want it.
    torch.backends.mkldnn.set_flags(is_image(spec))  # type: ignore[no-untyped-call]
