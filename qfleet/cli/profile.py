"""``qfleet profile``: find the stage that limits the speed of a task on this machine.

Takes the options of train. Reports the rate of every stage alone and of the whole run, the
bottleneck in one sentence, and a trace of every thread.
"""

from __future__ import annotations

import json as json_module
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfleet.cli.run_options import quiet_stdout, timeline_path, trace_path
from qfleet.cli.start import ExperimentOptions, read_start
from qfleet.config.config import Config
from qfleet.core.cores import usable_cores
from qfleet.core.errors import ConfigError
from qfleet.core.files import short
from qfleet.telemetry.formatting import format_duration

if TYPE_CHECKING:
    from qfleet.engines.stage_rates import Stages
    from qfleet.training.result import Result

HELP = "train for some seconds with a trace, and report the bottleneck"

DESCRIPTION = """Train for some seconds and report the rate of every stage: qfleet profile ENV

Every option of the configuration works as in train. The learning phase is profiled, so some
defaults differ: learning starts at once with the final ε, there are no evaluations, and only the
last checkpoint is written. The run's folder also holds trace.json (chrome://tracing,
ui.perfetto.dev) and plots/timeline.png.

Examples:
  qfleet profile CartPole-v1
  qfleet profile ALE/Pong-v5 --seconds 60 --engine pipeline
  qfleet profile CartPole-v1 --envs 64 --engine serial --json
"""

ENDLESS = 10**9
"""A number of env steps that no profile reaches."""


@dataclass(frozen=True)
class ProfileOptions(ExperimentOptions):
    seconds: float = 20.0
    """Seconds of training, in addition to building, tuning and measuring the stages."""
    json: bool = False
    """Print one JSON object and nothing else."""


def run(argv: list[str]) -> int:
    start = read_start(argv)
    start = start._replace(base=_learning_phase(start.base))
    options, config = start.parse(ProfileOptions, "profile", DESCRIPTION)
    if not 0 < options.seconds < math.inf:
        raise ConfigError(f"--seconds must be > 0, got {options.seconds:g}")
    return _profile(config, options)


def _learning_phase(config: Config) -> Config:
    """Return defaults with which a few seconds are like most of a run; options override them."""
    return config.replace(
        steps=ENDLESS,
        learning_starts=0,
        exploration_fraction=0.0,
        eval_freq=0,
        checkpoint_freq=ENDLESS,
        patience=0,
        lr_plateau_patience=0,
    )


def _profile(config: Config, options: ProfileOptions) -> int:
    from qfleet.storage.rundir import default_name, new_run_dir
    from qfleet.training import api
    from qfleet.training.callbacks import Callback
    from qfleet.training.checks import check_config
    from qfleet.training.run import Run
    from qfleet.training.run_state import RunOptions

    class RunRecorder(Callback):
        """A callback that keeps the run and its rate, which a result does not hold."""

        rate: float | None = None
        ended: Run

        def on_log(self, _run: Run, scalars: dict[str, float | None]) -> None:
            # The last log comes before the last checkpoint, so that the rate does not include it.
            elapsed_s, env_steps = scalars["time/time_elapsed"], scalars["time/env_steps"]
            self.rate = env_steps / elapsed_s if elapsed_s and env_steps else None

        def on_end(self, run: Run, _result: Result) -> None:
            self.ended = run

    folder: Path | str | None = options.run_dir
    config = check_config(config)
    if folder is None:
        name = f"profile-{default_name(config.env, config.algo, config.seed)}"
        folder = new_run_dir(api.RUNS, name, explicit=False)
    if not options.json:
        print(f"profiling {config.env} for {format_duration(options.seconds)} …", file=sys.stderr)
    recorder = RunRecorder()
    with quiet_stdout(options.json):
        trained = api.train(
            config=config,
            run_dir=folder,
            overwrite=options.overwrite,
            options=RunOptions(max_wall_s=options.seconds, trace=True, stage_rates=True),
            callbacks=[recorder],
            trust=options.trust,
        )
    run, result, from_timers = recorder.ended, trained.result, recorder.ended.stages is None
    stages = run.stages or stages_from_timers(
        result, trained.config, recorder.rate or 0.0, run.parts.device.type
    )
    if options.json:
        print(json_module.dumps(_as_dict(result, stages, short(trained.folder), from_timers)))
    else:
        for note in run.parts.notes:
            print(note)
        _show(result, stages, short(trained.folder), from_timers)
    return 128 + trained.interrupted_by if trained.interrupted_by else 0


def stages_from_timers(
    result: Result, config: Config, end_to_end: float, device_type: str
) -> Stages:
    """Return the rates of stages that took turns on one thread, from the seconds of each."""
    from qfleet.engines.stage_rates import Stages
    from qfleet.telemetry.bottleneck import StageRates, diagnose

    spent_s = {stage: (share or 0.0) * result.wall_s for stage, share in result.time_share.items()}

    def rate(env_steps: float, seconds: float) -> float | None:
        return env_steps / seconds if env_steps and seconds > 0 else None

    rates = StageRates(
        env_only=rate(result.env_steps, spent_s["env"]),
        inference_only=rate(result.env_steps, spent_s["act"]),
        learner_only=rate(
            result.updates / config.updates_per_env_step, spent_s["learn"] + spent_s["copy"]
        ),
        end_to_end=end_to_end,
    )
    diagnosis = diagnose(
        rates,
        cores=usable_cores(),
        envs=config.envs,
        device_type=device_type,
        updates_per_env_step=config.updates_per_env_step,
        batch_size=config.batch_size,
    )
    return Stages(rates, diagnosis)


def _as_dict(result: Result, stages: Stages, folder: Path, from_timers: bool) -> dict[str, Any]:
    shown = ("env_id", "algo", "engine", "env_steps", "updates", "wall_s", "stopped_by")
    return {
        **{name: getattr(result, name) for name in shown},
        **asdict(stages.rates),
        **asdict(stages.diagnosis),
        "from_timers": from_timers,
        "time_share": result.time_share,
        "faults": result.faults,
        "run_dir": str(folder),
        "trace": str(trace_path(folder)),
        "timeline": str(timeline_path(folder)),
    }


def _show(result: Result, stages: Stages, folder: Path, from_timers: bool) -> None:
    print(
        f"{result.env_id} · {result.algo} · {result.engine} · {result.env_steps:,} steps, "
        f"{result.updates:,} updates in {format_duration(result.wall_s)}\n"
    )
    print(stages.table())
    if from_timers:
        print("(The stages share one thread: their rates are from timers, not measured alone.)")
    if result.faults:
        print("faults: " + ", ".join(f"{kind} ×{count}" for kind, count in result.faults.items()))
    print(f"\n  trace      {trace_path(folder)}\n  timeline   {timeline_path(folder)}")
