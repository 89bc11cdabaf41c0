"""A stored configuration joins no cluster, writes no files elsewhere and sends no data out."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.cli.main import main
from qfleet.config.config import Config
from qfleet.config.trust import check_trust, needs_trust
from qfleet.core.errors import ConfigError
from qfleet.engines.cluster import ray_cluster as clusters
from qfleet.storage.checkpoint import load_checkpoint
from qfleet.training import api, checks
from support.messages import says

WORDS = (
    "--preset none --steps 400 --learning-starts 50 --net-arch 8 --batch-size 8 --buffer-size 500 "
    "--eval-freq 0 --n-eval-episodes 1 --max-episode-steps 50 --log-interval 100 --no-tensorboard "
    "--engine serial --device cpu --quiet"
)
TINY = WORDS.split()
ADDRESS = "127.0.0.1:6379"


class Reached(Exception):
    """The call that a test waits for was made."""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def half_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped half-way; tests work on copies."""
    folder = tmp_path_factory.mktemp("made") / "half"
    words = ["train", "CartPole-v1", *TINY, "--stop-after", "200", "--run-dir", str(folder)]
    assert main(words) == 0
    return folder


@pytest.fixture
def half(half_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half_run, tmp_path / "half"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Configurations that got past every check; no run is started with them."""
    configs: list[Config] = []

    def record(config: Config, *_: Any, **__: Any) -> None:
        configs.append(config)
        raise Reached

    monkeypatch.setattr(api, "Run", record)
    # It imports the environment, after consent; the modules that these tests name do not exist.
    monkeypatch.setattr(checks, "check_env", lambda _: None)
    return configs


def craft(folder: Path, **fields: Any) -> None:
    """Change fields of a run's config.json, and leave its checkpoint as it is."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run a command that must be refused with one line; return that line."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


@contextlib.contextmanager
def listener() -> Iterator[tuple[str, socket.socket]]:
    """A port of this machine, and whether anything has connected to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        yield f"127.0.0.1:{server.getsockname()[1]}", server


# --- the rule ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"address": ADDRESS}, ["address", ADDRESS, "--address", "--trust"]),
        ({"address": "auto"}, ["address", "auto", "--address", "--trust"]),
        ({"replay_dir": "/elsewhere"}, ["replay_dir", "/elsewhere", "--replay-dir", "--trust"]),
        ({"track": "wandb"}, ["track", "wandb", "--track", "--trust"]),
        ({"imports": ("code",), "track": "mlflow"}, ["code", "track", "mlflow", "--trust"]),
        ({"env": "code:Env", "network": "code:Net"}, ["code:Env", "code:Net", "--trust"]),
        ({"wrappers": ("code:Wrap",)}, ["code:Wrap", "--trust"]),
        ({"eval_env": "code:Env-v0"}, ["code:Env-v0", "--trust"]),
    ],
)
def test_values_that_need_consent_are_all_named_in_one_line(
    fields: dict[str, Any], words: list[str]
) -> None:
    config = Config(**fields)
    assert needs_trust(config)
    with pytest.raises(ConfigError) as caught:
        check_trust(config, trust=False)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    check_trust(config, trust=True)


def test_a_value_cannot_break_the_line() -> None:
    with pytest.raises(ConfigError) as caught:
        check_trust(Config(replay_dir="a\nqfleet: all is well\x1b[2K"), trust=False)
    assert str(caught.value).isprintable()


def test_a_configuration_that_only_computes_needs_no_consent() -> None:
    check_trust(Config(engine="parameter-server", workers=7), trust=False)


def test_acting_needs_consent_for_code_alone() -> None:
    """Loading a policy uses neither a cluster nor replay nor a tracker."""
    outward = Config(address=ADDRESS, replay_dir="/elsewhere", track="wandb")
    check_trust(outward, trust=False, training=False)
    with pytest.raises(ConfigError, match="code:Env"):
        check_trust(outward.replace(env="code:Env"), trust=False, training=False)


# --- resume -----------------------------------------------------------------------------------


def test_resume_does_not_connect_to_a_stored_address(
    half: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The checkpoint is that of a serial run, which actors refuse only after they have a cluster.
    monkeypatch.setattr(api, "FREE_ON_RESUME", api.FREE_ON_RESUME | {"engine"})
    monkeypatch.setattr(clusters, "PROBE_S", 0.5)
    with listener() as (address, server):
        craft(half, engine="actors", address=address)
        line = refusal(capsys, "resume", half)
        assert f"address '{address}'" in line
        assert "--address" in line
        assert "--trust" in line
        with pytest.raises(BlockingIOError):
            server.accept()
        assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
        pytest.importorskip("ray")
        # With consent there is a connection.
        assert main(["resume", str(half), "--trust"]) == 1
        assert f"no cluster answers at {address}" in capsys.readouterr().err
        server.accept()[0].close()


def test_resume_writes_nothing_to_a_stored_replay_dir(
    half: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    craft(half, replay_dir=str(victim))
    line = refusal(capsys, "resume", half)
    assert f"replay_dir '{victim}'" in line
    assert "--replay-dir" in line
    assert not victim.exists()
    assert main(["resume", str(half), "--trust", "--quiet"]) == 0
    assert list(victim.glob("*.bin"))


def test_resume_imports_no_stored_tracker(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    canary = tmp_path / "imported"
    fakes = tmp_path / "fakes"
    fakes.mkdir()
    (fakes / "wandb.py").write_text(f"open({str(canary)!r}, 'w')\nraise ImportError\n")
    monkeypatch.syspath_prepend(str(fakes))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    craft(half, track="wandb")
    line = refusal(capsys, "resume", half)
    assert "track 'wandb'" in line
    assert "--track" in line
    assert not canary.exists()
    assert "not installed" in refusal(capsys, "resume", half, "--trust")
    assert canary.exists()


def test_options_of_resume_win_and_need_no_consent(
    half: Path, started: list[Config], tmp_path: Path
) -> None:
    craft(half, address=ADDRESS, replay_dir="/elsewhere", track="wandb")
    own = str(tmp_path / "replay")
    with pytest.raises(Reached):
        main(["resume", str(half), "--address", "", "--replay-dir", own, "--track", "none"])
    assert started[-1].address == ""
    assert started[-1].replay_dir == own
    assert started[-1].track == "none"
    with pytest.raises(Reached):
        main(["resume", str(half), "--address=", "--replay-dir=", "--track=mlflow"])
    assert (started[-1].replay_dir, started[-1].track) == ("", "mlflow")
    with pytest.raises(Reached):
        main(["resume", str(half), "--trust"])
    assert (started[-1].address, started[-1].track) == (ADDRESS, "wandb")


def test_an_option_of_resume_is_no_consent_to_other_fields(
    half: Path, started: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    craft(half, address=ADDRESS, replay_dir="/elsewhere", track="wandb")
    line = refusal(capsys, "resume", half, "--address", "", "--replay-dir", "")
    assert "track 'wandb'" in line
    assert ADDRESS not in line
    assert not started


def test_the_address_of_a_fleet_comes_from_the_option(
    half: Path, started: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The checkpoint is that of a serial run; no cluster is needed to see which address is used.
    monkeypatch.setattr(api, "FREE_ON_RESUME", api.FREE_ON_RESUME | {"engine"})
    craft(half, engine="parameter-server", address="10.0.0.66:6379")
    with pytest.raises(Reached):
        main(["resume", str(half), "--address", ADDRESS])
    assert started[-1].address == ADDRESS


def test_a_run_in_one_process_has_no_address(half: Path) -> None:
    with pytest.raises(ConfigError, match=says("address", "serial")):
        qfleet.resume(half, address=ADDRESS)


def test_the_library_takes_the_same_arguments(half: Path, tmp_path: Path) -> None:
    craft(half, address=ADDRESS, replay_dir=str(tmp_path / "victim"), track="wandb")
    with pytest.raises(ConfigError, match=f"address '{ADDRESS}'.*replay_dir.*track 'wandb'"):
        qfleet.resume(half)
    trained = qfleet.resume(half, address="", replay_dir="", track="none")
    assert trained.result.env_steps == 400
    assert not (tmp_path / "victim").exists()
    # The new values are stored: the next resume needs neither arguments nor consent.
    assert qfleet.resume(half, steps=450).result.env_steps == 450


def test_a_wrong_tracker_is_refused(half: Path) -> None:
    with pytest.raises(ConfigError, match=says("track", "nosuch")):
        qfleet.resume(half, track="nosuch")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "first"),
        ("first", "second"),
        pytest.param("", "", marks=pytest.mark.slow),
        pytest.param("", "second", marks=pytest.mark.slow),
        pytest.param("first", "", marks=pytest.mark.slow),
        pytest.param("first", "first", marks=pytest.mark.slow),
    ],
)
def test_replay_moves_between_ram_and_files_on_resume(
    before: str, after: str, tmp_path: Path
) -> None:
    """The checkpoint holds the replay memory: where it was kept does not change the numbers."""
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    words = ["train", "CartPole-v1", *TINY]
    assert main([*words, "--run-dir", str(whole)]) == 0
    where = ["--replay-dir", before]
    assert main([*words, *where, "--stop-after", "200", "--run-dir", str(parted)]) == 0
    for path in Path(before or "nowhere").glob("*.bin"):
        path.write_bytes(bytes(path.stat().st_size))  # nothing is read from the old files
    assert main(["resume", str(parted), "--replay-dir", after, "--quiet"]) == 0
    assert bool(list(Path(after or "nowhere").glob("*.bin"))) is (after != "")
    expected, got = (load_checkpoint(path / "checkpoints").parts for path in (whole, parted))
    assert got["learner"]["weights"].equal(expected["learner"]["weights"])
    for column in ("action", "reward", "flags"):
        assert got["memory"][column].equal(expected["memory"][column])


# --- --config ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["train", pytest.param("profile", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("field", "value", "own"),
    [
        ("address", ADDRESS, ""),
        ("address", ADDRESS, "10.0.0.1:6379"),
        ("replay_dir", "/elsewhere", ""),
        ("replay_dir", "/elsewhere", "replay"),
        ("track", "wandb", "none"),
        ("network", "nosuch:Net", "mlp"),
        ("imports", ["nosuch"], "json"),
        ("wrappers", ["nosuch:Wrap"], "own:Wrap"),
        ("eval_env", "nosuch:Env-v0", "own:Env-v0"),
    ],
)
def test_a_configuration_file_needs_consent_or_the_option(
    verb: str, field: str, value: Any, own: str, started: list[Config],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    engine = "parameter-server" if field == "address" else "serial"
    fields = {"env": "CartPole-v1", "engine": engine, "buffer_size": 500, field: value}
    Path("theirs.json").write_text(json.dumps(fields))
    words = [verb, "--config", "theirs.json"]
    line = refusal(capsys, *words)
    assert (value[0] if isinstance(value, list) else value) in line
    assert "--trust" in line
    assert not started
    assert not Path("runs").exists()
    option = "--" + field.replace("_", "-")
    for spelling in ([option, own], [f"{option}={own}"], [f"--{field}={own}"]):
        with pytest.raises(Reached):
            main([*words, *spelling])
        assert "nosuch" not in started[-1].to_json()
        assert getattr(started[-1], field) == ((own,) if isinstance(value, list) else own)
    with pytest.raises(Reached):
        main([*words, "--trust"])
    stored = getattr(started[-1], field)
    assert (list(stored) if isinstance(value, list) else stored) == value


def test_an_environment_of_a_file_needs_consent_unless_another_is_typed(
    started: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("theirs.json").write_text(json.dumps({"env": "nosuch:Env"}))
    assert "nosuch:Env" in refusal(capsys, "train", "--config", "theirs.json")
    for words in (["CartPole-v1"], ["--env", "own:Env"], ["--env-id=own:Env"]):
        with pytest.raises(Reached):
            main(["train", *words, "--config", "theirs.json"])
    assert started[-1].env == "own:Env"


def test_a_file_does_not_import_the_package_of_an_id_that_is_not_used(
    started: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("theirs.json").write_text(json.dumps({"env": "nosuch:Env-v0", "gamma": 0.5}))
    line = refusal(capsys, "train", "--config", "theirs.json")
    assert "nosuch" in line
    assert "--trust" in line
    assert not started
    with pytest.raises(Reached):
        main(["train", "CartPole-v1", "--config", "theirs.json"])
    used = started[-1]
    assert (used.env, used.imports, used.gamma) == ("CartPole-v1", (), 0.5)
    with pytest.raises(Reached):
        main(["train", "--config", "theirs.json", "--trust"])
    assert (started[-1].env, started[-1].imports) == ("Env-v0", ("nosuch",))


def test_what_is_typed_needs_no_consent(started: list[Config]) -> None:
    words = f"train own:Env --engine actors --address {ADDRESS} --track wandb --preset none"
    with pytest.raises(Reached):
        main(words.split())
    assert (started[-1].address, started[-1].track) == (ADDRESS, "wandb")


# --- what is not concerned --------------------------------------------------------------------


def test_evaluate_uses_no_outward_field(half: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    with listener() as (address, server):
        craft(half, engine="parameter-server", address=address, replay_dir=str(victim))
        craft(half, track="wandb")
        assert main(["evaluate", str(half), "--episodes", "1"]) == 0
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not victim.exists()
    assert "wandb" not in sys.modules


def test_the_command_that_goes_on_works(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "CartPole-v1", *TINY, "--stop-after", "200", "--run-dir", "run"]
    assert main([*words, "--replay-dir", "replay"]) == 0
    hint = capsys.readouterr().out.split("qfleet resume ")[1].split()
    assert "--trust" in hint
    assert main(["resume", *hint, "--quiet"]) == 0
