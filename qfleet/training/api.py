"""The library: train, resume, load, evaluate. The command line calls these functions."""

from __future__ import annotations

import json
import operator
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from qfleet.agent.evaluation import Evaluation
from qfleet.agent.policy import Policy, load_run_policy, load_saved_policy
from qfleet.config.config import OPTIONS, Config, PipelineSchedule
from qfleet.config.files import read_fields
from qfleet.config.presets import resolve
from qfleet.config.trust import check_trust
from qfleet.config.validation import validate
from qfleet.config.words import rename
from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.core.files import atomic_write_text
from qfleet.core.urls import is_url
from qfleet.data.writer import check_target
from qfleet.engines.all_reduce.world import with_launched_workers
from qfleet.engines.offline import check_datasets, dataset_fields, with_dataset, with_given
from qfleet.envs.objects import named_fields
from qfleet.envs.short_names import full_id
from qfleet.storage.checkpoint import POLICY_SUFFIX, diff_meta, has_checkpoint, load_checkpoint
from qfleet.storage.locks import RunLock, check_idle
from qfleet.storage.published import working_folder
from qfleet.storage.rundir import check_name, default_name, new_run_dir
from qfleet.storage.state_checks import reading
from qfleet.storage.vacancy import (
    CONFIG,
    EXPERIMENT,
    check_vacant,
    how_to_start_anew,
    removed_if_refused,
)
from qfleet.telemetry.progress import choose_mode
from qfleet.training.callbacks import Callbacks, as_callbacks
from qfleet.training.checks import check_can_start, check_config
from qfleet.training.publisher import Publisher, publishing
from qfleet.training.restarts import FREE_ON_RESUME, follow_if_told, stored_engine, was_lost
from qfleet.training.result import Result
from qfleet.training.run import Run
from qfleet.training.run_folders import find_one_run
from qfleet.training.run_state import RunOptions
from qfleet.training.seeds import finished, resume_seeds, vacant_urls
from qfleet.training.trained import Trained, TrainedSeeds, aggregate_seeds, draw_learning_curve

RUNS = Path("runs")

OLDER_RUNS = {"action_masks": False}
"""Values of fields in runs that are older than them, where they are not the defaults."""


def train(
    env: Any = None,
    *,
    algo: str | None = None,
    preset: str | None = None,
    config: Config | None = None,
    run_dir: Path | str | None = None,
    name: str | None = None,
    overwrite: bool = False,
    options: RunOptions | None = None,
    progress: bool = False,
    callbacks: Callbacks = (),
    trust: bool = False,
    **fields: Any,
) -> Trained:
    """Train one agent. ``fields`` are fields of Config by name; ``config`` sets all at once.

    ``env`` is an id, an environment from ``gymnasium.make``, or a class or function that makes one;
    ``network`` may be a class; ``env_kwargs`` a dict. An object that other processes cannot import
    (a lambda, a class inside a function) works on engines that have one process.

    ``callbacks``: a ``Callback``, a function that is called with the run between turns of
    collecting and learning, or a list of these. ``progress`` shows the progress; ``options`` has
    more. ``trust`` accepts the code that the policy of ``init_from`` imports. ``overwrite``
    removes a run that ``run_dir`` or ``name`` holds already. ``run_dir`` may be a URL (s3://…): the
    run works in a local folder and is published there.
    """
    config = _configure(env, algo, preset, config, fields, trust)
    follow_if_told(config.engine)
    if is_url(str(run_dir)):
        with Publisher(str(run_dir)) as publisher:
            if not was_lost(publisher.folder, config):
                publisher.check_vacant(overwrite)
            trained = train(
                config=config, run_dir=publisher.folder, name=name, overwrite=overwrite,
                options=options, progress=progress, trust=trust,
                callbacks=[*as_callbacks(callbacks), publisher],
            )  # fmt: skip
        return replace(trained, url=str(run_dir))
    initial, place = _initial(config, trust), Path(run_dir or RUNS / (name or "-"))
    lost = was_lost(place, config)
    if lost:
        if has_checkpoint(place / "checkpoints"):
            how: dict[str, Any] = {"options": options, "progress": progress, "callbacks": callbacks}
            return cast(Trained, resume(place, trust=True, **how))
        overwrite = True  # before the first checkpoint
    adds = lost or (place.parent / EXPERIMENT).exists()  # other seeds record there too
    check_target(config.record, config if adds else None)
    folder = _folder(config, run_dir, name, overwrite)
    with removed_if_refused(folder):
        run = Run(config, folder, _options(options, progress), callbacks, None, initial)
    return _trained(run, run.go())


