"""The all-reduce engine: one rank is serial, and several ranks are one learner."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

import qfleet
from qfleet.agent import schedules
from qfleet.agent.learner import Learner
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import CheckpointError, ConfigError, RankLost
from qfleet.core.types import FIRST, Block, EnvSpec
from qfleet.engines.all_reduce.compression import make_exchange
from qfleet.engines.all_reduce.group import Group
from qfleet.engines.all_reduce.rank import _check_alike, rank_config, whole_config
from qfleet.engines.all_reduce.replay import SharedReplay, deal, in_order
from qfleet.engines.all_reduce.world import World, launched_world, see_own_gpu
from qfleet.engines.auto import settle
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
from qfleet.storage.checkpoint import load_checkpoint
from support.configs import tiny_config, tiny_fields
from support.waiting import CLUSTER_S, deadline

SMALL = tiny_fields(
    engine="all-reduce", workers=2, envs=2, device="cpu", learning_starts=64, train_freq=8,
    buffer_size=300, target_update_interval=100, checkpoint_freq=10**6,
)  # fmt: skip
SPEC = EnvSpec("fixed", (4,), "float32", 2)
CPU = torch.device("cpu")


def parts_of(run: Path) -> dict[str, Any]:
    return load_checkpoint(run / "checkpoints").parts


# --- one rank ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "fields"),
    [
        ("dqn", {}),
        ("rainbow", {}),
        ("pqn", {"train_freq": 128, "batch_size": 64, "gradient_steps": 4, "learning_starts": 0}),
    ],
)
def test_one_rank_is_serial(tmp_path: Path, algo: str, fields: dict[str, Any]) -> None:
    told = SMALL | {"workers": 1, "steps": 512, "algo": algo} | fields
    one = qfleet.train("CartPole-v1", run_dir=tmp_path / "one", **told)
    del told["workers"]
    serial = qfleet.train("CartPole-v1", run_dir=tmp_path / "s", **told | {"engine": "serial"})
    assert one.result.updates == serial.result.updates > 0
    assert one.result.eval_return_mean == serial.result.eval_return_mean
    ours, theirs = parts_of(tmp_path / "one"), parts_of(tmp_path / "s")
    for name in ("weights", "target_weights"):
        if name in theirs["learner"]:
            assert torch.equal(ours["learner"][name], theirs["learner"][name])
    if algo == "rainbow":
        ours_of, theirs_of = (
            state["memory"]["sampler"]["leaves"] for state in (ours["rank-0-of-1"], theirs)
        )
        assert torch.equal(ours_of, theirs_of)


def test_exploration_follows_the_steps_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(schedules, "epsilon", lambda _, env_steps: asked.append(env_steps) or 1.0)
    told = SMALL | {"steps": 80, "learning_starts": 64, "block_rows": 4}
    qfleet.train("CartPole-v1", run_dir=tmp_path / "run", **told)
    assert asked[:20] == list(range(0, 80, 4))  # two ranks with two envs each: four steps a row


# --- the meeting of ranks ---------------------------------------------------------------------


def in_group(rank: int, store: Any, size: int = 2, timeout_s: float = 60.0) -> Group:
    return Group(World(rank, size, rank, size, "127.0.0.1", 1), 0, timeout_s, store)


def test_ranks_meet_and_hear_each_other() -> None:
    store, heard = HashStore(), list[str]()
    groups = [in_group(rank, store) for rank in (0, 1)]
    late = threading.Thread(target=lambda: heard.extend(groups[1].meet("tune", "tf32")))
    late.start()
    assert groups[0].meet("tune", "fp32") == ["fp32", "tf32"]
    late.join()
    assert heard == ["fp32", "tf32"]


def test_a_rank_that_does_not_come_is_named() -> None:
    group = in_group(0, HashStore())
    with pytest.raises(RankLost, match=r"rank 1 of 2 did not tune within 0\.1 s; .*--workers"):
        group.meet("tune", "fp32", limit_s=0.1)


def test_a_rank_without_a_sign_of_life_is_not_awaited() -> None:
    """Fault 19 of docs/faults.md, of a rank that is no child: its process cannot be asked."""
    group = in_group(0, HashStore(), timeout_s=0.2)
    group._heard_s = {1: time.monotonic()}
    with pytest.raises(RankLost, match=r"rank 1 of 2 did not tune: no sign of life for 0\.2 s"):
        group.meet("tune", "fp32")


@pytest.mark.parametrize(
    ("error", "is_of_connection"),
    [
        (RuntimeError("input tensor has to be contiguous"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False),
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Timed out waiting 4500ms for recv operation to complete"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("[pair.cc:534] No route to host"), True),
        (RuntimeError("[pair.cc:534] Network is down"), True),
        (torch.distributed.DistBackendError("NCCL error"), True),
    ],
)
def test_an_error_of_this_rank_is_not_called_a_lost_rank(
    error: Exception, is_of_connection: bool
) -> None:
    group = in_group(0, HashStore(), timeout_s=0.1)
    with pytest.raises(RankLost if is_of_connection else RuntimeError) as raised, group.exchange():
        raise error
    assert (raised.value is error) != is_of_connection


def test_signs_of_life_begin_before_ranks_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a rank that waits for others to be connected is ended when rank 0 is lost."""
    group, running = in_group(1, HashStore()), list[str]()
    monkeypatch.setattr(group, "_run_thread", lambda work: running.append(work.__name__))
    monkeypatch.setattr(group, "meet", lambda *_: ["", ""])

    def init(*_: object, **__: object) -> None:
        raise ConfigError(f"{running} {sorted(group._heard_s)}")

    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    with pytest.raises(ConfigError, match=r"\['_beat', '_watch'\] \[0\]"):
        group.connect(CPU)


