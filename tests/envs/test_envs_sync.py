"""SyncEnvs and the guard: autoreset rows, faults 1, 2, 6, 7, 10, 46 and 47, spaces, seeds."""

from __future__ import annotations

import contextlib
import json
import signal
from typing import Any

import gymnasium
import numpy as np
import pytest

from qfleet.config.config import Config
from qfleet.core import signals
from qfleet.core.errors import EnvironmentFault
from qfleet.core.seeding import env_seeds, mix_seeds
from qfleet.core.types import Step
from qfleet.envs.factory import make_envs
from qfleet.envs.native import NativeEnvs
from qfleet.envs.sync import SyncEnvs
from support.messages import holds, says
from support.scripted_envs import Faults, scripted
from support.waiting import PHASE_S, deadline

GO = np.zeros(1, dtype=np.int64)


def faulty(fault: str, at: int = 1, **changes: Any) -> tuple[SyncEnvs, Faults]:
    kwargs = json.dumps({"fault": fault, "at": at})
    faults = Faults()
    return SyncEnvs(scripted(env_kwargs=kwargs, **changes), 1, 0, faults), faults


def row(step: Step) -> tuple[list[float], float, bool, bool, bool, bool]:
    return (
        step.obs[0].tolist(),
        float(step.reward[0]),
        bool(step.terminated[0]),
        bool(step.truncated[0]),
        bool(step.invalid[0]),
        bool(step.fresh[0]),
    )


@pytest.mark.parametrize(
    ("env_id", "limit"), [("CartPole-v1", 0), ("CartPole-v1", 7), ("MountainCar-v0", 12)]
)
def test_rows_equal_a_plain_env_stepped_by_hand(env_id: str, limit: int) -> None:
    config = Config(env=env_id, max_episode_steps=limit)
    envs = SyncEnvs(config, 3, seed=5, on_fault=Faults())
    plain = [gymnasium.make(env_id, max_episode_steps=limit or None) for _ in range(3)]
    expected = np.stack([env.reset(seed=s)[0] for env, s in zip(plain, envs.seeds, strict=True)])
    assert np.array_equal(envs.reset(), expected)
    rng, over, ends = np.random.default_rng(1), [False] * 3, 0
    for _ in range(120):
        actions = rng.integers(envs.spec.num_actions, size=3)
        step = envs.step(actions)
        for i, env in enumerate(plain):
            if over[i]:
                obs, reward, terminated, truncated = env.reset()[0], 0.0, False, False
            else:
                obs, reward, terminated, truncated, _ = env.step(int(actions[i]))
            assert np.array_equal(step.obs[i], obs)
            assert step.reward[i] == reward
            assert step.terminated[i] == terminated
            assert step.truncated[i] == truncated
            assert step.invalid[i] == step.fresh[i] == over[i]
            over[i] = terminated or truncated
            ends += over[i]
    assert ends >= 9


def test_previous_observation_outlives_the_next_step() -> None:
    envs = SyncEnvs(scripted(), 1, 0, Faults())
    first = envs.reset()
    second = envs.step(GO).obs
    assert first.tolist() == [[1, 0]]
    assert second.tolist() == [[1, 1]]
    third = envs.step(GO).obs
    assert second.tolist() == [[1, 1]]
    assert third.tolist() == [[1, 2]]


@pytest.mark.parametrize("fault", ["nan_reward", "inf_reward", "large_reward"])
def test_bad_reward_spoils_its_row_only(fault: str) -> None:
    envs, faults = faulty(fault, at=2)
    envs.reset()
    assert row(envs.step(GO)) == ([1, 1], 1.0, False, False, False, False)
    assert row(envs.step(GO)) == ([1, 2], 0.0, False, False, True, False)
    assert row(envs.step(GO)) == ([1, 3], 1.0, False, False, False, False)
    assert faults.kinds == ["env_reward"]
    assert "env 0" in faults[0][1]
    assert "step 2" in faults[0][1]


@pytest.mark.parametrize(("fault", "kind"), [("text_reward", "str"), ("bytes_reward", "bytes")])
def test_a_reward_that_is_text_is_refused_with_its_type(fault: str, kind: str) -> None:
    envs, _ = faulty(fault)
    envs.reset()
    with pytest.raises(EnvironmentFault, match=says("env 0", "1.0", kind, "step 1")):
        envs.step(GO)


@pytest.mark.parametrize("kind", ["array", "float32", "tensor", "bool"])
def test_rewards_of_other_types_are_numbers(kind: str) -> None:
    envs, faults = faulty(f"{kind}_reward")
    envs.reset()
    assert row(envs.step(GO)) == ([1, 1], 1.0, False, False, False, False)
    assert not faults


def test_bad_reward_on_the_last_step_still_ends_the_episode() -> None:
    envs, _ = faulty("nan_reward", at=4)
    envs.reset()
    for _ in range(3):
        envs.step(GO)
    assert row(envs.step(GO)) == ([1, 4], 0.0, False, True, True, False)
    assert row(envs.step(GO)) == ([2, 0], 0.0, False, False, True, True)


