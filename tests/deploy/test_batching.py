"""Requests are computed in batches of what has arrived; limits, deadlines and faults of models."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError
from qfleet.deploy.batching import Batcher, Overloaded, Reply
from qfleet.deploy.models import Answers
from support.policy_servers import FakeModel
from support.waiting import PHASE_S, deadline, wait_until


def rows(*values: float) -> NDArray[Any]:
    """Observations whose sums are these values."""
    return np.array([[value, 0, 0, 0] for value in values], np.float32)


def firsts(reply: Reply) -> list[float]:
    """The Q-values of action 0: the sums of the observations."""
    return list(reply.batch.q_values[reply.rows, 0])


async def until(condition: Any) -> None:
    async with asyncio.timeout(deadline(PHASE_S)):
        while not condition():
            await asyncio.sleep(0.001)


class Gate:
    """Holds a model's batches until it is opened."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self) -> None:
        assert self.event.wait(deadline(PHASE_S))


def test_every_request_gets_its_own_answers() -> None:
    async def run() -> None:
        batcher = Batcher(FakeModel())
        replies = await asyncio.gather(
            *(batcher.submit(rows(*range(n, 2 * n)), None) for n in range(1, 20))
        )
        assert [firsts(reply) for reply in replies] == [list(range(n, 2 * n)) for n in range(1, 20)]
        assert batcher.pending == 0
        batcher.stop()

    asyncio.run(run())


def test_what_arrives_during_a_batch_is_the_next_batch() -> None:
    async def run() -> None:
        gate = Gate()
        model = FakeModel(wait=gate)
        batcher = Batcher(model)
        first = batcher.submit(rows(1), None)
        await until(lambda: model.batches == [1])
        others = [batcher.submit(rows(n, n), None) for n in range(2, 7)]
        gate.event.set()
        assert firsts(await first) == [1]
        assert [firsts(await other) for other in others] == [[n, n] for n in range(2, 7)]
        assert model.batches == [1, 10]
        batcher.stop()

    asyncio.run(run())


def test_a_request_waits_for_others_if_told_so() -> None:
    async def run() -> None:
        model = FakeModel()
        batcher = Batcher(model, max_wait_s=deadline(PHASE_S), max_batch=3)
        first = [batcher.submit(rows(n), None) for n in range(2)]
        await asyncio.sleep(0.05)
        assert model.batches == []
        await asyncio.gather(*first, batcher.submit(rows(2), None))  # the batch is full
        assert model.batches == [3]
        batcher = Batcher(model, max_wait_s=0.01)
        await batcher.submit(rows(1), None)  # nothing else comes
        batcher.stop()

    asyncio.run(run())


def test_batches_have_at_most_the_given_size() -> None:
    async def run() -> None:
        model = FakeModel()
        batcher = Batcher(model, max_batch=4)
        large = batcher.submit(rows(*range(10)), None)
        small = [batcher.submit(rows(n), None) for n in range(9)]
        assert firsts(await large) == list(range(10))
        assert [firsts(await one) for one in small] == [[n] for n in range(9)]
        assert model.batches[:3] == [4, 4, 2]
        assert max(model.batches) <= 4
        batcher.stop()

    asyncio.run(run())


def test_the_queue_is_bounded() -> None:
    async def run() -> None:
        gate = Gate()
        batcher = Batcher(FakeModel(wait=gate), max_queue=10)
        accepted = [batcher.submit(rows(0), None) for _ in range(10)]
        with pytest.raises(Overloaded, match="10 observations"):
            batcher.submit(rows(0), None)
        assert batcher.pending == 10
        gate.event.set()
        await asyncio.gather(*accepted)
        assert batcher.pending == 0
        assert firsts(await batcher.submit(rows(3), None)) == [3]
        with pytest.raises(ConfigError, match="at most 10 observations, got 11"):
            batcher.submit(rows(*range(11)), None)  # it would never be accepted
        batcher.stop()

    asyncio.run(run())


