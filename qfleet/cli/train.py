"""``qfleet train``: train an agent."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from qfleet.cli.parsing import parse, spell
from qfleet.cli.run_options import RunArguments, finish, show
from qfleet.config.config import Config, read_fields
from qfleet.config.presets import PRESETS, resolve
from qfleet.config.trust import check_trust
from qfleet.config.validation import validate
from qfleet.core.errors import ConfigError, UserError

HELP = "train an agent: qfleet train CartPole-v1"

DESCRIPTION = """Train a DQN-family agent: qfleet train ENV [options]

ENV is a Gymnasium id, an Atari game (ALE/Pong-v5, PongNoFrameskip-v4) or package.module:EnvClass.
Without --preset, the preset that suits ENV is used; every option below overrides it.
Stable-Baselines3's and CleanRL's option names are understood.

Examples:
  qfleet train CartPole-v1
  qfleet train CartPole-v1 --algo qr-dqn --steps 30000 --seeds 5
  qfleet train PongNoFrameskip-v4 --algo rainbow --envs 16 --device cuda
  qfleet train my_package.envs:Corridor --network my_package.nets:Torso
  qfleet train ALE/Breakout-v5 --max-wall 30m      (qfleet resume RUN continues)
  qfleet train --config runs/NAME/config.json --seed 7
"""


@dataclass(frozen=True)
class TrainOptions:
    experiment: Annotated[Config, tyro.conf.arg(name="")]
    run_arguments: Annotated[RunArguments, tyro.conf.arg(name="")]
    preset: str | None = None
    """Published recipe to start from; 'none' for plain defaults, 'list' to list them."""
    config: Path | None = None
    """JSON file with fields of the configuration, e.g. the config.json of a run."""
    seeds: int = 1
    """Number of seeds to train, starting at --seed, and to aggregate."""
    run_dir: Path | None = None
    """Folder of this run; default runs/NAME."""
    name: str | None = None
    """Name of the run below runs/; default from env, algorithm, seed and time."""
    trust: bool = False
    """Accept what the file of --config names: code to import (module:Class, imports), and address,
    replay_dir and track where they are not given here."""


class Start(NamedTuple):
    """The defaults of a command line that trains, found before its options are parsed."""

    argv: list[str]
    """Arguments in our spelling; an environment given as the first one is ``--env``."""
    base: Config
    """The configuration that the options override."""
    preset: str | None
    names_task: bool
    stored: Config
    """The fields that come from the file of ``--config``; the others have their defaults."""

    def config(self, parsed: Config, verb: str, trust: bool) -> Config:
        """Return the parsed configuration after validation."""
        if not self.names_task:
            raise UserError(f"{verb} needs an environment: qfleet {verb} CartPole-v1")
        check_trust(self.stored, trust)
        # ``base.algo`` is the algorithm's own name; ``parsed.algo`` may be an alias.
        return validate(parsed.replace(algo=self.base.algo))


def read_start(argv: list[str]) -> Start:
    """Find environment, algorithm, preset and file in ``argv``: they determine the defaults."""
    argv = _with_env_named(argv)
    said = _peek(argv, ("--env", "--algo", "--preset", "--config", "--engine", "--update"))
    file_fields = read_fields(Path(said["--config"])) if said["--config"] else None
    base, preset = resolve(
        said["--env"],
        said["--algo"],
        said["--preset"],
        file_fields,
        engine=said["--engine"],
        update=said["--update"],
    )
    names_task = bool(said["--env"] or file_fields is not None or preset)
    given = {word.partition("=")[0] for word in argv}
    kept = {
        name: value
        for name, value in (file_fields or {}).items()
        if "--" + name.replace("_", "-") not in given
    }
    return Start(argv, base, preset, names_task, Config(**kept))


def run(argv: list[str]) -> int:
    if _peek(_with_env_named(argv), ("--preset",))["--preset"] == "list":
        width = max(map(len, PRESETS))
        for name, recipe in PRESETS.items():
            print(f"{name:<{width}} {' '.join((recipe.__doc__ or '').split())}")
        return 0
    start = read_start(argv)
    options = parse(
        TrainOptions,
        start.argv,
        "train",
        default=TrainOptions(start.base, RunArguments()),
        description=DESCRIPTION,
    )
    config = start.config(options.experiment, "train", options.trust)
    if options.seeds < 1:
        raise ConfigError(f"seeds {options.seeds} must be at least 1")
    return _train(config, options, start.preset)


def _train(config: Config, options: TrainOptions, preset: str | None) -> int:
    from qfleet.training import api

    run_options = options.run_arguments.resolve()
    if preset and run_options.display != "silent":
        print(f"preset {preset}; --preset none for plain defaults")
    if options.seeds == 1:
        with options.run_arguments.quiet_stdout():
            one = api.train(
                config=config, run_dir=options.run_dir, name=options.name, options=run_options
            )
        return finish(one, options.run_arguments)
    with options.run_arguments.quiet_stdout():
        trained = api.train_seeds(
            options.seeds,
            config=config,
            run_dir=options.run_dir,
            name=options.name,
            options=run_options,
        )
    if options.run_arguments.json:
        extra = {"run_dir": str(trained.folder), "curve": trained.curve and str(trained.curve)}
        print(json_module.dumps({**trained.aggregate, **extra}))
    else:
        for run_of_seed in trained.runs:
            show(run_of_seed)
        low, high = trained.aggregate["eval_return_iqm_ci95"]
        score = trained.aggregate["eval_return_iqm"]
        if score is not None:
            print(
                f"\n{len(trained.runs)} seeds: IQM of the final evaluations {score:.1f}, "
                f"95 % confidence {low:.1f} to {high:.1f}"
            )
        print(f"  folder     {trained.folder}\n  curve      {trained.curve}")
    interrupted = trained.runs[-1].interrupted_by
    return 128 + interrupted if interrupted else 0


def _with_env_named(argv: list[str]) -> list[str]:
    argv = spell(argv)
    return ["--env", *argv] if argv and not argv[0].startswith("-") else argv


def _peek(argv: list[str], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of a few options that determine the defaults of the full parse."""
    found: dict[str, Any] = dict.fromkeys(names)
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in found:
            if not equals:
                value = argv[i + 1] if i + 1 < len(argv) else ""
            if not value or value.startswith("--"):
                raise UserError(f"{name} needs a value")
            found[name] = value
    return found
