"""The start of a command line that trains: environment, preset and file, then all options.

In: the words of ``train`` or ``profile``. Out: the verb's own options and a Config.
"""

from __future__ import annotations

import os
import typing
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import tyro

from qfleet.cli.parsing import parse, spell
from qfleet.config.config import FIELDS, OPTIONS, Config, Group, read_docstrings
from qfleet.config.files import SUFFIXES, read_fields
from qfleet.config.presets import resolve
from qfleet.config.trust import check_trust
from qfleet.config.words import convert
from qfleet.core.errors import UserError
from qfleet.envs.short_names import full_id
from qfleet.telemetry.runs import seed_folders
from qfleet.training.run_folders import find_run


@dataclass(frozen=True)
class ExperimentOptions:
    """Options of train and profile that are not fields of the configuration."""

    help_all: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show all options, not only the common ones, and exit."""
    preset: str | None = None
    """Published recipe to start from; 'none': plain defaults; `qfleet train --preset list`."""
    config: str | None = None
    """Run, or JSON, YAML or TOML file, whose fields of the configuration are used."""
    run_dir: str | None = None
    """Folder of the run, or a URL to publish it to; default: a new one below runs/."""
    overwrite: bool = False
    """Remove the run that is there already, once the configuration is valid."""
    trust: bool = False
    """Accept code, address, replay_dir and track of --config, and code of --init-from."""


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
        # Their empty help keeps it from looking for classes made here in source files, 60 ms.
        nested = [
            (group, Annotated[make_dataclass(group, fields), tyro.conf.arg(help="")])
            for group, fields in groups.items()
        ]
        target = make_dataclass(
            "Options", [("own", Annotated[own, tyro.conf.arg(name="", help="")]), *nested]
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
        config = Config(**fields).replace(algo=self.base.algo)
        if config.data:  # otherwise --help would wait for torch
            from qfleet.engines.offline import with_given

            options = [word.partition("=")[0] for word in self.argv if word.startswith("--")]
            config = with_given(config, {option[2:].replace("-", "_") for option in options})
        return parsed.own, config


def read_start(argv: list[str]) -> Start:
    """Find environment, algorithm, preset and file in ``argv``: they determine the defaults."""
    argv = _with_env_named(argv)
    named = peek(
        argv,
        ("--env", "--algo", "--preset", "--config", "--engine", "--update", "--steps", "--data"),
    )
    given = {word.partition("=")[0] for word in argv}
    steps = convert(named["--steps"], int)  # what is no number is refused with all other options
    file_fields = read_fields(config_file(named["--config"])) if named["--config"] else {}
    if named["--data"]:
        from qfleet.data.manifest import Dataset

        file_fields = Dataset(named["--data"]).manifest.origin.env | file_fields
    env = named["--env"] or file_fields.get("env")
    if env and not ("--imports" in given or file_fields.get("imports")):
        env = full_id(env)
        argv = [*argv, "--env", env] if named["--env"] not in (None, env) else argv
        file_fields |= {"env": env} if "env" in file_fields else {}
    base, preset = resolve(
        env if named["--env"] else None,
        named["--algo"],
        named["--preset"],
        file_fields,
        engine=named["--engine"],
        update=named["--update"],
        steps=steps if isinstance(steps, int) else None,
    )
    names_task = bool(env or preset)
    kept = {
        name: value
        for name, value in file_fields.items()
        if "--" + name.replace("_", "-") not in given
    }
    return Start(argv, base, preset, names_task, Config(**kept))


def config_file(named: str) -> Path:
    """Return the file of ``--config``: a file, or the config.json of a run (of its first seed)."""
    path = Path(named)  # os.path, unlike Path: False for names that are too long
    if os.path.isfile(path) or (path.suffix.lower() in SUFFIXES and not os.path.isdir(path)):
        return path
    return seed_folders(find_run(named, Path("runs"), "summary"))[0] / "config.json"


def _with_env_named(argv: list[str]) -> list[str]:
    argv = spell(argv)
    if not argv or argv[0].startswith("-"):
        return argv
    if any(word.partition("=")[0] == "--env" for word in argv):
        raise UserError(f"'{argv[0]}' and --env both name the environment; leave one of them out")
    return ["--env", *argv]


def peek(argv: list[str], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of a few options that determine the defaults of the full parse."""
    found, argv = dict[str, Any].fromkeys(names), _with_env_named(argv)
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in found:
            if not equals:
                value = argv[i + 1] if i + 1 < len(argv) else ""
            if not value or value.startswith("--"):
                raise UserError(f"{name} needs a value")
            found[name] = value
    return found
