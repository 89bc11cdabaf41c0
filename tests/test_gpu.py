"""The same code on an accelerator. Skipped where there is none; the CPU suite covers the paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qfleet
from qfleet.accelerator.compiling import switch
from qfleet.agent.device_actor import TensorActor
from qfleet.agent.device_evaluation import TensorEvaluator
from qfleet.agent.device_inference import DeviceInference
from qfleet.agent.recorded_learner import RecordedLearner
from qfleet.agent.updaters.local import LocalUpdater
from qfleet.agent.updaters.optimisers import make_optimiser
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.config.presets import resolve
from qfleet.core.counter_rng import draw_below, first_counters, next_counters
from qfleet.core.types import FIRST, SKIP, TERMINATED, Block, Clock, EnvSpec
from qfleet.engines import serial
from qfleet.engines.cluster.state_arrays import copy_state
from qfleet.engines.factories import make_objective, make_ring, make_updater
from qfleet.engines.loop import SameWeights
from qfleet.engines.placement import Placement
from qfleet.engines.registry import build
from qfleet.engines.torch_settings import TorchSettings
from qfleet.engines.tuning import Choice, apply_choice
from qfleet.envs.device.names import MINATAR_IDS, make_tensor_env
from qfleet.envs.device.protocol import begin_episodes, step_episodes
from qfleet.envs.factory import make_envs
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import PrioritizedSampler, UniformSampler, Window
from qfleet.networks.factory import make_network
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.timers import Timers
from support.integrity import assert_rows_tell_the_truth, run, share_of_actions_explained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
CUDA = torch.device("cuda")
IMAGES = EnvSpec("pong", (4, 84, 84), "uint8", 6, frame_stack=4, frame_skip=4)


def updater(name: str, decay: float, device: torch.device) -> tuple[FlatWeights, LocalUpdater]:
    torch.manual_seed(0)
    weights = FlatWeights(torch.nn.Linear(20, 30).to(device))
    return weights, LocalUpdater(weights, make_optimiser(name, weights.data, 1e-8, decay), 1.0)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["adam", "adamw", "radam", "rmsprop", "sgd"])
def test_updates_agree_with_the_host_and_bad_gradients_change_nothing(
    name: str, decay: float
) -> None:
    host, on_host = updater(name, decay, torch.device("cpu"))
    device, on_device = updater(name, decay, CUDA)
    for step in range(30):
        gradient = torch.randn(host.grad.shape, generator=torch.Generator().manual_seed(step))
        if step % 7 == 3:
            gradient[5] = float("nan")
            before = device.data.clone()
        host.grad.copy_(gradient)
        device.grad.copy_(gradient)
        assert float(on_host.apply(1e-2)["skipped"]) == float(on_device.apply(1e-2)["skipped"])
        if step % 7 == 3:
            assert torch.equal(device.data, before)
    torch.testing.assert_close(device.data.cpu(), host.data, rtol=1e-5, atol=1e-6)


def test_a_ring_on_the_device_equals_one_on_the_host_index_for_index() -> None:
    spec = EnvSpec("toy", (3, 4, 4), "uint8", 3, frame_stack=3)
    random = torch.Generator().manual_seed(1)
    rings = [
        Ring(
            spec, 2, 80, 3, 0.9,
            PrioritizedSampler(40, 2, 0.6, 1e-6, device, torch.Generator(device).manual_seed(0)),
            device,
        )
        for device in (torch.device("cpu"), CUDA)
    ]  # fmt: skip
    for _ in range(15):
        flags = torch.randint(0, 12, (5, 2), generator=random)
        block = Block(
            obs=torch.randint(0, 255, (5, 2, 4, 4), generator=random, dtype=torch.uint8),
            action=torch.randint(0, 3, (5, 2), generator=random),
            reward=torch.randn(5, 2, generator=random),
            flags=((flags == 1) * TERMINATED + (flags == 2) * SKIP + (flags == 3) * FIRST).to(
                torch.uint8
            ),
        )
        for ring in rings:
            ring.extend(block)
    row, env = torch.meshgrid(torch.arange(40), torch.arange(2), indexing="ij")
    host, device = (
        ring.gather(row.reshape(-1).to(ring._flags.device), env.reshape(-1).to(ring._flags.device))
        for ring in rings
    )
    for name in ("obs", "action", "reward", "discount", "next_obs"):
        torch.testing.assert_close(getattr(device, name).cpu(), getattr(host, name))
    drawn = rings[1].sample(64, 0.5)
    assert torch.isfinite(drawn.weight).all()


@pytest.mark.parametrize("algo", ["dqn", "rainbow", "iqn"])
def test_atari_trains_on_the_device(algo: str, tmp_path: Path) -> None:
    config, _ = resolve(
        "ALE/Pong-v5",
        algo,
        fields={
            "steps": 600, "learning_starts": 200, "buffer_size": 2000, "device": "cuda",
            "engine": "serial", "envs": 8,
            "eval_freq": 0, "n_eval_episodes": 1, "max_episode_steps": 100, "tensorboard": False,
        },
    )  # fmt: skip
    trained = qfleet.train(config=config, run_dir=tmp_path / "run")
    assert trained.result.updates == 100
    assert trained.result.faults == {}
    assert trained.result.peak_device_bytes
    resumed = qfleet.resume(tmp_path / "run", steps=800)
    assert resumed.result.updates == 150


def learner_pair(
    algo: str, buffer_size: int = 4000, precision: str = "auto"
) -> tuple[tuple[RecordedLearner, Ring, Clock], tuple[RecordedLearner, Ring, Clock]]:
    config, _ = resolve(
        "ALE/Pong-v5",
        algo,
        fields={"envs": 8, "buffer_size": buffer_size, "batch_size": 16, "steps": 10**6,
                "engine": "pipeline", "target_update_interval": 400, "device": "cuda",
                "precision": precision},
    )  # fmt: skip
    place = Placement(CUDA, CUDA, ahead=True, capturable=True)

    def make() -> tuple[RecordedLearner, Ring, Clock]:
        clock = Clock()
        memory = make_ring(config, IMAGES, place, seed=1)
        learner = RecordedLearner(
            config=config,
            online=make_network(config, IMAGES, CUDA, 0),
            target=make_network(config, IMAGES, CUDA, 0),
            memory=memory,
            objective=make_objective(config, CUDA, 2),
            updater_factory=lambda weights: make_updater(config, weights, capturable=True),
            clock=clock,
            timers=Timers(),
            device=CUDA,
            seed=3,
            capturable=True,
        )
        return learner, memory, clock

    return make(), make()


def fill(memory: Ring, clock: Clock, seed: int) -> None:
    random = torch.Generator(CUDA).manual_seed(seed)
    kind = torch.randint(0, 30, (20, 8), generator=random, device=CUDA)
    memory.extend(
        Block(
            obs=torch.randint(
                0, 255, (20, 8, 84, 84), generator=random, device=CUDA, dtype=torch.uint8
            ),
            action=torch.randint(0, 6, (20, 8), generator=random, device=CUDA),
            reward=torch.randint(-1, 2, (20, 8), generator=random, device=CUDA).float(),
            flags=((kind == 1) * TERMINATED + (kind == 2) * SKIP + (kind == 3) * FIRST).to(
                torch.uint8
            ),
        )
    )
    clock.env_steps += 160


@pytest.mark.parametrize(
    ("algo", "precision"), [("dqn", "auto"), ("rainbow", "auto"), ("dqn", "fp16")]
)
def test_recorded_updates_equal_eager_ones_over_a_thousand(
    algo: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    pair = learner_pair(algo, precision=precision)
    (eager, eager_memory, eager_clock), (recorded, memory, clock) = pair
    if precision == "fp16":
        for learner in (eager, recorded):
            for network in learner.networks:
                network.autocast_dtype = torch.float16
    saved = copy_state({"learner": recorded.state_dict(), "memory": memory.state_dict()})
    recorded.record(10)
    recorded.load_state_dict(saved["learner"])
    memory.load_state_dict(saved["memory"])
    eager.burst_updates = 10
    start = eager.weights.data.clone()
    for turn in range(10):
        fill(eager_memory, eager_clock, turn)
        fill(memory, clock, turn)
        eager.learn(100)
        recorded.learn(100)
    assert clock.updates == eager_clock.updates == 1000
    moved = float((eager.weights.data - start).norm())
    apart = float((eager.weights.data - recorded.weights.data).norm())
    print(f"{algo}: weights moved {moved:.3f}, apart {apart:.3g}")
    assert apart <= 1e-3 * moved
    assert float(recorded.read_metrics()["skipped"]) == 0
    if precision == "fp16":
        scales = [learner.state_dict()["loss_scale"].tolist() for learner in (eager, recorded)]
        assert scales[0] == scales[1]
        assert 1 < scales[0][0] < 2.0**24
        assert recorded.read_metrics()["loss_scale"] > 1


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_compiled_updates_point_where_plain_ones_do(precision: Any) -> None:
    settings = TorchSettings()
    (plain, plain_memory, plain_clock), _ = learner_pair("dqn")
    (compiled, memory, clock), _ = learner_pair("dqn", precision=precision)
    try:
        for turn in range(3):
            fill(plain_memory, plain_clock, turn)
            fill(memory, clock, turn)
        apply_choice(Choice("fp32", False), plain.networks, plain.compilables())
        plain.burst_updates = 4
        compiled.burst_updates = 4
        plain.learn(4)
        apply_choice(Choice(precision, True), compiled.networks, compiled.compilables())
        compiled.learn(4)
        assert [f.failure for f in compiled.compilables()] == [None] * len(compiled.compilables())
        one, other = plain.weights.grad, compiled.weights.grad
        alike = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
        print(f"{precision}: cosine of gradients {alike:.5f}")
        assert alike > 0.99
    finally:
        settings.restore()


@pytest.mark.parametrize("prioritized", [False, True])
def test_compiled_draws_are_those_of_plain_code(prioritized: bool) -> None:
    """Of a memory as large as Atari's: a compiled search went wrong, and nothing was learnt.

    Both learn of the same errors: one draw that differs by a rounding would change all later ones.
    """
    rows, envs = 4166, 48
    samplers = list[UniformSampler | PrioritizedSampler]()
    for compiled in (False, True):
        generator = torch.Generator(device=CUDA).manual_seed(0)
        sampler: UniformSampler | PrioritizedSampler = UniformSampler(generator, True)
        if prioritized:
            sampler = PrioritizedSampler(rows, envs, 0.6, 1e-6, CUDA, generator, True)
        switch(sampler.compilables(), compiled)
        flags = torch.rand(rows, envs, generator=torch.Generator().manual_seed(1)) < 0.1
        sampler.move(Window(0, rows), (flags * SKIP).to(torch.uint8).to(CUDA))
        samplers.append(sampler)
    beta = torch.tensor(0.4, device=CUDA)
    for _ in range(20):
        (plain, weights), (compiled_ones, same) = (one.draw(1024, beta) for one in samplers)
        assert (plain == compiled_ones).float().mean() > 0.99
        assert (weights - same).abs().mean() < 1e-3
        assert len(plain.unique()) > 1000
        for sampler in samplers:
            sampler.update(plain, (plain % 97 + 1) * 0.01)


def test_stacks_on_the_device_are_those_of_the_environments() -> None:
    config, _ = resolve("ALE/Pong-v5", fields={"envs": 4, "max_episode_steps": 30})
    envs = make_envs(config, 4, 0, training=True, on_fault=FaultLog())
    network = make_network(config, envs.spec, CUDA, 0)
    inference = DeviceInference(network, envs.spec, [4], CUDA, 0, frames_stay=True, compiled=False)
    frames = inference.host_frames((1, 1, 4, *envs.spec.frame_shape))
    random = np.random.default_rng(0)
    obs, opened = envs.reset(), np.ones(4, dtype=np.bool_)
    for _ in range(120):
        frames[0, 0] = obs[:, -1]
        actions = inference.choose(0, 0, 0, slice(0, 4), obs, opened, needed=True)
        assert np.array_equal(inference._stacks[0].cpu().numpy(), obs)
        with torch.no_grad():
            expected = network.q_values(torch.from_numpy(obs).to(CUDA)).argmax(1)
        assert np.array_equal(actions, expected.cpu().numpy())
        step = envs.step(random.integers(6, size=4))
        obs, opened = step.obs, step.fresh
    envs.close()


def test_recorded_inference_and_updates_do_not_spoil_each_other() -> None:
    (learner, memory, clock), _ = learner_pair("dqn")
    fill(memory, clock, 0)
    saved = copy_state(learner.state_dict())
    learner.record(8)
    learner.load_state_dict(saved)
    network = make_network(resolve("ALE/Pong-v5")[0], IMAGES, CUDA, 5)
    inference = DeviceInference(network, IMAGES, [64], CUDA, 0, frames_stay=False, compiled=False)
    frames = inference.host_frames((1, 1, 64, 84, 84))
    frames[:] = np.random.default_rng(1).integers(0, 255, frames.shape, dtype=np.uint8)
    nobody, everybody = np.zeros(64, dtype=np.bool_), slice(0, 64)
    obs = np.zeros(0)
    for _ in range(4):
        alone = inference.choose(0, 0, 0, everybody, obs, nobody, needed=True)
    for _ in range(100):
        learner.learn(16)
        beside = inference.choose(0, 0, 0, everybody, obs, nobody, needed=True)
        assert np.array_equal(alone, beside)
    assert learner.read_metrics()["skipped"] == 0


def test_an_actor_critics_actions_are_drawn_on_the_device() -> None:
    """By a generator that the recorded graph moves on, and whose state can be put back."""
    network = make_network(resolve("ALE/Pong-v5", "a3c")[0], IMAGES, CUDA, 5)
    with torch.no_grad():
        list(network.parameters())[-1].copy_(torch.arange(IMAGES.num_actions + 1.0))
    inference = DeviceInference(network, IMAGES, [64], CUDA, 0, frames_stay=False, compiled=False)
    frames = inference.host_frames((1, 1, 64, 84, 84))
    frames[:] = 0
    nobody = np.zeros(64, dtype=np.bool_)

    def draw() -> np.ndarray:
        chosen = [
            inference.choose(0, 0, 0, slice(0, 64), np.zeros(0), nobody, needed=True)
            for _ in range(200)
        ]
        return np.concatenate(chosen)  # type: ignore[arg-type]

    state = inference.noise_state()
    drawn = draw()
    with torch.no_grad():
        policy = network.q_values(inference._stacks[0][:1])[0].softmax(0).cpu().numpy()
    shares = np.bincount(drawn, minlength=len(policy)) / len(drawn)
    assert np.abs(shares - policy).max() < 0.02  # 4.5 standard deviations of 12,800 draws
    assert not np.array_equal(draw(), drawn)
    inference.load_noise_state(state)
    assert np.array_equal(draw(), drawn)


@pytest.mark.parametrize("algo", ["dqn", "rainbow"])
def test_the_pipeline_trains_and_resumes_on_the_device(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, _ = resolve(
        "ALE/Pong-v5",
        algo,
        fields={
            "steps": 3200, "learning_starts": 800, "buffer_size": 4000, "envs": 8,
            "env_groups": 2, "eval_freq": 0, "n_eval_episodes": 1, "max_episode_steps": 100,
            "tensorboard": False, "compile": "off", "log_interval": 400, "engine": "pipeline",
            "inference_device": "cuda",
        },
    )  # fmt: skip
    options = qfleet.RunOptions(stage_rates=True)
    trained = qfleet.train(config=config, run_dir=tmp_path / "run", options=options)
    result = trained.result
    assert result.updates == 600
    assert result.faults == {}
    assert result.rates is not None
    assert result.communication["bytes_sent"] >= 3200 * 84 * 84
    assert result.communication["bytes_sent"] < 1.3 * 3200 * 84 * 84
    resumed = qfleet.resume(tmp_path / "run", steps=4000)
    assert resumed.result.updates == 800


@pytest.mark.parametrize("changes", [{}, {"n_steps": 3}, {"env_groups": 1}])
def test_every_row_is_followed_by_what_it_led_to(changes: dict[str, Any]) -> None:
    """Far more blocks than are in flight, with updates that take longer than collecting."""
    config, _ = resolve(
        "support.telltale_envs:TelltaleEnv",
        fields={
            "steps": 20_000, "envs": 16, "env_groups": 4, "block_rows": 4, "vectorize": "async",
            "buffer_size": 6000, "learning_starts": 200, "batch_size": 32, "train_freq": 2,
            "frame_stack": 3, "network": "nature", "device": "cuda", "engine": "pipeline",
            "compile": "off", "precision": "tf32", "inference_device": "cuda", **changes,
        },
    )  # fmt: skip
    parts = run(config)
    assert isinstance(parts.memory, Ring)
    assert parts.memory.device.type == "cuda"
    assert_rows_tell_the_truth(parts.memory)


@pytest.mark.parametrize("compile", ["off", "on"])
def test_the_network_takes_the_remembered_actions_on_the_remembered_stacks(compile: str) -> None:
    config, _ = resolve(
        "ALE/Pong-v5",
        fields={
            "steps": 8000, "envs": 32, "buffer_size": 6000, "learning_starts": 500,
            "learning_rate": 1e-30, "exploration_initial_eps": 0.0, "exploration_final_eps": 0.0,
            "engine": "pipeline", "device": "cuda", "inference_device": "cuda", "compile": compile,
            "precision": "fp32", "max_episode_steps": 90,
        },
    )  # fmt: skip
    parts = run(config, balanced=True)
    assert share_of_actions_explained(parts) > 0.98
    assert share_of_actions_explained(parts, behind=1) < 0.9


def test_replay_on_the_host_feeds_recorded_updates(tmp_path: Path) -> None:
    config, _ = resolve(
        "ALE/Pong-v5",
        fields={
            "steps": 1600, "learning_starts": 800, "buffer_size": 4000, "envs": 8,
            "eval_freq": 0, "n_eval_episodes": 1, "max_episode_steps": 100,
            "tensorboard": False, "compile": "off", "precision": "tf32",
            "replay_device": "cpu", "engine": "pipeline",
        },
    )  # fmt: skip
    assert qfleet.train(config=config, run_dir=tmp_path / "run").result.updates == 200


def test_device_auto_takes_the_accelerator_for_images_only() -> None:
    from qfleet.agent.devices import resolve_device

    assert resolve_device("auto", EnvSpec("x", (4, 84, 84), "uint8", 2)).type == "cuda"
    assert resolve_device("auto", EnvSpec("x", (4,), "float32", 2)).type == "cpu"
    assert Config().device == "auto"


# --- the device engine ------------------------------------------------------------------------


@pytest.mark.parametrize("env", [*MINATAR_IDS, "MountainCar-v0"])
def test_a_tensor_env_plays_the_same_on_both_devices(env: str) -> None:
    made = make_tensor_env(resolve(env, fields={"max_episode_steps": 200})[0])
    seen = []
    for device in (torch.device("cpu"), CUDA):
        episodes = begin_episodes(made, torch.arange(32, device=device))
        counters = first_counters(torch.arange(100, 132, device=device))
        rows = []
        for _ in range(300):
            counters = next_counters(counters)
            episodes, step = step_episodes(
                made, episodes, draw_below(counters, 0, made.spec.num_actions)
            )
            rows.append([column.cpu() for column in step])
        seen.append([torch.stack(column) for column in zip(*rows, strict=True)])
    for host, device_ in zip(*seen, strict=True):
        if host.is_floating_point():  # sines differ in the last bit
            torch.testing.assert_close(device_, host, rtol=0, atol=1e-3)
        else:
            assert torch.equal(device_, host)


def rollouts(final_eps: float, graphs: bool, compiled: bool) -> tuple[list[Any], list[Any]]:
    config, _ = resolve(
        "MinAtar/Breakout-v1",
        fields={
            "envs": 64, "steps": 64 * 200, "exploration_fraction": 0.5, "graphs": graphs,
            "exploration_final_eps": final_eps, "max_episode_steps": 20,
        },
    )  # fmt: skip
    made = make_tensor_env(config)
    network = make_network(config, made.spec, CUDA, 0)
    actor = TensorActor(
        made, torch.arange(64), network.q_values, config, CUDA, [3], 8,
        channel=SameWeights(), clock=Clock(), timers=Timers(),
        resample_noise=network.resample_noise, compiled=compiled,
    )  # fmt: skip
    blocks = []
    for rows in (8, 8, 3, *(8,) * 10):
        block = actor.collect(rows)
        columns = (block.obs, block.action, block.reward, block.flags)
        blocks.append([column.cpu() for column in columns])
    assert actor.compile_failure is None
    return blocks, actor.take_episodes()


@pytest.mark.parametrize(
    ("compiled", "final_eps"),
    # Compiled, products are formed in another order: there, all actions are random.
    [(False, 0.1), (True, 1.0)],
)
def test_a_recorded_rollout_equals_an_unrecorded_one(compiled: bool, final_eps: float) -> None:
    plain, plain_episodes = rollouts(final_eps, graphs=False, compiled=False)
    recorded, episodes = rollouts(final_eps, graphs=True, compiled=compiled)
    assert episodes == plain_episodes
    assert len(episodes) > 64
    for one, other in zip(plain, recorded, strict=True):
        for left, right in zip(one[:-1], other[:-1], strict=True):
            assert torch.equal(left, right)
        torch.testing.assert_close(one[-1], other[-1], rtol=1e-2, atol=1e-3)


def test_a_recorded_evaluation_equals_an_unrecorded_one() -> None:
    config, _ = resolve("MinAtar/Breakout-v1")
    made = make_tensor_env(config)
    network = make_network(config, made.spec, CUDA, 0).eval()
    q_values, seeds = network.q_values, torch.arange(20)
    played = [
        TensorEvaluator(q_values, made, seeds, 0.1, CUDA, 5, 125_000, graphs).play()
        for graphs in (False, True)
    ]
    assert played[0] is not None
    assert played[1] is not None
    assert played[0] == played[1]


@pytest.mark.parametrize(
    ("env", "algo"),
    [("MinAtar/Breakout-v1", "dqn"), ("MinAtar/Breakout-v1", "rainbow"), ("CartPole-v1", "dqn")],
)
def test_the_device_engine_trains_and_resumes(
    env: str, algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, _ = resolve(
        env,
        algo,
        fields={
            "steps": 6400, "learning_starts": 1280, "buffer_size": 5000, "envs": 64,
            "train_freq": 16, "gradient_steps": 1, "eval_freq": 3200, "n_eval_episodes": 4,
            "max_episode_steps": 100, "tensorboard": False, "compile": "off",
            "precision": "fp32", "log_interval": 800, "engine": "device",
        },
    )  # fmt: skip
    options = qfleet.RunOptions(stage_rates=True)
    result = qfleet.train(config=config, run_dir=tmp_path / "run", options=options).result
    assert result.updates == (6400 - 1280) // 16
    assert result.faults == {}
    assert result.rates is not None
    assert result.eval_return_mean is not None
    resumed = qfleet.resume(tmp_path / "run", steps=8000)
    assert resumed.result.updates == (8000 - 1280) // 16


def test_a_block_of_the_device_engine_is_not_waited_for() -> None:
    """The host queues collecting and learning; torch says so where it would have to wait."""
    config, _ = resolve(
        "MinAtar/Breakout-v1",
        "dqn",
        fields={
            "steps": 10**6, "learning_starts": 640, "buffer_size": 50_000, "envs": 64,
            "train_freq": 16, "compile": "off", "precision": "fp32", "engine": "device",
            "block_rows": 4,
        },
    )  # fmt: skip
    parts = build(config, FaultLog())
    blocks = 0

    def keep_going() -> bool:
        nonlocal blocks
        blocks += 1
        if blocks == 20:  # all is recorded, and a witness of what can be sampled was found
            torch.cuda.set_sync_debug_mode("error")
        return blocks < 60

    try:
        serial.run(parts, keep_going)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        parts.close()
    assert parts.clock.updates > 500


@pytest.mark.parametrize("algo", ["dqn", "pqn"])
@pytest.mark.parametrize("engine", ["device", "pipeline", "serial"])
def test_no_illegal_action_is_taken_on_the_device(tmp_path: Path, engine: str, algo: str) -> None:
    """An illegal action of this environment is a NaN, which raises."""
    rollout = {"train_freq": 512, "gradient_steps": 8, "batch_size": 64}
    trained = qfleet.train(
        "support.masked_envs:TensorLocks", algo=algo, engine=engine, device="cuda", envs=64,
        steps=20_000, learning_starts=640, buffer_size=10_000, eval_eps=0.2, preset="none",
        run_dir=tmp_path / "run", **(rollout if algo == "pqn" else {"train_freq": 64}),
    )  # fmt: skip
    assert trained.result.updates > 0
