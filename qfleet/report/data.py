"""The data of a page: curves of groups of runs, scores, and details, from histories of runs.

In: histories. Out: ``page_data``, a plain dictionary whose arrays are already down-sampled. It is
the only place that decides what a page shows; ``charts.py`` and ``page.py`` draw it.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import math
import os
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qfleet.core.files import open_regular
from qfleet.report import configuration
from qfleet.report.histories import ELAPSED_S, RATE, UPDATES, FloatArray, History
from qfleet.telemetry.aggregate import (
    aggregate_curves,
    bootstrap_ci,
    compare_scores,
    iqm,
    iqm_curve,
)
from qfleet.telemetry.formatting import finite
from qfleet.telemetry.runs import (
    EVAL_RETURN,
    FINISHED,
    ROLLOUT_RETURN,
    computed_fields,
    group_runs,
)
from qfleet.telemetry.timeline import WAITS, join_kinds, last_spans
from qfleet.telemetry.timers import KINDS, STAGES
from qfleet.telemetry.trace import read_chrome_trace

REPLAY_RATIO = "replay_ratio"
AXES = {"env_steps": "env steps", "updates": "updates", "wall_s": "wall time (s)"}
"""Column of a curve → label of the axis."""


class ChartKind(NamedTuple):
    metric: str
    title: str
    unit: str


CHARTS = (
    ChartKind(EVAL_RETURN, "Evaluation return", "mean return of an evaluation"),
    ChartKind(ROLLOUT_RETURN, "Training return", "mean return of 100 episodes"),
    ChartKind("train/loss", "Loss", "loss"),
    ChartKind("train/q_mean", "Q-values", "mean Q-value"),
    ChartKind("rollout/exploration_rate", "Exploration rate", "ε"),
    ChartKind(RATE, "Speed", "env steps per second"),
    ChartKind(REPLAY_RATIO, "Replay ratio", "samples learnt per env step"),
)
"""Charts over time, in their order on the page."""
PIXELS = 600
"""Width of a chart: more buckets than pixels show nothing more."""
MOST_POINTS = 10_000
"""Points of all curves of a chart, so that pages of hundreds of runs stay small and quick."""
MOST_DETAILED = 20
"""Groups whose details are shown; a page of more is for comparing."""
MOST_TIMELINES = 4
MOST_VIDEO_BYTES = 8 * 2**20
"""Bytes of all videos of a page."""
VIDEO_TYPES = {".mp4": "video/mp4", ".gif": "image/gif"}
_SHARE = re.compile(r"((?:worker|actor|rank)_\d+|learner)/time/share_(\w+)")


class Group(NamedTuple):
    """Runs that are seeds of one experiment, or one agent of a population."""

    label: str
    members: list[History]
    prefix: str = ""
    """Of the metrics of an agent, ``agent_2/``."""

    def series(self, member: History, metric: str) -> tuple[FloatArray, FloatArray]:
        if metric != REPLAY_RATIO:
            return member.series(self.prefix + metric)
        steps, updates = member.series("" if self.prefix else UPDATES)
        samples = updates * (finite(member.run.config.get("batch_size")) or 0)
        return steps[steps > 0], samples[steps > 0] / steps[steps > 0]


def page_data(histories: Sequence[History], by_seed: bool = False) -> dict[str, Any]:
    """Return what a page shows: groups, curves, scores, differing fields, and details of groups.

    ``by_seed``: every run is a group of its own, as while some of the seeds have not begun.
    """
    groups = _group(histories, by_seed)
    buckets = max(20, min(PIXELS, MOST_POINTS // (2 * max(len(groups), 1))))
    curves = {
        kind.metric: [_curve(group, kind.metric, buckets) for group in groups] for kind in CHARTS
    }
    whole = [group for group in groups if not group.prefix]
    return {
        "groups": [group.label for group in groups],
        "experiments": [group.label for group in whole],
        "curves": {metric: found for metric, found in curves.items() if any(found)},
        "distributions": [_distribution(_returns(group), buckets) for group in groups],
        "staleness": [_staleness(group) for group in groups],
        "scores": _scores(groups),
        "fields": _differing_fields(whole),
        "details": [_details(group) for group in whole[:MOST_DETAILED]],
        "left_out": max(0, len(whole) - MOST_DETAILED),
    }


def read_media(details: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return timelines by label, and a video or None per detail: what only a whole page shows.

    Live pages do not follow them, because reading traces and videos takes long.
    """
    named = ((f"{detail['label']}{detail['of_first']}", _timeline(detail)) for detail in details)
    timelines = itertools.islice(((name, spans) for name, spans in named if spans), MOST_TIMELINES)
    videos, left_bytes = list[str | None](), MOST_VIDEO_BYTES
    for detail in details:
        videos.append(_video(detail["paths"], left_bytes))
        left_bytes -= len(videos[-1] or "") * 3 // 4
    return {"timelines": dict(timelines), "videos": videos}


