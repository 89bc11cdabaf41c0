"""What a run remembers is what its environments did, whichever way it was placed."""

from __future__ import annotations

from typing import Any

import pytest

from qfleet.config.presets import resolve
from support.integrity import assert_rows_tell_the_truth, run, share_of_actions_explained
from support.runs import configure

TELLTALE: dict[str, Any] = {
    "steps": 900, "envs": 6, "buffer_size": 600, "learning_starts": 100, "batch_size": 8,
    "train_freq": 6, "net_arch": (16,), "network": "mlp", "device": "cpu", "max_episode_steps": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "serial"},
        {"engine": "pipeline", "vectorize": "sync", "env_groups": 3, "block_rows": 4},
        {"engine": "pipeline", "vectorize": "async", "env_groups": 2, "block_rows": 4},
        {"engine": "pipeline", "vectorize": "async", "frame_stack": 3, "n_steps": 3},
        {"engine": "pipeline", "vectorize": "async", "lockstep": True},
    ],
)
def test_every_row_is_followed_by_what_it_led_to(changes: dict[str, Any]) -> None:
    config = configure("support.telltale_envs:TelltaleEnv", **TELLTALE | changes)
    assert_rows_tell_the_truth(run(config).memory)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["serial", "pipeline"])
def test_the_network_takes_the_remembered_actions_on_the_remembered_stacks(engine: str) -> None:
    config, _ = resolve(
        "ALE/Pong-v5",
        fields={
            "steps": 400, "envs": 8, "buffer_size": 4000, "learning_starts": 100, "batch_size": 2,
            "train_freq": 64, "learning_rate": 1e-30, "exploration_initial_eps": 0.0,
            "exploration_final_eps": 0.0, "engine": engine, "device": "cpu",
            "max_episode_steps": 20, "noop_max": 3,
        },
    )  # fmt: skip
    parts = run(config, balanced=True)
    # A near tie may fall either way in batches of another size.
    assert share_of_actions_explained(parts) > 0.98
    assert share_of_actions_explained(parts, behind=1) < 0.9
