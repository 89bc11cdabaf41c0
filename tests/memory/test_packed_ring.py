"""A packed ring returns the samples of a plain one, on another device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qfleet.core.types import BATCH_FIELDS, FIRST, SKIP, TERMINATED, Batch, Block, EnvSpec
from qfleet.memory.packed_ring import PackedRing, PinnedBuffer
from qfleet.memory.ring import Ring
from support.ring_cases import CPU, prioritized, uniform

STACKED = EnvSpec("stacked", (4, 5, 3), "uint8", 3, frame_stack=4)
SPECS = {
    "stacks": STACKED,
    "vectors": EnvSpec("vectors", (3,), "float32", 3),
    "numbers": EnvSpec("numbers", (), "int64", 3, num_obs_values=9),
}
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])


def fill(ring: Ring, spec: EnvSpec) -> None:
    random = torch.Generator().manual_seed(1)
    for _ in range(15):
        flags = torch.randint(0, 12, (5, 2), generator=random)
        ring.extend(
            Block(
                obs=torch.randint(0, 9, (5, 2, *spec.frame_shape), generator=random).to(
                    spec.torch_dtype
                ),
                action=torch.randint(0, 3, (5, 2), generator=random),
                reward=torch.randn(5, 2, generator=random),
                flags=((flags == 1) * TERMINATED + (flags == 2) * SKIP + (flags == 3) * FIRST).to(
                    torch.uint8
                ),
            )
        )


def bursts(ring: Ring, spec: EnvSpec, priority: float = 9.0) -> list[Batch]:
    """Five draws with new priorities between them, all of them still in use at the end."""
    fill(ring, spec)
    drawn = []
    for count in (7, 64, 1, 64, 30):
        drawn.append(ring.sample(count, 0.5))
        ring.update_priorities(drawn[-1].index, torch.full_like(drawn[-1].reward, priority))
    return drawn


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(
    ("name", "n_steps", "options"),
    [
        ("stacks", 1, {}),
        ("stacks", 3, {}),
        ("stacks", 3, {"compression": "lz4"}),
        ("vectors", 3, {}),
        ("numbers", 1, {}),
    ],
)
@pytest.mark.parametrize("by_priority", [False, True])
def test_samples_are_those_of_a_plain_ring(
    name: str, n_steps: int, options: dict[str, Any], by_priority: bool, device: str
) -> None:
    spec, to = SPECS[name], torch.device(device)

    def batches(factory: Any, **more: Any) -> list[Batch]:
        sampler = prioritized(40, 2) if by_priority else uniform()
        return bursts(factory(spec, 2, 80, n_steps, 0.9, sampler, CPU, **options, **more), spec)

    plain, packed = batches(Ring), batches(PackedRing, to=to)
    for ours, expected in zip(packed, plain, strict=True):
        for field in BATCH_FIELDS:
            column = getattr(ours, field)
            assert column.device.type == device
            assert column.dtype == getattr(expected, field).dtype
            assert torch.equal(column.cpu(), getattr(expected, field)), field


def test_every_different_frame_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stacks of 4 and one step, neighbouring samples share nearly all of their frames."""
    sent = []
    begin = PinnedBuffer.begin

    def count(self: PinnedBuffer, forms: Any) -> Any:
        sent.append(forms[-1].shape[0])
        return begin(self, forms)

    monkeypatch.setattr(PinnedBuffer, "begin", count)
    ring = PackedRing(STACKED, 1, 40, 1, 0.9, uniform(), CPU, to=CPU)
    frames = torch.arange(20, dtype=torch.uint8).view(20, 1, 1, 1).expand(20, 1, 5, 3)
    flags = torch.zeros(20, 1, dtype=torch.uint8)
    ring.extend(Block(frames, torch.zeros(20, 1).long(), torch.zeros(20, 1), flags))
    batch = ring.gather(torch.arange(5, 15), torch.zeros(10, dtype=torch.int64))
    assert batch.obs.shape == (10, 4, 5, 3)
    assert sent == [14]  # rows 2 to 15, instead of 10 × 2 × 4
