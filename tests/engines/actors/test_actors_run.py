"""Whole runs with actors and shards, in one process: ratio, losses, checkpoints, resumes."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import qfleet
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.core.errors import CheckpointError, ClusterError, ClusterLost, ConfigError
from qfleet.core.types import Clock, StateDict
from qfleet.engines import registry
from qfleet.engines.actors import broadcast, engine
from qfleet.engines.actors.account import Account
from qfleet.engines.actors.broadcast import INTERVAL_S, Broadcast
from qfleet.engines.actors.replay import ShardedReplay
from qfleet.engines.cluster.liveness import RUN_AGAIN
from qfleet.engines.cluster.processes_hook import CountedProcesses, ProcessesHook
from qfleet.engines.loop import RateLimiter
from qfleet.engines.parts import Parts
from qfleet.engines.placement import Placement
from qfleet.engines.registry import build
from qfleet.memory import ring
from qfleet.storage.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.fleet import FleetAccount
from qfleet.telemetry.fleet_table import fleet_lines
from qfleet.telemetry.runs import read_metrics
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions
from support.in_process_cluster import Handle, OneProcess, small
from support.messages import says


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> list[OneProcess]:
    """Every cluster that is opened, in order."""
    opened: list[OneProcess] = []

    @contextlib.contextmanager
    def open_one(*_: object, **__: object) -> Iterator[OneProcess]:
        cluster = OneProcess()
        opened.append(cluster)
        try:
            yield cluster
        finally:
            cluster.address = "gone"

    monkeypatch.setattr(engine, "open_cluster", open_one)
    return opened


def train_until(parts: Parts, env_steps: int, between: Callable[[], None] = lambda: None) -> None:
    def keep_going() -> bool:
        between()
        return parts.clock.env_steps < env_steps

    registry.run(parts, keep_going)


def account_of(parts: Parts) -> FleetAccount:
    account = processes_of(parts).account()
    assert account is not None
    return account


def processes_of(parts: Parts) -> CountedProcesses:
    hook = parts.find(ProcessesHook)
    assert hook is not None
    return hook.processes


@contextlib.contextmanager
def built(config: Config, faults: FaultLog | None = None) -> Iterator[Parts]:
    parts = build(config, faults or FaultLog())
    try:
        yield parts
    finally:
        parts.close()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prioritized_replay": True, "servers": 2},
        {"workers": 3, "servers": 2, "prioritized_replay": True, "double": True, "dueling": True},
        {"noisy": True, "head": "c51", "prioritized_replay": True},
        {"exploration_ladder": True, "exploration_final_eps": 0.4},
    ],
    ids=["uniform", "prioritised", "three actors", "rainbow", "ladder"],
)
def test_a_run_goes_through_and_says_what_it_cost(
    fields: dict[str, Any], clusters: list[OneProcess], tmp_path: Path
) -> None:
    config = small(**fields)
    result = Run(config, tmp_path / "run", RunOptions()).go()
    assert result.stopped_by == "steps"
    assert result.env_steps >= 400
    # (400 − 40) / 4, to within the last block.
    assert result.updates == (result.env_steps - 40) // 4
    assert result.faults == {}
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "time/fps" in row]
    logged = {name.partition("/")[0] for name in rows[-1] if name.endswith("share_waiting")}
    assert logged == {"learner", *(f"actor_{k}" for k in range(config.workers))}
    assert clusters[0].address == "gone"
    fleet = result.fleet
    assert fleet is not None
    assert sum(fleet["env_steps_each"]) == fleet["env_steps"] == result.env_steps
    assert min(fleet["env_steps_each"]) > 0
    assert fleet["letter_bytes"] == fleet["traffic"]["bytes_sent"] > 0
    assert [actor["env_steps"] for actor in fleet["workers"]] == fleet["env_steps_each"]
    assert sum(shard["env_steps"] for shard in fleet["shards"]) == result.env_steps
    assert (
        sum(shard["bytes_out"] for shard in fleet["shards"])
        == result.communication["bytes_received"]
    )
    assert fleet["servers"] == []
    drawing = result.time_share["communicate"]
    assert drawing is not None
    assert drawing > 0
    blocks = result.env_steps // (5 * config.envs)
    assert sum(fleet["staleness"]["counts"].values()) == blocks
    pictures = {path.name for path in (tmp_path / "run" / "plots").iterdir()}
    assert pictures == {"shares.png", "staleness.png"}
    received = result.communication["bytes_received"]
    assert received is not None
    assert received >= result.updates * config.batch_size * 2 * 16  # two observations of 4 floats
    each = json.loads((tmp_path / "run" / "seeds.json").read_text())["each_env"]
    assert len(set(each)) == config.workers * config.envs


def test_the_table_is_shown_and_the_trace_has_a_lane_for_the_learner_and_every_actor(
    clusters: list[OneProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(small(), tmp_path / "run", RunOptions(display="plain", trace=True)).go()
    told = capsys.readouterr()
    lines = (told.out + told.err).splitlines()
    assert "fleet         2 actors, 1 shard, 1 host" in lines
    names = [line.split("  ")[0] for line in lines]
    assert {"actor 0", "actor 1", "all", "learner", "shard 0", "staleness"} <= set(names)
    assert (tmp_path / "run" / "plots" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(lanes.values()) == ["learner", "actor 0", "actor 1"]
    stages = {name: {e["name"] for e in events if e["tid"] == tid} for tid, name in lanes.items()}
    assert stages["learner"] >= {"learn", "communicate", "idle"}
    assert stages["actor 0"] >= {"env", "act", "communicate", "idle"}
    assert clusters[0].address == "gone"


def test_a_block_is_as_old_as_the_updates_since_its_weights(
    clusters: list[OneProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "INTERVAL_S", 1e9)  # no actor ever hears of new weights
    with built(small()) as parts:
        train_until(parts, 200)
        ages = account_of(parts).staleness.counts
    # A block has 10 steps; after 40 of them every 4 steps are an update.
    assert ages == Counter(max(0, (10 * block - 40) // 4) for block in range(20))
    assert len(clusters) == 1


def test_the_replay_ratio_is_held_where_blocks_enter_the_memory(
    clusters: list[OneProcess],
) -> None:
    with built(small(replay_slack=3, learning_starts=0)) as parts:
        owed: list[int] = []
        train_until(parts, 400, lambda: owed.append(parts.limiter.updates_owed()))
        # Asked before each block: never more than the band, and a block (10 steps) owes 2.5.
        assert max(owed[5:]) <= 3
        assert parts.clock.updates >= (parts.clock.env_steps // 4) - 3
        assert clusters[0].living("RemoteActor")


def test_blocks_wait_while_updates_are_owed(clusters: list[OneProcess]) -> None:
    with built(small()) as parts:
        train_until(parts, 100)
        clock = parts.clock
        parts.limiter = RateLimiter(parts.config, clock, parts.memory)
        clock.updates -= 7
        assert parts.limiter.updates_owed() == 7
        assert not parts.limiter.may_collect()
    del clusters


def test_an_actor_that_dies_is_replaced_and_its_ring_goes_on(clusters: list[OneProcess]) -> None:
    faults = FaultLog()
    with built(small(prioritized_replay=True), faults) as parts:
        train_until(parts, 100)
        victim = next(h for h in clusters[0].handles if h.kind == "RemoteActor" and h.args[1] == 1)
        victim.doomed = True
        before = account_of(parts).workers[1].env_steps
        train_until(parts, 200)
        assert faults.counts == {"actor": 1}
        assert faults.first_messages("actor") == ["actor 1 died; replaced"]
        living = clusters[0].living("RemoteActor")
        assert [(h.args[1], h.args[2]) for h in living] == [(0, 0), (1, 1)]
        account = account_of(parts)
        assert [actor.restarts for actor in account.workers] == [0, 1]
        assert account.workers[1].env_steps > before
        assert "restarts      actor 1 ×1" in fleet_lines(account)
        # Its ring holds the rows of both lives.
        shard = clusters[0].living("ReplayShard")[0].instance
        life, start = shard._rings[1].follows
        assert life == 1
        assert len(shard._rings[1].ring) > start * 2


def test_an_actor_that_dies_time_and_again_ends_the_run(clusters: list[OneProcess]) -> None:
    with built(small(max_env_restarts=2)) as parts:
        train_until(parts, 100)

        def doom() -> None:
            for handle in clusters[0].living("RemoteActor"):
                handle.doomed = handle.args[1] == 0

        spawn = clusters[0].spawn

        def spawn_doomed(kind: type, *args: Any) -> Handle:
            handle = spawn(kind, *args)
            handle.doomed = True
            return handle

        clusters[0].spawn = spawn_doomed  # type: ignore[method-assign]
        with pytest.raises(ClusterError, match=says("actor 0", "3")):
            train_until(parts, 400, doom)


def test_an_actor_that_finds_no_room_is_waited_for(clusters: list[OneProcess]) -> None:
    """Its node is gone: it is lost once, and those that wait in its place are not counted."""
    faults = FaultLog()
    with built(small(max_env_restarts=2), faults) as parts:
        train_until(parts, 100)
        cluster, spawn, spawned = clusters[0], clusters[0].spawn, []
        cluster.room = 2

        def spawn_pending(kind: type, *args: Any) -> Handle:
            handle = spawn(kind, *args)
            handle.doomed = cluster.room == 2
            spawned.append(handle)
            return handle

        cluster.spawn = spawn_pending  # type: ignore[method-assign]
        next(h for h in cluster.living("RemoteActor") if h.args[1] == 0).doomed = True
        train_until(parts, 300)
        assert len(spawned) > 3
        assert faults.counts == {"actor": 1}
        before = processes_of(parts).counts()["env_steps_each"][0]
        cluster.room = 3
        train_until(parts, 400)
        counts = processes_of(parts).counts()
        assert counts["env_steps_each"][0] > before
        assert faults.counts["actor"] == counts["actors_replaced"]


def test_without_room_a_learner_that_needs_every_actor_ends_the_run(
    clusters: list[OneProcess],
) -> None:
    """With replay in the learner, blocks of all actors are taken in turn."""
    with built(small(servers=0)) as parts:
        train_until(parts, 100)
        cluster, spawn = clusters[0], clusters[0].spawn
        cluster.room = 1

        def spawn_pending(kind: type, *args: Any) -> Handle:
            handle = spawn(kind, *args)
            handle.doomed = True
            return handle

        cluster.spawn = spawn_pending  # type: ignore[method-assign]
        next(h for h in cluster.living("RemoteActor") if h.args[1] == 0).doomed = True
        with pytest.raises(ClusterError, match=says("servers 0", "resume")):
            train_until(parts, 400)


def test_when_no_actor_is_left_nor_room_for_one_the_run_ends(clusters: list[OneProcess]) -> None:
    with built(small()) as parts:
        train_until(parts, 100)
        spawn = clusters[0].spawn

        def spawn_pending(kind: type, *args: Any) -> Handle:
            handle = spawn(kind, *args)
            handle.doomed = True
            return handle

        clusters[0].room = 0
        clusters[0].spawn = spawn_pending  # type: ignore[method-assign]
        for handle in clusters[0].living("RemoteActor"):
            handle.doomed = True
        with pytest.raises(ClusterError, match=says("actor", "0")):
            train_until(parts, 400)


def test_a_letter_that_is_lost_with_its_machine_costs_itself_alone(
    clusters: list[OneProcess],
) -> None:
    faults = FaultLog()
    with built(small(), faults) as parts:
        train_until(parts, 100)
        collect, lost = parts.collector.collect, []

        def losing(rows: int) -> Any:
            block = collect(rows)
            if not lost and block.message is not None:
                block.message.lost = True
                lost.append(block)
            return block

        parts.collector.collect = losing  # type: ignore[method-assign]
        train_until(parts, 400)
        assert faults.counts == {"letter": 1}
        assert len(clusters[0].living("ReplayShard")) == 1


def test_the_survivors_are_sampled_while_a_lost_shard_is_refilled(
    clusters: list[OneProcess],
) -> None:
    faults = FaultLog()
    config = small(servers=2, prioritized_replay=True, steps=2000)
    with built(config, faults) as parts:
        train_until(parts, 200)
        memory = parts.memory
        assert isinstance(memory, ShardedReplay)
        held = memory.holdings()[1].starts
        victim = clusters[0].living("ReplayShard")[1]
        assert victim.args[2] == [1]
        victim.doomed = True
        updates = parts.clock.updates
        train_until(parts, 400)
        assert faults.counts == {"replay_shard": 1}
        assert "replay shard 1 died" in faults.first_messages("replay_shard")[0]
        assert "refilling" in faults.first_messages("replay_shard")[0]
        kept, lost = account_of(parts).shards
        assert lost.lost >= held
        assert (kept.restarts, kept.lost, lost.restarts) == (0, 0, 1)
        # Both lives of the shard count: two actors took turns, each with a shard of its own.
        assert lost.env_steps > 100
        assert f"restarts      shard 1 ×1 ({lost.lost} transitions lost)" in fleet_lines(
            account_of(parts)
        )
        assert parts.clock.updates > updates
        assert (parts.clock.env_steps - 40) // 4 == parts.clock.updates  # nothing owed was dropped
        assert memory.holdings()[1].starts > 0


def test_when_all_is_lost_collecting_comes_first(clusters: list[OneProcess]) -> None:
    faults = FaultLog()
    config = small(learning_starts=100, steps=2000)
    with built(config, faults) as parts:
        train_until(parts, 200)
        clusters[0].living("ReplayShard")[0].doomed = True
        least: list[int] = []
        memory = parts.memory
        assert isinstance(memory, ShardedReplay)
        sample = memory.sample

        def watched(count: int, beta: Any) -> Any:
            least.append(sum(held.starts for held in memory.holdings().values()))
            return sample(count, beta)

        memory.sample = watched  # type: ignore[method-assign]
        train_until(parts, 600)
        assert faults.counts == {"replay_shard": 1}
        assert (parts.clock.env_steps - 100) // 4 == parts.clock.updates
        refilled = least[least.index(min(least)) + 1 :]
        assert min(refilled) >= 50  # half of what a run begins with


def test_priorities_of_learnt_samples_reach_their_rings(clusters: list[OneProcess]) -> None:
    with built(small(servers=2, prioritized_replay=True)) as parts:
        train_until(parts, 100)
        memory = parts.memory
        memory.update_priorities(
            torch.tensor([3, 203, 7]), torch.tensor([1e6, -1e6, 1e6])
        )  # 200 slots a ring
        assert isinstance(memory, ShardedReplay)
        memory._request(1)
        for actor, places in ((0, [3, 7]), (1, [3])):
            shard = clusters[0].living("ReplayShard")[actor].instance
            leaves = shard._rings[actor].sampler.leaves
            assert sorted(torch.topk(leaves, len(places)).indices.tolist()) == places


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize(
    ("precision", "matmul", "autocast"),
    [("auto", "medium", None), ("tf32", "high", None), ("bf16", "high", torch.bfloat16)],
)
def test_the_learner_has_the_precision_that_was_asked_for(
    precision: str,
    matmul: str,
    autocast: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on an accelerator; the CPU stands in for one."""
    host = torch.device("cpu")
    place = Placement(host, host, ahead=False, capturable=False)
    monkeypatch.setattr(Placement, "of", lambda *_, **__: place)
    torch.set_float32_matmul_precision("medium")
    with built(small(precision=precision)) as parts:
        assert torch.get_float32_matmul_precision() == matmul
        assert len(parts.learner.networks) == 2
        assert [network.autocast_dtype for network in parts.learner.networks] == [autocast] * 2
        train_until(parts, 100)
        assert parts.clock.updates > 0


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_a_precision_of_accelerators_is_refused_before_there_is_a_cluster(
    precision: str, clusters: list[OneProcess]
) -> None:
    with pytest.raises(ConfigError, match=says("precision", precision)):
        build(small(precision=precision, device="cpu"), FaultLog())
    assert clusters == []


