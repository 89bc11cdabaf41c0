"""Acrobot-v1 as tensors: Gymnasium's equations (its ``"book"`` variant), in float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qfleet.core.counter_rng import draw_uniform
from qfleet.core.types import EnvSpec
from qfleet.envs.device.protocol import Outcome, State, TensorEnv

# Both links are equal; CENTRE is the distance of a link's centre of mass from its joint.
GRAVITY, MASS, LENGTH, CENTRE, INERTIA, TIME_STEP = 9.8, 1.0, 1.0, 0.5, 1.0, 0.2
FASTEST = (4 * math.pi, 9 * math.pi)
HEIGHT = 1.0
"""An episode terminates when the tip is higher than this above the upper joint."""
START = 0.1
"""Every component of the initial state is uniform within ± this value."""
START_LANES = (1, 2, 3, 4)


class Acrobot(TensorEnv):
    spec = EnvSpec("Acrobot-v1", (6,), "float32", 3)
    max_episode_steps = 500

    def begin(self, counters: Tensor) -> State:
        drawn = [draw_uniform(counters, lane) for lane in START_LANES]
        return {"joints": (2 * torch.stack(drawn, dim=1) - 1) * START}

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        del counters  # the dynamics are deterministic
        joints = state["joints"]
        torque = (action - 1).to(joints.dtype)
        # Fourth-order Runge-Kutta; the torque is constant during the step.
        first = _change(joints, torque)
        second = _change(joints + TIME_STEP / 2 * first, torque)
        third = _change(joints + TIME_STEP / 2 * second, torque)
        fourth = _change(joints + TIME_STEP * third, torque)
        joints = joints + TIME_STEP / 6 * (first + 2 * (second + third) + fourth)

        upper, lower, upper_speed, lower_speed = joints.unbind(1)
        joints = torch.stack(
            (
                _wrapped(upper),
                _wrapped(lower),
                upper_speed.clamp(-FASTEST[0], FASTEST[0]),
                lower_speed.clamp(-FASTEST[1], FASTEST[1]),
            ),
            dim=1,
        )
        high = -joints[:, 0].cos() - (joints[:, 0] + joints[:, 1]).cos() > HEIGHT
        return Outcome({"joints": joints}, high.float() - 1, high)

    def observe(self, state: State) -> Tensor:
        upper, lower, upper_speed, lower_speed = state["joints"].unbind(1)
        seen = (upper.cos(), upper.sin(), lower.cos(), lower.sin(), upper_speed, lower_speed)
        return torch.stack(seen, dim=1)


def _change(joints: Tensor, torque: Tensor) -> Tensor:
    """Return the time derivative of the four state components.

    Angle 0 hangs down; the lower link's angle is relative to the upper link.
    """
    upper, lower, upper_speed, lower_speed = joints.unbind(1)
    lever = MASS * LENGTH * CENTRE
    sine, cosine = lower.sin(), lower.cos()
    own = MASS * CENTRE**2 + INERTIA
    both = 2 * own + MASS * LENGTH**2 + 2 * lever * cosine
    shared = own + lever * cosine
    lower_pull = MASS * CENTRE * GRAVITY * (upper + lower).sin()
    upper_pull = (
        MASS * (CENTRE + LENGTH) * GRAVITY * upper.sin()
        - lever * sine * lower_speed * (lower_speed + 2 * upper_speed)
        + lower_pull
    )
    ratio = shared / both
    push = torque + ratio * upper_pull - lever * sine * upper_speed.square() - lower_pull
    lower_twist = push / (own - shared * ratio)
    upper_twist = -(shared * lower_twist + upper_pull) / both
    return torch.stack((upper_speed, lower_speed, upper_twist, lower_twist), dim=1)


def _wrapped(angle: Tensor) -> Tensor:
    """Return the angle wrapped to ± π; an angle in that range is unchanged."""
    return angle - 2 * math.pi * (angle / (2 * math.pi)).round()
