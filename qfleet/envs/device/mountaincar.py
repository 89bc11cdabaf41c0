"""MountainCar-v0 as tensors: Gymnasium's equations, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.core.counter_rng import draw_uniform
from qfleet.core.types import EnvSpec
from qfleet.envs.device.protocol import Outcome, State, TensorEnv

FORCE, GRAVITY, FASTEST = 0.001, 0.0025, 0.07
LEFTMOST, RIGHTMOST, GOAL = -1.2, 0.6, 0.5
START = (-0.6, -0.4)
"""The range of the initial position."""
START_LANE = 1


class MountainCar(TensorEnv):
    spec = EnvSpec("MountainCar-v0", (2,), "float32", 3)
    max_episode_steps = 200

    def begin(self, counters: Tensor) -> State:
        place = START[0] + (START[1] - START[0]) * draw_uniform(counters, START_LANE)
        return {"car": torch.stack((place, torch.zeros_like(place)), dim=1)}

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        del counters  # the dynamics are deterministic
        place, speed = state["car"].unbind(1)
        push = FORCE * (action - 1).to(place.dtype)
        speed = (speed + push - GRAVITY * (3 * place).cos()).clamp(-FASTEST, FASTEST)
        place = (place + speed).clamp(LEFTMOST, RIGHTMOST)
        # The left wall stops the car.
        speed = torch.where(place <= LEFTMOST, speed.clamp(min=0), speed)
        arrived = (place >= GOAL) & (speed >= 0)
        return Outcome(
            {"car": torch.stack((place, speed), dim=1)}, torch.full_like(place, -1), arrived
        )

    def observe(self, state: State) -> Tensor:
        return state["car"]