def downsample(x: FloatArray, y: FloatArray, buckets: int) -> NDArray[np.int64]:
    """Return the indices of the least and greatest y in each of ``buckets`` equal ranges of x.

    The first and the last point are kept. ``x`` must not decrease.
    """
    if y.size <= 2 * buckets:
        return np.arange(y.size)
    place = (x - x[0]) * (buckets / max(x[-1] - x[0], 1e-300))
    bucket = np.minimum(place.astype(np.int64), buckets - 1)
    order = np.lexsort((y, bucket))
    is_first = np.diff(bucket[order], prepend=-1) > 0
    is_last = np.append(is_first[1:], True)
    return np.unique(np.concatenate([order[is_first], order[is_last], [0, y.size - 1]]))


def _group(histories: Sequence[History], by_seed: bool) -> list[Group]:
    """Return the groups, named by their run if all members are seeds of one run."""
    by_path = {history.run.path: history for history in histories}
    groups: dict[str, Group] = {}
    each = {str(history.run.path): [history.run] for history in histories}
    grouped = each if by_seed else group_runs([history.run for history in histories])
    for settings, runs in grouped.items():
        members = [by_path[run.path] for run in runs]
        names = {run.name.split("/seed-")[0] for run in runs}
        label = names.pop() if len(names) == 1 else settings
        label = runs[0].name if len(runs) == 1 else label
        if label in groups:
            label = f"{label} ({settings})"
        while label in groups:
            label += "′"
        groups[label] = Group(label, members)
        rows = _result(members[0])["agents"]
        for agent in members[0].agents if len(members) == 1 else []:
            values = rows[agent] if agent < len(rows) else {}
            own = "".join(f" {name}={value:.4g}" for name, value in values.items())
            name = f"{label} · agent {agent}{own}"
            groups[name] = Group(name, members, f"agent_{agent}/")
    return list(groups.values())


def _curve(group: Group, metric: str, buckets: int) -> dict[str, FloatArray] | None:
    """Return columns of ``AXES``, ``value`` and, for several runs, ``low`` and ``high``."""
    found = [(member, *group.series(member, metric)) for member in group.members]
    found = [(member, steps, values) for member, steps, values in found if steps.size]
    if not found:
        return None
    members = [member for member, _, _ in found]
    _, steps, values = found[0]
    columns = {}
    if len(found) > 1:
        curves = [(steps, values) for _, steps, values in found]
        if metric in (EVAL_RETURN, ROLLOUT_RETURN):
            steps, values, low, high = aggregate_curves(curves)
            columns = {"low": low, "high": high}
        else:
            steps, values = iqm_curve(curves)
    kept = downsample(steps, values, buckets)
    env_steps = steps[kept]
    return {
        "env_steps": env_steps,
        "updates": np.mean([each.at_steps(UPDATES, env_steps) for each in members], axis=0),
        "wall_s": np.mean([each.at_steps(ELAPSED_S, env_steps) for each in members], axis=0),
        "value": values[kept],
        **{name: column[kept] for name, column in columns.items()},
    }


def _returns(group: Group) -> FloatArray:
    """Return the returns of all episodes of the last evaluations."""
    found = []
    for member in group.members:
        result = _result(member)
        returns = result["eval_returns"]
        if group.prefix:  # agent-major: every agent has played as many
            agents = max(len(result["agents"]), 1)
            each, agent = len(returns) // agents, int(group.prefix[len("agent_") : -1])
            returns = returns[agent * each : (agent + 1) * each]
        found += returns
    return np.array(found, dtype=np.float64)


