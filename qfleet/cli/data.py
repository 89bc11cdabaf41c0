"""``qfleet data``: record datasets, and work with them."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import tyro

from qfleet.cli.parsing import parse
from qfleet.cli.run_options import PolicyOptions, quiet_stdout
from qfleet.core.errors import UnknownNameError
from qfleet.core.urls import public_url

if TYPE_CHECKING:
    from qfleet.data.manifest import Dataset

HELP = "record, check, split, import and export datasets of transitions"

EXAMPLES = """Examples:
  qfleet train CartPole-v1 --record data/cartpole
  qfleet data record runs/NAME data/expert --steps 50000 --epsilon 0.1
  qfleet data split data/expert data/split --stratify
  qfleet train --data data/split/train --algo behaviour-cloning --epochs 10
  qfleet data compare runs/A runs/B --data data/split/test
  qfleet data import NAME data/imported"""


@dataclass(frozen=True)
class RecordOptions(PolicyOptions):
    url: tyro.conf.Positional[str] = tyro.MISSING
    """Folder or URL of the new dataset."""
    steps: int = 10_000
    """Env steps to record, over all environments."""
    epsilon: float = 0.0
    """Probability of a random action."""
    envs: int = 8
    """Environments that are played together."""


@dataclass(frozen=True)
class DataOptions:
    url: tyro.conf.Positional[str]
    """Folder or URL of the dataset."""
    json: bool = False
    """Print one JSON object and nothing else."""


@dataclass(frozen=True)
class SplitOptions(DataOptions):
    to: tyro.conf.Positional[str] = tyro.MISSING
    """Folder or URL that gets the datasets train, validation and test."""
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    """Shares of the episodes."""
    stratify: bool = False
    """Give every split the same shares of episodes with low and high returns."""


@dataclass(frozen=True)
class ShardOptions(DataOptions):
    to: tyro.conf.Positional[str] = tyro.MISSING
    """Folder or URL that gets the datasets 0, 1, …"""
    speeds: tuple[float, ...] = (1.0, 1.0)
    """One number per shard: their sizes are in this proportion."""


@dataclass(frozen=True)
class ImportOptions:
    name: tyro.conf.Positional[str]
    """Name of a Minari dataset on this machine."""
    url: tyro.conf.Positional[str]
    """Folder or URL of the new dataset."""
    json: bool = False
    """Print one JSON object and nothing else."""


@dataclass(frozen=True)
class CompareOptions:
    runs: tyro.conf.Positional[tuple[str, ...]]
    """Names, folders or URLs of runs, or files that policy.save wrote."""
    data: str
    """Folder or URL of the dataset that the estimates are made from."""
    which: Literal["best", "last"] | None = None
    """The best evaluated policy, or the newest checkpoint's; default: best, if there is one."""
    gamma: float = 0.99
    """Discount per env step of the estimated returns."""
    updates: int = 3000
    """Gradient steps of each fitted function."""
    seed: int = 0
    """Seed of fitted functions and bootstrap samples."""
    trust: bool = False
    """Import the code (module:Class, --import) that the runs' configurations name."""
    json: bool = False
    """Print one JSON object and nothing else."""


@dataclass(frozen=True)
class ExportOptions(DataOptions):
    name: tyro.conf.Positional[str] = tyro.MISSING
    """Name of the new Minari dataset."""


def run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: qfleet data ACTION …   (qfleet data ACTION --help lists options)\n")
        print("\n".join(f"  {name:<10} {what}" for name, (what, *_) in ACTIONS.items()))
        print(f"\n{EXAMPLES}")
        return 0
    action, *rest = argv
    if action not in ACTIONS:
        raise UnknownNameError("action", action, ACTIONS)
    what, kind, act = ACTIONS[action]
    options = parse(kind, rest, f"data {action}", f"{what}\n\n{EXAMPLES}")
    with quiet_stdout(options.json):
        report = act(options)
    if options.json:
        print(json_module.dumps(report))
    else:
        for name, value in report.items():
            for line in _lines(name, value):
                print(line)
    return 0