def test_a_reply_that_takes_too_long_is_given_up() -> None:
    async def run() -> None:
        gate = Gate()
        model = FakeModel(wait=gate)
        batcher = Batcher(model, timeout_s=0.05)
        first = batcher.submit(rows(1), None)
        # Not ``until``: while the event loop is blocked, it cannot give up the first one too early.
        wait_until(lambda: model.batches == [1], "the first batch")
        second = batcher.submit(rows(2), None)
        for late in (first, second):
            with pytest.raises(Overloaded, match=r"0\.05 s"):
                await late
        assert batcher.pending == 2  # their memory is still in use
        gate.event.set()
        await until(lambda: batcher.pending == 0)
        assert model.batches == [1]  # the second was not computed
        batcher.stop()

    asyncio.run(run())


def test_a_model_that_fails_is_reported_and_the_next_batch_is_computed() -> None:
    async def run() -> None:
        faults = [RuntimeError("out of memory")]

        def fail_once() -> None:
            if faults:
                raise faults.pop()

        counted: list[str] = []
        batcher = Batcher(
            FakeModel(wait=fail_once),
            count=lambda kind, _: counted.append(kind),
        )
        with pytest.raises(Overloaded, match="out of memory"):
            await batcher.submit(rows(1), None)
        assert firsts(await batcher.submit(rows(2), None)) == [2]
        assert counted.count("failures") == 1
        assert counted.count("batches") == 1
        batcher.stop()

    asyncio.run(run())


def test_a_fault_before_the_model_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qfleet.deploy.batching.STOP_S", deadline(PHASE_S))

    async def run() -> None:
        batcher = Batcher(FakeModel(), max_batch=2, max_wait_s=deadline(PHASE_S))

        def fail(_: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr("numpy.concatenate", fail)
            both = [batcher.submit(rows(n), None) for n in range(2)]
            for reply in both:
                with pytest.raises(Overloaded, match="model failed"):
                    await reply
        assert firsts(await batcher.submit(rows(2, 3), None)) == [2, 3]
        assert batcher.is_alive
        batcher.stop()
        assert not batcher.is_alive

    asyncio.run(run())


def test_answers_of_another_number_are_not_handed_out() -> None:
    class Short(FakeModel):
        def __call__(self, observations: Any, action_masks: Any = None) -> Answers:
            return super().__call__(observations[1:], action_masks)

    async def run() -> None:
        with pytest.raises(Overloaded, match="answers"):
            await Batcher(Short()).submit(rows(1, 2), None)

    asyncio.run(run())


def test_a_batch_is_finished_by_the_model_that_began_it() -> None:
    async def run() -> None:
        gate = Gate()
        old, new = FakeModel("old", wait=gate), FakeModel("new")
        batcher = Batcher(old, max_batch=2)
        first = batcher.submit(rows(1, 2, 3, 4, 5), None)  # in three parts
        await until(lambda: old.batches == [2])
        batcher.model = new
        second = batcher.submit(rows(6), None)
        gate.event.set()
        assert (await first).version == "old"
        assert (await second).version == "new"
        assert old.batches == [2, 2, 1]
        assert new.batches == [1]
        batcher.stop()

    asyncio.run(run())


def test_masks_are_batched_with_their_observations() -> None:
    async def run() -> None:
        batcher = Batcher(FakeModel(), max_batch=2, max_wait_s=deadline(PHASE_S))
        legal = np.array([[True, False]]), np.array([[False, True]])
        first, second = await asyncio.gather(*(batcher.submit(rows(1), mask) for mask in legal))
        assert first.batch.actions[first.rows] == [0]
        assert second.batch.actions[second.rows] == [1]

    asyncio.run(run())


def test_stop_computes_what_is_waiting() -> None:
    async def run() -> None:
        gate = Gate()
        batcher = Batcher(FakeModel(wait=gate))
        replies = [batcher.submit(rows(n), None) for n in range(3)]
        gate.event.set()
        await asyncio.to_thread(batcher.stop)
        assert [firsts(await reply) for reply in replies] == [[0], [1], [2]]

    asyncio.run(run())
