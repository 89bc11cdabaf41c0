"""A slow, plain model of what a replay memory must return, told from episodes, not from flags.

In: per env, a list of episodes. Out: the rows they are recorded as, and for every start the
transition that learning should see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from qfleet.core.types import FIRST, SKIP, TERMINATED, Block, EnvSpec

PLAIN, LIFE_LOST, FAULT = "plain", "life lost", "fault"
GAMMA = 0.5
FRAME = 2  # numbers in a frame


@dataclass(frozen=True)
class Plan:
    """An episode: what each action led to, and whether the last one ended the task."""

    steps: tuple[str, ...]
    terminated: bool


@dataclass(frozen=True)
class Start:
    """Where a row lies: step ``time`` of an episode of one env; frame ids count up along it."""

    plan: Plan
    time: int
    first_id: int

    @property
    def is_final_observation(self) -> bool:
        return self.time == len(self.plan.steps)

    @property
    def eligible(self) -> bool:
        return not self.is_final_observation and self.plan.steps[self.time] != FAULT


@dataclass
class Transition:
    obs: np.ndarray
    action: int
    reward: float
    discount: float
    next_obs: np.ndarray


def lay_out(plans: list[Plan], rows: int, env: int) -> list[Start]:
    """The first ``rows`` rows of an env that plays the plans over and over."""
    starts: list[Start] = []
    first_id = 1000 * env + 1
    turn = 0
    while len(starts) < rows:
        plan = plans[turn % len(plans)]
        starts += [Start(plan, time, first_id) for time in range(len(plan.steps) + 1)]
        first_id += len(plan.steps) + 1
        turn += 1
    return starts[:rows]


def frame(identity: int) -> np.ndarray:
    return np.array([identity, -identity], dtype=np.float32)


def action_of(start: Start) -> int:
    return (start.first_id + start.time) * 7


def reward_of(start: Start) -> float:
    if not start.eligible:
        return math.nan  # meaningless by definition: must never reach a return
    return float((start.first_id + start.time) % 13 - 6)


def flags_of(start: Start) -> int:
    flags = FIRST if start.time == 0 else 0
    if not start.eligible:
        return flags | SKIP
    last = start.time == len(start.plan.steps) - 1
    if start.plan.steps[start.time] == LIFE_LOST or (last and start.plan.terminated):
        flags |= TERMINATED
    return flags


def as_block(envs: list[list[Start]], begin: int, end: int) -> Block:
    rows = [[envs[env][row] for env in range(len(envs))] for row in range(begin, end)]
    obs = np.array([[frame(s.first_id + s.time) for s in row] for row in rows], dtype=np.float32)
    return Block(
        obs=torch.from_numpy(obs),
        action=torch.tensor([[action_of(s) for s in row] for row in rows]),
        reward=torch.tensor([[reward_of(s) for s in row] for row in rows], dtype=torch.float32),
        flags=torch.tensor([[flags_of(s) for s in row] for row in rows], dtype=torch.uint8),
    )


def observation(start: Start, time: int, stack: int) -> np.ndarray:
    """What the agent saw at ``time``: the stack of the last frames, blank before the episode."""
    if stack == 1:
        return frame(start.first_id + time)
    blank = np.zeros(FRAME, dtype=np.float32)
    times = range(time - stack + 1, time + 1)
    return np.stack([frame(start.first_id + t) if t >= 0 else blank for t in times])


def transition(start: Start, n_steps: int, stack: int) -> Transition:
    """Play on from a start for at most n steps, or until the episode gives no more."""
    steps = start.plan.steps
    total, time, discount = 0.0, start.time, 1.0
    for _ in range(n_steps):
        total += discount * reward_of(Start(start.plan, time, start.first_id))
        discount *= GAMMA
        task_over = steps[time] == LIFE_LOST or (start.plan.terminated and time == len(steps) - 1)
        time += 1
        if task_over:
            discount = 0.0
            break
        if time == len(steps) or steps[time] == FAULT:
            break
    return Transition(
        obs=observation(start, start.time, stack),
        action=action_of(start),
        reward=total,
        discount=discount,
        next_obs=observation(start, time, stack),
    )


def eligible_rows(total: int, rows: int, n_steps: int, stack: int) -> range:
    """Rows that are followed by n others and, once rows were lost, preceded by a stack's rest."""
    oldest = max(total - rows, 0)
    return range(oldest + (stack - 1 if oldest else 0), max(total - n_steps, 0))


def make_spec(stack: int) -> EnvSpec:
    shape = (FRAME,) if stack == 1 else (stack, FRAME)
    return EnvSpec("model", shape, "float32", 1000, frame_stack=stack)
