"""Ranks that hold parts of one network: they are one learner with the whole network."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qfleet
from qfleet.agent.learner import Learner
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import ConfigError
from qfleet.core.types import BATCH_FIELDS, Batch, Block, EnvSpec
from qfleet.engines.all_reduce.inference import SharedInference
from qfleet.engines.all_reduce.mesh import cut_state, join_states
from qfleet.engines.all_reduce.rank import rank_config
from qfleet.engines.all_reduce.replay import SharedReplay
from qfleet.lab.compare import (
    FixedBatches,
    ThreadRanks,
    collect_batches,
    compare,
    initial_weights,
    learn_batches,
)
from qfleet.memory.samplers import UniformSampler
from qfleet.networks.factory import make_network
from qfleet.networks.parallel import stages
from qfleet.networks.parallel.layout import Layout, Piece
from qfleet.networks.parallel.split import split_network
from qfleet.storage.checkpoint import load_checkpoint
from support.configs import tiny_config, tiny_fields

CPU = torch.device("cpu")
UPDATES = 100


class NoSum(ThreadRanks):
    """A negative control: nothing is added up."""

    def sum(self, tensor: Tensor) -> None:
        return


class NoGather(ThreadRanks):
    """A negative control: every rank sees its own part in place of all others."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor] * self.size


class Apart(ThreadRanks):
    """A negative control: the copies of the network do not add their gradients up."""

    def sum(self, tensor: Tensor) -> None:
        tensor.mul_(self.size)


def learn(config: Config, *kinds: Any) -> tuple[dict[str, Tensor], list[dict[str, int]]]:
    """Return the whole state after the updates, with the losses, and the bytes of each rank."""
    spec, batches = collect_batches(config.replace(engine="serial"), UPDATES)
    generator = torch.Generator().manual_seed(3)
    for batch in batches:  # as if they had been drawn by priority
        batch.weight.uniform_(generator=generator)
    found: dict[str, Tensor] = {}
    has_ranks = config.engine == "all-reduce"
    held: list[dict[str, int]] = [{} for _ in range(config.workers if has_ranks else 1)]
    losses: list[list[float]] = [[] for _ in held]

    def keep(
        rank: int, learner: Learner, _: FixedBatches, whole: Callable[[Tensor], Tensor]
    ) -> None:
        losses[rank].append(learner.read_metrics()["loss"])
        if len(losses[rank]) < UPDATES:
            return
        state = learner.state_dict()
        vectors = {
            "weights": state["weights"],
            "target_weights": state["target_weights"],
            "gradient": learner.weights.grad,
            "first": state["optimiser"]["first"],
            "second": state["optimiser"]["second"],
        }
        held[rank] = {name: vector.nbytes for name, vector in vectors.items()}
        joined = {name: whole(vector).clone() for name, vector in vectors.items()}
        if rank == 0:
            found.update(joined)

    learn_batches(config, spec, batches, initial_weights(config, spec), keep, *kinds)
    found["loss"] = torch.tensor(losses, dtype=torch.float64).mean(
        0
    )  # of a batch: the mean of all parts
    return found, held


def whole_and_split(
    workers: int, tensor_parallel: int, pipeline_parallel: int, *kinds: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, int]]]:
    serial = tiny_config(
        algo="double-dqn", precision="fp64", batch_size=32, learning_rate=1e-3, steps=10_000,
        prioritized_replay=True, target_update_interval=80, engine="serial", net_arch=(16, 12),
        max_grad_norm=0.5, dueling=True,
    )  # fmt: skip
    split = serial.replace(
        engine="all-reduce",
        workers=workers,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
    )
    return learn(serial)[0], *learn(split, *kinds)


