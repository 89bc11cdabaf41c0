"""Options that several verbs share, and the output at the end of train and resume."""

from __future__ import annotations

import contextlib
import json as json_module
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from qfleet.cli.parsing import parse_duration
from qfleet.config.trust import needs_trust
from qfleet.core.cores import usable_cores
from qfleet.core.errors import UserError
from qfleet.core.files import short
from qfleet.core.urls import public_url

if TYPE_CHECKING:
    from qfleet.training.run_state import RunOptions
    from qfleet.training.trained import Trained, TrainedSeeds


@dataclass(frozen=True)
class PolicyOptions:
    """Options of the verbs that play with the policy of a run."""

    run: tyro.conf.Positional[str]
    """Name, folder or URL of the run, or a file that policy.save wrote."""
    seed: int = 1000
    """Seed of the environments."""
    which: Literal["best", "last"] | None = None
    """The best evaluated policy, or the newest checkpoint's; default: best, if there is one."""
    device: str | None = None
    """Device to use instead of the run's own: cpu, cuda …"""
    trust: bool = False
    """Import the code (module:Class, --import) that the run's configuration names."""
    json: bool = False
    """Print one JSON object and nothing else."""


@dataclass(frozen=True)
class RunArguments:
    stop_after: int | None = None
    """Stop at this total of env steps. Changes no schedule; qfleet resume continues the run."""
    max_wall: str | None = None
    """Stop after this time (90s, 30m, 1h30m). Changes no schedule; qfleet resume continues."""
    trace: bool = False
    """Record every thread: trace.json (chrome://tracing, ui.perfetto.dev), plots/timeline.png. At
    the end, also measure what each stage could do alone."""
    quiet: bool = False
    """Show no progress, only the final report."""
    json: bool = False
    """Print the result as one JSON object and nothing else."""

    def resolve(self, note: str | None = None) -> RunOptions:
        from qfleet.telemetry.progress import choose_mode
        from qfleet.training.run_state import RunOptions

        max_wall_s = parse_duration(self.max_wall) if self.max_wall else None
        if self.stop_after is not None and self.stop_after <= 0:
            raise UserError(f"--stop-after must be > 0, got {self.stop_after}")
        if max_wall_s is not None and max_wall_s <= 0:
            raise UserError(f"--max-wall must be > 0, got {self.max_wall}")
        return RunOptions(
            stop_after=self.stop_after,
            max_wall_s=max_wall_s,
            display=choose_mode(self.quiet or self.json, sys.stderr),
            trace=self.trace,
            stage_rates=self.trace,
            note=note,
        )


def quiet_stdout(json: bool) -> contextlib.AbstractContextManager[object]:
    """With --json, redirect what environments print to standard error."""
    return contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()


def trace_path(folder: Path) -> Path:
    return folder / "trace.json"


def timeline_path(folder: Path) -> Path:
    return folder / "plots" / "timeline.png"


def show(trained: Trained) -> None:
    from dataclasses import asdict

    from rich.console import Console

    from qfleet.telemetry.report import final_report

    # soft_wrap: a path that is cut in two cannot be copied.
    Console(soft_wrap=True).print(
        final_report(
            asdict(trained.result),
            short(trained.folder),
            trained.curve and short(trained.curve),
        )
    )


SLOW_STEP_S = 0.001
"""Seconds per env step from which processes, which cost about a fifth of it, are worth advice."""


def _advice(trained: Trained) -> str | None:
    """Return what would help a run that spent most of its time in slow environments."""
    config, result = trained.config, trained.result
    share = result.time_share.get("env") or 0.0
    is_slow = share > 0.5 and share * result.wall_s > SLOW_STEP_S * result.env_steps
    can_change = config.engine in ("serial", "pipeline") and config.vectorize in ("auto", "sync")
    cores = usable_cores()
    if not is_slow or not can_change or cores == 1:
        return None
    return (
        f"{share:.0%} of the time was in the environments; --envs {max(config.envs, cores)} "
        f"--vectorize async steps them in processes, on all {cores} cores"
    )


def finish(trained: Trained | TrainedSeeds, options: RunArguments) -> int:
    """Print the result; return the exit code: 130 or 143 if a signal stopped the run, else 0."""
    from dataclasses import asdict

    from qfleet.training.trained import Trained

    if not isinstance(trained, Trained):
        return _finish_seeds(trained, options)
    if options.json:
        curve = trained.curve and str(short(trained.curve))
        extra = {"run_dir": str(short(trained.folder)), "curve": curve}
        print(json_module.dumps({**asdict(trained.result), **extra}))
    else:
        show(trained)
        if options.trace:
            print(f"  trace      {short(trace_path(trained.folder))}")
            print(f"  timeline   {short(timeline_path(trained.folder))}")
        if trained.url:
            print(f"  URL        {public_url(trained.url)}")
        if advice := _advice(trained):
            print(f"  advice     {advice}")
        is_cut = trained.result.stopped_by in ("SIGINT", "SIGTERM", "max_wall")
        if is_cut or trained.result.env_steps < trained.config.steps:
            score, best = trained.result.eval_return_mean, trained.result.best_eval_return
            if score is not None and best is not None and score > best:
                print("  note       the score is the last policy's (--which last); best/ is older")
            where = public_url(trained.url) if trained.url else short(trained.folder)
            trust = " --trust" if needs_trust(trained.config) else ""
            print(f"  go on with: qfleet resume {where}{trust}")
    return 128 + trained.interrupted_by if trained.interrupted_by else 0


def _finish_seeds(trained: TrainedSeeds, arguments: RunArguments) -> int:
    """Print what several seeds gave together; return the exit code."""
    from qfleet.training.seeds import has_ended

    if arguments.json:
        curve = trained.curve and str(short(trained.curve))
        extra = {"run_dir": str(short(trained.folder)), "curve": curve}
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
        print(f"  folder     {short(trained.folder)}")
        if trained.curve is not None:
            print(f"  curve      {short(trained.curve)}")
        last = trained.runs[-1]
        left = [run for run in trained.runs if not has_ended(run.result, run.config.steps)]
        if left or last.interrupted_by is not None:
            trust = " --trust" if needs_trust(last.config) else ""
            # At a URL, every seed is a run of its own.
            urls = [public_url(run.url) for run in left if run.url]
            for place in urls if last.url else [short(trained.folder)]:
                print(f"  go on with: qfleet resume {place}{trust}")
    interrupted = trained.runs[-1].interrupted_by
    return 128 + interrupted if interrupted else 0
