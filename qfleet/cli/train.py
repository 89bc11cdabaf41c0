"""``qfleet train``: train an agent."""

from __future__ import annotations

import functools
import json as json_module
import typing
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import tyro

from qfleet.cli.parsing import parse, spell
from qfleet.cli.run_options import RunArguments, finish, quiet_stdout, show
from qfleet.config.config import FIELDS, OPTIONS, Config, Group, read_docstrings, read_fields
from qfleet.config.presets import resolve
from qfleet.config.recipes import PRESETS
from qfleet.config.trust import check_trust
from qfleet.core.errors import ConfigError, UserError

if TYPE_CHECKING:
    from qfleet.training.trained import TrainedSeeds

HELP = "train an agent: qfleet train CartPole-v1"

DESCRIPTION = """Train a DQN-family agent: qfleet train ENV [options]

ENV is a Gymnasium id, package:id, an Atari game (ALE/Pong-v5, PongNoFrameskip-v4) or
package.module:EnvClass. Without --preset, the preset that suits ENV is used, scaled to --steps if
that is fewer than its own; every option below overrides it.
Stable-Baselines3's and CleanRL's option names are understood.

Examples:
  qfleet train CartPole-v1
  qfleet train CartPole-v1 --algo qr-dqn --steps 30000 --seeds 5
  qfleet train PongNoFrameskip-v4 --algo rainbow --envs 16 --device cuda
  qfleet train highway_env:highway-fast-v0 --steps 20000
  qfleet train my_package.envs:Corridor --network my_package.nets:Torso
  qfleet train ALE/Breakout-v5 --max-wall 30m      (qfleet resume RUN continues)
  qfleet train --config runs/NAME/config.json --seed 7
"""

MOST_SEEDS = 10_000


@dataclass(frozen=True)
class ExperimentOptions:
    """Options of train and profile that are not fields of the configuration."""

    help_all: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show all options, not only the common ones, and exit."""
    preset: str | None = None
    """Published recipe to start from; 'none': plain defaults; `qfleet train --preset list`."""
    config: Path | None = None
    """JSON file with fields of the configuration, e.g. the config.json of a run."""
    run_dir: Path | None = None
    """Folder of the run; default: a new one below runs/."""
    trust: bool = False
    """Accept code, address, replay_dir and track that --config names, and code of --init-from."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ExperimentOptions):
    name: str | None = None
    """Name of the run below runs/; default from env, algorithm, seed and time."""
    seeds: int = 1
    """Number of seeds to train, starting at --seed, and to aggregate."""
    run_arguments: Annotated[RunArguments, tyro.conf.arg(name="")]


Options = TypeVar("Options", bound=ExperimentOptions)


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

    def parse(self, own: type[Options], verb: str, description: str) -> tuple[Options, Config]:
        """Return the verb's own options, and the configuration, which is not validated yet."""
        shows_all = "--help-all" in self.argv
        argv = ["--help"] if shows_all else self.argv
        hides = not shows_all and ("-h" in argv or "--help" in argv)
        groups: dict[str, list[Any]] = {group: [] for group in typing.get_args(Group)}
        for name, text in read_docstrings().items():
            marks = (tyro.conf.Suppress,) if hides and not OPTIONS[name].common else ()
            kind = Annotated[(FIELDS[name], tyro.conf.arg(help=text), *marks)]  # type: ignore
            groups[OPTIONS[name].group].append((name, kind, getattr(self.base, name)))
        # tyro shows each nested dataclass as a group; without prefixes the options' names are flat.
        nested = [(group, make_dataclass(group, fields)) for group, fields in groups.items()]
        target = make_dataclass(
            "Options", [("own", Annotated[own, tyro.conf.arg(name="")]), *nested]
        )
        if self.preset:
            note = f"The defaults below are those of preset {self.preset}.\n\nExamples:"
            description = description.replace("Examples:", note)
        parsed = parse(target, argv, verb, description, config=(tyro.conf.OmitArgPrefixes,))
        if not self.names_task:
            raise UserError(f"{verb} needs an environment: qfleet {verb} CartPole-v1")
        check_trust(self.stored, parsed.own.trust)
        fields = {
            name: value for group in groups for name, value in vars(getattr(parsed, group)).items()
        }
        # ``base.algo`` is the algorithm's own name; the parsed one may be an alias.
        return parsed.own, Config(**fields).replace(algo=self.base.algo)


def read_start(argv: list[str]) -> Start:
    """Find environment, algorithm, preset and file in ``argv``: they determine the defaults."""
    argv = _with_env_named(argv)
    named = _peek(
        argv, ("--env", "--algo", "--preset", "--config", "--engine", "--update", "--steps")
    )
    steps = named["--steps"] or ""
    file_fields = read_fields(Path(named["--config"])) if named["--config"] else None
    base, preset = resolve(
        named["--env"],
        named["--algo"],
        named["--preset"],
        file_fields,
        engine=named["--engine"],
        update=named["--update"],
        steps=int(steps) if steps.isdecimal() else None,
    )
    names_task = bool(named["--env"] or file_fields is not None or preset)
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
        for name, preset in PRESETS.items():
            print(f"{name:<{width}} {preset.source}")
        return 0
    start = read_start(argv)
    options, config = start.parse(TrainOptions, "train", DESCRIPTION)
    if not 1 <= options.seeds <= MOST_SEEDS:
        raise ConfigError(f"seeds must be ≥ 1 and ≤ {MOST_SEEDS}, got {options.seeds}")
    from qfleet.training import api
    from qfleet.training.trained import Trained

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
            options=arguments.resolve(note),
            trust=options.trust,
        )
    if isinstance(trained, Trained):
        return finish(trained, arguments)
    return _finish_seeds(trained, arguments)


def _finish_seeds(trained: TrainedSeeds, arguments: RunArguments) -> int:
    """Print what several seeds gave together; return the exit code."""
    if arguments.json:
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
