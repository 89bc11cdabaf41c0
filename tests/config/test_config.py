"""Every field of Config is documented, read, checked, and survives a trip through JSON."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import qfleet.config.config
from qfleet.config.algorithms import ALGORITHMS, ALIASES, algorithm_switches
from qfleet.config.config import Config, split_env
from qfleet.config.files import read_fields
from qfleet.config.presets import preset_config, preset_for, resolve
from qfleet.config.recipes import PRESETS
from qfleet.config.validation import validate
from qfleet.core.errors import ConfigError, UnknownNameError
from support.messages import says

CONFIG_FILE = Path(qfleet.config.config.__file__)
FIELDS = [field.name for field in dataclasses.fields(Config)]
SERVERS: dict[str, Any] = {"engine": "parameter-server"}


# --- documented and read ----------------------------------------------------------------------


def read_attributes(sources: Iterable[str]) -> set[str]:
    """Return names read as ``config.name`` on any object."""
    found: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                continue
            base = node.value
            name = base.id if isinstance(base, ast.Name) else getattr(base, "attr", "")
            if name in ("config", "_config"):
                found.add(node.attr)
    return found


def test_every_field_is_read_outside_config_py() -> None:
    files = [path for path in Path(qfleet.__file__).parent.rglob("*.py") if path != CONFIG_FILE]
    read = read_attributes(path.read_text(encoding="utf-8") for path in files)
    assert [name for name in FIELDS if name not in read] == []


def test_the_check_for_unread_fields_finds_one() -> None:
    source = "a = config.steps + self._config.seed\nconfig.unread = 1\nother.unread\n"
    assert read_attributes([source]) == {"steps", "seed"}


def test_every_field_has_a_docstring_line() -> None:
    tree = ast.parse(CONFIG_FILE.read_text(encoding="utf-8"))
    body = next(
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == Config.__name__
    )
    documented = {
        field.target.id
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
        and len(text.value.value) > 5
    }
    assert [name for name in FIELDS if name not in documented] == []


# --- checked ----------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"envs": -1}, "envs -1"),
    ({"frame_skip": 0}, "frame_skip 0"),
    ({"n_steps": 0}, "n_steps 0"),
    ({"n_quantiles": 0}, "n_quantiles 0"),
    ({"iqn_samples": 0}, "iqn_samples 0"),
    ({"iqn_act_samples": -1}, "iqn_act_samples -1"),
    ({"iqn_embedding": 0}, "iqn_embedding 0"),
    ({"munchausen_tau": 0.0}, "munchausen_tau 0.0"),
    ({"batch_size": 0}, "batch_size 0"),
    ({"buffer_size": 0}, "buffer_size 0"),
    ({"train_freq": 0}, "train_freq 0"),
    ({"gradient_steps": 0}, "gradient_steps 0"),
    ({"target_update_interval": -1}, "target_update_interval -1"),
    (
        {"target_update_interval": 0, "replay": False, "gradient_steps": 2, "train_freq": 64},
        "target_update_interval gradient_steps",
    ),
    ({"separate_networks": True}, "separate_networks actor-critic"),
    ({"value_learning_rate": 1e-3}, "value_learning_rate separate_networks"),
    (
        {"engine": "all-reduce", "workers": 2, "sum_gradients": True},
        "sum_gradients all-reduce",
    ),
    ({"steps": 0}, "steps 0"),
    ({"learning_rate": 0.0}, "learning_rate 0.0"),
    ({"learning_rate": math.nan}, "learning_rate nan"),
    ({"learning_rate": math.inf}, "learning_rate inf"),
    ({"n_eval_episodes": 0}, "n_eval_episodes 0"),
    ({"log_interval": 0}, "log_interval 0"),
    ({"checkpoint_freq": 0}, "checkpoint_freq 0"),
    ({"keep_checkpoints": 0}, "keep_checkpoints 0"),
    ({"max_env_restarts": 0}, "max_env_restarts 0"),
    ({"env_timeout_s": 0.0}, "env_timeout_s 0.0"),
    ({"max_abs_q": 0.0}, "max_abs_q 0.0"),
    ({"prioritized_replay_eps": 0.0}, "prioritized_replay_eps 0.0"),
    ({"lr_plateau_factor": 0.0}, "lr_plateau_factor 0.0"),
    ({"lr_plateau_factor": 1.5}, "lr_plateau_factor 1.5"),
    ({"max_episode_steps": -1}, "max_episode_steps -1"),
    ({"frame_stack": -1}, "frame_stack -1"),
    ({"noop_max": -1}, "noop_max -1"),
    ({"lr_plateau_patience": -1}, "lr_plateau_patience -1"),
    ({"optimizer_eps": -1e-8}, "optimizer_eps -1e-08"),
    ({"max_grad_norm": -1.0}, "max_grad_norm -1.0"),
    ({"learning_starts": -1}, "learning_starts -1"),
    ({"eval_freq": -1}, "eval_freq -1"),
    ({"patience": -1}, "patience -1"),
    ({"threads": -1}, "threads -1"),
    ({"noisy_sigma": -0.5}, "noisy_sigma -0.5"),
    ({"seed": -1}, "seed -1"),
    ({"prioritized_replay_alpha": -0.1}, "prioritized_replay_alpha -0.1"),
    ({"sticky_actions": 1.1}, "sticky_actions 1.1"),
    ({"gamma": 1.01}, "gamma 1.01"),
    ({"gamma": math.nan}, "gamma nan"),
    ({"munchausen_alpha": 2.0}, "munchausen_alpha 2.0"),
    ({"prioritized_replay_beta0": -0.1}, "prioritized_replay_beta0 -0.1"),
    ({"tau": 1.5}, "tau 1.5"),
    ({"tau": 0.0}, "tau 0.0"),
    ({"exploration_fraction": 1.5}, "exploration_fraction 1.5"),
    ({"exploration_initial_eps": -0.1}, "exploration_initial_eps -0.1"),
    ({"exploration_final_eps": 1.2}, "exploration_final_eps 1.2"),
    (
        {"exploration_initial_eps": 0.1, "exploration_final_eps": 0.2},
        "exploration_final_eps 0.2 exploration_initial_eps 0.1",
    ),
    ({"eval_eps": 2.0}, "eval_eps 2.0"),
    ({"eval_max_steps": 0}, "eval_max_steps 0"),
    ({"seed": 2**63}, f"seed {2**63} 2^63"),
    ({"net_arch": (8, 10**39)}, f"net_arch {10**39} 2^63"),
    ({"v_max": 1e300}, "v_max 1e+300 1e38"),
    ({"step_latency_s": 1e300}, "step_latency_s 1e+300"),
    ({"env_timeout_s": 1e9}, "env_timeout_s 1000000000.0 1e+06"),
    ({"frame_stack": 10**18}, f"frame_stack {10**18} 1024"),
    ({"max_fault_rate": -0.1}, "max_fault_rate -0.1"),
    ({"v_min": 10.0}, "v_min 10.0 v_max"),
    ({"v_max": math.inf}, "v_max inf"),
    ({"n_atoms": 1}, "n_atoms 1"),
    ({"munchausen_clip": 0.5}, "munchausen_clip 0.5"),
    ({"net_arch": (64, 0)}, "net_arch (64, 0)"),
    ({"buffer_size": 40, "envs": 8}, "buffer_size 40 8 envs"),
    ({"learning_starts": 100_000}, "learning_starts 100000"),
    ({"patience": 3, "eval_freq": 0}, "patience 3"),
    ({"lr_plateau_patience": 3, "eval_freq": 0}, "lr_plateau_patience 3"),
    (
        {"exploration_ladder": True, "exploration_final_eps": 0.0},
        "exploration_final_eps 0.0",
    ),
    ({"step_latency_s": -0.1}, "step_latency_s -0.1"),
    (
        {"engine": "device", "step_latency_s": 0.1},
        "step_latency_s 0.1 engine device",
    ),
    ({"straggler": 0.5, "step_latency_s": 0.1}, "straggler 0.5"),
    ({"straggler": 4.0}, "straggler 4.0 step_latency_s 0"),
    (
        {"engine": "actors", "replay_dir": "somewhere"},
        "replay_dir somewhere engine actors",
    ),
    ({"engine": "actors", "env_groups": 2, "envs": 4}, "env_groups 2 engine"),
    ({"engine": "actors", "lockstep": True}, "lockstep True engine actors"),
    ({"engine": "actors", "inference_device": "cpu"}, "inference_device cpu"),
    ({"engine": "actors", "replay_device": "cuda"}, "replay_device cuda"),
    (
        {"engine": "actors", "workers": 2, "servers": 3},
        "servers 3 workers 2",
    ),
    ({"workers": 8}, "workers 8 engine parameter-server actors auto"),
    (
        {"engine": "serial", "update": "sync"},
        "update sync engine parameter-server serial",
    ),
    (
        {"engine": "pipeline", "straggler": 2.0, "step_latency_s": 0.1},
        "straggler 2.0 engine parameter-server actors pipeline",
    ),
    (
        {"engine": "actors", "gradient_compression": "fp16"},
        "gradient_compression fp16 engine parameter-server actors",
    ),
    ({**SERVERS, "staleness": 9}, "staleness 9 update ssp async"),
    (
        {**SERVERS, "local_steps": 3},
        "local_steps 3 update easgd local-sgd admm async",
    ),
    ({**SERVERS, "update": "easgd", "local_steps": 0}, "local_steps 0"),
    ({**SERVERS, "update": "easgd", "easgd_alpha": 1.5}, "easgd_alpha 1.5"),
    ({**SERVERS, "update": "admm", "admm_rho": 0.0}, "admm_rho 0.0"),
    (
        {**SERVERS, "update": "sync", "max_gradient_age": 3},
        "max_gradient_age 3 update async ssp hybrid sync",
    ),
    (
        {**SERVERS, "update": "easgd", "gradient_compression": "fp16"},
        "gradient_compression fp16 update sync async ssp hybrid local-sgd",
    ),
    (
        {**SERVERS, "update": "admm", "gradient_compression": "top-k"},
        "gradient_compression top-k admm",
    ),
    (
        {**SERVERS, "gradient_compression": "fp16", "top_k_share": 0.5},
        "top_k_share 0.5 top-k fp16",
    ),
    (
        {**SERVERS, "update": "local-sgd", "outer_momentum": 1.0},
        "outer_momentum 1.0",
    ),
    ({**SERVERS, "address": "10.0.0.1"}, "address 10.0.0.1"),
    ({"engine": "actors", "address": ":6379"}, "address :6379"),
    ({"env_kwargs": "{"}, "env_kwargs { JSON"),
    ({"image_max": 200}, "image_max 127 255 200"),
    ({"env_kwargs": "[1]"}, "env_kwargs [1] JSON"),
]


@pytest.mark.parametrize(("changes", "words"), BAD, ids=[str(changes) for changes, _ in BAD])
def test_validate_refuses_a_bad_value_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=says(*words.split())):
        validate(Config(**changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head", "c52"),
        ("loss", "l1"),
        ("steps", 1.5),
        ("steps", "many"),
        ("engine", "warp"),
        ("net_arch", 64),
        ("imports", 3),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_however_it_got_there(field: str, value: Any) -> None:
    """By ``replace``, and by ``validate`` after a call of the constructor."""
    with pytest.raises(ConfigError, match=field):
        Config().replace(**{field: value})
    with pytest.raises(ConfigError, match=field):
        validate(Config(**{field: value}))


@pytest.mark.parametrize("value", [True, "8.5", 8.5, "many", None, float("inf")])
def test_an_integer_field_takes_whole_numbers_only(value: Any) -> None:
    with pytest.raises(ConfigError, match=says("envs", "int")):
        Config().replace(envs=value)


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=says("learning_rates", "learning_rate")):
        Config().replace(learning_rates=1e-3)
    with pytest.raises(UnknownNameError, match=says("gradient_step", "gradient_steps")):
        resolve("CartPole-v1", fields={"gradient_step": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": -0.001}, "learning_rate must be > 0, got -0.001"),
        ({"gamma": 1.5}, "gamma must be ≥ 0 and ≤ 1, got 1.5"),
        ({"net_arch": (64, 0)}, "net_arch must be ≥ 1, got (64, 0)"),
        ({"max_abs_q": math.nan}, "max_abs_q must be finite, got nan"),
        ({"loss": "l1"}, "loss must be one of huber, mse, cross-entropy, got 'l1'"),
    ],
)
def test_a_message_says_what_is_allowed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Config(**changes))
    assert str(caught.value) == message


def test_the_default_of_every_field_is_in_its_range() -> None:
    assert validate(Config()) == Config()


# --- JSON -------------------------------------------------------------------------------------


def test_config_json_gives_the_same_config_back(tmp_path: Path) -> None:
    config = Config(
        env="ALE/Pong-v5",
        imports=("one", "two"),
        net_arch=(12, 7),
        target_return=19.5,
        env_kwargs='{"a": [1, "ü"]}',
        learning_rate=1 / 3,
        exploration_ladder=True,
    )
    path = tmp_path / "config.json"
    path.write_text(config.to_json())
    assert set(json.loads(path.read_text())) == set(FIELDS)
    assert Config(**read_fields(path)) == config
    assert resolve(file_fields=read_fields(path)) == (config, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON"),
        ("[]", "JSON object"),
        ('{"learning_rat": 1}', "learning_rat learning_rate"),
        ('{"steps": "many"}', "steps many int"),
        ('{"net_arch": [64, "x"]}', "net_arch"),
        ('{"loss": "l1"}', "loss l1"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises((ConfigError, UnknownNameError), match=says(*words.split())):
        read_fields(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothere\.json"):
        read_fields(tmp_path / "nothere.json")


# --- presets, the table, and priority ---------------------------------------------------------

TUNED = ("td_lambda", "lr_schedule", "envs", "train_freq", "gradient_steps", "batch_size")
"""What a row sets so that it works anywhere; a preset knows better."""
OFFLINE_ROWS = ("behaviour-cloning", "cql", "bcq")
OWN_PRESET = [
    *(("CartPole-v1", row) for row in ("n-step-dqn", "pqn", "n-step-q", "a3c")),
    ("ALE/Pong-v5", "pqn"),
]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_valid_and_names_its_source(name: str) -> None:
    config = preset_config(name)
    assert validate(config) is config
    source = PRESETS[name].source.lower()
    papers = ("1710.02298", "1803.00933", "1903.03176", "2407.04811")
    known = ("rl-baselines3-zoo", "cleanrl", "nature", "qfleet", "highway-env", *papers)
    assert any(word in source for word in known)
    _, switches = algorithm_switches(config.algo)
    for field, value in switches.items():
        if field == "n_steps":  # a preset may look further ahead than its row, not less far
            assert getattr(config, field) >= value
        elif field == "max_grad_norm" and config.sum_gradients:
            assert config.max_grad_norm == 0  # the row's limit is for means
        elif field not in TUNED:
            assert getattr(config, field) == value


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("env", ["CartPole-v1", "ALE/Pong-v5", "Taxi-v3"])
def test_every_row_of_the_table_is_a_valid_config(algo: str, env: str) -> None:
    config, _ = resolve(env, algo, "none" if (env, algo) in OWN_PRESET else None)
    if algo in OFFLINE_ROWS:
        config = config.replace(data="somewhere")
    assert validate(config).algo == algo
    for field, value in ALGORITHMS[algo].items():
        assert getattr(config, field) == value


def test_the_actors_engine_has_presets_of_its_own() -> None:
    assert resolve("CartPole-v1", engine="actors")[1] == "cartpole-apex"
    config, preset = resolve("ALE/Pong-v5", fields={"engine": "actors", "workers": 3})
    assert (preset, config.engine, config.workers) == ("atari-apex", "actors", 3)
    assert resolve("CartPole-v1", engine="serial")[1] == "cartpole"
    assert resolve("Acrobot-v1", engine="actors")[1] == "acrobot"
    assert resolve("CartPole-v1", preset="cartpole", engine="actors")[1] == "cartpole"


def test_workers_have_a_preset_that_suits_rows_without_their_own() -> None:
    for algo, preset in [
        (None, "cartpole-parameter-server"),
        ("double-dqn", "cartpole-parameter-server"),
        ("a3c", "cartpole-a3c"),
    ]:
        config, used = resolve("CartPole-v1", algo, engine="parameter-server")
        assert used == preset
        assert config.algo == (algo or "n-step-dqn")
    assert resolve("Acrobot-v1", engine="parameter-server")[1] == "acrobot"


def test_an_update_may_have_a_preset_of_its_own() -> None:
    config, used = resolve("CartPole-v1", engine="parameter-server", update="easgd")
    assert (used, config.update) == ("cartpole-easgd", "easgd")
    given = {"engine": "parameter-server", "update": "easgd"}
    assert resolve("CartPole-v1", fields=given) == (config, used)
    assert resolve("CartPole-v1", "a3c", fields=given)[1] == "cartpole-a3c"
    assert resolve("Acrobot-v1", fields=given)[1] == "acrobot"
    given["update"] = "admm"
    assert resolve("CartPole-v1", fields=given)[1] == "cartpole-parameter-server"


def test_a_preset_that_is_a_row_of_its_own_gives_way_to_other_rows() -> None:
    assert resolve("CartPole-v1")[0].n_steps == 5
    assert resolve("CartPole-v1", "n-step-dqn")[0].n_steps == 5
    assert resolve("CartPole-v1", "dqn")[0].n_steps == 1
    assert resolve("CartPole-v1", "double-dqn")[0].n_steps == 1
    assert resolve("CartPole-v1", "rainbow")[0].n_steps == 3


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_means_its_row(alias: str, name: str) -> None:
    assert resolve("CartPole-v1", alias)[0] == resolve("CartPole-v1", name)[0]
    assert resolve("CartPole-v1", alias.upper())[0].algo == name


@pytest.mark.parametrize(
    ("env", "algo", "preset"),
    [
        ("CartPole-v1", None, "cartpole"),
        ("CartPole-v0", "c51", "cartpole"),
        ("Acrobot-v1", None, "acrobot"),
        ("MountainCar-v0", None, "mountaincar"),
        ("LunarLander-v3", None, "lunarlander"),
        ("ALE/Breakout-v5", None, "atari-dqn"),
        ("PongNoFrameskip-v4", "dqn", "atari-dqn"),
        ("ALE/Pong-v5", "rainbow", "atari-rainbow"),
        ("ALE/Pong-v5", "PQN", "atari-pqn"),
        ("CartPole-v1", "pqn", "cartpole-pqn"),
        ("CartPole-v1", "async-q", "cartpole-n-step-q"),
        ("CartPole-v1", "A2C", "cartpole-a3c"),
        ("MinAtar/Breakout-v1", "pqn", "minatar-pqn"),
        ("MinAtar/Breakout-v1", None, "minatar-pqn"),
        ("MinAtar/Breakout-v1", "dqn", "minatar-dqn"),
        ("MinAtar/Breakout-v1", "c51", "minatar-dqn"),
        ("Acrobot-v1", "pqn", "acrobot"),
        ("Taxi-v3", None, "toy-text"),
        ("my.module:Env", None, "general"),
        ("highway_env:highway-fast-v0", None, "highway"),
        ("highway-fast-v0", "c51", "highway"),
        ("highways-v0", None, "general"),
    ],
)
def test_the_preset_that_suits_an_env_is_used(
    env: str, algo: str | None, preset: str | None
) -> None:
    assert preset_for(env, algo) == preset
    config, used = resolve(env, algo)
    assert used == preset
    if algo is not None:  # a row that was asked for counts more than an engine
        assert preset_for(env, algo, "actors") == preset
    assert config.env == split_env(env)[1]
    start = preset_config(preset) if preset else Config()
    assert config.steps == start.steps


@pytest.mark.parametrize(
    "env", ["CartPole-v1", "ALE/Pong-v5", "MinAtar/Breakout-v1", "Acrobot-v1", "MountainCar-v0"]
)
def test_pqn_is_whole_on_every_preset_and_gone_with_another_row(env: str) -> None:
    config, preset = resolve(env, "pqn")
    assert not validate(config).replay
    assert config.layer_norm
    assert config.optimizer == "radam"
    again, _ = resolve(env, "dqn", preset)
    assert again.replay
    assert (again.optimizer, again.layer_norm, again.n_steps) == ("adam", False, 1)
    validate(again)


def test_later_wins() -> None:
    plain, used = resolve("CartPole-v1", preset="none")
    assert plain == Config(env="CartPole-v1")
    assert used == "none"
    # A file wins over the preset …
    file_fields = {"n_steps": 4, "gamma": 0.5}
    from_file, _ = resolve("CartPole-v1", None, "cartpole", file_fields)
    assert (from_file.n_steps, from_file.gamma) == (4, 0.5)
    assert from_file.steps == preset_config("cartpole").steps
    # … the row of an algorithm that was asked for by name over both …
    row, _ = resolve("CartPole-v1", "rainbow", "cartpole", file_fields)
    assert (row.n_steps, row.gamma, row.head) == (3, 0.5, "c51")
    # … and a single field over everything.
    field, _ = resolve("CartPole-v1", "rainbow", "cartpole", file_fields, {"n_steps": 7})
    assert (field.n_steps, field.gamma, field.head) == (7, 0.5, "c51")


def test_another_algorithm_beside_a_runs_file_switches_the_old_one_off() -> None:
    file_fields = {"env": "CartPole-v1", "algo": "rainbow", **ALGORITHMS["rainbow"]}
    config, _ = resolve(algo="dqn", file_fields=file_fields)
    assert config == Config(env="CartPole-v1")


def test_a_file_is_whole_without_a_preset_and_may_name_the_algorithm() -> None:
    config, used = resolve(file_fields={"env": "CartPole-v1", "algo": "rainbow"})
    assert used is None
    assert config == Config(env="CartPole-v1", algo="rainbow", **ALGORITHMS["rainbow"])


@pytest.mark.parametrize(
    ("preset", "algo"), [("atari-c51", "dqn"), ("atari-rainbow", "dqn"), ("atari-c51", "qr-dqn")]
)
def test_a_row_replaces_the_switches_of_the_presets_own_row(preset: str, algo: str) -> None:
    """Otherwise a run labelled dqn would train C51."""
    config, _ = resolve("ALE/Pong-v5", algo, preset)
    plain = Config(algo=algo, **ALGORITHMS[algo])
    for field in ("head", "double", "dueling", "noisy", "prioritized_replay", "n_steps"):
        assert getattr(config, field) == getattr(plain, field), field


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("CartPole-v1", "dqnn"), "dqnn dqn"),
        (("CartPole-v1", None, "cartpol"), "preset cartpol cartpole"),
    ],
)
def test_unknown_names_come_with_the_nearest(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(UnknownNameError, match=says(*words.split())):
        resolve(*arguments)


# --- what follows the number of steps ---------------------------------------------------------


def test_a_shorter_run_scales_what_its_preset_counts_in_steps() -> None:
    whole, short = (resolve("ALE/Pong-v5", fields=f)[0] for f in ({}, {"steps": 20_000}))
    assert whole.steps == 10_000_000
    assert validate(short).learning_starts == whole.learning_starts // 500
    assert short.target_update_interval == whole.target_update_interval == 1000
    shortest = resolve("ALE/Pong-v5", fields={"steps": 5000})[0]
    assert shortest.target_update_interval == 250  # 20 updates of the target network
    assert short.eval_freq == whole.eval_freq // 500
    assert short.exploration_fraction == whole.exploration_fraction


def test_a_longer_run_keeps_a_published_recipe_and_stretches_the_general_one() -> None:
    zoo, longer = (resolve("MountainCar-v0", fields=f)[0] for f in ({}, {"steps": 10**7}))
    assert longer == zoo.replace(steps=10**7)
    general, longer = (resolve("Mine-v0", fields=f)[0] for f in ({}, {"steps": 10**7}))
    assert longer.eval_freq == general.eval_freq * 100
    assert longer.learning_starts == general.learning_starts * 10
    assert longer.target_update_interval == general.target_update_interval * 10


@pytest.mark.parametrize("steps", [0, -5])
def test_impossible_steps_are_refused_by_name(steps: int) -> None:
    with pytest.raises(ConfigError, match=says("steps", str(steps))):
        validate(resolve("Mine-v0", fields={"steps": steps})[0])


def test_a_field_that_is_given_is_not_scaled_and_plain_defaults_never_are() -> None:
    config, _ = resolve("Mine-v0", fields={"steps": 1000, "learning_starts": 500})
    assert (config.learning_starts, config.eval_freq) == (500, 100)
    plain, _ = resolve("Mine-v0", preset="none", fields={"steps": 1000})
    assert plain == Config(env="Mine-v0", steps=1000)


@pytest.mark.parametrize("steps", [1, 10, 100, 1000])
@pytest.mark.parametrize("env", ["CartPole-v1", "ALE/Pong-v5", "Taxi-v4", "highway-v0", "my:Env"])
@pytest.mark.parametrize("algo", [None, "rainbow", "iqn"])
def test_no_number_of_steps_is_too_small(env: str, algo: str | None, steps: int) -> None:
    validate(resolve(env, algo, fields={"steps": steps})[0])


@pytest.mark.parametrize("env", ["CartPole-v1", "ALE/Pong-v5", "MinAtar/Breakout-v1"])
def test_a_rollout_is_cut_to_a_short_run(env: str) -> None:
    whole, _ = resolve(env, "pqn")
    config = validate(resolve(env, "pqn", fields={"steps": 600})[0])
    assert config.train_freq <= 600 < whole.train_freq
    epochs = [c.gradient_steps * c.batch_size / c.train_freq for c in (whole, config)]
    assert epochs[0] == epochs[1]


def test_replay_has_no_more_room_than_the_run_can_fill() -> None:
    assert Config(buffer_size=10**6, steps=300).replay_capacity < 400
    assert Config(buffer_size=100, steps=300).replay_capacity == 100


def test_a_package_before_an_id_is_imported() -> None:
    config = Config(env="highway_env:highway-fast-v0", imports=("other",))
    assert (config.env, config.imports) == ("highway-fast-v0", ("highway_env", "other"))
    assert config.replace(seed=1).imports == config.imports
    assert "highway_env" in config.plugins()
    assert Config(env="my.envs:Corridor").env == "my.envs:Corridor"
    with pytest.raises(ConfigError, match=says("env", "3")):
        validate(Config(env=3))  # type: ignore[arg-type]


def test_json_fields_take_dicts() -> None:
    config = Config().replace(env_kwargs={"size": 3})
    assert config.env_kwargs == '{"size": 3}'
    assert resolve("Mine-v0", fields={"env_kwargs": {"size": 3}})[0].env_kwargs == '{"size": 3}'
    with pytest.raises(ConfigError, match="net_arch"):
        Config().replace(net_arch={"a": 1})
