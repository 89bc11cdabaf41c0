"""Checkpoints that were edited and signed again: every checksum holds, the contents need not."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from qfleet.storage.segments import Segments
from qfleet.storage.snapshot import read_snapshot, write_snapshot

Parts = dict[str, Any]
MISSING = object()


def edit(snapshot: Path, change: Callable[[Parts], None]) -> None:
    """Change the parts of a snapshot in its place, and write new checksums."""
    manifest, parts = read_snapshot(snapshot)
    change(parts)
    shutil.rmtree(snapshot)
    snapshot.mkdir()
    write_snapshot(snapshot, parts, manifest.meta, manifest.env_steps)


def put(path: str, value: Any) -> Callable[[Parts], None]:
    """Return a change: set the entry at ``a/b/c``; a function gets the old value."""

    def change(parts: Parts) -> None:
        *parents, key = path.split("/")
        node: Any = parts
        for parent in parents:
            node = node[int(parent) if isinstance(node, list) else parent]
        key = int(key) if isinstance(node, list) else key
        new = value(node[key]) if callable(value) else value
        if new is MISSING:
            del node[key]
        else:
            node[key] = new

    return change


def entries(node: Any, path: str = "", in_list: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the path of every entry below a node, and whether it is inside a list."""
    in_list = in_list or isinstance(node, list)
    items = enumerate(node) if isinstance(node, list) else node.items()
    for key, value in items:
        yield f"{path}{key}", in_list
        if isinstance(value, (dict, list)):
            yield from entries(value, f"{path}{key}/", in_list)


def mutate(parts: Parts, seed: int) -> str:
    """Change one entry at random; return what was done."""
    choice = random.Random(seed)
    path, in_list = choice.choice(list(entries(parts)))
    # A whole section cannot be anything but a dict: the manifest's own check refuses it.
    is_section = "/" not in path
    done = ""

    def changed(old: Any) -> Any:
        nonlocal done
        others: list[Any] = [MISSING, {}, {"unknown": 1}]
        if not is_section:
            others += ["text", None, [], [1, "text"], -1, 2**70, 0.5, float("nan"), True]
        if not is_section and not in_list:  # JSON has no tensors
            others += [torch.zeros(3), *_other_tensors(old, choice)]
        new = choice.choice(others)
        if isinstance(old, dict) and choice.random() < 0.3:
            new = old | {"unknown": torch.ones(2)}
        done = f"seed {seed}: {path} = {_short(old)} → {_short(new)}"
        return new

    put(path, changed)(parts)
    return done


def _other_tensors(old: Any, choice: random.Random) -> list[Any]:
    if isinstance(old, Segments):
        pieces = list(old.tensors)
        others = [Segments(pieces[1:], old.versions[1:])]
        others += [
            Segments([tensor, *pieces[1:]], old.versions)
            for tensor in _other_tensors(pieces[0], choice)
        ]
        return others * 3
    if not isinstance(old, torch.Tensor):
        return []
    scattered = old.clone()
    if old.numel() and old.dtype != torch.bool:
        worst = float("nan") if old.is_floating_point() else torch.iinfo(old.dtype).max
        scattered.view(-1)[choice.randrange(old.numel())] = worst
    others = [old.double(), old.long(), old[None], scattered, scattered, torch.zeros_like(old)]
    others += [old[:-1], torch.cat([old, old[:1]]), old[:1]] if old.dim() else []
    return others * 3


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return str(value)[:50]