# A torso 4 → 16 → 12 and streams 12 → 2 and 12 → 1. Weights that ranks hold: those of a layer that
# is split by outputs have a part of its bias, those of one that is split by inputs all of it.
TORSO, STREAMS = (4 * 16 + 16) + (16 * 12 + 12), (12 * 2 + 2) + (12 + 1)
HALF_TORSO, HALF_STREAMS = (4 * 16 + 16) // 2 + 16 * 12 // 2 + 12, (12 * 2 + 2) // 2 + 6 + 1
HELD = {
    (2, 2, 1): [HALF_TORSO + HALF_STREAMS] * 2,
    (4, 2, 1): [HALF_TORSO + HALF_STREAMS] * 4,
    (2, 1, 2): [16 * 4 + 16, TORSO - 16 * 4 - 16 + STREAMS],
    (4, 1, 2): [16 * 4 + 16, TORSO - 16 * 4 - 16 + STREAMS] * 2,
    (4, 2, 2): [HALF_TORSO] * 2 + [HALF_STREAMS] * 2,
    (8, 2, 2): ([HALF_TORSO] * 2 + [HALF_STREAMS] * 2) * 2,
}
"""Ranks, parts of layers and stages → weights of each rank."""


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(mesh, marks=pytest.mark.slow if mesh[1] * mesh[2] > 2 else ()) for mesh in HELD],
    ids=str,
)
def test_parts_of_a_network_are_the_whole_network(mesh: tuple[int, int, int]) -> None:
    """In float64, after 100 updates of double DQN with Adam, clipping and a target network."""
    whole, split, held = whole_and_split(*mesh)
    for name, theirs in whole.items():
        torch.testing.assert_close(split[name], theirs, rtol=0, atol=1e-10, msg=name)
    assert held == [dict.fromkeys(held[0], 8 * size) for size in HELD[mesh]]


@pytest.mark.parametrize(
    ("mesh", "ranks", "tensor_ranks"),
    [
        ((4, 2, 1), ThreadRanks, NoSum),
        ((4, 2, 1), ThreadRanks, NoGather),
        ((4, 2, 1), Apart, ThreadRanks),
        ((4, 1, 2), Apart, ThreadRanks),
        pytest.param((4, 2, 2), ThreadRanks, NoSum, marks=pytest.mark.slow),
    ],
)
def test_without_an_exchange_they_are_not(
    mesh: tuple[int, int, int], ranks: type[ThreadRanks], tensor_ranks: type[ThreadRanks]
) -> None:
    whole, split, _ = whole_and_split(*mesh, ranks(mesh[0]), tensor_ranks)
    assert (split["weights"] - whole["weights"]).abs().max() > 1e-4


