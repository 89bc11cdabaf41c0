"""The common part of the MinAtar games (1903.03176): 10×10 board, six actions, sticky actions."""

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
"""Random lane of sticky actions; the draws of a game use the lanes from 1 on."""


class Game(Protocol):
    """The rules of a game. Actions are the six above, after sticky actions were applied."""

    name: str
    channels: int
    useful: tuple[int, ...]
    """The actions that have an effect in this game."""

    def begin(self, counters: Tensor) -> State: ...

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome: ...

    def draw(self, state: State) -> Tensor:
        """Return the boards as bool ``[N, 10, 10, channels]``: row, column, channel."""
        ...


class MinAtar(TensorEnv):
    """A MinAtar game as a ``TensorEnv``, with boards ``[C, 10, 10]`` of 0 and 255.

    ``all_actions``: the action space includes the actions without effect in this game, in the
    order of the minatar package. With probability ``sticky`` the previous action is repeated. At
    the start of an episode the previous action is no-op.
    """

    def __init__(self, game: Game, sticky: float = 0.1, *, all_actions: bool = False) -> None:
        self.game, self.sticky, self.max_episode_steps = game, sticky, 0
        self.actions = tuple(range(FIRE + 1)) if all_actions else game.useful
        shape, version = (game.channels, SIDE, SIDE), 0 if all_actions else 1
        self.spec = EnvSpec(f"MinAtar/{game.name}-v{version}", shape, "uint8", len(self.actions))

    def begin(self, counters: Tensor) -> State:
        return {**self.game.begin(counters), "last_action": torch.zeros_like(counters)}

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        # The table is passed as kernel arguments, which needs no copy from the host.
        chosen = torch.zeros_like(action)
        for number, code in enumerate(self.actions):
            chosen = torch.where(action == number, code, chosen)
        repeats = draw_uniform(counters, STICKY_LANE) < self.sticky
        chosen = torch.where(repeats, state["last_action"], chosen)
        inner, reward, terminated = self.game.advance(state, chosen, counters)
        return Outcome({**inner, "last_action": chosen}, reward, terminated)

    def observe(self, state: State) -> Tensor:
        # Channels first: a board with ten channels is a cube, whose channel axis cannot be inferred
        # from its shape.
        return (self.game.draw(state).movedim(3, 1).to(torch.uint8) * 255).contiguous()


def cells(row: Tensor, column: Tensor) -> Tensor:
    """Return bool ``[N, 10, 10]``, True at one cell of each board; all False if it is outside."""
    line = torch.arange(SIDE, device=row.device)
    return (row.view(-1, 1, 1) == line.view(1, -1, 1)) & (column.view(-1, 1, 1) == line)
