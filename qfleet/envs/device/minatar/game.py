"""What the five MinAtar games share (1903.03176): a 10×10 board, six actions, sticky actions."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from qfleet.core.counter_rng import draw_uniform
from qfleet.core.types import EnvSpec
from qfleet.envs.device.protocol import Outcome, State, TensorEnv

SIDE = 10
NOTHING, LEFT, UP, RIGHT, DOWN, FIRE = range(6)
STICKY_LANE = 0
"""Draws of a game use the lanes from 1 on."""


class Game(Protocol):
    """A game's own rules. Actions are the six above; sticky ones are resolved already."""

    name: str
    channels: int
    useful: tuple[int, ...]
    """The actions that do something in this game."""

    def begin(self, counters: Tensor) -> State: ...

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome: ...

    def draw(self, state: State) -> Tensor:
        """bool ``[N, 10, 10, channels]``: row, column, channel."""
        ...


class MinAtar(TensorEnv):
    """A game as a ``TensorEnv``: its useful actions, its board ``[C, 10, 10]`` in 0 and 255.

    ``all_actions``: also those that do nothing in this game, in the package's order. With
    probability ``sticky`` the action before is repeated. An episode starts as if nothing had
    been done before it.
    """

    def __init__(
        self,
        game: Game,
        sticky: float = 0.1,
        *,
        all_actions: bool = False,
    ) -> None:
        self.game, self.sticky, self.max_episode_steps = game, sticky, 0
        self.actions = tuple(range(FIRE + 1)) if all_actions else game.useful
        shape, version = (game.channels, SIDE, SIDE), 0 if all_actions else 1
        self.spec = EnvSpec(f"MinAtar/{game.name}-v{version}", shape, "uint8", len(self.actions))

    def begin(self, counters: Tensor) -> State:
        return {**self.game.begin(counters), "last_action": torch.zeros_like(counters)}

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        # The table is made of kernel arguments: no copy from the host is waited for.
        chosen = torch.zeros_like(action)
        for number, code in enumerate(self.actions):
            chosen = torch.where(action == number, code, chosen)
        repeats = draw_uniform(counters, STICKY_LANE) < self.sticky
        chosen = torch.where(repeats, state["last_action"], chosen)
        inner, reward, terminated = self.game.advance(state, chosen, counters)
        return Outcome({**inner, "last_action": chosen}, reward, terminated)

    def observe(self, state: State) -> Tensor:
        # Channels first: a board of ten channels is a cube, which tells nobody what is what.
        return (self.game.draw(state).movedim(3, 1).to(torch.uint8) * 255).contiguous()


def cells(row: Tensor, column: Tensor) -> Tensor:
    """bool ``[N, 10, 10]``, true at one cell of each board; nowhere if that lies outside."""
    line = torch.arange(SIDE, device=row.device)
    return (row.view(-1, 1, 1) == line.view(1, -1, 1)) & (column.view(-1, 1, 1) == line)
