"""The newest rollout, for algorithms without replay: takes blocks, returns batches with λ-returns.

Rows and flags mean the same as in a ring: the next observation of row r is the one in row r + 1.
The newest row has none yet, so it becomes a start in the next rollout, and the starts of this one
are the ``rows`` rows before it. Every start is drawn once per epoch, in a new order each time;
starts that are SKIP, or were never filled, have weight 0, so that shapes never change.

The rows are stored oldest first at fixed addresses, and ``sample`` never synchronises with the
host: drawing a whole rollout can be recorded and replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.core.counter_rng import draw_bits, first_counters, next_counters
from qfleet.core.errors import CheckpointError
from qfleet.core.types import FIRST, SKIP, TERMINATED, Batch, Block, EnvSpec, StateDict
from qfleet.memory.ring import blank_earlier_episodes, check_block, check_equal, end_episodes
from qfleet.storage.state_checks import check_like

VALUED_BYTES = 64 * 2**20
"""Bytes of observations, as float32, in one forward pass of the value network on the CPU; the
outputs of a convolution take about as much again. An accelerator evaluates all of them in one pass,
because it has the memory."""


class Rollout:
    """λ-returns of the newest ``rows`` transitions of every env, in shuffled minibatches."""

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        rows: int,
        gamma: float,
        td_lambda: float,
        values: Callable[[Tensor], Tensor],
        seeds: Sequence[int],
        device: torch.device,
        *,
        batch_size: int,
        epochs: int,
    ) -> None:
        """Create an empty rollout.

        ``values`` returns the value of each observation (the largest Q-value, or the critic's)
        by the learner's current network.

        ``seeds``: one per agent. Each agent owns the same number of adjacent envs. Every
        ``agents * batch_size`` consecutive samples are agent-major, ``batch_size`` of each agent;
        an agent's order depends on its own seed only.
        """
        agents = len(seeds)
        if num_envs % agents:
            raise ValueError(f"{num_envs} envs cannot be divided evenly among {agents} agents")
        if epochs * rows * num_envs % (agents * batch_size):
            raise ValueError(
                f"{epochs} × {rows} × {num_envs} samples do not divide into batches of {batch_size}"
            )
        self.rows, self.num_envs, self.device = rows, num_envs, device
        self.gamma = torch.full((num_envs,), gamma, device=device)
        """Discount of each env; like td_lambda, it may be changed in place."""
        self.td_lambda = torch.full((num_envs,), td_lambda, device=device)
        self._agents, self._batch_size, self._epochs = agents, batch_size, epochs
        self._stack, self._frame_shape = spec.frame_stack, spec.frame_shape
        # The starts, the newest row, and the earlier rows that the oldest start's stack needs.
        held = spec.frame_stack - 1 + rows + 1
        self._slots = held * num_envs
        frames = (self._slots + 1, *spec.frame_shape)  # the last one stays blank
        self._frames = torch.zeros(frames, dtype=spec.torch_dtype, device=device)
        per_row = (held, num_envs)
        self._frame_rows = self._frames[:-1].view(*per_row, *spec.frame_shape)
        self._action = torch.zeros(per_row, dtype=torch.int64, device=device)
        self._reward = torch.zeros(per_row, device=device)
        self._flags = torch.full(per_row, SKIP, dtype=torch.uint8, device=device)
        self._written = 0
        """Number of rows ever appended."""
        self._drawn = 0
        """Number of samples of this rollout drawn so far; 0 again after the last one."""
        self._returns = torch.zeros(rows * num_envs, device=device)
        self._order = torch.zeros(epochs * rows * num_envs, dtype=torch.int64, device=device)
        """Starts in the order in which they will be drawn, counted from the oldest."""
        self._shuffles = first_counters(torch.tensor(seeds, device=device)).unsqueeze(1)
        self._own_starts = torch.arange(rows * num_envs // agents, device=device)
        self._first_start = (spec.frame_stack - 1) * num_envs
        self._stack_offsets = torch.arange(1 - spec.frame_stack, 1, device=device) * num_envs
        self._values = Compilable(values)
        self._add_up = Compilable(self._returns_of)
        self._gather_columns = Compilable(self._columns_at, is_sized=True)
        obs_bytes = 4 * math.prod(spec.obs_shape) * max(1, spec.num_obs_values)
        on_host = max(1, VALUED_BYTES // (obs_bytes * num_envs))
        self._valued_at_once = on_host if device.type == "cpu" else rows
        """Rows per forward pass of the value network."""

    def set_gammas(self, gammas: Sequence[float]) -> None:
        """Set the discount of every agent, in place: recorded kernels read it."""
        self.gamma.copy_(torch.tensor(gammas).repeat_interleave(self.num_envs // self._agents))

    def gammas(self) -> list[float]:
        """Return the discount of every agent, from the tensor that kernels read."""
        return self.gamma[:: self.num_envs // self._agents].tolist()

    def __len__(self) -> int:
        """Return the number of transitions whose next observation is known."""
        return max(0, min(self._written - 1, self.rows)) * self.num_envs

    # --- in -----------------------------------------------------------------------------------

    def extend(self, block: Block) -> None:
        """Append rows and drop equally many of the oldest."""
        check_block("rollout", block, self.rows, self.num_envs, self._frame_shape)
        if self._drawn:
            raise ValueError(
                f"{self._drawn} of {len(self._order)} samples drawn; draw all before extending"
            )
        _append(self._frame_rows, block.obs)
        _append(self._action, block.action)
        _append(self._reward, block.reward)
        _append(self._flags, block.flags)
        if self._written == 0:
            # No row precedes the first one, whatever its flags say.
            self._flags[-block.rows].bitwise_or_(FIRST)
        self._written += block.rows

    def end_open_episodes(self) -> None:
        """Mark the newest row SKIP: its observation ends the episode, its action has no result.

        A row that is TERMINATED is left as it is, because it needs no next observation.
        """
        end_episodes(self._flags[-1])

    def close(self) -> None:
        """Do nothing: a rollout holds no files or processes."""

    # --- out ----------------------------------------------------------------------------------

    def can_sample(self) -> bool:
        """Return whether there is a transition. It may be SKIP: a check would synchronise."""
        return len(self) > 0

    def sample(self, count: int, beta: float | Tensor) -> Batch:
        """Return the next ``count`` samples of this rollout. ``beta`` has no effect.

        The λ-returns and the order are computed when the first sample of a rollout is drawn.
        """
        del beta
        total = len(self._order)
        if self._drawn + count > total:
            raise ValueError(f"{count} samples after {self._drawn} exceed the rollout's {total}")
        if self._drawn == 0:
            self._returns.copy_(self._find_returns())
            self._order.copy_(self._shuffle())
        index = self._order[self._drawn : self._drawn + count]
        self._drawn = (self._drawn + count) % total
        obs, action, target, weight = self._gather_columns(index)
        return Batch(obs, action, target, torch.zeros_like(target), obs, weight, index)

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Do nothing: every start is drawn equally often, whatever its error."""

    def generators(self) -> list[torch.Generator]:
        """Return an empty list: the order is drawn from counters, which are tensors."""
        return []

    def compilables(self) -> list[Compilable]:
        """Return the functions that may be compiled with torch.compile."""
        return [self._values, self._add_up, self._gather_columns]

    def _shuffle(self) -> Tensor:
        """Return a permutation of each agent's starts for every epoch, split into minibatches.

        The permutation sorts random numbers, because graphs cannot record torch.randperm.
        """
        own = self.num_envs // self._agents
        self._shuffles.copy_(next_counters(self._shuffles))
        # One counter per start and agent, derived from the agent's counter and mixed, so that the
        # counters are far apart.
        counters = first_counters(self._shuffles + self._own_starts)
        keys = torch.stack([draw_bits(counters, epoch) for epoch in range(self._epochs)])
        of_agent = keys.argsort(dim=2, stable=True)
        first_env = torch.arange(self._agents, device=self.device).mul_(own).unsqueeze(1)
        start = of_agent // own * self.num_envs + of_agent % own + first_env
        batches = start.transpose(0, 1).reshape(self._agents, -1, self._batch_size)
        return batches.transpose(0, 1).reshape(-1)

    def _find_returns(self) -> Tensor:
        """Return the λ-returns of all starts, ``[rows * num_envs]``."""
        first = self._first_start + self.num_envs
        following = torch.arange(first, self._slots, device=self.device).view(self.rows, -1)
        values = [self._values_at(slots) for slots in torch.split(following, self._valued_at_once)]
        returns: Tensor = self._add_up(torch.cat(values))
        return returns

    def _values_at(self, slots: Tensor) -> Tensor:
        """Return the values of whole rows of slots; a population is evaluated agent-major."""
        own = (len(slots), self._agents, -1)
        by_agent = slots.view(own).transpose(0, 1).reshape(-1)
        values: Tensor = self._values(self._observe(by_agent))
        return values.view(self._agents, len(slots), -1).transpose(0, 1).reshape(slots.shape)

    def _returns_of(self, ahead: Tensor) -> Tensor:
        """Return G_t = r_t + γ ((1 − λ) v(t+1) + λ G_{t+1}), where ``ahead`` is v(t+1).

        λ counts as 0 where row t + 1 is not a start: it is SKIP, or the newest row.
        """
        starts = slice(self._stack - 1, self._stack - 1 + self.rows)
        flags, skipped = self._flags[starts], (self._flags[self._stack :] & SKIP) != 0
        skipped[-1] = True
        # The rewards of SKIP rows may be NaN, so they are masked, not multiplied by 0.
        reward = torch.where((flags & SKIP) != 0, 0.0, self._reward[starts])
        discount = torch.where((flags & TERMINATED) != 0, 0.0, self.gamma)
        trust = torch.where(skipped, 0.0, self.td_lambda)
        near = torch.addcmul(reward, discount * (1.0 - trust), ahead)
        far = discount * trust
        total = near[-1]
        totals = [total]
        for row in range(self.rows - 2, -1, -1):
            total = torch.addcmul(near[row], far[row], total)
            totals.append(total)
        return torch.stack(totals[::-1]).view(-1)

    def _columns_at(self, start: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        slot = start + self._first_start
        flags = self._flags.view(-1).index_select(0, slot)
        return (
            self._observe(slot),
            self._action.view(-1).index_select(0, slot),
            self._returns.index_select(0, start),
            ((flags & SKIP) == 0).float(),
        )

    def _observe(self, slot: Tensor) -> Tensor:
        """Return the observations at these slots, stacked from frames if the env stacks them."""
        if self._stack == 1:
            return self._frames.index_select(0, slot)
        at = slot.unsqueeze(1) + self._stack_offsets
        blank_earlier_episodes(at, self._flags.view(-1), self._slots)
        frames = self._frames.index_select(0, at.view(-1))
        return frames.view(-1, self._stack, *self._frame_shape)

    # --- checkpoints --------------------------------------------------------------------------

    def _shape(self) -> dict[str, int]:
        """Return the properties that must be equal for a rollout to load another's rows."""
        return {
            "rows": self.rows,
            "num_envs": self.num_envs,
            "frame_stack": self._stack,
            "agents": self._agents,
            "epochs": self._epochs,
        }

    def state_dict(self) -> StateDict:
        """Return the full state. Tensors are not copied: write them out before extending."""
        return {
            "shape": self._shape(),
            "written": self._written,
            "drawn": self._drawn,
            "frames": self._frame_rows,
            "action": self._action,
            "reward": self._reward,
            "flags": self._flags,
            "returns": self._returns,
            "order": self._order,
            "shuffles": self._shuffles,
        }

    def load_state_dict(self, state: StateDict) -> None:
        check_equal(state["shape"], self._shape(), "rollout")
        check_like(state, self.state_dict(), "rollout", finite=False)
        order, left = state["order"], len(self._order) - state["drawn"]
        is_whole = left > 0 and left % (self._agents * self._batch_size) == 0
        if not is_whole or not 0 <= order.min() <= order.max() < self.rows * self.num_envs:
            raise CheckpointError("rollout/drawn or rollout/order is outside the rollout")
        self._written, self._drawn = state["written"], state["drawn"]
        self._frame_rows.copy_(state["frames"])
        for name in ("action", "reward", "flags", "returns", "order", "shuffles"):
            getattr(self, f"_{name}").copy_(state[name])

    @staticmethod
    def select(state: StateDict, agents: list[int], own: int) -> StateDict:
        """Return the part of a state that belongs to these agents, each with ``own`` envs.

        The state must have been saved between two rollouts, where returns and order are unused.
        """
        if state["drawn"]:
            raise ValueError(f"{state['drawn']} samples drawn; draw the whole rollout first")
        shape = {**state["shape"], "agents": len(agents), "num_envs": len(agents) * own}
        columns = [env for agent in agents for env in range(agent * own, (agent + 1) * own)]
        starts = shape["rows"] * shape["num_envs"]
        rows = {name: state[name][:, columns] for name in ("frames", "action", "reward", "flags")}
        return {
            **state,
            **rows,
            "shape": shape,
            "returns": state["returns"][:starts],
            "order": torch.zeros_like(state["order"][: shape["epochs"] * starts]),
            "shuffles": state["shuffles"][agents],
        }


def _append(column: Tensor, rows: Tensor) -> None:
    """Shift the column by ``len(rows)``, which drops the oldest, and write ``rows`` at its end."""
    count = rows.shape[0]
    column[:-count].copy_(column[count:].clone())  # source and target overlap
    column[-count:].copy_(rows)
