"""What a page shows: curves that are down-sampled, groups, scores and configurations."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet.cli.main import main
from qfleet.cli.start import read_start
from qfleet.cli.train import DESCRIPTION, TrainOptions
from qfleet.config.config import Config
from qfleet.config.presets import resolve
from qfleet.report import histories
from qfleet.report.charts import chart_columns
from qfleet.report.configuration import describe
from qfleet.report.data import MOST_POINTS, downsample, page_data
from qfleet.report.histories import History, read_histories
from qfleet.report.page import render
from qfleet.storage.published import INDEX, Index, object_name, record_of
from qfleet.telemetry.trace import Trace, write_chrome_trace
from support.messages import holds
from support.synthetic_runs import EVAL, ROLLOUT, curve, write_run

OUTSIDE = r'<(script|link|img)[^>]+(src|href)="(?!data:)'
HOSTILE = "</script><img src=x onerror=alert(1)>"


def logged(*values: float) -> list[dict[str, Any]]:
    """Rows with a clock: 2 s and 50 updates per 100 env steps."""
    clocks = [
        {"time/time_elapsed": 2.0 * k, "train/n_updates": 50 * k} for k in range(1, len(values) + 1)
    ]
    return [row | clock for row, clock in zip(curve(*values), clocks, strict=True)]


def ended(score: float, **more: Any) -> dict[str, Any]:
    """The result of a run that has made all its steps."""
    return {"env_steps": 1000, "stopped_by": "steps", "eval_return_mean": score, **more}


def test_downsampling_keeps_the_least_and_greatest_of_every_bucket() -> None:
    rng = np.random.default_rng(0)
    x, y = np.sort(rng.random(5000)), rng.normal(size=5000)
    kept = downsample(x, y, 40)
    bucket = np.minimum(((x - x[0]) * 40 / (x[-1] - x[0])).astype(int), 39)
    for k in range(40):
        inside = np.flatnonzero(bucket == k)
        assert {inside[y[inside].argmin()], inside[y[inside].argmax()]} <= set(kept.tolist())
    assert kept[0] == 0
    assert kept[-1] == 4999
    assert (np.diff(kept) > 0).all()
    assert kept.size <= 2 * 40 + 2
    # Every n-th point, as a control, loses the extremes.
    assert y[::60].max() < y.max() == y[kept].max()


def test_few_points_are_all_kept() -> None:
    assert downsample(np.arange(8.0), np.zeros(8), 4).tolist() == list(range(8))
    assert downsample(np.zeros(9), np.arange(9.0), 4).tolist() == [0, 8]  # all at one x


def test_an_incomplete_line_is_left_for_the_next_read(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", curve(1.0))
    history = History(path)
    assert history.refresh()
    assert not history.refresh()
    line = json.dumps({"env_steps": 200, EVAL: 2.0}).encode() + b"\n"
    with (path / "metrics.jsonl").open("ab", buffering=0) as file:
        file.write(line[:10])
        assert not history.refresh()
        file.write(line[10:])
    assert history.refresh()
    assert history.series(EVAL)[1].tolist() == [1.0, 2.0]


def test_a_file_that_a_resume_has_replaced_is_read_anew(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", curve(1.0, 2.0, 3.0))
    history = History(path)
    history.refresh()
    (path / "new").write_text("".join(json.dumps(row) + "\n" for row in curve(1.0, 9.0, 4.0, 5.0)))
    os.replace(path / "new", path / "metrics.jsonl")
    assert history.refresh()
    assert history.series(EVAL)[1].tolist() == [1.0, 9.0, 4.0, 5.0]


def test_a_file_of_another_run_with_the_number_of_a_removed_one_is_read_anew(
    tmp_path: Path,
) -> None:
    """File systems give the number of a removed file to the next one."""
    path = write_run(tmp_path / "run", curve(1.0, 2.0))
    history = History(path)
    history.refresh()
    lines = "".join(json.dumps(row) + "\n" for row in curve(9.0, 9.0, 9.0, 9.0))
    (path / "metrics.jsonl").write_text(lines)  # in place
    assert history.refresh()
    assert history.series(EVAL)[1].tolist() == [9.0] * 4


def test_a_resumed_run_is_not_shown_with_its_old_result(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", curve(1.0, 2.0))
    (path / "result.json").write_text(json.dumps({"env_steps": 200, "stopped_by": "steps"}))
    history = History(path)
    history.refresh()
    assert history.result["stopped_by"] == "steps"
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in curve(1.0, 2.0, 3.0))
    )
    history.refresh()
    assert history.result == {}
    assert history.summary()["state"] == "running or interrupted"


def test_a_curve_has_env_steps_updates_and_wall_time(tmp_path: Path) -> None:
    rows = [*logged(1.0, 3.0), {"env_steps": 150, EVAL: 7.0}]
    rows.sort(key=lambda row: row["env_steps"])
    path = write_run(tmp_path / "run", rows, batch_size=32)
    data = page_data(read_histories([path]))
    (own,) = data["curves"][EVAL]
    assert own["env_steps"].tolist() == [100, 150, 200]
    assert own["updates"].tolist() == [50, 75, 100]  # of the evaluation: interpolated
    assert own["wall_s"].tolist() == [2, 3, 4]
    assert data["curves"]["replay_ratio"][0]["value"].tolist() == [16.0, 16.0]


def test_seeds_are_one_group_with_a_band_and_other_settings_another(tmp_path: Path) -> None:
    finals = {"a": (10.0, 11.0, 12.0, 13.0), "b": (30.0, 31.0, 32.0, 33.0)}
    folders = [
        write_run(
            tmp_path / name / f"seed-{seed}", logged(1.0, score), ended(score), seed=seed,
            learning_rate=1e-3 if name == "a" else 1e-4,
        )
        for name, scores in finals.items()
        for seed, score in enumerate(scores)
    ]  # fmt: skip
    data = page_data(read_histories(folders))
    assert data["groups"] == ["a", "b"]
    band = data["curves"][EVAL][0]
    assert band["value"].tolist() == [1.0, 11.5]
    assert band["low"][-1] < 11.5 < band["high"][-1]
    assert [row["verdict"] for row in data["scores"]] == [None, "better"]
    assert data["fields"] == {"learning_rate": [1e-3, 1e-4]}
    low, high = data["scores"][1]["interval"]
    assert 30 <= low < 31.5 < high <= 33


def test_one_run_against_one_cannot_be_told(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / name, logged(score), ended(score), gamma=score / 100)
        for name, score in (("a", 1.0), ("b", 99.0))
    ]
    scores = page_data(read_histories(folders))["scores"]
    assert [(row["verdict"], row["interval"]) for row in scores] == [
        (None, None),
        ("cannot tell", None),
    ]


@pytest.mark.parametrize(
    ("env", "stopped_by", "verdict"),
    [
        ("CartPole-v1", "steps", "better"),
        ("CartPole-v1", "patience", "better"),
        ("CartPole-v1", "SIGTERM", None),
        ("Acrobot-v1", "steps", None),
    ],
)
def test_only_finished_runs_of_one_environment_are_compared(
    env: str, stopped_by: str, verdict: str | None, tmp_path: Path
) -> None:
    for k in range(4):
        write_run(tmp_path / "a" / f"seed-{k}", [], ended(k), seed=k)
        result = ended(10 + k) | ({"stopped_by": stopped_by} if k == 3 else {})
        write_run(tmp_path / "b" / f"seed-{k}", [], result, seed=k, env=env, gamma=0.5)
    rows = page_data(read_histories(sorted(tmp_path.glob("*/*"))))["scores"]
    assert [row["verdict"] for row in rows] == [None, verdict]


def test_faults_and_cost_add_up_over_seeds_and_speed_is_the_median(tmp_path: Path) -> None:
    prices = {"per_cpu_hour": 1.0, "per_gpu_hour": None}
    for k, (rate, wall_s) in enumerate([(100, 60), (300, 20), (200, 30)]):
        more = {"env_steps_per_s": rate, "wall_s": wall_s, "faults": {"nan_reward": k}}
        cost = {"processor_s": 3600 * (k + 1), "device_s": None, "cost": prices | {"total": k + 1}}
        write_run(tmp_path / "run" / f"seed-{k}", logged(1.0), ended(1.0, **more, **cost), seed=k)
    data = page_data(read_histories(sorted((tmp_path / "run").iterdir())))
    (row,), (detail,) = data["scores"], data["details"]
    assert (row["env_steps_per_s"], row["wall_s"]) == (200, 30)
    assert detail["result"]["faults"] == {"nan_reward": 3}
    page = render(data, "run")
    assert "6 processor-hours: 6 (at 1 per hour)" in page
    assert "Reproduce, first seed" in page
    alone = render(page_data(read_histories([tmp_path / "run" / "seed-1"])), "run")
    assert "2 processor-hours: 2 (" in alone
    assert "first seed" not in alone


def test_agents_of_a_population_have_curves_and_returns_of_their_own(tmp_path: Path) -> None:
    rows = [{"env_steps": 100, EVAL: 5.0, f"agent_0/{EVAL}": 2.0, f"agent_1/{EVAL}": 8.0}]
    agents = [{"values": {"learning_rate": 1e-3}}, {"values": {"learning_rate": 1e-4}}]
    result = {"agents": agents, "eval_returns": [1, 3, 8, 8], "env_steps": 100}
    path = write_run(tmp_path / "run", rows, result, population=2)
    data = page_data(read_histories([path]))
    assert data["groups"][1:] == [
        "run · agent 0 learning_rate=0.001",
        "run · agent 1 learning_rate=0.0001",
    ]
    assert [own["value"].tolist() for own in data["curves"][EVAL]] == [[5.0], [2.0], [8.0]]
    assert data["distributions"][1]["x"].tolist() == [1, 1, 1, 3, 3]
    assert data["distributions"][1]["value"].tolist() == [100, 100, 50, 50, 0]
    assert data["experiments"] == ["run"]


def test_seeds_that_have_not_ended_are_shown_by_themselves(tmp_path: Path) -> None:
    rows = (logged(1.0, 2.0, 3.0), logged(4.0))
    folders = [write_run(tmp_path / f"seed-{k}", own, seed=k) for k, own in enumerate(rows)]
    histories = read_histories(folders)
    apart = page_data(histories, by_seed=True)["curves"][EVAL]
    assert [own["value"].tolist() for own in apart] == [[1.0, 2.0, 3.0], [4.0]]
    (together,) = page_data(histories)["curves"][EVAL]
    assert together["env_steps"].tolist() == [100]


def test_a_malformed_result_does_not_prevent_a_page(tmp_path: Path) -> None:
    names = ("fleet", "resources", "hardware", "faults", "cost", "communication", "agents")
    result = {name: [1] for name in names} | {"eval_returns": ["x"], "updates": "many"}
    path = write_run(tmp_path / "run", logged(1.0), result, population=10**9, batch_size="x")
    os.mkfifo(path.parent / "pipe")
    (write_run(tmp_path / "other", []) / "metrics.jsonl").unlink()
    os.rename(path.parent / "pipe", tmp_path / "other" / "metrics.jsonl")
    assert "other" in render(page_data(read_histories([path, tmp_path / "other"])), "run")


@pytest.mark.parametrize(
    "result",
    [
        {"agents": {"0": 1}},
        {"agents": [{"values": {"gamma": "much"}}]},
        {"eval_returns": 3},
        {"fleet": {"staleness": [1], "straggler": [1]}},
        {"fleet": {"staleness": {"counts": {"9" * 400: 1}}}},
        {"cost": {"total": 1.0}},
        {"cost": {"total": "1"}, "processor_s": "x", "faults": {"nan": "x"}},
        {"env_steps": 10**400, "eval_return_mean": 10**400},
    ],
)
def test_a_malformed_entry_of_a_result_does_not_prevent_a_page(
    result: dict[str, Any], tmp_path: Path
) -> None:
    rows = [{"env_steps": 1, f"agent_0/{EVAL}": 1.0}]
    path = write_run(tmp_path / "run", rows, result)
    assert "run" in render(page_data(read_histories([path])), "run")


@pytest.mark.parametrize(
    "row",
    [
        {"env_steps": 10**400, EVAL: 9.0},
        {"env_steps": 200, EVAL: 10**400},
        {"env_steps": 200, f"agent_{'9' * 5000}/{EVAL}": 1.0},
    ],
)
def test_a_malformed_row_of_metrics_does_not_prevent_a_page(
    row: dict[str, Any], tmp_path: Path
) -> None:
    path = write_run(tmp_path / "run", [*logged(1.0), row])
    data = page_data(read_histories([path]))
    assert [own["value"].tolist() for own in data["curves"][EVAL]] == [[1.0]]
    assert "run" in render(data, "run")


def test_of_videos_only_files_are_read(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", logged(1.0))
    videos = path / "videos"
    (videos / "folder.mp4").mkdir(parents=True)
    os.mkfifo(videos / "pipe.mp4")
    (videos / "link.gif").symlink_to("nothing")
    (videos / "notes.txt").write_text("no video")
    data = page_data(read_histories([path]))
    assert "data:video" not in render(data, "run")
    for age, name in enumerate(("new", "old")):
        (videos / f"{name}.mp4").write_bytes(name.encode())
        os.utime(videos / f"{name}.mp4", (1000 - age, 1000 - age))
    assert f"data:video/mp4;base64,{base64.b64encode(b'new').decode()}" in render(data, "run")


def test_lanes_of_a_trace_are_workers_only_in_fleets_that_trace_each(tmp_path: Path) -> None:
    for name in ("rank", "actor"):
        path = write_run(tmp_path / name, [{"env_steps": 1, f"{name}_0/time/share_waiting": 0.5}])
        trace = Trace()
        trace.lane("main").add("learn", 1.0, 2.0)
        write_chrome_trace(trace, path / "trace.json")
        page = render(page_data(read_histories([path])), "run")
        assert ("100% busy" in page, "0% waiting" in page) == (name == "rank", name == "actor")


def test_a_run_without_metrics_has_a_page(tmp_path: Path) -> None:
    data = page_data(read_histories([write_run(tmp_path / "run")]))
    assert data["curves"] == {}
    assert "run" in render(data, "run")


def test_details_show_workers_faults_and_hardware(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"env_steps": 1, "time/share_learn": 0.5}]
    rows[0] |= {f"{k}/time/share_waiting": 0.25 for k in ("learner", "actor_10", "actor_9")}
    result = {"env_steps": 1, "faults": {"nan_reward": 3}, "hardware": {"cores": 2, "system": "L"}}
    data = page_data(read_histories([write_run(tmp_path / "run", rows, result)]))
    (detail,) = data["details"]
    assert list(detail["workers"]) == ["actor 9", "actor 10", "learner"]
    assert detail["workers"]["actor 9"] == {"waiting": 0.25}
    assert detail["resources"] == {"all threads": {"learn": 0.5}}
    page = render(data, "run")
    assert "nan reward 3" in page
    assert "cores 2, system L" in page


def test_names_and_values_are_escaped(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", logged(1.0, 2.0), {"stopped_by": HOSTILE}, env=HOSTILE)
    history = read_histories([path])[0]
    history.run.name = HOSTILE
    page = render(page_data([history]), HOSTILE)
    assert HOSTILE not in page
    assert "<img src=x" not in page
    assert "&lt;/script&gt;&lt;img" in page
    # As many script elements as a page without such names has.
    plain = render(page_data(read_histories([write_run(tmp_path / "b", logged(1.0))])), "b")
    assert page.count("</script>") == plain.count("</script>")


def test_pages_refer_to_nothing_outside(tmp_path: Path) -> None:
    page = render(page_data(read_histories([write_run(tmp_path / "run", logged(1.0))])), "run")
    assert "default-src 'none'" in page
    assert not re.search(OUTSIDE, page)
    # The negative control: Bokeh's pages from a network would have this.
    assert re.search(OUTSIDE, '<script src="https://x">')


def test_env_steps_are_exact_and_no_value_is_infinite(tmp_path: Path) -> None:
    rows = [{"env_steps": 2**24 + k, EVAL: value} for k, value in ((1, 1e300), (3, -1e300))]
    data = page_data(read_histories([write_run(tmp_path / "run", rows)]))
    columns = chart_columns(data)[EVAL]
    assert columns["env_steps"][0].tolist() == [2**24 + 1, 2**24 + 3]
    assert columns["end_env_steps"] == [2**24 + 3]
    assert int(np.float32(2**24 + 1)) != 2**24 + 1  # what single precision would show
    assert np.isfinite(columns["value"][0]).all()
    assert "Infinity" not in json.dumps(columns["end_value"])


def test_only_agents_metrics_with_a_chart_have_a_history(tmp_path: Path) -> None:
    rows = [{"env_steps": 1, f"agent_3/{EVAL}": 1.0, "agent_4/time/share_learn": 0.5}]
    history = read_histories([write_run(tmp_path / "run", rows)])[0]
    assert history.agents == [3]
    assert history.series("agent_4/time/share_learn")[0].size == 0


def test_a_line_that_never_ends_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "READ_BYTES", 64)
    path = write_run(tmp_path / "run", [])
    with (path / "metrics.jsonl").open("a") as file:
        file.write("x" * 640)
    history = History(path)
    assert history.refresh()
    assert not history.refresh()
    with (path / "metrics.jsonl").open("a") as file:
        file.write("x\n" + json.dumps({"env_steps": 1, EVAL: 2.0}) + "\n")
    assert history.refresh()
    assert history.series(EVAL)[1].tolist() == [2.0]


def test_many_curves_have_few_points_each(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=2000).tolist()
    folders = [
        write_run(tmp_path / f"run-{k}", logged(*values), learning_rate=float(k)) for k in range(10)
    ]
    curves = page_data(read_histories(folders))["curves"][ROLLOUT]
    assert sum(own["value"].size for own in curves) <= 1.1 * MOST_POINTS
    assert all(own["value"].max() == pytest.approx(max(values) / 2) for own in curves)


def publish(run: Path, store: Path) -> None:
    """Store a run as it is stored at a URL."""
    files = {path.name: record_of(path) for path in run.iterdir()}
    for name, record in files.items():
        target = store / object_name(record.sha256)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run / name, target)
    (store / INDEX).write_bytes(Index(files, lease=1).to_json())


def test_report_takes_names_folders_and_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QFLEET_CACHE_DIR", str(tmp_path / "cache"))
    publish(write_run(tmp_path / "runs" / "one", logged(1.0, 2.0)), tmp_path / "store" / "far")
    write_run(tmp_path / "runs" / "two", logged(3.0), gamma=0.5)
    for words, count in (["one"], 1), (["runs"], 2), ([(tmp_path / "store/far").as_uri()], 1):
        assert main(["report", *words, "-o", "new/page.html"]) == 0
        assert f"{count} run" in capsys.readouterr().out
        assert "qfleet" in (tmp_path / "new" / "page.html").read_text(encoding="utf-8")


def test_a_damaged_run_is_left_out_of_a_folder_and_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "good", logged(1.0))
    bad = write_run(tmp_path / "bad", logged(1.0))
    (bad / "config.json").write_text("{")
    out = ["-o", str(tmp_path / "page.html")]
    assert main(["report", str(tmp_path), *out]) == 0
    said = capsys.readouterr()
    assert "1 run)" in said.out
    assert holds(said.err, str(bad), "config.json")
    assert said.err.count("\n") == 1
    assert main(["report", str(bad), *out]) == 2
    assert holds(capsys.readouterr().err, str(bad), "config.json")


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "give at least one run"), (["none"], "none"), (["one", "-o", "."], "'.'")],
)
def test_what_report_refuses(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "one", logged(1.0))
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("verb", "package"), [("report", "bokeh"), ("watch", "uvicorn")])
def test_a_missing_package_is_named(
    verb: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, package, None)
    assert main([verb, str(write_run(tmp_path / "run", logged(1.0)))]) == 2
    assert holds(capsys.readouterr().err, package, "qfleet[report]")


def parsed(command: str) -> Config:
    start = read_start(shlex.split(command)[2:])
    return start.parse(TrainOptions, "train", DESCRIPTION)[1]


@pytest.mark.parametrize(
    ("env", "algo", "changes"),
    [
        ("CartPole-v1", None, {"seed": 3}),
        ("CartPole-v1", "rainbow", {"net_arch": (64, 32), "noisy": False, "steps": 20_000}),
        ("CartPole-v1", None, {"engine": "parameter-server", "workers": 3, "tensorboard": False}),
        ("ALE/Pong-v5", None, {"learning_rate": 3e-4, "env_kwargs": '{"difficulty": 1}'}),
    ],
)
def test_the_command_gives_the_same_configuration(
    env: str, algo: str | None, changes: dict[str, Any]
) -> None:
    config, _ = resolve(env, algo, fields=changes)
    recipe = describe(json.loads(config.to_json()))
    assert recipe is not None
    assert parsed(recipe.command) == config
    # A command without its last option, as a control, gives another one.
    assert parsed(recipe.command.rsplit(" --", 1)[0]) != config


def test_the_command_has_each_option_once() -> None:
    recipe = describe(dataclasses.asdict(Config(data="d", steps=1234)))
    assert recipe is not None
    assert recipe.preset == "none"
    assert recipe.command.count("--steps") == 1


def test_a_preset_that_was_named_is_found_again() -> None:
    config, _ = resolve("CartPole-v1", preset="cartpole-textbook-a3c")
    recipe = describe(dataclasses.asdict(config))
    assert recipe is not None
    assert (recipe.preset, recipe.differences) == ("cartpole-textbook-a3c", {})


def test_fields_of_another_version_have_no_recipe() -> None:
    assert describe({"env": "CartPole-v1", "flux_capacitor": 1.21}) is None


def test_secrets_in_urls_are_not_in_the_command() -> None:
    config = Config(record="s3://user:secret@bucket/data")
    recipe = describe(dataclasses.asdict(config))
    assert recipe is not None
    assert "s3://bucket/data" in recipe.command
    assert "secret" not in recipe.command


def test_secrets_in_urls_are_not_on_the_page(tmp_path: Path) -> None:
    folders = []
    for k in range(4):
        fields = dataclasses.asdict(Config(data=f"s3://key:hunter2@bucket/{k // 2}?sig=hunter2"))
        fields |= {"record": f"s3://key:hunter2@bucket/r{k}", "replay_dir": "s3://key:hunter2@b/x"}
        # Equal names in other folders, so that labels have the fields that differ.
        folders.append(write_run(tmp_path / str(k) / "run", logged(1.0), **fields))
    page = render(page_data(read_histories(folders)), "run")
    assert "hunter2" not in page
    assert "data=s3://bucket/1" in page
    assert "s3://bucket/r3" in page
