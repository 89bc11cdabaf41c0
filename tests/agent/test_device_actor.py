"""The actor of the device engine, on a CPU: rows, flags, episodes and chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.agent import device_actor, schedules
from qfleet.agent.actor import Actor
from qfleet.agent.device_actor import EPISODES_KEPT, TensorActor, ring_places
from qfleet.agent.inference import HostInference
from qfleet.algorithms.exploration import epsilon_ladder
from qfleet.config.config import Config
from qfleet.config.presets import resolve
from qfleet.core.errors import EnvironmentFault
from qfleet.core.seeding import env_seeds
from qfleet.core.types import FIRST, SKIP, TERMINATED, Block, Clock, EnvSpec, Episode
from qfleet.engines.loop import SameWeights
from qfleet.envs.device.cartpole import CartPole
from qfleet.envs.device.names import make_tensor_env
from qfleet.envs.device.protocol import State, TensorEnv
from qfleet.envs.device.vector import TensorEnvs
from qfleet.networks.factory import make_network
from qfleet.telemetry.timers import Timers
from support.messages import says
from support.tensor_envs import Broken, Count, QValues, constant, scripted

CPU = torch.device("cpu")
GREEDY = Config(exploration_initial_eps=0.0, exploration_final_eps=0.0)


class Blind(Count):
    def observe(self, state: State) -> Tensor:
        seen = super().observe(state)
        return torch.where(seen == 2, torch.inf, seen)


def tensor_actor_of(
    env: TensorEnv,
    num_envs: int,
    q_values: QValues,
    max_rows: int,
    config: Config = GREEDY,
    seed: int = 0,
    clock: Clock | None = None,
) -> TensorActor:
    return TensorActor(
        env,
        torch.tensor(env_seeds(7, num_envs)),
        q_values,
        config,
        CPU,
        [seed],
        max_rows,
        channel=SameWeights(),
        clock=clock or Clock(),
        timers=Timers(),
        resample_noise=lambda _: None,
    )


class ScriptedInference(HostInference):
    """The same values for an actor on the host."""

    def __init__(self, spec: EnvSpec, q_values: QValues) -> None:
        network = make_network(Config(), EnvSpec("x", (1,), "float32", 2), CPU, 0)
        super().__init__(network, CPU, spec.obs_dtype, 0)
        self._values = q_values

    def choose(self, *arguments: Any, needed: bool) -> NDArray[np.int64]:
        obs = arguments[4]
        actions: NDArray[np.int64] = self._values(torch.from_numpy(obs)).argmax(1).numpy()
        return actions


def host_actor_of(
    env: TensorEnv, num_envs: int, q_values: QValues, max_rows: int, config: Config = GREEDY
) -> Actor:
    inference = ScriptedInference(env.spec, q_values)
    return Actor([TensorEnvs(env, num_envs, 7)], inference, config, Timers(), max_rows, 0)


def assert_same_block(one: Block, other: Block) -> None:
    for name in ("obs", "action", "reward", "flags"):
        left, right = getattr(one, name), getattr(other, name)
        assert left.dtype == right.dtype, name
        assert torch.equal(left, right), name


def short_cartpole() -> TensorEnv:
    env = CartPole()
    env.max_episode_steps = 12
    return env


def breakout() -> TensorEnv:
    return make_tensor_env(resolve("MinAtar/Breakout-v1")[0])


@pytest.mark.parametrize("make", [short_cartpole, breakout, Count], ids=lambda make: make.__name__)
@pytest.mark.parametrize("clip_rewards", [False, True])
def test_blocks_and_episodes_are_those_of_an_actor_on_the_host(
    make: Callable[[], TensorEnv], clip_rewards: bool
) -> None:
    config = GREEDY.replace(clip_rewards=clip_rewards)
    q_values = scripted(make().spec.num_actions)
    ours = tensor_actor_of(make(), 5, q_values, 16, config)
    theirs = host_actor_of(make(), 5, q_values, 16, config)
    seen = 0
    episodes: tuple[list[Episode], list[Episode]] = ([], [])
    for rows in (16, 16, 1, 7, 16, 16, 1, 1, 16):
        block = ours.collect(rows)
        assert_same_block(block, theirs.collect(rows, 0, 0))
        seen |= int(block.flags.max())
        if rows == 7:  # not asked after every block
            episodes[0].extend(ours.take_episodes())
            episodes[1].extend(theirs.take_episodes())
    episodes[0].extend(ours.take_episodes())
    episodes[1].extend(theirs.take_episodes())
    assert episodes[0] == episodes[1]
    assert len(episodes[0]) > 5
    assert seen & FIRST


def test_every_flag_is_met() -> None:
    """A termination, a truncation and the row after each, in one table."""
    block = tensor_actor_of(Count(), 64, constant(0), 12).collect(12)
    at, end = block.obs.long().unbind(2)
    assert torch.equal((block.flags & FIRST) > 0, at == 0)
    assert torch.equal((block.flags & TERMINATED) > 0, (at + 1 == end) & (at < 6))
    assert torch.equal((block.flags & SKIP) > 0, (at == end) | (at == 6))
    assert ((at == 6) & (end > 6)).any()  # truncated


def test_episodes_that_do_not_fit_leave_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_actor, "EPISODES_KEPT", 8)
    ours = tensor_actor_of(Count(), 6, scripted(3), 20)
    theirs = host_actor_of(Count(), 6, scripted(3), 20)
    for blocks, rows in ((1, 20), (3, 5), (1, 2), (2, 20), (1, 0)):
        for _ in range(blocks if rows else 0):
            ours.collect(rows)
            theirs.collect(rows, 0, 0)
        expected = theirs.take_episodes()
        assert ours.take_episodes() == expected[-8:]
        if rows == 20:
            assert len(expected) > 8  # more than fit, in one block


@pytest.mark.parametrize("share", [0.0, 0.05, 0.9, 1.0])
def test_no_two_episodes_get_one_place(share: float) -> None:
    random, size, total = torch.Generator().manual_seed(1), 8, 0
    for _ in range(20):
        over = torch.rand(60, generator=random) < share
        place, after = ring_places(over, torch.tensor(total), size)
        newest = over.nonzero().view(-1).tolist()
        expected = [size] * 60
        for number, at in enumerate(newest):
            if number >= len(newest) - size:
                expected[at] = (total + number) % size
        assert place.tolist() == expected
        taken = [at for at in expected if at < size]
        assert len(set(taken)) == len(taken)
        total += len(newest)
        assert int(after) == total


def test_more_fit_than_any_report_asks_for() -> None:
    from qfleet.training.standings import EPISODE_WINDOW

    assert EPISODES_KEPT > EPISODE_WINDOW


# --- chance -------------------------------------------------------------------------------------


def flat(eps: float, **fields: Any) -> Config:
    return Config(exploration_initial_eps=eps, exploration_final_eps=eps, **fields)


def test_epsilon_greedy_explores_as_often_as_asked_and_evenly() -> None:
    block = tensor_actor_of(Count(), 512, constant(1), 40, flat(0.3)).collect(40)
    share = torch.bincount(block.action.view(-1), minlength=3) / block.action.numel()
    # 20,480 draws: a standard deviation is below 0.003.
    torch.testing.assert_close(share, torch.tensor([0.1, 0.8, 0.1]), rtol=0, atol=0.01)


@pytest.mark.parametrize(("eps", "explored"), [(0.0, 0.0), (1.0, 2 / 3)])
def test_both_ends_of_epsilon_are_exact(eps: float, explored: float) -> None:
    block = tensor_actor_of(Count(), 512, constant(1), 8, flat(eps)).collect(8)
    share = float((block.action != 1).float().mean())
    assert abs(share - explored) <= (0.03 if eps else 0.0)


def test_envs_and_rows_and_seeds_draw_their_own() -> None:
    actions = tensor_actor_of(Count(), 64, constant(0), 64, flat(1.0)).collect(64).action
    other = tensor_actor_of(Count(), 64, constant(0), 64, flat(1.0), seed=1).collect(64).action
    for one, another in (
        (actions[:, :-1], actions[:, 1:]),
        (actions[:-1], actions[1:]),
        (actions, other),
    ):
        assert abs(float((one == another).float().mean()) - 1 / 3) < 0.04


def test_epsilon_falls_within_a_block() -> None:
    config = Config(
        steps=2048 * 40,
        exploration_fraction=0.5,
        exploration_initial_eps=0.9,
        exploration_final_eps=0.1,
    )
    clock = Clock()
    actor = tensor_actor_of(Count(), 2048, constant(0), 15, config, clock=clock)
    explored = []
    for rows in (15, 15, 4):
        explored += (actor.collect(rows).action != 0).float().mean(1).mul(1.5).tolist()
        clock.env_steps += rows * 2048
    expected = [schedules.epsilon(config, row * 2048) for row in range(34)]
    assert expected[19] > expected[20] == expected[33] == 0.1
    np.testing.assert_allclose(explored, expected, atol=0.06)
    assert actor.exploration_rate() == 0.1


def test_the_ladder_gives_every_env_its_own_epsilon() -> None:
    config = Config(exploration_ladder=True, exploration_final_eps=0.8)
    actor = tensor_actor_of(Count(), 4, constant(0), 1000, config)
    explored = (actor.collect(1000).action != 0).float().mean(0) * 1.5
    ladder = epsilon_ladder(4, 0.8)
    torch.testing.assert_close(explored, ladder, rtol=0, atol=0.08)
    assert actor.exploration_rate() == float(ladder.mean())


def test_noise_is_drawn_once_a_block() -> None:
    drawn: list[torch.Generator] = []
    actor = TensorActor(
        Count(), torch.arange(2), constant(0), GREEDY, CPU, [5], 4,
        channel=SameWeights(), clock=Clock(), timers=Timers(), resample_noise=drawn.append,
    )  # fmt: skip
    for _ in range(3):
        actor.collect(4)
    assert len(drawn) == 3
    assert drawn[0].initial_seed() == 5


# --- state --------------------------------------------------------------------------------------


def test_a_restored_actor_goes_on_with_the_same_rows() -> None:
    config = flat(0.4)
    actor = tensor_actor_of(Count(), 9, scripted(3), 10, config)
    actor.collect(10)
    actor.collect(3)
    state = tensor_state(actor.state_dict())
    other = tensor_actor_of(Count(), 9, scripted(3), 10, config, seed=3)
    assert other.load_state_dict(state)
    for rows in (10, 2):
        assert_same_block(actor.collect(rows), other.collect(rows))
    assert actor.take_episodes() == other.take_episodes()


def tensor_state(state: Any) -> Any:
    """As it would come back from a checkpoint."""
    if isinstance(state, dict):
        return {name: tensor_state(value) for name, value in state.items()}
    return state.clone() if isinstance(state, Tensor) else state


@pytest.mark.parametrize("env", [Broken, Blind])
def test_what_is_not_finite_is_found_when_the_host_looks(env: type[TensorEnv]) -> None:
    actor = tensor_actor_of(env(), 3, constant(0), 4)
    actor.collect(1)
    assert actor.take_episodes() == []
    actor.collect(4)
    for look in (actor.take_episodes, actor.state_dict):
        with pytest.raises(EnvironmentFault, match=says("NaN")):
            look()


def test_recording_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that records calls the function first; a run must not begin with those steps."""

    def record(function: Callable[[], None], *_: Any) -> Callable[[], None]:
        function()
        function()
        return function

    plain = tensor_actor_of(Count(), 8, scripted(3), 9, flat(0.5))
    monkeypatch.setattr(device_actor, "record", record)
    recorded = tensor_actor_of(Count(), 8, scripted(3), 9, flat(0.5))
    for rows in (9, 4, 9):
        assert_same_block(plain.collect(rows), recorded.collect(rows))
    assert plain.take_episodes() == recorded.take_episodes()


def test_collecting_alone_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_actor, "MEASURE_S", 0.01)
    assert tensor_actor_of(Count(), 4, constant(0), 2).rate() > 0
