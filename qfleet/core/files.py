"""Writing a small file so that readers find the old text or the new one, never a part."""

from __future__ import annotations

import os
from pathlib import Path


def atomic_write_text(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a crash, finds the old text or the new and no mixture."""
    tmp = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        tmp.unlink(missing_ok=True)
        files.write_text(tmp, text)
        files.rename(tmp, path)
        files.sync_folder(path.parent)
    finally:
        tmp.unlink(missing_ok=True)