def _lines(name: str, value: Any) -> Iterator[str]:
    """Yield a value as text: an object as one line for each of its keys."""
    if isinstance(value, dict):
        yield name
        for key, inner in value.items():
            yield f"  {key:<23} {_text(inner)}"
    else:
        yield f"{name:<25} {_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (list, tuple)):  # such as the mean of images
            import numpy as np

            sides = "×".join(map(str, np.shape(value)))
            return f"{_text(float(np.min(value)))} … {_text(float(np.max(value)))}, {sides}"
        return ", ".join(map(_text, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _record(options: RecordOptions) -> dict[str, Any]:
    from rich.console import Console

    from qfleet.training import api
    from qfleet.training.record_data import record

    policy = api.load(options.run, options.which, options.trust, options.device)
    with Console(stderr=True, quiet=options.json).status("recording") as status:
        dataset = record(
            policy,
            options.url,
            steps=options.steps,
            epsilon=options.epsilon,
            envs=options.envs,
            seed=options.seed,
            on_step=lambda done: status.update(f"recording {done}/{options.steps}"),
        )
    return _describe(dataset)


def _describe(dataset: Dataset) -> dict[str, Any]:
    manifest = dataset.manifest
    if dataset.unlisted:
        print(
            f"qfleet: {dataset.unlisted} finished files of '{dataset.url}' are not in its "
            f"manifest; take them in with: qfleet data merge {dataset.url}",
            file=sys.stderr,
        )
    return {
        "dataset": dataset.url,
        "env": manifest.origin.spec.env_id,
        "policy": manifest.origin.policy,
        "transitions": manifest.transitions,
        "episodes": manifest.episodes,
        "rows": manifest.rows,
        "files": len(manifest.parts),
        "unlisted_files": dataset.unlisted,
        "size_bytes": sum(part.size_bytes for part in manifest.parts),
        "statistics": manifest.statistics,
    }


def _open(options: DataOptions) -> Dataset:
    from qfleet.data.manifest import Dataset

    return Dataset(options.url)


def _info(options: DataOptions) -> dict[str, Any]:
    return _describe(_open(options))


def _validate(options: DataOptions) -> dict[str, Any]:
    from qfleet.data.operations import validate

    dataset = _open(options)
    validate(dataset)
    return {**_describe(dataset), "valid": True}


def _stats(options: DataOptions) -> dict[str, Any]:
    from qfleet.data.operations import fit_statistics, store_statistics

    dataset = _open(options)
    store_statistics(dataset, fit_statistics(dataset))
    return dict(dataset.manifest.statistics or {})


def _merge(options: DataOptions) -> dict[str, Any]:
    from qfleet.data.manifest import merge

    merge(options.url)
    return _info(options)


def _split(options: SplitOptions) -> dict[str, Any]:
    from qfleet.data.operations import split

    return _sizes(split(_open(options), options.to, options.fractions, options.stratify))


def _shard(options: ShardOptions) -> dict[str, Any]:
    from qfleet.data.operations import shard

    return _sizes(shard(_open(options), options.to, options.speeds))


def _sizes(datasets: dict[str, Dataset]) -> dict[str, Any]:
    return {
        name: {"transitions": one.manifest.transitions, "episodes": one.manifest.episodes}
        for name, one in datasets.items()
    }


def _compare(options: CompareOptions) -> dict[str, Any]:
    from dataclasses import asdict

    from rich.console import Console

    from qfleet.data.manifest import Dataset
    from qfleet.training import api
    from qfleet.training.off_policy import compare

    dataset = Dataset(options.data)
    policies = {run: api.load(run, options.which, options.trust, "cpu") for run in options.runs}
    console = Console(stderr=True, quiet=options.json, soft_wrap=True)
    with console.status("reading the dataset, estimating"):
        estimates = compare(
            policies,
            dataset,
            gamma=options.gamma,
            updates=options.updates,
            seed=options.seed,
            on_policy=lambda name: console.out(f"estimating {public_url(name)} …", highlight=False),
        )
    warnings = [one.warning for one in estimates if one.warning is not None]
    if dataset.manifest.origin.env.get("clip_rewards"):
        warnings.append(f"the rewards of '{dataset.url}' are clipped, and so are these returns")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    found = [asdict(one) for one in estimates]
    named = {
        public_url(one.pop("policy")): {"rank": rank, **one} for rank, one in enumerate(found, 1)
    }
    return {**named, **({"warnings": warnings} if options.json else {})}


def _import(options: ImportOptions) -> dict[str, Any]:
    from qfleet.data.minari import import_minari

    return _describe(import_minari(options.name, options.url))


def _export(options: ExportOptions) -> dict[str, Any]:
    from qfleet.data.minari import export_minari

    return {"minari": options.name, "episodes": export_minari(_open(options), options.name)}


ACTIONS: dict[str, tuple[str, type[Any], Callable[[Any], dict[str, Any]]]] = {
    "record": ("play with a run's policy and record what happens", RecordOptions, _record),
    "info": ("show what a dataset holds", DataOptions, _info),
    "validate": ("check every checksum and every row", DataOptions, _validate),
    "stats": ("compute statistics of a dataset and store them in it", DataOptions, _stats),
    "split": ("split episodes into train, validation and test", SplitOptions, _split),
    "shard": ("split episodes into shards, in proportion to speeds", ShardOptions, _shard),
    "compare": ("rank the policies of runs by estimates from a dataset", CompareOptions, _compare),
    "merge": ("make the manifest of all finished files, e.g. after a kill", DataOptions, _merge),
    "import": ("copy a Minari dataset into a dataset", ImportOptions, _import),
    "export": ("copy a dataset into a Minari dataset", ExportOptions, _export),
}
"""What each action does, its options, and its function."""