def test_a_silent_rank_ends_one_that_watches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    group = in_group(0, HashStore(), timeout_s=1.0)
    said: list[str] = []
    monkeypatch.setattr(group, "_exit", lambda why: (said.append(why), group._closed.set()))
    group._heard_s = {1: time.monotonic()}
    group._watch()
    assert said == ["rank 1 is lost: no sign of life for 1 s"]


def test_ranks_whose_updates_would_differ_are_refused() -> None:
    whole = tiny_config(engine="all-reduce", workers=2, batch_size=33)
    alone = SimpleNamespace(size=2, meet=lambda _, words: [words, words])
    with pytest.raises(ConfigError, match="must be a multiple of the 2 ranks"):
        _check_alike(alone, whole, "replay on cuda")  # type: ignore[arg-type]
    apart = SimpleNamespace(size=2, meet=lambda _, words: [words, "replay on cpu"])
    with pytest.raises(ConfigError, match="rank 1: replay on cpu"):
        _check_alike(apart, whole.replace(batch_size=32), "replay on cuda")  # type: ignore[arg-type]


def test_groups_of_envs_are_for_gpus() -> None:
    config = tiny_config(engine="all-reduce", workers=2, env_groups=2, envs=4, device="cpu")
    with pytest.raises(ConfigError, match="ranks on a GPU"):
        settle(config)


# --- two halves of a batch --------------------------------------------------------------------


class Apart(ThreadRanks):
    """The negative control: nothing is exchanged."""

    def sum(self, tensor: Tensor) -> None:
        tensor.mul_(self.size)


@dataclass
class Learnt:
    """What a learner did with the batches, one entry per update."""

    weights: list[Tensor] = field(default_factory=list)
    target_weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    priorities: list[Tensor] = field(default_factory=list)


def learn(config: Config, *given: Any) -> list[Learnt]:
    """Return what each rank has learnt."""
    learnt = [Learnt() for _ in range(config.workers if config.engine == "all-reduce" else 1)]

    def keep(rank: int, learner: Learner, memory: FixedBatches, _: Any) -> None:
        state = learner.state_dict()
        learnt[rank].weights.append(state["weights"].clone())
        learnt[rank].target_weights.append(state["target_weights"].clone())
        learnt[rank].gradients.append(learner.weights.grad.clone())
        learnt[rank].priorities.append(memory.priority)

    learn_batches(config, *given[:3], keep, *given[3:])
    return learnt


