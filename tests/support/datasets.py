"""Datasets for tests: rows of scripted episodes, written by the recorder in small files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from qfleet.config.config import Config
from qfleet.core.types import FIRST, SKIP, TERMINATED, Block, EnvSpec
from qfleet.data.manifest import Dataset, Origin
from qfleet.data.recorder import Recorder
from qfleet.data.rows import PartFile, Rows, concatenate
from qfleet.data.writer import Writer

BOX = EnvSpec("Box-v0", (2,), "float32", 3)
CARTPOLE = EnvSpec("CartPole-v1", (4,), "float32", 2)
STACK = EnvSpec("Stack-v0", (3, 2, 2), "uint8", 3, frame_stack=3)


def scripted_block(
    spec: EnvSpec, rows: int, num_envs: int, seed: int = 0, mean_length: float = 6.0
) -> Block:
    """Return rows of episodes of random lengths that terminate or are truncated, in turn.

    Every observation holds a number of its own, so that a wrong row cannot go unnoticed.
    """
    random = np.random.default_rng(seed)
    flags = np.zeros((rows, num_envs), np.uint8)
    for env in range(num_envs):
        row, terminates = 0, bool(env % 2)
        while row < rows:
            flags[row, env] |= FIRST
            length = 1 + int(random.geometric(1 / mean_length))
            if row + length < rows:
                flags[row + length - 1, env] |= TERMINATED * terminates
                flags[row + length, env] |= SKIP
            row, terminates = row + length + 1, not terminates
    number = np.arange(rows * num_envs).reshape(rows, num_envs)
    shape = (rows, num_envs, *spec.frame_shape)
    digits = np.stack([number // 251**k % 251 for k in range(int(np.prod(spec.frame_shape)))], -1)
    return Block(
        obs=torch.from_numpy(digits.reshape(shape)).to(spec.torch_dtype),
        action=torch.from_numpy(random.integers(spec.num_actions, size=(rows, num_envs))),
        reward=torch.from_numpy(random.normal(size=(rows, num_envs)).astype(np.float32)),
        flags=torch.from_numpy(flags),
        probability=torch.from_numpy(random.random((rows, num_envs)).astype(np.float32)),
    )


def telling_block(rows: int) -> Block:
    """Return rows with CartPole's shapes whose first observation tells the action.

    It is 0 in an episode's first row and 1 in the others.
    """
    block = scripted_block(CARTPOLE, rows, 2)
    first = block.flags & FIRST != 0
    block.action = torch.where(first, 0, 1)
    block.obs = torch.randn(block.obs.shape, generator=torch.Generator().manual_seed(0))
    block.obs[..., 0] = torch.where(first, -1.0, 1.0)
    return block


def pieces_of(block: Block, rows: int) -> list[Block]:
    """Return the block in pieces of ``rows`` rows."""
    names = ["obs", "action", "reward", "flags"]
    names += [] if block.probability is None else ["probability"]
    columns = zip(*(getattr(block, name).split(rows) for name in names), strict=True)
    return [Block(**dict(zip(names, piece, strict=True))) for piece in columns]


def record_block(
    url: Path | str,
    block: Block,
    spec: EnvSpec = BOX,
    *,
    chunk_rows: int = 16,
    part_bytes: int = 4096,
    group_rows: int = 20,
    **env: Any,
) -> Dataset:
    """Record a block in small chunks, groups and files; return the dataset."""
    origin = Origin.of(Config(env=spec.env_id, **env), spec, {"algo": "scripted"})
    writer = Writer(str(url), origin, "test", part_bytes)
    writer.group_rows = group_rows
    failures = list[str]()
    recorder = Recorder(
        writer, spec, block.action.shape[1], lambda *fault: failures.append(str(fault))
    )
    recorder._chunk_rows = chunk_rows
    recorder._chunk = recorder._new_chunk()
    for piece in pieces_of(block, 5):
        recorder.add(piece)
    recorder.close()
    assert not failures
    return Dataset(str(url))


def read_all(dataset: Dataset) -> Rows:
    """Return all rows of a dataset, in the order of its files."""
    groups = []
    for part in dataset.manifest.parts:
        file = PartFile(part, dataset.local(part), dataset.spec)
        groups += [file.read(group) for group in range(len(part.groups))]
    return concatenate(groups)