@pytest.mark.parametrize("fault", ["nan_obs", "huge_obs"])
@pytest.mark.filterwarnings("ignore:overflow")
def test_bad_observation_never_leaves_and_opens_a_new_episode(fault: str) -> None:
    envs, faults = faulty(fault, at=2)
    envs.reset()
    envs.step(GO)
    assert row(envs.step(GO)) == ([2, 0], 0.0, False, False, True, True)
    assert row(envs.step(GO)) == ([2, 1], 1.0, False, False, False, False)
    assert faults.kinds == ["env_observation"]


def test_crash_rebuilds_the_env_and_only_that_env() -> None:
    kwargs = json.dumps({"fault": "crash", "at": 3, "length": 100})
    faults = Faults()
    envs = SyncEnvs(scripted(env_kwargs=kwargs), 2, 0, faults)
    envs.reset()
    envs._envs.guards[1]._env.fault = ""  # type: ignore[union-attr]
    both = np.zeros(2, dtype=np.int64)
    for _ in range(2):
        envs.step(both)
    step = envs.step(both)
    assert row(step) == ([1, 0], 0.0, False, False, True, True)
    assert step.obs[1].tolist() == [1, 3]
    assert not step.invalid[1]
    assert row(envs.step(both)) == ([1, 1], 1.0, False, False, False, False)
    assert faults.kinds == ["env_crash"]
    assert "ValueError: boom" in faults[0][1]


def test_crashes_with_completed_steps_between_them_are_endured() -> None:
    envs, faults = faulty("crash", at=2, max_env_restarts=1)
    envs.reset()
    for _ in range(10):
        envs.step(GO)
    assert faults.kinds == ["env_crash"] * 5


def test_crashes_in_a_row_stop_after_the_limit() -> None:
    envs, faults = faulty("crash", at=1, max_env_restarts=3)
    envs.reset()
    for _ in range(3):
        envs.step(GO)
    with pytest.raises(EnvironmentFault, match=says("env 0", "boom", "4", "max_env_restarts", "3")):
        envs.step(GO)
    assert faults.kinds == ["env_crash"] * 4


@pytest.mark.parametrize(
    ("fault", "kind"), [("reset", "env_reset"), ("nan_reset", "env_observation")]
)
def test_env_that_cannot_reset_is_a_typed_error_after_n_tries(fault: str, kind: str) -> None:
    envs, faults = faulty(fault, max_env_restarts=2)
    with pytest.raises(EnvironmentFault, match=says("3")):
        envs.reset()
    assert faults.kinds == [kind] * 3


def test_env_that_cannot_be_made_is_a_typed_error() -> None:
    with pytest.raises(EnvironmentFault, match="no licence"):
        faulty("constructor")


def test_env_that_cannot_be_made_again_is_retried_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    envs, faults = faulty("crash", at=1, max_env_restarts=2)
    envs.reset()
    monkeypatch.setattr("support.scripted_envs.ScriptedEnv.__init__", lambda *_, **__: 1 / 0)
    with pytest.raises(EnvironmentFault, match="division by zero"):
        envs.step(GO)
    assert faults.kinds == ["env_crash", "env_reset", "env_reset"]


@pytest.mark.parametrize(("fault", "got"), [("shape", "(5,) float32"), ("kind", "(2,) int64")])
@pytest.mark.parametrize("frame_stack", [0, 2])
def test_changed_observation_names_both(fault: str, got: str, frame_stack: int) -> None:
    envs, _ = faulty(fault, at=2, frame_stack=frame_stack)
    envs.reset()
    envs.step(GO)
    with pytest.raises(EnvironmentFault, match=says("(2,) float32", got)):
        envs.step(GO)


def test_discrete_observation_out_of_range_names_both() -> None:
    envs = SyncEnvs(Config(env="FrozenLake-v1"), 1, 0, Faults())
    envs.reset()
    envs._envs.guards[0]._env.unwrapped.P = {0: {0: [(1.0, 16, 0.0, False)]}}  # type: ignore[union-attr]
    with pytest.raises(EnvironmentFault, match=says("15", "16")):
        envs.step(GO)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("fault", ["sys.exit", "interrupt"])
