"""Words that people type: numbers, other libraries' names, short ids, runs as configurations."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.cli.main import main
from qfleet.config.config import Config
from qfleet.config.presets import preset_for
from qfleet.core.errors import ConfigError, RunBusyError
from qfleet.envs.short_names import full_id
from qfleet.storage.locks import RunLock
from qfleet.storage.rundir import remove_run
from qfleet.training import api, checks
from support.messages import says

TINY = {
    "preset": "none", "steps": 200, "learning_starts": 50, "net_arch": (8,), "batch_size": 8,
    "buffer_size": 500, "eval_freq": 0, "n_eval_episodes": 1, "max_episode_steps": 50,
    "tensorboard": False, "engine": "serial", "device": "cpu",
}  # fmt: skip


class Reached(Exception):
    """A run would start."""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Config]:
    """Return the configuration with which a command line would train."""
    configs: list[Config] = []

    def record(config: Config, *_: Any, **__: Any) -> None:
        configs.append(config)
        raise Reached

    monkeypatch.setattr(api, "Run", record)

    def settle(line: str) -> Config:
        with pytest.raises(Reached):
            main(line.split())
        return configs[-1]

    return settle


def refused(capsys: pytest.CaptureFixture[str], line: str) -> str:
    capsys.readouterr()
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


# --- numbers and names ------------------------------------------------------------------------


def test_numbers_lists_and_names_of_other_libraries(settled: Callable[[str], Config]) -> None:
    config = settled("train CartPole-v1 --timesteps 20k --lr 3e-4 --net-arch 32,1k --n-envs 4")
    assert (config.steps, config.learning_rate, config.envs) == (20_000, 3e-4, 4)
    assert config.net_arch == (32, 1000)
    same = settled("train CartPole-v1 --steps 20000 --lr 3e-4 --net-arch 32 1000 --envs 4")
    assert config == same  # the preset is scaled to 20k as to 20000
    assert settled("train CartPole-v1 --net-arch --preset none").net_arch == ()
    assert settled("train CartPole-v1 --buffer_size 1M --stop-after 1e3").buffer_size == 10**6


def test_a_wrong_number_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "1.5" in refused(capsys, "train CartPole-v1 --steps 1.5")
    assert "6x" in refused(capsys, "train CartPole-v1 --net-arch 6,6x")


@pytest.mark.parametrize(
    "words", ["--lr 1 --learning-rate 1", "--learning_rate=1 --lr=1", "--n-envs 1 --num-envs 1"]
)
def test_an_alias_and_its_option_are_refused(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "same option" in refused(capsys, f"train CartPole-v1 {words}")


def test_an_environment_is_named_once_and_a_file_without_one_names_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, "train CartPole-v1 --env Acrobot-v1 --steps 100")
    assert "CartPole-v1" in told
    assert "--env" in told
    file = tmp_path / "fields.json"
    file.write_text('{"steps": 100}')
    assert "environment" in refused(capsys, f"train --config {file}")


@pytest.mark.parametrize("option", ["--stepss", "--gammaa", "--gamm"])
def test_an_option_that_begins_or_ends_like_another_one_is_named(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "did you mean --" in refused(capsys, f"train CartPole-v1 {option} 10")


@pytest.mark.parametrize(
    ("given", "instead"),
    [("--cuda", "--device cuda"), ("--verbose 1", "--quiet"), ("--save-model", "qfleet export")],
)
def test_an_option_of_a_peer_names_its_counterpart(
    given: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert instead in refused(capsys, f"train CartPole-v1 {given}")


def test_python_takes_aliases_and_short_names(settled: Callable[[str], Config]) -> None:
    del settled  # no run starts
    with pytest.raises(Reached):
        qfleet.train("cartpole", lr="1e-3", total_timesteps="5k")
    with pytest.raises(ConfigError, match=says("env", "env_id")):
        qfleet.train("CartPole-v1", env_id="CartPole-v1")


# --- short ids --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "env", "preset"),
    [
        ("CartPole", "CartPole-v1", "cartpole"),
        ("cart_pole", "CartPole-v1", "cartpole"),
        ("lunarlander", "LunarLander-v3", "lunarlander"),
        ("breakout", "ALE/Breakout-v5", "atari-dqn"),
        ("Space-Invaders", "ALE/SpaceInvaders-v5", "atari-dqn"),
        ("Taxi", "Taxi-v4", "toy-text"),
    ],
)
def test_a_short_name_is_the_newest_id_with_the_preset_of_its_family(
    name: str, env: str, preset: str, settled: Callable[[str], Config],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config = settled(f"train {name} --steps 1e6")
    assert f"'{name}' is {env}\n" in capsys.readouterr().err
    assert config == settled(f"train {env} --steps 1e6")
    assert config.env == env
    assert preset_for(env, None) == preset


def test_evaluations_take_a_short_name_too(settled: Callable[[str], Config]) -> None:
    for verb in ("train", "profile"):
        assert settled(f"{verb} CartPole-v0 --eval-env cartpole").eval_env == "CartPole-v1"


def test_an_id_is_taken_as_it_is_without_imports() -> None:
    code = (
        "import sys; from qfleet.envs.short_names import full_id\n"
        "for name in ('CartPole-v1', 'ALE/Pong-v5', 'm.n:Env', 'a:B-v0', '', '../x'):\n"
        "    assert full_id(name) == name\n"
        "assert 'gymnasium' not in sys.modules and 'ale_py' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_or_ambiguous_name_is_left_alone() -> None:
    import gymnasium

    assert full_id("nosuchgame") == "nosuchgame"
    for name in ("one/Twin-v0", "two/Twin-v0", "Plainname"):
        gymnasium.register(name, entry_point="gymnasium.envs.classic_control:CartPoleEnv")
    try:
        assert full_id("twin") == "twin"
        assert full_id("Plainname") == "Plainname"
        assert full_id("plainname") == "Plainname"
    finally:
        for name in ("one/Twin-v0", "two/Twin-v0", "Plainname"):
            del gymnasium.registry[name]


def test_a_name_that_an_import_may_register_is_left_alone(
    settled: Callable[[str], Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "check_env", lambda _: None)
    assert settled("train breakout --import json --preset none").env == "breakout"


# --- a run or a file as a configuration ---------------------------------------------------------


def write_run(folder: Path, **fields: Any) -> None:
    folder.mkdir(parents=True)
    config = Config(steps=500, learning_starts=50, buffer_size=600).replace(**fields)
    (folder / "config.json").write_text(config.to_json())


def test_config_takes_a_run_by_name_or_folder(settled: Callable[[str], Config]) -> None:
    write_run(Path("runs/mine"), gamma=0.5)
    write_run(Path("elsewhere/many/seed-3"), gamma=0.25, seed=3)
    for named in ("mine", "runs/mine", "runs/mine/config.json", str(Path("runs/mine").absolute())):
        assert settled(f"train --config {named} --lr 0.5").gamma == 0.5
    config = settled("train --config elsewhere/many --seed 7")
    assert (config.gamma, config.seed) == (0.25, 7)


def test_config_takes_toml_and_yaml(settled: Callable[[str], Config]) -> None:
    Path("a.toml").write_text('env = "cartpole"\nlr = 1e-3\nsteps = 1e4\n')
    Path("a.yaml").write_text("env: cartpole\nlr: 1e-3\nsteps: 10k\n")
    config = settled("train --config a.toml")
    assert config == settled("train --config a.yaml")
    assert (config.env, config.learning_rate, config.steps) == ("CartPole-v1", 1e-3, 10_000)


def test_a_missing_file_or_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nosuch.toml" in refused(capsys, "train --config nosuch.toml")
    assert "xxx" in refused(capsys, f"train --config {'x' * 300}.json")
    assert "xxx" in refused(capsys, f"train --config {'x' * 300}")
    write_run(Path("runs/mine"))
    assert "mine" in refused(capsys, "train --config mien")
    assert "../mine" in refused(capsys, "train --config ../mine")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"import": ["evil"]}, "evil"),
        ({"imports": "evil"}, "evil"),
        ({"env_id": "evil:Env"}, "evil:Env"),
        ({"env": "evil:Env-v0"}, "evil"),
        ({"network": "evil:Net"}, "evil:Net"),
        ({"track": "wandb"}, "wandb"),
        ({"replay_dir": "/elsewhere"}, "/elsewhere"),
        ({"address": "10.0.0.1:6379", "engine": "actors"}, "10.0.0.1:6379"),
    ],
)
@pytest.mark.parametrize("form", ["run", "a.yaml", pytest.param("a.toml", marks=pytest.mark.slow)])
def test_a_stranger_s_configuration_needs_consent_however_it_is_written(
    fields: dict[str, Any], named: str, form: str, settled: Callable[[str], Config],
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(checks, "check_env", lambda _: None)  # after consent it imports
    Path("evil.py").write_text("open('imported', 'w')")
    text = json.dumps({"env": "CartPole-v1", **fields} if "env_id" not in fields else fields)
    if form == "run":
        Path("runs/run").mkdir(parents=True)
        Path("runs/run/config.json").write_text(text)
    elif form == "a.yaml":
        Path(form).write_text(text)  # JSON is YAML
    else:
        lines = (f"{name} = {json.dumps(value)}" for name, value in json.loads(text).items())
        Path(form).write_text("\n".join(lines))
    line = refused(capsys, f"train --config {form}")
    assert named in line
    assert "--trust" in line
    assert not Path("imported").exists()
    assert settled(f"train --config {form} --trust --preset none")
    assert not Path("imported").exists()  # nothing is imported before the run is checked


# --- overwrite ----------------------------------------------------------------------------------


def words(**changes: Any) -> list[str]:
    pairs = {**TINY, **changes}
    switches = {True: "", False: "no-"}
    found = []
    for name, value in pairs.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{switches[value]}{option}")
        else:
            values = value if isinstance(value, tuple) else (value,)
            found += [f"--{option}", *map(str, values)]
    return found


def test_overwrite_replaces_a_run_and_keeps_other_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["train", "CartPole-v1", "--name", "mine", "--quiet"]
    assert main([*line, *words()]) == 0
    folder = Path("runs/mine")
    (folder / "notes.txt").write_text("mine")
    (folder / "best" / "old").write_text("")
    (folder / "link").symlink_to("notes.txt")
    assert "--overwrite" in refused(capsys, " ".join([*line, *words()]))
    # A configuration that is refused removes nothing.
    assert main([*line, *words(gamma=2), "--overwrite"]) == 2
    assert (folder / "best" / "old").exists()
    assert main([*line, *words(gamma=0.5), "--overwrite"]) == 0
    assert json.loads((folder / "config.json").read_text())["gamma"] == 0.5
    assert not (folder / "best" / "old").exists()
    assert (folder / "notes.txt").read_text() == "mine"


def test_overwrite_leaves_no_file_of_the_old_run() -> None:
    fields = {**TINY, "tensorboard": True}
    qfleet.train("CartPole-v1", run_dir="run", options=qfleet.RunOptions(trace=True), **fields)
    remove_run(Path("run"))
    assert [path.name for path in Path("run").iterdir()] == [".lock"]


def test_overwrite_refuses_folders_in_use_or_of_others() -> None:
    Path("runs/theirs").mkdir(parents=True)
    for text in ("{}", "no json", '{"env": 1, "algo": 2, "engine": 3, "steps": 4}'):
        Path("runs/theirs/config.json").write_text(text)
        with pytest.raises(ConfigError, match=says("theirs", "overwrite")):
            qfleet.train("CartPole-v1", name="theirs", overwrite=True, **TINY)
    assert Path("runs/theirs/config.json").exists()
    qfleet.train("CartPole-v1", name="busy", **TINY)
    with RunLock(Path("runs/busy")), pytest.raises(RunBusyError):
        qfleet.train("CartPole-v1", name="busy", overwrite=True, **TINY)
    assert Path("runs/busy/result.json").exists()


def test_overwrite_of_seeds_removes_all_of_them() -> None:
    qfleet.train_seeds(3, "CartPole-v1", name="many", **TINY)
    with pytest.raises(ConfigError, match="overwrite"):
        qfleet.train_seeds(2, "CartPole-v1", name="many", **TINY)
    with RunLock(Path("runs/many/seed-2")), pytest.raises(RunBusyError):
        qfleet.train_seeds(2, "CartPole-v1", name="many", overwrite=True, **TINY)
    assert Path("runs/many/seed-0/result.json").exists()
    trained = qfleet.train_seeds(2, "CartPole-v1", name="many", overwrite=True, **TINY)
    assert trained.aggregate["seeds"] == [0, 1]
    assert len(list(Path("runs").glob("many/seed-*/config.json"))) == 2