def split_and_whole(
    precision: str, updates: int, parts: int = 2, ranks: ThreadRanks | None = None
) -> tuple[list[Learnt], Learnt]:
    """Return what the ranks learn from parts of the batches, and one learner from all of them."""
    config = tiny_config(
        algo="double-dqn", precision=precision, batch_size=32, learning_rate=1e-3, steps=10_000,
        prioritized_replay=True, target_update_interval=80, engine="serial",
    )  # fmt: skip
    spec, batches = collect_batches(config, updates)
    generator = torch.Generator().manual_seed(3)
    for batch in batches:  # as if they had been drawn by priority
        batch.weight.uniform_(generator=generator)
    initial = initial_weights(config, spec)
    (whole,) = learn(config, spec, batches, initial)
    split = config.replace(engine="all-reduce", workers=parts)
    return learn(split, spec, batches, initial, ranks), whole


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_a_batch_are_the_whole_batch(parts: int) -> None:
    """In float64, after 100 updates with Adam, clipping and a target network; with three ranks
    their batches differ in size."""
    ranks, whole = split_and_whole("fp64", 100, parts)
    for rank in ranks:
        for name in ("weights", "target_weights"):
            ours, theirs = (getattr(learnt, name)[-1] for learnt in (rank, whole))
            assert ours.dtype == torch.float64
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    assert not torch.equal(whole.target_weights[-1], whole.target_weights[0])  # it was moved
    split = torch.cat([torch.stack(rank.priorities) for rank in ranks], 1)
    torch.testing.assert_close(split, torch.stack(whole.priorities), rtol=0, atol=1e-9)


def test_without_the_sum_they_are_not() -> None:
    ranks, whole = split_and_whole("fp64", 100, ranks=Apart(2))
    for rank in ranks:
        assert (rank.weights[-1] - whole.weights[-1]).abs().max() > 1e-4


def test_in_float32_the_first_gradient_is_the_same() -> None:
    ranks, whole = split_and_whole("fp32", 1)
    theirs = whole.gradients[0]
    for rank in ranks:
        difference = torch.linalg.vector_norm(rank.gradients[0] - theirs)
        assert difference < 1e-6 * torch.linalg.vector_norm(theirs)