def test_an_env_that_exits_or_interrupts_has_crashed(fault: str) -> None:
    """Fault 46 of docs/faults.md."""
    signals.mark_interrupts()
    envs, faults = faulty(fault, at=2)
    envs.reset()
    envs.step(GO)
    assert row(envs.step(GO)) == ([1, 0], 0.0, False, False, True, True)
    assert faults.kinds == ["env_crash"]


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("during", ["notebook", "program", "training"])
@pytest.mark.parametrize("then_exits", [False, True])
def test_the_users_interrupt_passes_even_if_the_env_makes_an_exit_of_it(
    during: str, then_exits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs, faults = faulty("")
    envs.reset()

    def step(*_: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if then_exits:
                raise SystemExit  # noqa: B904
            raise

    monkeypatch.setattr("support.scripted_envs.ScriptedEnv.step", step)
    if during == "program":
        signals.mark_interrupts()
    times_s = iter((0.0, 9.0))
    with contextlib.ExitStack() as stack:
        if during == "training":
            requested = signals.signals_request_stop(lambda _: None, lambda: next(times_s))
            stack.enter_context(requested)
            signal.raise_signal(signal.SIGINT)  # the first one only requests a stop
        with pytest.raises(KeyboardInterrupt):
            envs.step(GO)
    assert not faults


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("close", ["RuntimeError", "cannot close"]),
        ("exit_in_close", ["SystemExit", "3"]),
        ("hang_in_close", ["0.1 s"]),
    ],
)
def test_an_env_that_fails_or_hangs_in_close_is_counted(fault: str, words: list[str]) -> None:
    """Fault 47 of docs/faults.md."""
    envs, faults = faulty(fault, action_masks=False)
    envs.reset()
    envs._envs.guards[0].close(0.1 if fault == "hang_in_close" else deadline(PHASE_S))
    assert faults.kinds == ["env_close"]
    assert holds(faults[0][1], "env 0", "close", *words)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_large_finite_observations_are_no_fault() -> None:
    envs, faults = faulty("")
    envs.reset()
    envs._envs.guards[0]._env.episode = 1e30  # type: ignore[union-attr]
    assert not envs.step(GO).invalid[0]
    assert not faults


def test_discrete_offsets() -> None:
    envs = SyncEnvs(Config(env="support.scripted_envs:OffsetEnv"), 1, 0, Faults())
    assert (envs.spec.num_obs_values, envs.spec.num_actions) == (3, 2)
    assert envs.spec.obs_shape == ()
    first = envs.reset()
    assert first.dtype == np.int64
    assert first.tolist() == [2]
    assert envs.step(np.array([1])).obs.tolist() == [1]


@pytest.mark.parametrize(
    ("dtype", "canonical"),
    [
        ("float64", "float32"),
        ("float32", "float32"),
        ("int64", "float32"),
        ("int8", "float32"),
        ("bool", "float32"),
        ("uint8", "uint8"),
    ],
)
@pytest.mark.parametrize("frame_stack", [0, 3])
def test_observation_dtypes_and_frame_stacks(dtype: str, canonical: str, frame_stack: int) -> None:
    config = Config(
        env="support.scripted_envs:TypedEnv",
        env_kwargs=json.dumps({"dtype": dtype}),
        frame_stack=frame_stack,
    )
    envs = SyncEnvs(config, 2, 0, Faults())
    obs = envs.reset().copy()
    assert envs.spec.obs_dtype == obs.dtype == canonical
    after = envs.step(np.zeros(2, dtype=np.int64)).obs
    if frame_stack:
        assert (envs.spec.frame_stack, envs.spec.frame_shape) == (3, (3,))
        assert obs[1].tolist() == [[0] * 3, [0] * 3, [1] * 3]
        assert after[1].tolist() == [[0] * 3, [1] * 3, [0] * 3]
    else:
        assert obs[1].tolist() == [1] * 3
        assert after[1].tolist() == [0] * 3


def test_frame_stack_restarts_at_zeros() -> None:
    envs = SyncEnvs(scripted(frame_stack=3), 1, 0, Faults())
    stack = envs.reset()[0].copy()
    for _ in range(12):
        step = envs.step(GO)
        if step.fresh[0]:
            assert not step.obs[0, :2].any()
        else:
            assert np.array_equal(step.obs[0, :2], stack[1:])
        stack = step.obs[0].copy()


def test_seeds_are_distinct_reproducible_and_mixed() -> None:
    seeds = env_seeds(0, 256)
    assert len(set(seeds)) == 256
    assert seeds == env_seeds(0, 256)
    assert seeds[:8] == env_seeds(0, 8)
    assert not set(seeds) & set(env_seeds(1, 256))
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len({mix_seeds(seeds[0], k) for k in range(8)} | set(seeds)) == 264


def test_reset_repeats_the_first_episodes_and_envs_differ() -> None:
    envs = SyncEnvs(Config(), 2, 3, Faults())
    first = envs.reset().copy()
    for _ in range(50):
        envs.step(np.zeros(2, dtype=np.int64))
    assert np.array_equal(envs.reset(), first)
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(SyncEnvs(Config(), 2, 4, Faults()).reset(), first)


@pytest.mark.parametrize(
    ("changes", "num_envs", "kind"),
    [
        ({}, 1, SyncEnvs),
        ({}, 8, NativeEnvs),
        ({"vectorize": "sync"}, 8, SyncEnvs),
        ({"vectorize": "native"}, 1, NativeEnvs),
        ({"frame_stack": 2}, 8, SyncEnvs),
        ({"env_kwargs": '{"sutton_barto_reward": true}'}, 8, SyncEnvs),
        ({"env": "MountainCar-v0"}, 8, SyncEnvs),
    ],
)
def test_choice_of_adapter(changes: dict[str, Any], num_envs: int, kind: type) -> None:
    config = Config().replace(**changes)
    envs = make_envs(config, num_envs, 0, training=True, on_fault=Faults())
    assert type(envs) is kind
    assert envs.num_envs == num_envs
    assert envs.reset().shape == (num_envs, *envs.spec.obs_shape)
    envs.close()