@pytest.mark.parametrize(
    "mesh", [(2, 1, 2), pytest.param((4, 2, 2), marks=pytest.mark.slow)], ids=str
)
def test_without_the_gradient_of_the_next_stage_they_are_not(
    mesh: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = stages._Send.backward

    def without(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        received, none = send(ctx, grad)
        return torch.zeros_like(received), none

    monkeypatch.setattr(stages._Send, "backward", staticmethod(without))
    whole, split, _ = whole_and_split(*mesh)
    assert (split["weights"] - whole["weights"]).abs().max() > 1e-4


def test_the_command_that_compares_knows_parts_of_networks() -> None:
    config = tiny_config(engine="serial", batch_size=32, precision="fp64")
    split = config.replace(engine="all-reduce", workers=2, tensor_parallel=2)
    assert max(compare(config, split, 20).relative) < 1e-12
    with pytest.raises(ConfigError, match="different networks"):
        compare(config, split.replace(net_arch=(8,)), 1)


def test_all_ranks_skip_a_gradient_that_is_not_finite() -> None:
    config = tiny_config(engine="all-reduce", workers=4, tensor_parallel=2, batch_size=32)
    spec, batches = collect_batches(config.replace(engine="serial"), 3)
    batches[1].reward[20] = torch.nan  # in the samples of the second copy
    weights: dict[int, list[Tensor]] = {rank: [] for rank in range(4)}

    def keep(rank: int, learner: Learner, *_: Any) -> None:
        weights[rank].append(learner.weights.data.clone())

    learn_batches(config, spec, batches, initial_weights(config, spec), keep)
    for first, second, third in weights.values():
        assert torch.equal(first, second)
        assert not torch.equal(second, third)
        assert torch.isfinite(third).all()


# --- batches and actions ----------------------------------------------------------------------


def test_every_rank_learns_from_what_its_peers_have_drawn() -> None:
    """Two batches of six: of each, a rank draws three samples, and gets their priorities."""
    spec = EnvSpec("numbers", (1,), "float32", 2)
    peers, drawn, updated = ThreadRanks(2), dict[int, Batch](), dict[int, Tensor]()

    def draw(rank: int) -> None:
        group: Any = SimpleNamespace(exchanges=False)
        sampler = UniformSampler(torch.Generator().manual_seed(rank))
        ring = SharedReplay(group, spec, 2, 40, 1, 0.99, sampler, CPU, peers=peers, share=3)
        shape = (8, 2)
        flags, obs = torch.zeros(shape, dtype=torch.uint8), torch.zeros(*shape, 1)
        rewards = torch.full(shape, float(rank))
        ring.extend(Block(obs, torch.ones(shape).long(), rewards, flags))
        drawn[rank] = ring.sample(12, 1.0)
        ring.sampler = SimpleNamespace(update=lambda index, _: updated.update({rank: index}))  # type: ignore[assignment]
        ring.update_priorities(torch.arange(6), torch.arange(6.0))

    peers.run(draw)
    assert drawn[0].reward.tolist() == [0, 0, 0, 1, 1, 1] * 2
    for name in BATCH_FIELDS:
        assert torch.equal(getattr(drawn[0], name), getattr(drawn[1], name))
    assert [updated[rank].tolist() for rank in (0, 1)] == [[0, 1, 2], [3, 4, 5]]


def test_ranks_act_together_in_their_own_environments() -> None:
    """The actions are those of the whole network, also while one rank explores only."""
    config, spec = tiny_config(net_arch=(8, 8)), EnvSpec("vector", (4,), "float32", 3)
    whole = make_network(config, spec, CPU, 5)
    states = np.random.default_rng(1).normal(size=(2, 6, 4)).astype(np.float32)
    peers, chosen, lock = ThreadRanks(2), dict[int, Any](), threading.Lock()

    def act(rank: int) -> None:
        with lock:  # the weights are drawn from torch's global generator
            network = make_network(
                config, spec, CPU, 5, lambda n: split_network(n, peers, ThreadRanks(1))
            )
        inference = SharedInference(peers, network, CPU, spec.obs_dtype, 0)
        obs, opened = states[rank], np.zeros(6, dtype=np.bool_)
        chosen[rank] = inference.choose(0, 0, 0, slice(0, 6), obs, opened, needed=rank == 0)

    peers.run(act)
    for rank in (0, 1):
        expected = whole.q_values(torch.from_numpy(states[rank])).argmax(1)
        assert chosen[rank].tolist() == expected.tolist()
    assert chosen[0].tolist() != chosen[1].tolist()


# --- checkpoints ------------------------------------------------------------------------------


def test_a_state_is_cut_and_joined_for_any_number_of_ranks() -> None:
    pieces = [Piece("weight", (8, 4), 0), Piece("bias", (4,), None), Piece("last", (4, 8), 1)]
    size = 8 * 4 + 4 + 4 * 8
    numbers = torch.arange(float(size))
    whole = {
        "weights": numbers,
        "target_weights": numbers + 0.5,
        "optimiser": {"first": -numbers, "steps": torch.tensor(3.0)},
        "lr_scale": 1.0,
    }
    for ranks in (2, 4):
        layout = Layout(pieces, ranks)
        parts = [cut_state(whole, layout, rank) for rank in range(ranks)]
        assert all(len(part["weights"]) == layout.local_size(0) < size for part in parts)
        assert parts[0]["weights"][:4].tolist() == [0, 1, 2, 3]
        assert parts[1]["weights"][0] == 8 // ranks * 4
        joined = join_states(parts, layout)
        for name in ("weights", "target_weights"):
            assert torch.equal(joined[name], whole[name])  # type: ignore[arg-type]
        assert torch.equal(joined["optimiser"]["first"], -numbers)
        assert joined["optimiser"]["steps"] == 3


def learner_of(run: Path) -> dict[str, Any]:
    return load_checkpoint(run / "checkpoints").parts["learner"]


@pytest.mark.slow
def test_a_run_resumes_with_any_other_split(tmp_path: Path) -> None:
    """Ranks collect and draw as they do without a split, so the whole run is the same one."""
    told = tiny_fields(
        engine="all-reduce", workers=2, envs=2, device="cpu", learning_starts=64, train_freq=8,
        buffer_size=300, target_update_interval=100, steps=240, precision="fp64", eval_freq=120,
    )  # fmt: skip
    half = qfleet.RunOptions(stop_after=144)
    whole = qfleet.train("CartPole-v1", run_dir=tmp_path / "whole", **told)
    split = told | {"tensor_parallel": 2}
    qfleet.train("CartPole-v1", run_dir=tmp_path / "split", options=half, **split)
    shutil.copytree(tmp_path / "split", tmp_path / "stages")
    shutil.copytree(tmp_path / "split", tmp_path / "joined")
    shutil.copytree(tmp_path / "split", tmp_path / "four")
    qfleet.resume(tmp_path / "split")
    qfleet.resume(tmp_path / "joined", tensor_parallel=1)
    qfleet.resume(tmp_path / "stages", tensor_parallel=1, pipeline_parallel=2)
    theirs = learner_of(tmp_path / "whole")
    for name in ("split", "joined", "stages"):
        ours = learner_of(tmp_path / name)
        for vector in ("weights", "target_weights"):
            torch.testing.assert_close(ours[vector], theirs[vector], rtol=0, atol=1e-10)
        policy = qfleet.load(tmp_path / name)
        assert policy.predict(np.zeros(4, dtype=np.float32))[0] in (0, 1)
    other = qfleet.resume(tmp_path / "four", workers=4, tensor_parallel=2)
    assert isinstance(other, qfleet.Trained)
    assert other.result.updates == whole.result.updates
    assert learner_of(tmp_path / "four")["weights"].shape == theirs["weights"].shape


# --- settings ---------------------------------------------------------------------------------


def test_the_batch_of_a_copy_is_that_of_its_ranks() -> None:
    config = tiny_config(engine="all-reduce", workers=4, batch_size=32, tensor_parallel=2)
    own = [rank_config(config, rank) for rank in range(4)]
    assert [c.batch_size for c in own] == [16] * 4
    assert len({c.seed for c in own}) == 4  # every rank has environments of its own


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tensor_parallel": 3}, "workers must be a multiple of tensor_parallel"),
        ({"batch_size": 18}, "must divide batch_size 18"),
        ({"pipeline_parallel": 3}, "workers must be a multiple"),
        ({"algo": "rainbow"}, "noisy"),
        ({"algo": "iqn"}, "head 'iqn'"),
        ({"device": "cuda"}, "for CPUs so far"),
        ({"network": "some.module:Torso"}, "qfleet's own networks"),
        ({"normalize_observations": True}, "normalize_observations"),
        ({"gradient_compression": "top-k"}, "gradient_compression 'top-k'"),
        ({"engine": "serial"}, "tensor_parallel 2 is for --engine all-reduce"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], words: str) -> None:
    told = {"engine": "all-reduce", "workers": 4, "tensor_parallel": 2, "batch_size": 32} | fields
    if told["engine"] == "serial":
        del told["workers"]
    with pytest.raises(ConfigError, match=words):
        validate(tiny_config(**told))
