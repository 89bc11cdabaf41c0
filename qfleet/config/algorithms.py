"""The algorithm table: each algorithm is a name for a set of configuration fields.

Every field is also an option, so algorithms can be combined: ``--algo c51 --double --n-steps 3``.
This module imports no heavy package, so that the command line starts fast.
"""

from __future__ import annotations

from typing import Any

from qfleet.core.errors import UnknownNameError

# fmt: off
_ROLLOUTS: dict[str, Any] = {
    "replay": False, "td_lambda": 1.0, "lr_schedule": "linear", "learning_starts": 0,
    # One update on 5 steps of 16 envs.
    "envs": 16, "train_freq": 80, "gradient_steps": 1, "batch_size": 80,
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dqn": {},
    "behaviour-cloning": {"loss": "cross-entropy"},
    "double-dqn": {"double": True},
    "cql": {"double": True, "cql_alpha": 1.0},
    "bcq": {"double": True, "bcq_threshold": 0.3},
    "dueling-dqn": {"dueling": True},
    "prioritized-dqn": {"prioritized_replay": True},
    "n-step-dqn": {"n_steps": 3},
    "noisy-dqn": {"noisy": True},
    "c51": {"head": "c51"},
    "qr-dqn": {"head": "qr"},
    "iqn": {"head": "iqn"},
    "munchausen-dqn": {"munchausen": True},
    "munchausen-iqn": {"munchausen": True, "head": "iqn"},
    "rainbow": {
        "double": True, "dueling": True, "prioritized_replay": True,
        "prioritized_replay_alpha": 0.5, "n_steps": 3, "noisy": True, "head": "c51",
    },
    "pqn": {
        "replay": False, "td_lambda": 0.65, "layer_norm": True, "loss": "mse",
        "optimizer": "radam", "lr_schedule": "linear", "learning_starts": 0,
        # Two epochs of eight minibatches over 32 steps of 32 envs.
        "envs": 32, "train_freq": 1024, "gradient_steps": 16, "batch_size": 128,
    },
    "n-step-q": {**_ROLLOUTS, "target_network": True},
    "a3c": {**_ROLLOUTS, "head": "actor-critic", "max_grad_norm": 0.5},
}

ALIASES = {
    "ddqn": "double-dqn", "double": "double-dqn", "dueling": "dueling-dqn",
    "per": "prioritized-dqn", "prioritised-dqn": "prioritized-dqn", "nstep": "n-step-dqn",
    "noisy": "noisy-dqn", "qrdqn": "qr-dqn", "qr": "qr-dqn", "m-dqn": "munchausen-dqn",
    "m-iqn": "munchausen-iqn", "async-q": "n-step-q", "n-step-q-learning": "n-step-q",
    "a2c": "a3c", "bc": "behaviour-cloning", "behavior-cloning": "behaviour-cloning",
    "discrete-cql": "cql", "discrete-bcq": "bcq",
}
# fmt: on


def algorithm_switches(name: str) -> tuple[str, dict[str, Any]]:
    """Return the algorithm's own name, with aliases resolved, and its fields."""
    name = ALIASES.get(name.lower(), name.lower())
    if name not in ALGORITHMS:
        raise UnknownNameError("algorithm", name, ALGORITHMS)
    return name, ALGORITHMS[name]