def _distribution(returns: FloatArray, buckets: int) -> dict[str, FloatArray] | None:
    """Return the share of episodes, in %, with a return of at least x, as a staircase."""
    if not returns.size:
        return None
    x = np.sort(returns)
    share = 100 * np.arange(x.size, 0, -1) / x.size
    x, y = np.repeat(x, 2), np.append(np.repeat(share, 2)[1:], 0.0)
    kept = downsample(x, y, buckets)
    return {"x": np.append(x[0], x[kept]), "value": np.append(100.0, y[kept])}


def _staleness(group: Group) -> dict[str, FloatArray] | None:
    """Return the share of gradients or blocks, in %, by the age of their weights in updates."""
    counts: dict[int, float] = {}
    for member in group.members:
        staleness = _result(member)["fleet"]["staleness"]
        for age, count in _object(staleness.get("counts")).items():
            if age.isdecimal() and len(age) < 16:
                counts[int(age)] = counts.get(int(age), 0) + (finite(count) or 0)
    if not counts or group.prefix:
        return None
    ages = np.array(sorted(counts), dtype=np.float64)
    shares = np.array([counts[int(age)] for age in ages])
    return {"x": ages, "value": 100 * shares / max(shares.sum(), 1)}


def _scores(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return a row per group: IQM of final returns, its interval, and the first group beside it.

    Groups are compared if all their runs have finished, in the same environment.
    """
    rows: list[dict[str, Any]] = []
    reference: tuple[Any, list[float]] = (None, [])
    for group in groups:
        summaries = [_summary(group, member) for member in group.members]
        scores = [s["eval_return_mean"] for s in summaries if s["eval_return_mean"] is not None]
        best = [s["best_eval_return"] for s in summaries if s["best_eval_return"] is not None]
        has_finished = all(s["state"] in FINISHED for s in summaries)
        env = summaries[0]["env"] if has_finished else None
        if not rows:
            reference = (env, scores)
        can_compare = bool(rows) and env is not None and env == reference[0]
        rows.append(
            {
                **summaries[0],
                **{
                    name: _combined(statistics.median, [s[name] for s in summaries])
                    for name in ("env_steps", "env_steps_per_s", "wall_s")
                },
                "label": group.label,
                "runs": len(summaries),
                "score": iqm(scores) if scores else None,
                "interval": bootstrap_ci(scores) if len(scores) > 1 else None,
                "best": max(best, default=None),
                "verdict": compare_scores(scores, reference[1]) if can_compare else None,
                "state": " · ".join(dict.fromkeys(str(s["state"]) for s in summaries)),
            }
        )
    return rows


def _summary(group: Group, member: History) -> dict[str, Any]:
    whole = member.summary()
    if not group.prefix:
        return whole
    evaluations = group.series(member, EVAL_RETURN)[1].tolist()
    last, best = evaluations[-1] if evaluations else None, max(evaluations, default=None)
    return whole | {"eval_return_mean": last, "best_eval_return": best}


def _differing_fields(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Return the fields of the configuration that differ between groups, with a value for each."""
    fields = [computed_fields(group.members[0].run) for group in groups]
    names = dict.fromkeys(name for own in fields for name in own)
    found = {name: [own.get(name) for own in fields] for name in names}
    return {name: values for name, values in found.items() if any(v != values[0] for v in values)}


def _details(group: Group) -> dict[str, Any]:
    """Return what is shown of one group: sums over its runs, and the rest of its first run."""
    first, results = group.members[0], [_result(member) for member in group.members]
    shares: dict[str, dict[str, float]] = {}
    for name, value in first.last.items():
        if match := _SHARE.fullmatch(name):
            shares.setdefault(match[1].replace("_", " "), {})[match[2]] = value
    threads = _object(results[0].get("resources")) or {
        "all threads": {stage: first.last.get(f"time/share_{stage}") for stage in STAGES}
    }
    return {
        "label": group.label,
        "has_ended": any(member.result for member in group.members),
        "of_first": ", first seed" if len(results) > 1 else "",
        "paths": [str(member.run.path) for member in group.members],
        "result": results[0] | _sums(results),
        "resources": {name: _numbers(shares, STAGES) for name, shares in threads.items()},
        "workers": {name: _numbers(shares[name], KINDS) for name in sorted(shares, key=_place)},
        "recipe": configuration.describe(first.run.config),
        "config_path": str(first.run.path / "config.json"),
    }


def _place(process: str) -> tuple[bool, int, str]:
    """Return a key that sorts processes by number, and the learner last."""
    return (process == "learner", len(process), process)


def _object(value: Any) -> dict[str, Any]:
    """Return a value of a file if it is an object, as it should be; else an empty one."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _finite_values(value: Any) -> dict[str, float]:
    """Return the entries of an object that are numbers; none if it is no object."""
    found = {name: finite(own) for name, own in _object(value).items()}
    return {name: own for name, own in found.items() if own is not None}


def _result(member: History) -> dict[str, Any]:
    """Return the result of a run, with the types that the page relies on; empty while it trains.

    ``agents`` are the values of each agent.
    """
    result = member.result
    fleet, cost = _object(result.get("fleet")), _finite_values(result.get("cost"))
    returns = (finite(value) for value in _list(result.get("eval_returns")))
    prices = {name: cost.get(name) for name in ("total", "per_cpu_hour", "per_gpu_hour")}
    return result | {
        "fleet": fleet | {name: _object(fleet.get(name)) for name in ("staleness", "straggler")},
        "hardware": _object(result.get("hardware")),
        "communication": _object(result.get("communication")),
        "faults": _finite_values(result.get("faults")),
        "cost": prices if "total" in cost else None,
        **{name: finite(result.get(name)) for name in ("processor_s", "device_s", "joules")},
        "eval_returns": [value for value in returns if value is not None],
        "agents": [
            _finite_values(_object(agent).get("values")) for agent in _list(result.get("agents"))
        ],
    }


def _sums(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the entries of results that add up over seeds: faults, time, energy and cost."""
    names = dict.fromkeys(name for result in results for name in result["faults"])
    costs = [result["cost"] for result in results if result["cost"]]
    total = _combined(sum, [cost["total"] for cost in costs])
    return {
        "faults": {name: sum(own["faults"].get(name, 0) for own in results) for name in names},
        "cost": costs[0] | {"total": total} if costs else None,
        **{
            name: _combined(sum, [result[name] for result in results])
            for name in ("processor_s", "device_s", "joules")
        },
    }


def _combined(
    combine: Callable[[list[float]], float], values: Sequence[float | None]
) -> float | None:
    """Return the sum, median … of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return combine(known) if known else None


def _numbers(shares: Any, names: Sequence[str]) -> dict[str, float]:
    found = {name: finite(_object(shares).get(name)) for name in names}
    return {name: share for name, share in found.items() if share}


def _timeline(detail: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """Return lane, stage, start and end in ms of the end of the first run's trace, if any."""
    lanes = read_chrome_trace(Path(detail["paths"][0]) / "trace.json")
    # The trace of all-reduce has the threads of rank 0, not a lane per rank.
    are_workers = any(not name.startswith("rank") for name in detail["workers"])
    if are_workers:
        lanes = {name: join_kinds(spans) for name, spans in lanes.items()}
    if not any(stage not in WAITS for spans in lanes.values() for stage, _, _ in spans):
        return []
    rows, _ = last_spans(lanes, are_workers)
    return [(name, s, a * 1e3, b * 1e3) for name, spans in rows.items() for s, a, b in spans]


def _video(folders: Sequence[str], most_bytes: int) -> str | None:
    """Return the newest video of the first run that has one, as a data URL, if it is small."""
    for folder in folders:
        newest_s, video = -math.inf, None
        for path in Path(folder).glob("videos/*"):
            # Other things than readable files of these types are left out.
            with contextlib.suppress(OSError, KeyError), open_regular(path) as file:
                status, kind = os.fstat(file.fileno()), VIDEO_TYPES[path.suffix]
                if status.st_size <= most_bytes and status.st_mtime > newest_s:
                    text = base64.b64encode(file.read(most_bytes)).decode()
                    newest_s, video = status.st_mtime, f"data:{kind};base64,{text}"
        if video is not None:
            return video
    return None
