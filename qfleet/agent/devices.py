"""Devices by name: ``auto``, ``cpu``, ``cuda:1`` …"""

from __future__ import annotations

import torch

from qfleet.core.errors import ConfigError
from qfleet.core.types import EnvSpec
from qfleet.networks.torsos import image_layout


def is_image(spec: EnvSpec) -> bool:
    return image_layout(spec) is not None


def resolve_device(name: str, spec: EnvSpec) -> torch.device:
    """Return a usable device. ``auto``: an accelerator for images; else the CPU is faster."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None and is_image(spec) else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device '{name}' is not available ({reason}); try cpu") from None
    return device
