"""Whether the memory holds what really happened, and who acted saw what it remembers.

Shared by the suite on a CPU (test_integrity.py) and the one on an accelerator (tests/test_gpu.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.types import FIRST, SKIP
from qfleet.engines import registry
from qfleet.engines.parts import Parts
from qfleet.engines.registry import build
from qfleet.envs.factory import make_envs
from qfleet.memory.ring import Ring
from qfleet.telemetry.faults import FaultLog


def run(config: Config, balanced: bool = False) -> Parts:
    """``balanced``: no action is better than the others on the whole, so that all are taken."""
    parts = build(validate(config), FaultLog())
    try:
        if balanced:
            _balance(parts)
        registry.run(parts, lambda: parts.clock.env_steps < config.steps)
    finally:
        parts.close()
    return parts


def _balance(parts: Parts) -> None:
    """Take the mean value of each action, over what random play sees, off the last layer's bias."""
    envs = make_envs(parts.config, 8, seed=77, training=True, on_fault=FaultLog())
    random, seen = np.random.default_rng(0), [envs.reset().copy()]
    for _ in range(40):
        actions = random.integers(envs.spec.num_actions, size=8)
        seen.append(envs.step(actions).obs.copy())
    envs.close()
    online = parts.learner.online
    with torch.no_grad():
        values = online.q_values(torch.from_numpy(np.concatenate(seen[10:])).to(parts.device))
        biases = [p for name, p in online.head.named_parameters() if name.endswith("bias_1")]
        biases[0].sub_(values.mean(0))


def rows_in_order(memory: Ring) -> dict[str, torch.Tensor]:
    """Everything the ring holds, the oldest row first, on the CPU."""
    state: dict[str, Any] = memory.state_dict()
    columns = {name: state[name].cpu() for name in ("action", "reward", "flags")}
    columns = {name: column.view(-1, memory.num_envs) for name, column in columns.items()}
    columns["frames"] = torch.cat([piece.cpu() for piece in state["frames"].tensors])
    oldest = state["total_rows"] % memory.rows if state["total_rows"] > memory.rows else 0
    return {name: column.roll(-oldest, 0) for name, column in columns.items()}


def assert_rows_tell_the_truth(memory: Ring) -> None:
    """For telltale_envs: every picture names the step, action and reward of the row before it."""
    rows = rows_in_order(memory)
    step, action, reward, _ = rows["frames"][:, :, 0, :4].long().unbind(-1)
    opens, skips = ((rows["flags"] & bit) != 0 for bit in (FIRST, SKIP))
    follows = ~opens[1:] & ~skips[:-1]
    assert follows.float().mean() > 0.8
    assert torch.equal(step[1:][follows], step[:-1][follows] + 1)
    assert torch.equal(action[1:][follows], rows["action"][:-1][follows])
    assert torch.equal(reward[1:][follows] - 1, rows["reward"][:-1][follows].long())
    assert (step[opens] == 0).all()
    assert ((step == 0) == opens).all()


def share_of_actions_explained(parts: Parts, behind: int = 0) -> float:
    """How many remembered actions the network takes on the remembered observations.

    Where it never changed and never explored, that is all of them but for the first row; on what
    was remembered ``behind`` rows earlier, it is not.
    """
    memory, network = parts.memory, parts.learner.online
    assert isinstance(memory, Ring)
    state = memory.state_dict()
    device = parts.device
    filled = len(memory) // memory.num_envs
    # Not the first row, which explores; of a ring that wrapped, what lies behind its seam.
    wrapped = state["total_rows"] > memory.rows
    first = state["total_rows"] % memory.rows + memory._stack if wrapped else 1
    agree = count = 0
    for row in range(first + behind, filled - memory._n_steps):
        envs = torch.arange(memory.num_envs, device=memory.device)
        batch = memory.gather(torch.full_like(envs, row), envs)
        seen = memory.gather(torch.full_like(envs, row - behind), envs).obs
        usable = (memory._flag_rows[row].to(device) & SKIP) == 0
        with torch.no_grad():
            chosen = network.q_values(seen.to(device)).argmax(1)
        agree += int((chosen == batch.action.to(device))[usable].sum())
        count += int(usable.sum())
    return agree / count