def test_checkpoints_hold_the_rings_and_servers_may_change(
    clusters: list[OneProcess], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    config = small(servers=2, prioritized_replay=True)
    Run(config, folder, RunOptions(stop_after=200)).go()
    (step,) = list_checkpoints(folder / "checkpoints")[-1:]
    checkpoint = load_checkpoint(folder / "checkpoints")
    assert checkpoint.env_steps == step
    before = {
        actor: kept.ring.state_dict()
        for handle in clusters[0].handles
        if handle.kind == "ReplayShard"
        for actor, kept in handle.instance._rings.items()
    }
    with built(config.replace(servers=1)) as parts:
        parts.memory.load_state_dict(checkpoint.parts["memory"])
        shard = clusters[1].living("ReplayShard")[0].instance
        for actor, state in before.items():
            ring = shard._rings[actor].ring.state_dict()
            assert ring["total_rows"] == state["total_rows"] > 0
            for name in ("action", "reward", "flags"):
                assert torch.equal(ring[name], state[name])
            for mine, theirs in zip(ring["frames"].tensors, state["frames"].tensors, strict=True):
                assert torch.equal(mine, theirs)
            assert torch.equal(ring["sampler"]["leaves"], state["sampler"]["leaves"])
        assert parts.memory.can_sample()


def test_a_checkpoint_has_no_frames_of_a_shard_that_was_lost(
    clusters: list[OneProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames that did not change are shared with the checkpoint before; a lost shard's did."""
    monkeypatch.setattr(ring, "SEGMENT_BYTES", 512)  # many pieces, as with images
    config = small(servers=2, buffer_size=8000, steps=8000)

    def check_saved(number: int, parts: Parts, cluster: OneProcess) -> StateDict:
        memory = {"memory": parts.memory.state_dict()}
        save_checkpoint(tmp_path / "checkpoints", number, memory, {}, keep=9)
        saved: StateDict = load_checkpoint(tmp_path / "checkpoints").parts["memory"]
        for shard in cluster.living("ReplayShard"):
            for actor, kept in shard.instance._rings.items():
                there, here = saved["rings"][str(actor)], kept.ring.state_dict()
                assert len(here["frames"].tensors) > 3
                for mine, stored in zip(
                    here["frames"].tensors, there["frames"].tensors, strict=True
                ):
                    assert torch.equal(mine, stored)
                assert torch.equal(here["action"], there["action"])
        return saved

    with built(config) as parts:
        train_until(parts, 700)
        check_saved(1, parts, clusters[0])
        clusters[0].living("ReplayShard")[1].doomed = True
        train_until(parts, 1800)
        assert parts.faults.counts == {"replay_shard": 1}
        saved = check_saved(2, parts, clusters[0])
    with built(config) as parts:  # a resumed run counts lives on
        parts.memory.load_state_dict(saved)
        clusters[1].living("ReplayShard")[1].doomed = True
        train_until(parts, 1800)
        assert parts.faults.counts == {"replay_shard": 1}
        check_saved(3, parts, clusters[1])


def test_another_number_of_actors_is_refused_and_both_are_named(
    clusters: list[OneProcess], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    Run(small(), folder, RunOptions(stop_after=200)).go()
    checkpoint = load_checkpoint(folder / "checkpoints")
    with (
        built(small(workers=3)) as parts,
        pytest.raises(CheckpointError, match=says("2", "3", "--workers 2")),
    ):
        parts.memory.load_state_dict(checkpoint.parts["memory"])
    with pytest.raises(CheckpointError, match=says("2", "3")):
        qfleet.resume(folder, workers=3)
    resumed = qfleet.resume(folder, servers=2)
    assert resumed.result.stopped_by == "steps"
    assert len(clusters[-1].handles) == 2 + 2


def test_a_resumed_run_goes_on_with_new_episodes(
    clusters: list[OneProcess], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    Run(small(), folder, RunOptions(stop_after=200)).go()
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"servers": 1', '"servers": 2'))
    resumed = qfleet.resume(folder)
    assert len(clusters[1].living("ReplayShard")) == 2
    assert resumed.result.env_steps >= 400
    assert resumed.result.updates == (resumed.result.env_steps - 40) // 4
    first, second = (
        [h.instance._envs.seeds for h in cluster.handles if h.kind == "RemoteActor"]
        for cluster in clusters
    )
    assert not set(map(tuple, first)) & set(map(tuple, second))


def test_a_run_that_lost_its_cluster_is_resumed_with_an_empty_memory(
    clusters: list[OneProcess], tmp_path: Path
) -> None:
    run = Run(small(), tmp_path / "run", RunOptions())
    collect = run.parts.collector.collect

    def collect_until_lost(rows: int) -> Any:
        if run.parts.clock.env_steps >= 200:
            clusters[0].is_lost = True
            raise ClusterLost(f"the raylet died{RUN_AGAIN}")
        return collect(rows)

    run.parts.collector.collect = collect_until_lost  # type: ignore[method-assign]
    with pytest.raises(ClusterLost, match=says("raylet", "checkpoint 200", "qfleet resume")):
        run.go()
    checkpoint = load_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint.parts["memory"]["rings"] == {}
    assert checkpoint.parts["run"]["updates"] == (200 - 40) // 4
    resumed = qfleet.resume(tmp_path / "run").result
    assert resumed.env_steps >= 400
    assert resumed.updates == (resumed.env_steps - 40) // 4


def test_a_shard_that_dies_while_it_is_saved_costs_the_checkpoint_only(
    clusters: list[OneProcess], tmp_path: Path
) -> None:
    run = Run(small(), tmp_path / "run", RunOptions(stop_after=250))
    state_dict = run.parts.memory.state_dict
    calls: list[int] = []

    def dying() -> Any:
        calls.append(1)
        if len(calls) == 1:
            clusters[0].living("ReplayShard")[0].doomed = True
        return state_dict()

    run.parts.memory.state_dict = dying  # type: ignore[method-assign]
    result = run.go()
    assert result.faults == {"checkpoint": 1, "replay_shard": 1}
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == [result.env_steps]


def test_an_object_store_that_is_too_small_is_refused(
    monkeypatch: pytest.MonkeyPatch, clusters: list[OneProcess]
) -> None:
    monkeypatch.setattr(OneProcess, "store_bytes", lambda _: 1000)
    with pytest.raises(ClusterError, match=says("object store", "0 MiB")):
        build(small(batch_size=64), FaultLog())
    assert clusters[0].address == "gone"


def test_rings_too_small_for_their_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=says("buffer_size", "25", "2 actors", "12")):
        build(small(buffer_size=25, batch_size=4), FaultLog())


def test_weights_are_stored_once_per_version_and_not_too_often() -> None:
    cluster, account, now = OneProcess(), Account(1, 1), [0.0]
    flat = FlatWeights(torch.nn.Linear(2, 1))
    channel = Broadcast(cast("Any", cluster), flat, account, clock=lambda: now[0])
    first = channel.reference
    channel.publish(1)
    assert channel.reference is first
    now[0] += INTERVAL_S
    channel.publish(0)  # nothing new
    assert (channel.reference is first, channel.version) == (True, 0)
    with torch.no_grad():
        flat.data += 1
    channel.publish(5)
    assert channel.refresh() == channel.version == 5
    assert np.array_equal(channel.reference.value, flat.data.numpy())
    assert not np.array_equal(first.value, channel.reference.value)
    channel.restart(2)
    assert channel.version == 2
    assert account.broadcasts == 3
    assert account.bytes_sent == 3 * flat.data.nbytes


def test_a_silent_fleet_gives_empty_blocks_so_that_a_signal_is_heard(
    clusters: list[OneProcess],
) -> None:
    with built(small()) as parts:
        clusters[0].ready = lambda _pending, _wait_s: []  # type: ignore[method-assign]
        asked: list[Clock] = []
        registry.run(parts, lambda: len(asked) < 3 and not asked.append(parts.clock))
        assert parts.clock.env_steps == 0
        assert len(asked) == 3
