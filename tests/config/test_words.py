"""Numbers, lists and names as people write them, and configuration files in three formats."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from qfleet.config.config import FIELDS, Config
from qfleet.config.files import read_fields
from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.config.words import ALIASES, parse_whole
from qfleet.core.errors import ConfigError
from support.messages import says

FILES = {
    "json": '{"env_id": "CartPole-v1", "lr": 0.001, "steps": 1e6, "net_arch": [32, "1k"]}',
    "yaml": "env_id: CartPole-v1\nlr: 1e-3\nsteps: 1M\nnet_arch: 32, 1k\n",
    "yml": "env_id: CartPole-v1\nlr: 0.001\nsteps: 1_000_000\nnet_arch: [32, 1000]\n",
    "toml": 'env_id = "CartPole-v1"\nlr = 1e-3\nsteps = 1e6\nnet_arch = [32, 1000]\n',
}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("-3", -3),
        ("1_000_000", 10**6),
        ("1e6", 10**6),
        ("2.5E3", 2500),
        ("1M", 10**6),
        ("50k", 50_000),
        ("1.5m", 1_500_000),
        (".5k", 500),
        ("2G", 2 * 10**9),
        ("1e22", 10**22),
        ("12e-1k", 1200),
    ],
)
def test_whole_numbers_are_exact(text: str, number: int) -> None:
    assert parse_whole(text) == number


@pytest.mark.parametrize(
    "text",
    ["", "k", ".", "_", "1.5", "1e-3", "1e400", "1e999999999", "nan", "inf", "1kk", "1 000", "0x10"]
    + ["9" * 5000, "1." + "1" * 5000, "1e", "٣.5k", "1,2"],
)
def test_other_texts_are_no_whole_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_whole(text)


def test_python_takes_the_same_words() -> None:
    config = Config().replace(lr="1e-3", total_timesteps="1M", net_arch="32,1k", num_envs=4.0)
    assert (config.learning_rate, config.steps, config.net_arch) == (1e-3, 10**6, (32, 1000))
    assert type(config.envs) is int
    config, _ = resolve("CartPole-v1", fields={"timesteps": "1e4", "target_return": "400"})
    assert (config.steps, config.target_return) == (10_000, 400.0)
    config = validate(Config(steps="200k", net_arch=()))  # type: ignore[arg-type]
    assert (config.steps, config.net_arch) == (200_000, ())


def test_a_preset_is_scaled_to_a_number_that_is_written_in_words() -> None:
    plain, words = (resolve("CartPole-v1", fields={"steps": n})[0] for n in (10_000, "10k"))
    assert plain == words
    assert plain.learning_starts < resolve("CartPole-v1")[0].learning_starts


def test_every_alias_is_of_a_field_and_is_none_itself() -> None:
    assert set(ALIASES.values()) <= set(FIELDS)
    assert not set(ALIASES) & set(FIELDS)


@pytest.mark.parametrize("pair", [("lr", "learning_rate"), ("n_envs", "num_envs")])
def test_a_field_given_twice_is_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    values = dict.fromkeys(pair, 1)
    with pytest.raises(ConfigError, match=says(*pair)):
        Config().replace(**values)  # type: ignore[arg-type]
    (tmp_path / "c.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=says(*pair)):
        read_fields(tmp_path / "c.json")


@pytest.mark.parametrize("suffix", FILES)
def test_files_in_all_formats_hold_the_same_fields(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"config.{suffix}"
    path.write_text(FILES[suffix])
    assert read_fields(path) == {
        "env": "CartPole-v1", "learning_rate": 1e-3, "steps": 10**6, "net_arch": (32, 1000),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "steps: [1, 2", "YAML"),
        ("a.yaml", "- 1\n- 2\n", "YAML object"),
        ("a.yaml", "1: 2\n", "field '1'"),
        ("a.yaml", "env_kwargs: {day: 2026-01-01}\n", "env_kwargs JSON"),
        ("a.toml", "steps = ", "TOML"),
        ("a.toml", "steps = 2026-01-01", "steps int"),
        ("a.toml", "[optimisation]\nlr = 1", "optimisation"),
        ("a.json", "[" * 100_000, "JSON"),
        ("a.yaml", "[" * 1_500, "YAML"),
        ("a.json", json.dumps({"steps": "9" * 10_000}), "steps int"),
    ],
)
def test_a_bad_file_costs_one_short_line(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(Exception, match=says(*words.split())) as caught:
        read_fields(tmp_path / name)
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]
    assert len(str(caught.value)) < 700


def test_yaml_is_data(tmp_path: Path) -> None:
    """No tag calls a function, and aliases of aliases do not fill the memory."""
    path, canary = tmp_path / "a.yaml", tmp_path / "called"
    path.write_text(f"env: !!python/object/apply:os.mkdir [{canary}]\n")
    with pytest.raises(ConfigError, match="YAML"):
        read_fields(path)
    assert not canary.exists()
    bomb = "a: &a [x, x]\n" + "".join(
        f"{new}: &{new} [*{old}, *{old}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    path.write_text(f"{bomb}env_kwargs: {{z: *i}}\n")
    with pytest.raises(ConfigError, match="aliases"):
        read_fields(path)


def test_a_missing_yaml_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yaml").write_text("steps: 1\n")
    with pytest.raises(ConfigError, match="pip install pyyaml"):
        read_fields(tmp_path / "a.yaml")


def test_arguments_that_json_cannot_hold_are_refused() -> None:
    values: dict[str, Any] = {"day": object()}
    with pytest.raises(ConfigError, match=says("env_kwargs", "JSON")):
        Config().replace(env_kwargs=values)
