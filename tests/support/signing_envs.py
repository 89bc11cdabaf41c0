"""An environment that says which process steps it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from support.processes import is_alive


class SigningCartPole(CartPoleEnv):
    """Leaves a file with the name of its process in a folder when it is first stepped."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._file: Path | None = Path(folder) / str(os.getpid())

    def step(self, action: Any) -> Any:
        if self._file is not None:
            self._file.touch()
            self._file = None
        return super().step(action)


def who_stepped(folder: Path) -> set[int]:
    """The processes that have stepped such an environment and are alive."""
    return {int(file.name) for file in folder.iterdir() if is_alive(int(file.name))}
