from __future__ import annotations

from pathlib import Path

import pytest

from qfleet.core.errors import ConfigError, UnknownNameError
from qfleet.telemetry.runs import find_runs, group_runs, read_run, resolve_run
from support.messages import says
from support.synthetic_runs import EVAL, curve, write_run


def test_reads_a_run_with_a_torn_last_line_and_nan(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", curve(1.0, float("nan"), 3.0), {"env_steps": 300})
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 400, "eval/me')
    run = read_run(path)
    assert (run.name, run.env, run.algo) == ("a", "CartPole-v1", "dqn")
    assert run.result == {"env_steps": 300}
    assert len(run.metrics) == 3
    assert run.series(EVAL) == ([100, 300], [1.0, 3.0])
    assert run.series("nothing") == ([], [])
    assert run.metric_names() == {EVAL, "rollout/ep_rew_mean", "train/loss"}


def test_only_the_configuration_must_be_there(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a"))
    assert run.result is None
    assert run.metrics == []
    (tmp_path / "a" / "result.json").write_text('{"env_st')
    assert read_run(tmp_path / "a").result is None
    (tmp_path / "a" / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=says("config.json")):
        read_run(tmp_path / "a")
    with pytest.raises(ConfigError, match="nowhere"):
        read_run(tmp_path / "nowhere")


def test_finds_runs_and_their_seeds_in_order(tmp_path: Path) -> None:
    write_run(tmp_path / "single")
    for seed in (10, 2, 0):
        write_run(tmp_path / "many" / f"seed-{seed}", seed=seed)
    (tmp_path / "many" / "aggregate.json").write_text("{}")
    (tmp_path / "many" / "config.json").write_text("{}")
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "file").write_text("")
    found = [path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path)]
    assert found == ["many/seed-0", "many/seed-2", "many/seed-10", "single"]
    assert read_run(tmp_path / "many" / "seed-2").name == "many/seed-2"
    assert find_runs(tmp_path / "missing") == []


def test_resolves_paths_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "runs"
    write_run(root / "alpha")
    write_run(root / "many" / "seed-3")
    outside = write_run(tmp_path / "elsewhere" / "beta")
    assert resolve_run("alpha", root) == root / "alpha"
    assert resolve_run("many", root) == root / "many"
    assert resolve_run("many/seed-3", root) == root / "many" / "seed-3"
    assert resolve_run(str(outside), root) == outside
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resolve_run("beta", root) == Path("beta")


def test_unknown_names_come_with_the_nearest_ones(tmp_path: Path) -> None:
    write_run(tmp_path / "alpha")
    write_run(tmp_path / "many" / "seed-3")
    with pytest.raises(UnknownNameError, match=says("alpha")):
        resolve_run("alhpa", tmp_path)
    with pytest.raises(UnknownNameError, match=says("alpha", "many", "many/seed-3")):
        resolve_run("zzzzzzz", tmp_path)
    for odd in ("", "\0", "x" * 5000):
        with pytest.raises(UnknownNameError):
            resolve_run(odd, tmp_path)


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "/etc", "/etc/passwd", ".."])
def test_names_may_not_leave_the_root(tmp_path: Path, name: str) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    write_run(tmp_path / "secret")  # is below root/.., so only the refusal keeps it out
    with pytest.raises(ConfigError, match="no run folder"):
        resolve_run(name, root)


def test_groups_are_seeds_of_one_experiment(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / name, **config))
        for name, config in {
            "a": {"seed": 0, "gamma": 0.99, "device": "cpu"},
            "b": {"seed": 1, "gamma": 0.99, "device": "cuda"},
            "c": {"seed": 0, "gamma": 0.9},
            "d": {"seed": 0, "gamma": 0.99, "algo": "rainbow"},
        }.items()
    ]
    named = {label: [r.name for r in members] for label, members in group_runs(runs).items()}
    assert named == {
        "CartPole-v1 · dqn gamma=0.99": ["a", "b"],
        "CartPole-v1 · dqn gamma=0.9": ["c"],
        "CartPole-v1 · rainbow": ["d"],
    }
    assert list(group_runs(runs[:2])) == ["CartPole-v1 · dqn"]
    pooled = group_runs(runs, by_algo=True)
    assert {label: len(members) for label, members in pooled.items()} == {"dqn": 3, "rainbow": 1}


def test_labels_too_long_to_differ_name_the_run(tmp_path: Path) -> None:
    same = {"a": 1, "b": 1, "c": 1}
    runs = [
        read_run(write_run(tmp_path / "one", **same, d=1)),
        read_run(write_run(tmp_path / "two", **same, d=2)),
        read_run(write_run(tmp_path / "three", a=2, b=2, c=2, d=1)),
    ]
    assert list(group_runs(runs)) == [
        "CartPole-v1 · dqn a=1 b=1 c=1",
        "CartPole-v1 · dqn a=1 b=1 c=1 (two)",
        "CartPole-v1 · dqn a=2 b=2 c=2",
    ]
