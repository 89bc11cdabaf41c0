"""Every row an actor hands over belongs together, however its envs are grouped and in flight.

Scripted groups of environments and a scripted inference go in; the blocks that come out are held
against the script, row by row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.agent.actor import Actor
from qfleet.config.config import Config
from qfleet.core.types import FIRST, SKIP, TERMINATED, Block, EnvSpec, Episode, StateDict, Step
from qfleet.telemetry.timers import Timers

ACTIONS = 4
GREEDY = 7
"""No random action has this value, so it shows that the network chose."""
LIFE_LOST_AT, FAULT_AT = 2, 3
"""In these steps of an episode: a life is lost; the reward is useless, but the episode goes on."""
MAX_ROWS = 5
GROUPINGS = [(4,), (2, 2), (3, 2, 1)]


def length_of(env: int) -> int:
    """Steps of every episode of this env: no two envs of a group reset together for long."""
    return 4 + env


def reward_of(env: int, episode: int, step: int, action: int) -> float:
    return 1000.0 * env + 100.0 * episode + 10.0 * step + action + 1.0


class ScriptedGroup:
    """A ``core.VectorEnv`` that observes [env, episode, step]; ``first_env`` is its first number.

    Even episodes terminate, odd ones are truncated. It takes every liberty that the protocol
    gives: what it has returned is overwritten as soon as it is called again.
    """

    in_background = True

    def __init__(self, group: int, first_env: int, size: int, stack: int, log: list[Any]) -> None:
        shape = (3,) if stack == 1 else (stack, 3)
        self.spec = EnvSpec("scripted", shape, "float32", ACTIONS, frame_stack=stack)
        self.num_envs = size
        self.seeds = list(range(size))
        self._group, self._log = group, log
        self._env = np.arange(first_env, first_env + size)
        self._length = np.array([length_of(env) for env in self._env.tolist()])
        self._episode = np.zeros(size, dtype=np.int64)
        self._step = np.zeros(size, dtype=np.int64)
        self._sent: NDArray[np.int64] | None = None
        self._obs = np.zeros((size, *shape), dtype=np.float32)
        self._returned: Step | None = None

    def _observe(self, fresh: NDArray[np.bool_]) -> NDArray[Any]:
        newest = np.stack((self._env, self._episode, self._step), axis=1).astype(np.float32)
        if self.spec.frame_stack == 1:
            self._obs[:] = newest
        else:
            self._obs[fresh] = -1.0
            self._obs[:, :-1] = self._obs[:, 1:].copy()
            self._obs[:, -1] = newest
        return self._obs.copy()

    def reset(self) -> NDArray[Any]:
        self._log.append((self._group, "reset"))
        return self._observe(np.ones(self.num_envs, dtype=np.bool_))

    def step(self, actions: NDArray[np.int64]) -> Step:
        self.send(actions)
        return self.recv()

    def send(self, actions: NDArray[np.int64]) -> None:
        assert self._sent is None, "two sends without a recv"
        self._log.append((self._group, "send"))
        assert actions.shape == (self.num_envs,)
        self._sent = actions.copy()
        if self._returned is not None:
            for array in self._returned:
                assert array is not None
                array[:] = -99 if array.dtype != np.bool_ else ~array

    def recv(self) -> Step:
        assert self._sent is not None, "recv without a send"
        self._log.append((self._group, "recv"))
        actions, self._sent = self._sent, None
        over = self._step == self._length
        fields = zip(self._env, self._episode, self._step, actions, strict=True)
        reward = np.array([reward_of(*map(int, field)) for field in fields])
        self._step += 1
        self._episode[over] += 1
        self._step[over] = 0
        faulty = ~over & (self._step == FAULT_AT)
        reward[over | faulty] = 0.0
        ended = self._step == self._length
        self._returned = Step(
            obs=self._observe(over),
            reward=reward,
            terminated=ended & (self._episode % 2 == 0),
            truncated=ended & (self._episode % 2 == 1),
            invalid=over | faulty,
            fresh=over.copy(),
            life_lost=~over & (self._step == LIFE_LOST_AT),
        )
        return self._returned

    def state_dict(self) -> StateDict | None:
        assert self._sent is None, "a step is in flight"
        return {"episode": self._episode.tolist(), "step": self._step.tolist()}

    def load_state_dict(self, state: StateDict) -> None:
        raise AssertionError(f"no test loads {state}")

    def close(self) -> None:
        """Nothing is held."""


class ScriptedInference:
    """Answers GREEDY, and sees to it that it is asked about what the row will hold."""

    def __init__(self) -> None:
        self.needed: list[bool] = []
        self._frames: NDArray[Any] = np.zeros(0)

    def host_frames(self, shape: tuple[int, ...]) -> NDArray[Any]:
        self._frames = np.zeros(shape, dtype=np.float32)
        return self._frames

    def begin_block(self) -> None:
        """Nothing is drawn."""

    def choose(
        self,
        group: int,
        block: int,
        row: int,
        columns: slice,
        obs: NDArray[Any],
        opened: NDArray[np.bool_],
        needed: bool,
    ) -> NDArray[np.int64] | None:
        newest = obs.reshape(len(obs), -1, 3)[:, -1]
        assert np.array_equal(self._frames[block, row, columns], newest)
        assert np.array_equal(opened, newest[:, 2] == 0)
        self.needed.append(needed)
        return np.full(len(obs), GREEDY) if needed else None

    def deliver(self, number: int, block: Block) -> Block:
        return block

    def noise_state(self) -> Tensor:
        return torch.zeros(1)

    def load_noise_state(self, state: Tensor) -> None:
        """There is none."""


@dataclasses.dataclass
class Scene:
    actor: Actor
    inference: ScriptedInference
    log: list[Any]
    """(group, call) of every call of every group."""

    def collect(self, rows: list[int]) -> list[Block]:
        """Return copies of blocks with these numbers of rows; the actor reuses its own."""
        return [copied(self.actor.collect(count, version=0, env_steps=0)) for count in rows]


def copied(block: Block) -> Block:
    columns = ("obs", "action", "reward", "flags")
    return dataclasses.replace(block, **{name: getattr(block, name).clone() for name in columns})


def scene(
    sizes: tuple[int, ...],
    *,
    stack: int = 1,
    epsilon: float = 0.5,
    blocks: int = 4,
    seed: int = 0,
    **changes: Any,
) -> Scene:
    config = Config(
        envs=sum(sizes),
        exploration_initial_eps=epsilon,
        exploration_final_eps=epsilon,
        **changes,
    )
    log: list[Any] = []
    firsts = np.cumsum((0, *sizes)).tolist()
    groups = [
        ScriptedGroup(number, firsts[number], size, stack, log) for number, size in enumerate(sizes)
    ]
    inference = ScriptedInference()
    actor = Actor(groups, inference, config, Timers(), MAX_ROWS, seed, blocks)
    return Scene(actor, inference, log)


def check_rows(blocks: list[Block], num_envs: int) -> list[Episode]:
    """Hold all rows against the script; the episodes that were finished in them, env by env."""
    frames = torch.cat([block.obs for block in blocks]).numpy()
    actions = torch.cat([block.action for block in blocks]).tolist()
    rewards = torch.cat([block.reward for block in blocks]).tolist()
    flags = torch.cat([block.flags for block in blocks]).tolist()
    episodes = []
    for env in range(num_envs):
        episode = step = 0
        earned = 0.0
        for row in range(len(actions)):
            where = f"env {env}, row {row}"
            assert frames[row, env].tolist() == [env, episode, step], where
            reward = reward_of(env, episode, step, actions[row][env])
            expected = FIRST if step == 0 else 0
            if step == length_of(env):
                expected, reward = expected | SKIP, 0.0
                episode, step = episode + 1, 0
            else:
                step += 1
                terminates = step == length_of(env) and episode % 2 == 0
                if terminates or step == LIFE_LOST_AT:
                    expected |= TERMINATED
                if step == FAULT_AT:
                    expected, reward = expected | SKIP, 0.0
                earned += reward
                if step == length_of(env):
                    episodes.append(Episode(env, earned, step))
                    earned = 0.0
            assert flags[row][env] == expected, where
            assert rewards[row][env] == reward, where
    return episodes


@pytest.mark.parametrize("stack", [1, 2], ids=["plain", "stacked"])
@pytest.mark.parametrize(
    "rows", [[1] * 40, [5] * 8, [5, 1, 3, 5, 2, 5, 4, 1, 5, 5]], ids=["ones", "fives", "mixed"]
)
@pytest.mark.parametrize("sizes", GROUPINGS, ids=str)
def test_every_row_belongs_together(sizes: tuple[int, ...], rows: list[int], stack: int) -> None:
    played = scene(sizes, stack=stack)
    blocks = played.collect(rows)
    assert [block.rows for block in blocks] == rows
    episodes = check_rows(blocks, sum(sizes))
    assert len({episode.env for episode in episodes}) == sum(sizes)
    reported = played.actor.take_episodes()
    assert sorted(map(dataclasses.astuple, reported)) == sorted(map(dataclasses.astuple, episodes))
    assert played.actor.take_episodes() == []
    chosen = torch.cat([block.action for block in blocks])
    assert {GREEDY, *range(ACTIONS)} == set(chosen.flatten().tolist())


def test_a_block_stays_as_it_was_while_the_next_ones_are_filled() -> None:
    played = scene((2, 2), blocks=4)
    first = played.actor.collect(5, version=0, env_steps=0)
    before = copied(first)
    for _ in range(2):
        played.actor.collect(5, version=0, env_steps=0)
    for name in ("obs", "action", "reward", "flags"):
        assert torch.equal(getattr(first, name), getattr(before, name)), name
    for _ in range(2):
        played.actor.collect(5, version=0, env_steps=0)
    assert not torch.equal(first.obs, before.obs)


def test_a_block_is_as_old_as_the_weights_that_chose_its_first_row() -> None:
    alone, groups = scene((4,)), scene((2, 2))
    versions = (3, 8, 9)
    assert [alone.actor.collect(2, version, 0).version for version in versions] == [3, 8, 9]
    assert [groups.actor.collect(2, version, 0).version for version in versions] == [3, 3, 8]


def test_rewards_are_clipped_to_learn_from_and_not_in_reports() -> None:
    played = scene((2, 2), clip_rewards=True)
    rewards = torch.cat([block.reward for block in played.collect([5] * 3)])
    assert set(rewards.flatten().tolist()) == {0.0, 1.0}
    assert all(episode.reward > 1000 for episode in played.actor.take_episodes() if episode.env)


@pytest.mark.parametrize("sizes", GROUPINGS, ids=str)
def test_sends_and_receives_alternate_and_others_step_meanwhile(sizes: tuple[int, ...]) -> None:
    played = scene(sizes)
    played.collect([5, 1, 5])
    groups = range(len(sizes))
    newest = dict.fromkeys(groups, "")
    for group, call in played.log:
        expected = {"": "reset", "reset": "send", "send": "recv", "recv": "send"}[newest[group]]
        assert call == expected
        newest[group] = call
        if call == "recv":
            # Whoever else there is is stepping while this group is being answered.
            assert all(newest[other] == "send" for other in groups if other != group)
    assert set(newest.values()) == ({"send"} if len(sizes) > 1 else {"recv"})
    for group in groups:
        received = sum(entry == (group, "recv") for entry in played.log)
        assert received == 11


@pytest.mark.parametrize("sizes", GROUPINGS, ids=str)
def test_landing_leaves_nothing_in_flight(sizes: tuple[int, ...]) -> None:
    played = scene(sizes)
    played.actor.land()  # before anything was begun, too
    played.collect([5, 3])
    assert (played.actor.state_dict()["envs"] is None) == (len(sizes) > 1)
    played.actor.land()
    played.actor.land()
    for group in range(len(sizes)):
        calls = [call for number, call in played.log if number == group]
        assert calls[-1] == "recv"
        assert calls.count("send") == calls.count("recv")
    # Every group asserts that none of its steps is in flight.
    assert played.actor.state_dict()["envs"] is not None


def test_what_was_in_flight_cannot_be_continued() -> None:
    played = scene((2, 2))
    played.collect([5])
    saved = played.actor.state_dict()
    again = scene((2, 2), seed=1)
    assert again.actor.load_state_dict(saved) is False
    assert again.actor.state_dict()["random"] == saved["random"]
    check_rows(again.collect([5, 5]), 4)


@pytest.mark.parametrize("sizes", GROUPINGS, ids=str)
def test_the_network_is_not_run_if_all_actions_are_random(sizes: tuple[int, ...]) -> None:
    played = scene(sizes, epsilon=1.0)
    actions = torch.cat([block.action for block in played.collect([5, 1, 5])])
    # The very first row as well, which groups in flight are sent before any block.
    assert GREEDY not in actions[0].tolist()
    assert set(actions.flatten().tolist()) == set(range(ACTIONS))
    assert not any(played.inference.needed)


def test_the_actions_drawn_are_those_taken() -> None:
    blocks = scene((4,), epsilon=1.0, seed=5).collect([5, 2])
    random = np.random.default_rng(5)
    for block in blocks:
        random.random((block.rows, 4))
        assert block.action.tolist() == random.integers(ACTIONS, size=(block.rows, 4)).tolist()


@pytest.mark.parametrize("sizes", GROUPINGS, ids=str)
def test_never_exploring_every_action_is_greedy(sizes: tuple[int, ...]) -> None:
    played = scene(sizes, epsilon=0.0)
    actions = torch.cat([block.action for block in played.collect([5, 1, 5])])
    assert set(actions.flatten().tolist()) == {GREEDY}
    assert all(played.inference.needed)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_the_ladder_gives_every_column_its_own_rate(sizes: tuple[int, ...]) -> None:
    """0.9, 0.9^(10/3), 0.9^(17/3) and 0.9^8 = 0.43, whichever group an env is in."""
    played = scene(sizes, epsilon=0.9, exploration_ladder=True)
    actions = torch.cat([block.action for block in played.collect([5] * 200)])
    explored = (actions != GREEDY).float().mean(dim=0).numpy()
    expected = 0.9 ** (1 + 7 * np.arange(4) / 3)
    # 1000 draws of a fixed seed: the largest deviation to be expected is about 0.05.
    assert np.abs(explored - expected).max() < 0.06
