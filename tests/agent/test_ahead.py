"""Who fills blocks and when: order, versions, errors, deadlines; and the channels of weights.

A scripted actor goes in; it stops wherever a test wants it to.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

from qfleet.agent import ahead
from qfleet.agent.actor import Actor, Inline
from qfleet.agent.ahead import Ahead
from qfleet.agent.weights import FlatWeights, Mailbox
from qfleet.config.config import Config
from qfleet.core.errors import EnvironmentFault
from qfleet.core.types import Block, Clock, Episode, Lag, StateDict
from qfleet.engines.loop import SameWeights
from qfleet.telemetry.timers import Timers
from support.waiting import PHASE_S, deadline

CONFIG = Config(env="Toy-v0", envs=2, steps=26, train_freq=8, learning_starts=0, engine="pipeline")
"""Blocks of four rows, then what is left: 8 + 8 + 8 + 2 env steps."""


class FakeActor:
    """Numbers its blocks; ``before(k)`` runs in the thread before block k is complete."""

    def __init__(self, before: Callable[[int], None] = lambda _: None) -> None:
        self._before = before
        self.asked: list[tuple[int, int]] = []
        """(rows, version) of each block begun."""
        self.begun_at: list[int] = []
        """Env steps of the run at the first row of each block."""
        self.threads: set[str] = set()
        self.landed = False
        self._episodes: list[Episode] = []

    def collect(self, rows: int, version: int, env_steps: int) -> Block:
        self.begun_at.append(env_steps)
        number = len(self.asked)
        self.asked.append((rows, version))
        self.threads.add(threading.current_thread().name)
        self._before(number)
        self._episodes.append(Episode(env=0, reward=float(number), length=rows))
        numbers = torch.full((rows, CONFIG.envs), number)
        flags = torch.zeros((rows, CONFIG.envs), dtype=torch.uint8)
        return Block(numbers.float(), numbers, numbers.float(), flags, version)

    def take_episodes(self) -> list[Episode]:
        episodes, self._episodes = self._episodes, []
        return episodes

    def exploration_rate(self, env_steps: int) -> float:
        return 0.25 + env_steps

    def state_dict(self) -> StateDict:
        return {"envs": {"0": {}}, "episodes": [], "begun": len(self.asked)}

    def land(self) -> None:
        self.landed = True


class FakeChannel:
    """A version that the test counts up. It has no ``lag``: only the loop records lags."""

    def __init__(self) -> None:
        self.version = 0

    def publish(self, version: int) -> None:
        self.version = version

    def restart(self, version: int) -> None:
        self.version = version

    def refresh(self) -> int:
        return self.version


class Scene:
    """An ``Ahead`` with everything around it that the loop would do."""

    def __init__(self, actor: FakeActor, config: Config = CONFIG, **options: Any) -> None:
        self.actor, self.config, self.channel, self.clock = actor, config, FakeChannel(), Clock()
        self.timers = Timers()
        options.setdefault("lockstep", False)
        self.ahead = Ahead(
            cast(Actor, actor), self.channel, config, self.clock, self.timers, **options
        )

    def take(self, rows: int = 4) -> Block:
        """A block, as the loop takes it: into the memory, and then there are newer weights."""
        block = self.ahead.collect(rows)
        self.clock.env_steps += block.rows * self.config.envs
        self.channel.version += 1
        return block


@pytest.fixture
def opened() -> Iterator[list[Scene]]:
    """Scenes to be closed when the test is over."""
    scenes: list[Scene] = []
    yield scenes
    for scene in scenes:
        scene.ahead.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What actors wait at; opened at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def test_blocks_come_in_order_with_the_weights_of_when_the_one_before_was_taken(
    opened: list[Scene],
) -> None:
    scene = Scene(FakeActor())
    opened.append(scene)
    blocks = [scene.take(rows) for rows in (4, 4, 4, 1)]
    assert [int(block.action[0, 0]) for block in blocks] == [0, 1, 2, 3]
    # Block 1 is begun when block 0 is taken, before anything was learnt from that.
    assert [block.version for block in blocks] == [0, 0, 1, 2]
    assert [block.rows for block in blocks] == [4, 4, 4, 1]
    scene.ahead.land()
    assert scene.actor.asked == [(4, 0), (4, 0), (4, 1), (1, 2)]
    assert scene.actor.threads == {"collector"}


def test_in_lockstep_a_block_is_begun_when_it_is_wanted(opened: list[Scene]) -> None:
    scene = Scene(FakeActor(), lockstep=True)
    opened.append(scene)
    assert scene.take().version == 0
    scene.ahead.land()
    assert len(scene.actor.asked) == 1
    scene.channel.version = 7
    assert scene.take().version == 7
    assert scene.actor.threads == {"collector"}


def test_only_one_block_is_collected_ahead(opened: list[Scene]) -> None:
    begun = [threading.Event() for _ in range(4)]
    scene = Scene(FakeActor(before=lambda number: begun[number].set()))
    opened.append(scene)
    scene.take()
    assert begun[1].wait(deadline(PHASE_S)), "the next block is begun without being asked for"
    scene.ahead.land()  # the block under way is complete, and the thread has nothing to do
    assert len(scene.actor.asked) == 2
    scene.take()
    assert begun[2].wait(deadline(PHASE_S))


def test_the_learner_is_free_while_the_next_block_is_collected(
    opened: list[Scene], gate: threading.Event
) -> None:
    def wait_in_the_second(number: int) -> None:
        if number == 1:
            assert gate.wait(deadline(PHASE_S))

    scene = Scene(FakeActor(before=wait_in_the_second))
    opened.append(scene)
    scene.take()  # returns although block 1 cannot be completed yet
    gate.set()
    assert int(scene.take().action[0, 0]) == 1


@pytest.mark.parametrize(
    "error",
    [EnvironmentFault("no licence"), ValueError("boom"), TimeoutError("a simulator's own")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("number", [0, 1], ids=["on the spot", "ahead"])
def test_an_error_in_the_thread_is_raised_where_it_is_waited_for(
    error: Exception, number: int, opened: list[Scene]
) -> None:
    def fail(reached: int) -> None:
        if reached == number:
            raise error

    scene = Scene(FakeActor(before=fail))
    opened.append(scene)
    for _ in range(number):
        scene.take()
    with pytest.raises(type(error)) as caught:
        scene.take()
    assert caught.value is error


def test_a_checkpoint_does_not_fail_with_a_block_it_does_not_hold(opened: list[Scene]) -> None:
    def fail(number: int) -> None:
        if number == 1:
            raise EnvironmentFault("no licence")

    scene = Scene(FakeActor(before=fail))
    opened.append(scene)
    scene.take()
    assert scene.ahead.state_dict()["envs"] is None
    with pytest.raises(EnvironmentFault, match="no licence"):
        scene.take()


def test_closing_does_not_wait_for_an_actor_that_hangs(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "CLOSE_S", 0.05)
    reached, left = threading.Event(), threading.Event()

    def hang(number: int) -> None:
        if number == 1:
            reached.set()
            gate.wait(deadline(PHASE_S))
            left.set()

    scene = Scene(FakeActor(before=hang))
    scene.take()
    assert reached.wait(deadline(PHASE_S))
    scene.ahead.close()
    assert not left.is_set(), "close() came back only when the actor did"
    (thread,) = (t for t in threading.enumerate() if t.name == "collector")
    assert thread.daemon, "it would keep the process from ending"
    gate.set()
    thread.join(deadline(PHASE_S))
    assert not thread.is_alive(), "once the actor is back, the thread ends"


def test_closing_ends_the_thread() -> None:
    before = set(threading.enumerate())
    scene = Scene(FakeActor())
    scene.take()
    assert len(set(threading.enumerate()) - before) == 1
    scene.ahead.close()
    assert not set(threading.enumerate()) - before


def test_a_block_that_never_comes_names_the_env_and_the_mend(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "BOOT_S", 0.0)
    config = CONFIG.replace(env_timeout_s=0.01, max_env_restarts=3)
    scene = Scene(FakeActor(before=lambda _: cast(None, gate.wait(deadline(PHASE_S)))), config)
    with pytest.raises(EnvironmentFault) as caught:
        scene.take()
    message = str(caught.value)
    assert "'Toy-v0'" in message
    assert re.search(r"within [\d.]+ s", message)
    assert "--vectorize async" in message
    assert "env_timeout_s" in message
    gate.set()
    scene.ahead.close()


def test_episodes_come_with_their_blocks(opened: list[Scene]) -> None:
    scene = Scene(FakeActor())
    opened.append(scene)
    for number in range(3):
        scene.take()
        if number < 2:
            scene.ahead.state_dict()  # by now the next block is complete, with its episodes
        taken = scene.ahead.take_episodes()
        assert [episode.reward for episode in taken] == [float(number)]
    assert scene.ahead.take_episodes() == []


def test_the_state_has_the_episodes_not_yet_taken(opened: list[Scene]) -> None:
    scene = Scene(FakeActor())
    opened.append(scene)
    scene.take()
    scene.take()
    assert scene.ahead.state_dict()["episodes"] == [[0, 0.0, 4], [0, 1.0, 4]]


def test_envs_that_are_ahead_of_the_memory_give_no_state(opened: list[Scene]) -> None:
    for lockstep in (False, True):
        scene = Scene(FakeActor(), lockstep=lockstep)
        opened.append(scene)
        scene.take()
        state = scene.ahead.state_dict()
        assert (state["envs"] is not None) == lockstep
        # The block under way was waited for, and it is still the next one.
        assert state["begun"] == (1 if lockstep else 2)
        assert int(scene.take().action[0, 0]) == 1


def test_landing_lands_the_actor_behind_its_last_block(opened: list[Scene]) -> None:
    scene = Scene(FakeActor())
    opened.append(scene)
    scene.take()
    scene.ahead.land()
    assert scene.actor.landed
    assert len(scene.actor.asked) == 2


def test_blocks_are_made_ready_in_the_thread_that_takes_them(opened: list[Scene]) -> None:
    ready: list[threading.Thread] = []
    scene = Scene(FakeActor(), block_ready=lambda: ready.append(threading.current_thread()))
    opened.append(scene)
    for taken in range(1, 4):
        scene.take()
        assert ready == [threading.current_thread()] * taken


def test_waiting_counts_as_idle(opened: list[Scene]) -> None:
    scene = Scene(FakeActor())
    opened.append(scene)
    scene.take()
    assert scene.timers.seconds["idle"] > 0
    assert sum(scene.timers.seconds.values()) == scene.timers.seconds["idle"]


def test_inline_asks_on_the_spot_with_the_newest_weights() -> None:
    actor, channel = FakeActor(), FakeChannel()
    clock = Clock(env_steps=6, elsewhere_env_steps=100)
    inline = Inline(cast(Actor, actor), channel, clock)
    for version in (0, 5, 6):
        channel.version = version
        assert inline.collect(2).version == version
        clock.env_steps += 4
    # ε follows the steps of the whole run.
    assert actor.begun_at == [106, 110, 114]
    assert inline.exploration_rate() == 118.25
    assert actor.asked == [(2, 0), (2, 5), (2, 6)]
    assert actor.threads == {threading.current_thread().name}
    assert [episode.reward for episode in inline.take_episodes()] == [0.0, 1.0, 2.0]


# --- channels -------------------------------------------------------------------------------


def test_a_mailbox_takes_over_what_was_published_and_nothing_else() -> None:
    source, reader = FlatWeights(nn.Linear(3, 2)), FlatWeights(nn.Linear(3, 2))
    mailbox = Mailbox(source, reader)
    assert not torch.equal(source.data, reader.data)
    assert mailbox.refresh() == 0
    assert torch.equal(source.data, reader.data)
    first = source.data.clone()
    source.data.add_(1.0)
    assert mailbox.refresh() == 0
    assert torch.equal(reader.data, first), "these weights are not published yet"
    mailbox.publish(4)
    assert torch.equal(reader.data, first), "weights change only at a refresh"
    assert mailbox.refresh() == 4
    assert torch.equal(reader.data, first + 1.0)
    assert reader.data.data_ptr() != source.data.data_ptr()


def test_a_mailbox_that_restarts_hands_the_weights_over_again() -> None:
    """A checkpoint may bring other weights with the number of those in use."""
    source, reader = FlatWeights(nn.Linear(3, 2)), FlatWeights(nn.Linear(3, 2))
    mailbox = Mailbox(source, reader)
    mailbox.publish(4)
    mailbox.refresh()
    source.data.zero_()
    mailbox.restart(4)
    assert mailbox.refresh() == 4
    assert not reader.data.any()


def test_one_network_for_both_has_only_a_version() -> None:
    channel = SameWeights()
    assert channel.refresh() == 0
    channel.publish(3)
    assert channel.refresh() == 3
    channel.restart(9)
    assert channel.refresh() == 9


def test_lags_have_a_mean_and_a_largest() -> None:
    lag = Lag()
    assert (lag.mean, lag.largest) == (None, 0)
    for updates in (0, 6, 3):
        lag.record(updates)
    assert (lag.mean, lag.largest) == (3.0, 6)
    channel = SameWeights()
    channel.lag.record(2)
    assert (channel.lag.mean, channel.lag.largest) == (2.0, 2)
