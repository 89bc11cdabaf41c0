"""CartPole-v1 as tensors: Gymnasium's equations, in float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qfleet.core.counter_rng import draw_uniform
from qfleet.core.types import EnvSpec
from qfleet.envs.device.protocol import Outcome, State, TensorEnv

GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH, FORCE, TIME_STEP = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
FARTHEST, STEEPEST = 2.4, 12 * math.pi / 180
START = 0.05
"""Every component of the initial state is uniform within ± this value."""


class CartPole(TensorEnv):
    spec = EnvSpec("CartPole-v1", (4,), "float32", 2)
    max_episode_steps = 500

    def begin(self, counters: Tensor) -> State:
        lanes = torch.arange(4, device=counters.device)
        return {"body": (2 * draw_uniform(counters.unsqueeze(1), lanes) - 1) * START}

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        del counters  # the dynamics are deterministic
        place, speed, angle, turning = state["body"].unbind(1)
        force = torch.where(action == 1, FORCE, -FORCE)
        sine, cosine = angle.sin(), angle.cos()
        mass, lever = CART_MASS + POLE_MASS, POLE_MASS * HALF_LENGTH
        pull = (force + lever * turning.square() * sine) / mass
        twist = (GRAVITY * sine - cosine * pull) / (
            HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cosine.square() / mass)
        )
        push = pull - lever * twist * cosine / mass
        body = torch.stack(
            (
                place + TIME_STEP * speed,
                speed + TIME_STEP * push,
                angle + TIME_STEP * turning,
                turning + TIME_STEP * twist,
            ),
            dim=1,
        )
        fallen = (body[:, 0].abs() > FARTHEST) | (body[:, 2].abs() > STEEPEST)
        return Outcome({"body": body}, torch.ones_like(place), fallen)

    def observe(self, state: State) -> Tensor:
        return state["body"]