def train_seeds(
    seeds: int | Sequence[int],
    env: Any = None,
    *,
    algo: str | None = None,
    preset: str | None = None,
    config: Config | None = None,
    run_dir: Path | str | None = None,
    name: str | None = None,
    overwrite: bool = False,
    options: RunOptions | None = None,
    progress: bool = False,
    callbacks: Callbacks = (),
    trust: bool = False,
    **fields: Any,
) -> TrainedSeeds:
    """Train the same experiment with several seeds, one after another; return their aggregate."""
    config = _configure(env, algo, preset, config, fields, trust)
    follow_if_told(config.engine)
    if not isinstance(seeds, Iterable):
        seeds = range(config.seed, config.seed + int(seeds))
    seeds = [operator.index(seed) for seed in seeds]
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds must be at least one seed, each only once, got {list(seeds)}")
    if config.population > 1:
        raise ConfigError(
            f"population {config.population} does not go with several seeds: every agent has its "
            "own; train it once"
        )
    initial = _initial(config, trust)
    # Check all before the first run: the last must not be refused after the others are done.
    for seed in seeds:
        validate(config.replace(seed=seed))
    check_target(config.record)
    urls = vacant_urls(run_dir, seeds, overwrite)
    folder = _folder(config, working_folder(str(run_dir)) if urls else run_dir, name, overwrite)
    options = _options(options, progress)
    for seed in seeds:
        check_vacant(folder / f"seed-{seed}")
    runs: list[Trained] = []
    with RunLock(folder):
        stored = {"seeds": list(seeds), "config": json.loads(config.to_json())}
        atomic_write_text(folder / EXPERIMENT, json.dumps(stored, indent=2))
        for seed in seeds:
            one, url = config.replace(seed=seed), urls.get(seed)
            with publishing(url, callbacks, overwrite) as own:
                with removed_if_refused(folder):
                    run = Run(one, folder / f"seed-{seed}", options, own, None, initial)
                runs.append(replace(_trained(run, run.go()), url=url))
            if runs[-1].interrupted_by is not None:
                break
        return aggregate_seeds(folder, runs)


def resume(
    run: Path | str,
    *,
    steps: int | None = None,
    device: str | None = None,
    workers: int | None = None,
    tensor_parallel: int | None = None,
    pipeline_parallel: int | None = None,
    micro_batches: int | None = None,
    pipeline_schedule: PipelineSchedule | None = None,
    servers: int | None = None,
    address: str | None = None,
    replay_dir: str | None = None,
    track: Literal["none", "wandb", "mlflow"] | None = None,
    record: str | None = None,
    data: str | None = None,
    validation_data: str | None = None,
    options: RunOptions | None = None,
    progress: bool = False,
    callbacks: Callbacks = (),
    trust: bool = False,
) -> Trained | TrainedSeeds:
    """Continue a run from its newest complete checkpoint, bit for bit if it is a single process.

    Of several seeds, all are finished. ``trust`` accepts stored values that import code or reach
    outside the run's folder (``address``, ``replay_dir``, ``track``), unless they are given here.
    """
    follow_if_told(stored_engine(run, RUNS))
    asked: dict[str, Any] = {
        "steps": steps, "device": device, "workers": workers, "servers": servers,
        "address": address, "replay_dir": replay_dir, "track": track, "record": record,
        "data": data, "validation_data": validation_data, "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel, "micro_batches": micro_batches,
        "pipeline_schedule": pipeline_schedule,
    }  # fmt: skip
    if pipeline_parallel is not None:  # those of other stages may not go with these
        asked["micro_batches"] = micro_batches or Config.micro_batches
        asked["pipeline_schedule"] = pipeline_schedule or Config.pipeline_schedule
    asked = {name: value for name, value in asked.items() if value is not None}
    how = dict[str, Any](options=_options(options, progress), callbacks=callbacks, trust=trust)
    if is_url(str(run)):
        with Publisher(str(run), resumes=True) as publisher:
            how["callbacks"] = [*as_callbacks(callbacks), publisher]
            trained = cast(Trained, resume(publisher.fetch(), **asked, **how))
        return replace(trained, url=str(run))
    for parent in (Path(run), RUNS / run):
        if os.path.lexists(parent / EXPERIMENT) and not os.path.lexists(parent / CONFIG):
            return resume_seeds(
                parent, asked, trust, lambda child: resume(child, **asked, **how),
                lambda child, config: train(config=config, run_dir=child, overwrite=True, **how),
            )  # fmt: skip
    folder = find_one_run(run, RUNS, "summary")
    # Checked first: a run that has just started in this folder has no checkpoint yet.
    check_idle(folder)
    stored = OLDER_RUNS | read_fields(folder / "config.json")
    kept = {name: value for name, value in stored.items() if name not in asked}
    check_trust(Config(**kept), trust)
    config = Config(**stored).replace(**asked)
    if bool(config.validation_data) != bool(stored.get("validation_data")):
        has = "with" if stored.get("validation_data") else "without"
        raise ConfigError(f"'{folder}' was started {has} validation_data; go on {has} it")
    # An empty address is the default of every engine, so every run accepts it.
    fleet = [n for n, value in asked.items() if OPTIONS[n].group == "cluster" and value != ""]
    if any(config.engine not in OPTIONS[name].engines for name in fleet):
        raise ConfigError(f"{', '.join(fleet)} cannot be set: '{folder}' runs on {config.engine}")
    if not has_checkpoint(folder / "checkpoints"):
        raise CheckpointError(
            f"'{folder}' has no checkpoint to resume from; start it anew with: "
            f"{how_to_start_anew(folder)}"
        )
    alerts: list[str] = []
    checkpoint = load_checkpoint(folder / "checkpoints", None, on_alert=alerts.append)
    # Fields that are newer than the checkpoint.
    with reading(f"checkpoint '{checkpoint.path}' cannot be loaded"):
        saved = json.loads(Config().to_json()) | OLDER_RUNS | checkpoint.meta["config"]
        differing = diff_meta(saved, json.loads(config.to_json()), FREE_ON_RESUME)
    if differing:
        raise CheckpointError(
            f"config.json of '{folder}' differs from the configuration of its checkpoint: "
            + "; ".join(differing)
        )
    # A run that was killed between its last checkpoint and its result gets its result.
    if checkpoint.env_steps >= config.steps and finished(folder, config.steps):
        raise ConfigError(
            f"'{folder}' is complete ({checkpoint.env_steps} steps); --steps N sets a new total"
        )
    check_target(config.record, config)
    if config.data:
        check_datasets(config)
    runner = Run(config, folder, how["options"], callbacks, checkpoint)
    for alert in alerts:
        runner.alert(alert)
    return _trained(runner, runner.go())


