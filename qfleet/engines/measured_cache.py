"""The cache of choices that were measured on this machine: a key in, the stored value out.

It is one small JSON file in the user's cache folder. Losing it costs a few seconds of measuring, so
reading and writing it never raise an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qfleet.core.cores import usable_cores
from qfleet.core.files import atomic_write_text


def cache_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "qfleet" / "measured.json"


def recall(kind: str, key: Mapping[str, Any]) -> Any:
    """Return the value stored under this key for this hardware and these versions, or None."""
    entry = _read().get(_name(kind, key))
    return entry.get("value") if isinstance(entry, dict) else None


def remember(kind: str, key: Mapping[str, Any], value: Any) -> None:
    entry = {"kind": kind, "for": {**key, **_machine()}, "value": value}
    with contextlib.suppress(OSError, RuntimeError):  # a read-only home, or none
        cache_path().parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**_read(), _name(kind, key): entry}, indent=1)
        atomic_write_text(cache_path(), text)


def _name(kind: str, key: Mapping[str, Any]) -> str:
    text = json.dumps({"kind": kind, **key, **_machine()}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _machine() -> dict[str, Any]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "none"
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        device = module.get_device_name() if accelerator.type != "mps" else "mps"
    return {
        "accelerator": device,
        "cores": usable_cores(),
        "machine": platform.machine(),
        "torch": str(torch.__version__),
        "qfleet": importlib.metadata.version("qfleet"),
    }


def _read() -> dict[str, Any]:
    try:
        known = json.loads(cache_path().read_text())
    except (OSError, ValueError, RuntimeError):
        return {}  # never written, or damaged: measure again
    return known if isinstance(known, dict) else {}