def test_all_ranks_skip_a_gradient_that_is_not_finite_on_one() -> None:
    config = tiny_config(engine="all-reduce", workers=2, batch_size=32)
    spec, batches = collect_batches(config, 3)
    batches[1].reward[20] = torch.nan  # in the second half
    one, other = learn(config, spec, batches, initial_weights(config, spec))
    for ours, theirs in zip(one.weights, other.weights, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(one.weights[0], one.weights[1])
    assert not torch.equal(one.weights[1], one.weights[2])
    assert torch.isfinite(one.weights[2]).all()


def test_a_comparison_tells_where_weights_first_differ() -> None:
    config = tiny_config(engine="serial", batch_size=32)
    assert compare(config, config, 20).first_difference is None
    assert compare(config, config.replace(seed=1), 20).first_difference is None  # same start
    split = compare(config, config.replace(engine="all-reduce", workers=2), 20)
    assert max(split.relative) < 1e-4
    late = compare(config, config.replace(target_update_interval=20, learning_rate=1e-4), 20)
    assert late.first_difference == 6  # the target network moves after 5 updates of 4 steps
    assert late.largest[4] == 0 < late.largest[5] < late.largest[-1]
    with pytest.raises(ConfigError, match="32 and 16 samples per update"):
        compare(config, config.replace(batch_size=16), 1)
    with pytest.raises(ConfigError, match="not --engine pipeline"):
        compare(config, config.replace(engine="pipeline"), 1)
    with pytest.raises(ConfigError, match="different networks"):
        compare(config, config.replace(net_arch=(8,)), 1)


# --- real ranks -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["dqn", "rainbow"])
def test_a_run_of_two_ranks_resumes_bit_for_bit_and_with_other_numbers(
    tmp_path: Path, algo: str
) -> None:
    told = SMALL | {"steps": 480, "algo": algo, "batch_size": 24}
    whole = qfleet.train("CartPole-v1", run_dir=tmp_path / "whole", **told)
    assert whole.result.env_steps == 480
    assert whole.result.updates == (480 - 64) // 8
    assert whole.result.communication["bytes_sent"] > 0
    half = qfleet.RunOptions(stop_after=240)
    qfleet.train("CartPole-v1", run_dir=tmp_path / "two", options=half, **told)
    for workers in (1, 3):
        shutil.copytree(tmp_path / "two", tmp_path / str(workers))
    resumed = qfleet.resume(tmp_path / "two")
    assert isinstance(resumed, qfleet.Trained)
    assert resumed.result.updates == whole.result.updates
    ours, theirs = parts_of(tmp_path / "two"), parts_of(tmp_path / "whole")
    assert torch.equal(ours["learner"]["weights"], theirs["learner"]["weights"])
    for rank in ("rank-0-of-2", "rank-1-of-2"):
        assert torch.equal(ours[rank]["memory"]["action"], theirs[rank]["memory"]["action"])
    assert not torch.equal(
        theirs["rank-0-of-2"]["memory"]["action"], theirs["rank-1-of-2"]["memory"]["action"]
    )
    for workers in (1, 3):
        memory = MemoryAtEnd()
        other = qfleet.resume(tmp_path / str(workers), workers=workers, callbacks=[memory])
        assert isinstance(other, qfleet.Trained)
        assert other.result.env_steps >= 480
        assert other.result.updates == whole.result.updates
        assert other.result.faults == {}
        assert other.result.fleet is not None
        assert len(other.result.fleet["ranks"]) == workers
        state = parts_of(tmp_path / str(workers))
        assert sum(name.startswith("rank-") for name in state) == workers
        # Files of the old rings, which have the same rows with other contents, are not shared.
        saved = in_order(state[f"rank-0-of-{workers}"]["memory"])
        assert saved.keys() == memory.columns.keys()
        assert all(torch.equal(saved[name], memory.columns[name]) for name in saved)


class MemoryAtEnd(qfleet.Callback):
    """Keeps the replay memory of rank 0 as it was when the run ended."""

    def on_end(self, run: Any, result: Any) -> None:
        columns = in_order(run.parts.memory.state_dict())
        self.columns = {name: column.clone() for name, column in columns.items()}


LAUNCHED = ["train", "CartPole-v1", "--preset", "none", "--engine", "all-reduce", "--steps", "200"]


@pytest.mark.slow
def test_two_ranks_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "qfleet", *LAUNCHED, "--run-dir", str(tmp_path / "run"), "--json"]
    _train_launched(command, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun")
def test_two_ranks_under_mpirun(tmp_path: Path) -> None:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    command += ["-m", "qfleet", *LAUNCHED, "--run-dir", str(tmp_path / "run"), "--json"]
    _train_launched(command, tmp_path / "run")


def _train_launched(command: list[str], run: Path) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=deadline(CLUSTER_S), check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"engine": "all-reduce"') == 1  # rank 0 alone reports
    assert sum(name.startswith("rank-") for name in parts_of(run)) == 2


# --- settings ---------------------------------------------------------------------------------


def test_ranks_share_the_batch_and_the_memory() -> None:
    config = tiny_config(
        engine="all-reduce", workers=3, batch_size=32, buffer_size=9000, steps=10**6
    )
    own = [rank_config(config, rank) for rank in range(3)]
    assert [c.batch_size for c in own] == [11, 11, 10]
    assert [c.buffer_size for c in own] == [3000] * 3
    assert len({c.seed for c in own}) == 3
    grown = config.replace(batch_per_rank=64, lr_scaling="linear", learning_rate=1e-3)
    assert whole_config(grown).batch_size == 192
    assert whole_config(grown).learning_rate == pytest.approx(6e-3)
    assert whole_config(grown.replace(lr_scaling="sqrt")).learning_rate == pytest.approx(
        1e-3 * 6**0.5
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workers": 64}, "workers must be ≤ batch_size"),
        ({"lr_scaling": "linear"}, "set batch_per_rank"),
        ({"servers": 2}, "servers 2 is for"),
        ({"population": 2}, "population 2 is for"),
        ({"device": "cuda:1"}, "gives each rank a GPU of its own"),
        ({"workers": 3, "prioritized_replay": True}, "must divide batch_size 16"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(tiny_config(engine="all-reduce", **fields))


def test_the_place_of_a_rank_is_read_from_the_launcher() -> None:
    assert launched_world({}) is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    torchrun |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert launched_world(torchrun) == World(3, 4, 1, 2, "10.0.0.1", 1234)
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert launched_world(mpi) == World(1, 2, 1, 2, "127.0.0.1", 29500)
    pods = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}
    assert launched_world(pods) == World(1, 2, 1, 1, "10.0.0.1", 29500)
    with pytest.raises(ConfigError, match="need MASTER_ADDR"):
        launched_world(mpi | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    with pytest.raises(ConfigError, match="not numbers: PMI_RANK=x"):
        launched_world({"PMI_RANK": "x", "PMI_SIZE": "2"})


def test_a_rank_sees_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    world = World(rank=5, size=8, local_rank=1, local_size=4, host="127.0.0.1", port=1)
    for visible, own in (("", "1"), ("4,6,7", "6")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        see_own_gpu(world)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == own
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    see_own_gpu(world._replace(local_rank=4))  # more ranks than GPUs
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"


def test_a_checkpoint_without_ranks_is_refused(tmp_path: Path) -> None:
    config = tiny_config(engine="all-reduce", workers=1, steps=128, device="cpu")
    run = qfleet.Run(config, tmp_path / "run", qfleet.RunOptions())
    try:
        stored = run.parts.state_dict()
        del stored["rank-0-of-1"]
        with pytest.raises(CheckpointError, match="no state of any rank"):
            run.parts.load_state_dict(stored)
    finally:
        run.close()


# --- compression ------------------------------------------------------------------------------

ALL_KINDS: list[dict[str, Any]] = [
    {"gradient_compression": "fp16"},
    {"gradient_compression": "bf16"},
    {"gradient_compression": "top-k", "top_k_share": 0.1},
    {"gradient_compression": "powersgd", "powersgd_rank": 2},
]


def sum_on_ranks(
    fields: dict[str, Any], gradients: list[list[Tensor]]
) -> tuple[list[list[Tensor]], list[Any]]:
    """Add the gradients of each step up; return the sums by rank and step, and the exchanges."""
    config = tiny_config(net_arch=(32, 32), engine="all-reduce", **fields)
    ranks, sums = ThreadRanks(len(gradients)), [list[Tensor]() for _ in gradients]
    exchanges: list[Any] = [None] * len(gradients)

    def add_up(rank: int) -> None:
        weights = FlatWeights(make_network(config, SPEC, torch.device("cpu"), 7))
        exchanges[rank] = make_exchange(config, weights)
        for gradient in gradients[rank]:
            summed = gradient.clone()
            exchanges[rank].sum(summed, ranks)
            sums[rank].append(summed)

    ranks.run(add_up)
    return sums, exchanges


def random_gradients(steps: int, ranks: int = 2) -> list[list[Tensor]]:
    config = tiny_config(net_arch=(32, 32))
    size = FlatWeights(make_network(config, SPEC, torch.device("cpu"), 7)).data.numel()
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(size, generator=generator) for _ in range(steps)] for _ in range(ranks)]


@pytest.mark.parametrize("fields", ALL_KINDS, ids=lambda f: f["gradient_compression"])
def test_compressed_sums_are_the_same_on_all_ranks_and_lose_nothing(fields: dict[str, Any]) -> None:
    """What was summed so far and what is kept back add up to all gradients."""
    gradients = random_gradients(steps=20)
    sums, exchanges = sum_on_ranks(fields, gradients)
    for ours, theirs in zip(*sums, strict=True):
        assert torch.equal(ours, theirs)
    exact = sum(torch.stack(own).sum(0) for own in gradients)
    got = torch.stack(sums[0]).sum(0)
    kept = [exchange.state_dict().get("kept") for exchange in exchanges]
    if kept[0] is None:  # a cast has no memory, and rounds
        torch.testing.assert_close(got, exact, rtol=0, atol=0.5)
        assert not torch.equal(got, exact)
    else:
        torch.testing.assert_close(got + sum(kept), exact, rtol=0, atol=1e-3)
        assert (got - exact).abs().max() > 0.1


@pytest.mark.parametrize("fields", ALL_KINDS, ids=lambda f: f["gradient_compression"])
def test_a_compressed_gradient_that_is_not_finite_spoils_the_sum_alone(
    fields: dict[str, Any],
) -> None:
    gradients = random_gradients(steps=3)
    gradients[1][1][7] = torch.inf
    sums, _ = sum_on_ranks(fields, gradients)
    for own in sums:
        assert [bool(torch.isfinite(summed).all()) for summed in own] == [True, False, True]


def test_compression_to_the_whole_is_none() -> None:
    gradients = random_gradients(steps=2)
    exact = gradients[0][0] + gradients[1][0]
    for fields in (
        {"gradient_compression": "top-k", "top_k_share": 1.0},
        {"gradient_compression": "powersgd", "powersgd_rank": 64},
    ):
        sums, _ = sum_on_ranks(fields, gradients)
        assert torch.equal(sums[0][0], exact)


def test_powersgd_finds_a_gradient_of_low_rank() -> None:
    weights = FlatWeights(make_network(tiny_config(net_arch=(32, 32)), SPEC, CPU, 7))
    matrices = dict(zip(weights.layout, weights.offsets, strict=True))
    at = next(at for (_, shape), at in matrices.items() if shape == (32, 32))
    gradient = torch.zeros_like(weights.data)
    gradient[at : at + 1024] = torch.outer(torch.arange(32.0), torch.ones(32)).view(-1)
    same = {"gradient_compression": "powersgd", "powersgd_rank": 1}
    sums, _ = sum_on_ranks(same, [[gradient], [gradient]])
    torch.testing.assert_close(sums[0][0], 2 * gradient)


def test_powersgd_goes_on_with_the_factors_that_it_had() -> None:
    """Of more than ten matrices, whose numbers a checkpoint sorts as text."""
    config = tiny_config(net_arch=(24,) * 12, gradient_compression="powersgd", engine="all-reduce")
    weights = FlatWeights(make_network(config, SPEC, CPU, 7))
    one, other = make_exchange(config, weights), make_exchange(config, weights)
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(weights.data.shape, generator=generator) for _ in range(2))
    alone = ThreadRanks(1)
    one.sum(first.clone(), alone)
    state = one.state_dict()
    right = dict(sorted(state["right"].items()))
    assert list(right) != list(state["right"])
    other.load_state_dict({"kept": state["kept"].clone(), "right": right})
    ours, theirs = second.clone(), second.clone()
    one.sum(ours, alone)
    other.sum(theirs, alone)
    assert torch.equal(ours, theirs)


# --- replay memories that are dealt out -------------------------------------------------------


def make_ring(stack: int = 1, rows: int = 8) -> SharedReplay:
    spec = EnvSpec("numbers", (stack,) if stack > 1 else (1,), "float32", 2, frame_stack=stack)
    sampler = UniformSampler(torch.Generator().manual_seed(0))
    group: Any = SimpleNamespace(exchanges=False)
    return SharedReplay(group, spec, 2, rows * 2, 1, 0.99, sampler, CPU)


def write_rows(ring: SharedReplay, first: int, stop: int) -> None:
    """Write rows that hold their own number; an episode begins with row 0."""
    shape = (stop - first, 2)
    numbers = torch.arange(first, stop).float().view(-1, 1).expand(shape)
    flags = torch.zeros(shape, dtype=torch.uint8)
    if first == 0:
        flags[0] = FIRST
    frames = numbers.reshape(*shape, *ring._frame_shape)
    ring.extend(Block(frames, torch.ones(shape).long(), numbers, flags))


@pytest.mark.parametrize("written", [6, 8, 13])
def test_every_row_is_dealt_out_once(written: int) -> None:
    """Also of a ring that has wrapped around; and of rings that are empty, nothing."""
    ring = make_ring()
    for row in range(written):
        write_rows(ring, row, row + 1)
    kept = list(range(max(0, written - 8), written))
    columns = in_order(ring.state_dict())
    assert columns["reward"][:, 0].tolist() == kept
    assert columns["obs"].flatten().tolist() == [row for row in kept for _ in range(2)]
    dealt = [deal([columns, in_order(make_ring().state_dict())], rank, 3) for rank in range(3)]
    rows = [row for pieces in dealt for piece in pieces for row in piece["reward"][:, 0].tolist()]
    assert sorted(rows) == kept


def test_stacks_do_not_reach_into_another_piece() -> None:
    ring, other = make_ring(stack=3, rows=20), make_ring(stack=3, rows=20)
    write_rows(ring, 0, 12)
    columns = in_order(ring.state_dict())
    other.refill([deal([columns], rank, 2)[0] for rank in (1, 0)], stack=3)
    batch = other.sample(200, 1.0)
    stacks = {tuple(stack) for stack in batch.obs.tolist()}
    assert stacks <= {(n - 2.0, n - 1.0, float(n)) for n in range(2, 12)}
    assert (6.0, 7.0, 8.0) in stacks
    assert not any(stack[0] in (4.0, 5.0) for stack in stacks)  # of both pieces
