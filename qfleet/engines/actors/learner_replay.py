"""The replay memory of ``--servers 0``, in the learner's process. In: blocks of each actor.

One ring holds the envs of all actors side by side, on the learner's device if it fits there, and
is sampled as in the pipeline engine: batches do not travel. A row is complete when every actor has
sent its part of it; parts that are early wait here. ``ActorFleet`` bounds how early an actor is.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.config.config import Config
from qfleet.core.errors import CheckpointError, ClusterError, ClusterLost, StoreFullError
from qfleet.core.types import FIRST, Block, StateDict
from qfleet.engines.actors.account import Account
from qfleet.engines.actors.block_messages import BlockMessage, decode
from qfleet.engines.actors.replay import WHOLE, RemoteBlock, check_actors
from qfleet.engines.cluster.ray_cluster import Cluster
from qfleet.memory.ring import Ring, end_episodes
from qfleet.telemetry.faults import FaultLog


class _Part(NamedTuple):
    """Rows of one actor, and its priorities of the newest complete rows, if it computes them."""

    block: Block
    priority: NDArray[np.float32] | None


class LearnerReplay:
    """A ``Memory`` that fills a ring from the messages of actors and samples from it."""

    def __init__(
        self, cluster: Cluster, config: Config, ring: Ring, faults: FaultLog, account: Account
    ) -> None:
        self._cluster, self._ring, self._envs = cluster, ring, config.envs
        self._timeout_s, self._faults, self._account = config.worker_timeout_s, faults, account
        self._early: list[deque[_Part]] = [deque() for _ in range(config.workers)]
        self._follows: list[tuple[int, int] | None] = [None] * config.workers
        """By actor: life and number of the row that it sends next; None if no episode is open."""
        self.device = ring.device
        self.can_sample, self.sample, self.close = ring.can_sample, ring.sample, ring.close
        self.update_priorities, self.generators = ring.update_priorities, ring.generators
        self.compilables = ring.compilables

    def extend(self, block: Block) -> None:
        """Fetch the block of an actor; move the rows into the ring that are complete now."""
        assert isinstance(block, RemoteBlock), "actors send their blocks themselves"
        if not block.rows:
            return
        name = f"the block of actor {block.actor}"
        try:
            message: BlockMessage = self._cluster.get(block.message, name, self._timeout_s)
        except (ClusterLost, StoreFullError):
            raise
        except ClusterError as error:
            # It was lost with its machine. The next block shows that rows are missing.
            self._faults("letter", str(error))
            return
        self._account.bytes_received += message.nbytes
        self._keep(message)
        while all(self._early):
            self._insert_rows()

    def _keep(self, message: BlockMessage) -> None:
        block, actor = decode(message), message.actor
        if self._follows[actor] != (message.life, message.start):
            if self._follows[actor] is not None:
                self._end_episodes_of(actor)
            block.flags[0] |= FIRST  # the rows before it are of other episodes
        self._follows[actor] = (message.life, message.start + block.rows)
        self._early[actor].append(_Part(block, message.priority))

    def _end_episodes_of(self, actor: int) -> None:
        if early := self._early[actor]:
            end_episodes(early[-1].block.flags[-1])
        else:  # its last row is the newest of the ring
            self._ring.end_open_episodes(slice(actor * self._envs, (actor + 1) * self._envs))

    def _insert_rows(self) -> None:
        """Move as many rows into the ring as the shortest of the first parts has."""
        parts = [early.popleft() for early in self._early]
        rows = min(part.block.rows for part in parts)
        is_whole = True
        for early, (block, _) in zip(self._early, parts, strict=True):
            if block.rows > rows:  # only around the end of a run, whose last blocks are shorter
                early.appendleft(_Part(_rows(block, slice(rows, None)), None))
                is_whole = False
        blocks = [_rows(part.block, slice(0, rows)) for part in parts]
        self._ring.extend(_side_by_side(blocks))
        priorities = [part.priority for part in parts if part.priority is not None]
        if is_whole and len(priorities) == len(parts):
            self._set_priorities(priorities)

    def _set_priorities(self, priorities: list[NDArray[np.float32]]) -> None:
        count = min(map(len, priorities))
        index = self._ring.newest_starts(count)
        if not len(index):
            return
        newest = np.concatenate([own[len(own) - len(index) :] for own in priorities], axis=1)
        priority = torch.from_numpy(newest).to(self.device)
        self._ring.update_priorities(index.view(-1), priority.view(-1))

    def end_open_episodes(self) -> None:
        for early in self._early:
            early.clear()
        self._follows = [None] * len(self._follows)
        self._ring.end_open_episodes()

    def state_dict(self) -> StateDict:
        """Return the complete rows: episodes do not go on after a resume."""
        return {"actors": len(self._early), "rings": {WHOLE: self._ring.state_dict()}}

    def load_state_dict(self, state: StateDict) -> None:
        if WHOLE not in state["rings"]:
            raise CheckpointError(
                "the stored replay memory is that of replay shards; resume with --servers 1"
            )
        check_actors(state, len(self._early))
        self._ring.load_state_dict(state["rings"][WHOLE])


def _rows(block: Block, rows: slice) -> Block:
    return Block(
        block.obs[rows], block.action[rows], block.reward[rows], block.flags[rows], block.version
    )


def _side_by_side(blocks: list[Block]) -> Block:
    """Return one block with the envs of all; its version is the oldest."""
    return Block(
        obs=torch.cat([block.obs for block in blocks], 1),
        action=torch.cat([block.action for block in blocks], 1),
        reward=torch.cat([block.reward for block in blocks], 1),
        flags=torch.cat([block.flags for block in blocks], 1),
        version=min(block.version for block in blocks),
    )