def load(
    run: Path | str,
    which: Literal["best", "last"] | None = None,
    trust: bool = False,
    device: str | None = None,
) -> Policy:
    """Return the policy of a run, the best evaluated or the newest, or of a ``Policy.save`` file.

    ``which`` None: the best, or the newest if none was evaluated, which one line reports.
    ``trust`` accepts code that the stored configuration imports: a network of the user here, an
    environment when the policy is evaluated.
    """
    if is_policy_file(run):
        if which not in (None, "best"):
            raise ConfigError(f"'{run}' holds one policy, so which={which!r} cannot be chosen")
        return load_saved_policy(Path(run), trust, device)
    return load_run_policy(find_one_run(run, RUNS, which or "best"), which, trust, device)


def is_policy_file(run: Path | str) -> bool:
    """Return whether ``run`` names a file that ``Policy.save`` wrote, not a run."""
    path = Path(run)
    return path.suffix == POLICY_SUFFIX and not path.is_dir() and not is_url(str(run))


def evaluate(
    run: Path | str,
    *,
    episodes: int = 10,
    seed: int = 0,
    epsilon: float | None = None,
    which: Literal["best", "last"] | None = None,
    trust: bool = False,
    device: str | None = None,
) -> Evaluation:
    """Play episodes with the policy of a run or of a ``Policy.save`` file.

    ``epsilon`` None: the run's own ``eval_eps``.
    """
    return load(run, which, trust, device).evaluate(episodes, seed, epsilon)


def _configure(
    env: Any, algo: str | None, preset: str | None, config: Config | None, fields: Any, trust: bool
) -> Config:
    if config is None:
        own = rename(({} if env is None else {"env": env}) | fields)
        named = named_fields(own.pop("env", None), own)
        if isinstance(named.get("env"), str) and not named.get("imports"):
            named["env"] = full_id(named["env"])
        stored = dataset_fields(named.get("data", ""), trust)
        config, _ = resolve(named.pop("env", None), algo, preset, stored, named)
        config = with_given(config, named)
    elif env is not None or algo or preset or fields:
        raise ConfigError("config= sets every field; use config.replace(…) to change some of them")
    return check_config(with_dataset(with_launched_workers(config)))


def _options(given: RunOptions | None, progress: bool) -> RunOptions:
    options = given or RunOptions()
    return replace(options, display=choose_mode(False, sys.stderr)) if progress else options


def _initial(config: Config, trust: bool) -> Policy | None:
    """Return the policy of ``init_from``, if any."""
    return load(config.init_from, trust=trust, device="cpu") if config.init_from else None


def _folder(config: Config, run_dir: Path | str | None, name: str | None, overwrite: bool) -> Path:
    if run_dir is not None and name is not None:
        raise ConfigError("run_dir and name both set the folder of the run; give one of them")
    if overwrite:
        check_can_start(config)
    if run_dir is not None:
        path = Path(run_dir)
        return new_run_dir(path.parent, path.name, explicit=True, overwrite=overwrite)
    if name is not None:
        return new_run_dir(RUNS, check_name(name), explicit=True, overwrite=overwrite)
    return new_run_dir(RUNS, default_name(config.env, config.algo, config.seed), explicit=False)


def _trained(run: Run, result: Result) -> Trained:
    return Trained(
        run.folder, run.config, result, draw_learning_curve(run.folder), run.interrupted_by
    )
