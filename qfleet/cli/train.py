"""``qfleet train``: train an agent."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

import tyro

from qfleet.cli.run_options import RunArguments, finish, quiet_stdout
from qfleet.cli.start import ExperimentOptions, peek, read_start
from qfleet.config.recipes import PRESETS
from qfleet.core.errors import ConfigError

HELP = "train an agent: qfleet train CartPole-v1"

DESCRIPTION = """Train a DQN-family agent: qfleet train ENV [options]

ENV is a Gymnasium id or its name (CartPole, breakout), package:id, an Atari game (ALE/Pong-v5,
PongNoFrameskip-v4) or package.module:EnvClass. Without --preset, the preset that suits ENV is
used, scaled to --steps if that is fewer than its own; every option below overrides it.
Stable-Baselines3's and CleanRL's option names are understood.

Examples:
  qfleet train CartPole-v1
  qfleet train CartPole-v1 --algo qr-dqn --steps 30000 --seeds 5
  qfleet train PongNoFrameskip-v4 --algo rainbow --envs 16 --device cuda
  qfleet train highway_env:highway-fast-v0 --steps 20000
  qfleet train my_package.envs:Corridor --network my_package.nets:Torso
  qfleet train ALE/Breakout-v5 --max-wall 30m      (qfleet resume RUN continues)
  qfleet train --config NAME --seed 7              (a run, or a JSON, YAML or TOML file)
"""

MOST_SEEDS = 10_000


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ExperimentOptions):
    name: str | None = None
    """Name of the run below runs/; default from env, algorithm, seed and time."""
    seeds: int = 1
    """Number of seeds to train, starting at --seed, and to aggregate."""
    run_arguments: Annotated[RunArguments, tyro.conf.arg(name="")]


def run(argv: list[str]) -> int:
    if peek(argv, ("--preset",))["--preset"] == "list":
        width = max(map(len, PRESETS))
        for name, preset in PRESETS.items():
            print(f"{name:<{width}} {preset.source}")
        return 0
    start = read_start(argv)
    options, config = start.parse(TrainOptions, "train", DESCRIPTION)
    if not 1 <= options.seeds <= MOST_SEEDS:
        raise ConfigError(f"seeds must be ≥ 1 and ≤ {MOST_SEEDS}, got {options.seeds}")
    from qfleet.training import api

    arguments, note = options.run_arguments, None
    if start.preset:
        chosen = ("learning_starts", "target_update_interval", "eval_freq")
        values = ", ".join(f"{name} {getattr(config, name)}" for name in chosen)
        note = f"preset {start.preset} for {config.steps} steps: {values} (--preset none: plain)"
    train = api.train if options.seeds == 1 else functools.partial(api.train_seeds, options.seeds)
    with quiet_stdout(arguments.json):
        trained = train(
            config=config,
            run_dir=options.run_dir,
            name=options.name,
            overwrite=options.overwrite,
            options=arguments.resolve(note),
            trust=options.trust,
        )
    return finish(trained, arguments)
