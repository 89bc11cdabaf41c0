"""The same code on an accelerator. Skipped where there is none; the CPU suite covers the paths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import qfleet
from qfleet.config import Config
from qfleet.core import FIRST, SKIP, TERMINATED, Block, EnvSpec
from qfleet.memory import PrioritizedSampler, Ring
from qfleet.presets import resolve
from qfleet.updaters.local import LocalUpdater
from qfleet.updaters.optimisers import make_optimiser
from qfleet.weights import FlatWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
CUDA = torch.device("cuda")


def updater(name: str, device: torch.device) -> tuple[FlatWeights, LocalUpdater]:
    torch.manual_seed(0)
    weights = FlatWeights(torch.nn.Linear(20, 30).to(device))
    return weights, LocalUpdater(weights, make_optimiser(name, weights.data, 1e-8), 1.0)


@pytest.mark.parametrize("name", ["adam", "rmsprop", "sgd"])
def test_updates_agree_with_the_host_and_bad_gradients_change_nothing(name: str) -> None:
    (host, on_host), (device, on_device) = updater(name, torch.device("cpu")), updater(name, CUDA)
    for step in range(30):
        gradient = torch.randn(host.grad.shape, generator=torch.Generator().manual_seed(step))
        if step % 7 == 3:
            gradient[5] = float("nan")
            before = device.data.clone()
        host.grad.copy_(gradient)
        device.grad.copy_(gradient)
        assert float(on_host.apply(1e-2)["skipped"]) == float(on_device.apply(1e-2)["skipped"])
        if step % 7 == 3:
            assert torch.equal(device.data, before)
    torch.testing.assert_close(device.data.cpu(), host.data, rtol=1e-5, atol=1e-6)


def test_a_ring_on_the_device_equals_one_on_the_host_index_for_index() -> None:
    spec = EnvSpec("toy", (3, 4, 4), "uint8", 3, frame_stack=3)
    random = torch.Generator().manual_seed(1)
    rings = [
        Ring(
            spec, 2, 80, 3, 0.9,
            PrioritizedSampler(40, 2, 0.6, 1e-6, device, torch.Generator(device).manual_seed(0)),
            device,
        )
        for device in (torch.device("cpu"), CUDA)
    ]  # fmt: skip
    for _ in range(15):
        flags = torch.randint(0, 12, (5, 2), generator=random)
        block = Block(
            obs=torch.randint(0, 255, (5, 2, 4, 4), generator=random, dtype=torch.uint8),
            action=torch.randint(0, 3, (5, 2), generator=random),
            reward=torch.randn(5, 2, generator=random),
            flags=((flags == 1) * TERMINATED + (flags == 2) * SKIP + (flags == 3) * FIRST).to(
                torch.uint8
            ),
        )
        for ring in rings:
            ring.extend(block)
    row, env = torch.meshgrid(torch.arange(40), torch.arange(2), indexing="ij")
    host, device = (
        ring.gather(row.reshape(-1).to(ring._flags.device), env.reshape(-1).to(ring._flags.device))
        for ring in rings
    )
    for name in ("obs", "action", "reward", "discount", "next_obs"):
        torch.testing.assert_close(getattr(device, name).cpu(), getattr(host, name))
    drawn = rings[1].sample(64, 0.5)
    assert torch.isfinite(drawn.weight).all()


@pytest.mark.parametrize("algo", ["dqn", "rainbow", "iqn"])
def test_atari_trains_on_the_device(algo: str, tmp_path: Path) -> None:
    config, _ = resolve(
        "ALE/Pong-v5",
        algo,
        fields={
            "steps": 600, "learning_starts": 200, "buffer_size": 2000, "device": "cuda",
            "eval_freq": 0, "n_eval_episodes": 1, "max_episode_steps": 100, "tensorboard": False,
        },
    )  # fmt: skip
    trained = qfleet.train(config=config, run_dir=tmp_path / "run")
    assert trained.result.updates == 100
    assert trained.result.faults == {}
    assert trained.result.peak_device_bytes
    resumed = qfleet.resume(tmp_path / "run", steps=800)
    assert resumed.result.updates == 150


def test_device_auto_takes_the_accelerator_for_images_only() -> None:
    from qfleet.placement import resolve_device

    assert resolve_device("auto", EnvSpec("x", (4, 84, 84), "uint8", 2)).type == "cuda"
    assert resolve_device("auto", EnvSpec("x", (4,), "float32", 2)).type == "cpu"
    assert Config().device == "auto"
