"""Rows a3c and n-step-q: what is refused, losses and returns by hand, drawing, and engines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, tensor

import qfleet
from qfleet.agent import schedules
from qfleet.agent.dense_gradient import make_gradient
from qfleet.agent.device_actor import TensorActor
from qfleet.agent.gradients import AutogradGradient
from qfleet.agent.inference import HostInference, make_greedy
from qfleet.agent.learner import Learner
from qfleet.agent.weights import FlatWeights
from qfleet.algorithms.exploration import sample_actions
from qfleet.algorithms.losses import actor_critic, entropy
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import ConfigError
from qfleet.core.types import SKIP, TERMINATED, Batch, Block, Clock, EnvSpec, StateDict
from qfleet.engines import placement, registry
from qfleet.engines.factories import make_objective, make_updater
from qfleet.engines.loop import SameWeights
from qfleet.engines.parts import Parts
from qfleet.engines.registry import build
from qfleet.envs.device.cartpole import CartPole
from qfleet.memory.rollout import Rollout
from qfleet.networks.factory import build_network, make_network
from qfleet.networks.qnetwork import QNetwork
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.runs import read_run
from qfleet.telemetry.timers import Timers
from support.configs import tiny_config
from support.messages import says

CPU = torch.device("cpu")
SPEC = EnvSpec("toy", (3,), "float32", 4)
FIELDS: dict[str, Any] = {
    "engine": "serial",
    "steps": 640,
    "envs": 4,
    "train_freq": 20,
    "batch_size": 20,
    "learning_rate": 1e-2,
    "target_update_interval": 50,
    "tau": 0.5,
    "max_episode_steps": 30,
    "n_eval_episodes": 2,
    "seed": 2,
}
ROWS = ("a3c", "n-step-q")


def configure(algo: str = "a3c", **changes: Any) -> Config:
    return tiny_config(algo=algo, **{**FIELDS, **changes})


def close(actual: Tensor, expected: object, atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual, tensor(expected), atol=atol, rtol=0)


# --- refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "changes", "words"),
    [
        ("a3c", {"replay": True}, "replay True head actor-critic"),
        ("a3c", {"dueling": True}, "dueling True head actor-critic"),
        ("a3c", {"noisy": True}, "noisy True head actor-critic"),
        ("a3c", {"exploration_ladder": True}, "exploration_ladder True head"),
        ("a3c", {"double": True}, "double True replay"),
        ("a3c", {"munchausen": True}, "munchausen True replay"),
        ("a3c", {"prioritized_replay": True}, "prioritized_replay True"),
        ("a3c", {"value_weight": -0.1}, "value_weight -0.1"),
        ("a3c", {"entropy_weight": -0.1}, "entropy_weight -0.1"),
        ("a3c", {"population": 2, "engine": "device"}, "head actor-critic population"),
        ("n-step-q", {"double": True}, "double True replay"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(algo: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=says(*words.split())):
        validate(configure(algo, **changes))


@pytest.mark.parametrize(
    ("algo", "changes"),
    [
        ("a3c", {"target_network": True, "td_lambda": 0.95, "layer_norm": True}),
        ("n-step-q", {"dueling": True, "noisy": True, "target_network": False}),
        ("n-step-q", {"exploration_ladder": True}),
    ],
    ids=str,
)
def test_what_can_work_is_not(algo: str, changes: dict[str, Any]) -> None:
    config = configure(algo, **changes)
    assert validate(config) is config


def test_a_policy_explores_without_epsilon() -> None:
    assert [schedules.epsilon(configure(), steps) for steps in (0, 100)] == [0.0, 0.0]
    assert schedules.epsilon(configure("n-step-q"), 0) == 1.0


# --- the loss ---------------------------------------------------------------------------------


def test_entropy() -> None:
    # two equal actions: ln 2; (¼, ¾): ¼ ln 4 + ¾ ln 4/3 = .562335; one that is certain: 0
    logits = tensor([[0.0, 0.0], [0.0, math.log(3)], [0.0, 1e4]])
    close(entropy(logits), [math.log(2), 0.562335, 0.0])


def test_the_loss_by_hand() -> None:
    # π = (¼, ¾), V 1, R 3, action 1: A 2; ½·2² − 2 ln ¾ − .1·.562335 = 2 + .575364 − .056234
    logits = tensor([[0.0, math.log(3)]])
    loss = actor_critic(logits, tensor([1.0]), tensor([1]), tensor([3.0]), 0.5, 0.1)
    close(loss, [2.519131])


def test_its_gradient_by_hand() -> None:
    """∂/∂V = −2 c_v A; ∂/∂z_k = −A (1{k = a} − π_k) + β π_k (log π_k + H)."""
    logits = tensor([[0.0, math.log(3)]], requires_grad=True)
    value = tensor([1.0], requires_grad=True)
    loss = actor_critic(logits, value, tensor([1]), tensor([3.0]), 0.5, 0.1)
    of_logits, of_value = torch.autograd.grad(loss.sum(), (logits, value))
    close(of_value, [-2.0])
    # β π (log π + H): .1·¼·(−1.386294 + .562335) = −.020599, and its opposite
    close(of_logits, [[0.5 - 0.020599, -0.5 + 0.020599]])


def random_batch(size: int, seed: int = 0) -> Batch:
    random = torch.Generator().manual_seed(seed)
    obs = torch.randn(size, 3, generator=random)
    number = torch.randint(SPEC.num_actions, (size,), generator=random)
    returns = torch.randn(size, generator=random) * 3
    weight = (torch.rand(size, generator=random) < 0.8).float()
    return Batch(obs, number, returns, torch.zeros(size), obs, weight, torch.arange(size))


@pytest.mark.parametrize("changes", [{}, {"layer_norm": True}, {"net_arch": (8, 8)}], ids=str)
def test_the_learners_gradient_is_that_of_the_loss_written_plainly(changes: dict[str, Any]) -> None:
    config = configure(**changes, value_weight=0.3, entropy_weight=0.2)
    network = make_network(config, SPEC, CPU, seed=1)
    weights, batch = FlatWeights(network), random_batch(32)
    gradient = make_gradient(network, make_objective(config, CPU, 0), weights, weighted=True)
    assert isinstance(gradient, AutogradGradient)
    loss_info = gradient.backward(gradient.predict(batch), batch, batch.reward)
    ours = weights.grad.clone()

    output = network(batch.obs)
    policy, value = torch.distributions.Categorical(logits=output[:, :4]), output[:, 4]
    advantage = batch.reward - value.detach()
    losses = (
        0.3 * (batch.reward - value) ** 2
        - advantage * policy.log_prob(batch.action)
        - 0.2 * policy.entropy()
    )
    mean = (losses * batch.weight).sum() / 32
    theirs = torch.autograd.grad(mean, weights.parameters)
    plain = torch.cat([each.reshape(-1) for each in theirs])
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss_info.loss(), mean.detach())
    torch.testing.assert_close(loss_info.prediction, value.detach())
    torch.testing.assert_close(loss_info.priority, advantage.abs())
    assert list(loss_info.numbers()) == ["entropy"]
    torch.testing.assert_close(loss_info.numbers()["entropy"], policy.entropy().mean().detach())


# --- drawing actions --------------------------------------------------------------------------


def test_an_action_is_drawn_by_where_its_chance_falls() -> None:
    # π = (¼, ½, ¼): up to .25 the first, up to .75 the second
    logits = tensor([0.25, 0.5, 0.25]).log().expand(6, 3)
    chance = tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-24])
    assert sample_actions(logits, chance).tolist() == [0, 0, 1, 1, 2, 2]


def test_what_cannot_happen_is_never_drawn() -> None:
    logits = tensor([[-torch.inf, 0.0, -torch.inf], [-1e4, -1e4, 1e4]])
    assert sample_actions(logits, tensor([0.0, 0.0])).tolist() == [1, 2]
    assert sample_actions(logits, tensor([0.999999, 0.5])).tolist() == [1, 2]


def assert_frequencies(counts: Tensor, policy: Tensor) -> None:
    """Pearson's χ² with 3 degrees of freedom, whose 0.999 quantile is 16.3; the seed is fixed."""
    total = counts.sum()
    expected = total * policy
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3
    # A draw that is uniform, or greedy, would be far beyond.
    uniform = total * torch.full_like(policy, 1 / len(policy))
    assert float(((uniform - expected) ** 2 / expected).sum()) > 1000


@pytest.mark.parametrize("layer_norm", [False, True], ids=["numpy", "torch"])
def test_training_draws_actions_in_proportion_to_the_policy(layer_norm: bool) -> None:
    network = steep_network(layer_norm)
    obs = np.tile(np.float32([0.5, -1.0, 0.3]), (500, 1))
    inference = HostInference(network, CPU, "float32", seed=3)
    opened = np.zeros(500, dtype=np.bool_)
    drawn = [inference.choose(0, 0, 0, slice(0, 500), obs, opened, needed=True) for _ in range(40)]
    counts = torch.bincount(torch.from_numpy(np.concatenate(drawn)), minlength=4)  # type: ignore[arg-type]
    with torch.no_grad():
        policy = network.q_values(torch.from_numpy(obs[:1]))[0].softmax(0)
    assert_frequencies(counts, policy)


def steep_network(layer_norm: bool = False) -> QNetwork:
    """One whose policy is far from even."""
    network = make_network(configure(layer_norm=layer_norm), SPEC, CPU, seed=1)
    with torch.no_grad():
        list(network.parameters())[-1].copy_(tensor([0.0, 1.0, -1.0, 0.5, 9.0]))
    return network


def test_the_device_engines_actor_draws_in_proportion_too() -> None:
    logits = tensor([0.2, 0.8]).log()
    actor = TensorActor(
        CartPole(),
        torch.arange(64),
        lambda obs: logits.expand(len(obs), -1),
        configure(engine="device"),
        CPU,
        [5],
        32,
        channel=SameWeights(),
        clock=Clock(),
        timers=Timers(),
        resample_noise=lambda _: None,
    )
    actions = torch.cat([actor.collect(32).action.reshape(-1).clone() for _ in range(4)])
    share = float((actions == 1).float().mean())
    assert share == pytest.approx(0.8, abs=0.02)  # 4.5 standard deviations of 8192 draws


@pytest.mark.parametrize("layer_norm", [False, True], ids=["numpy", "torch"])
def test_evaluation_takes_the_likeliest_action_whatever_the_value(layer_norm: bool) -> None:
    network = steep_network(layer_norm)  # its value, 9 and more, is no action
    obs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = network(obs)
    assert output.shape == (64, 5)
    assert (output[:, 4] > output[:, :4].amax(1)).all()
    actions = make_greedy(network, CPU)(obs.numpy())
    assert actions.tolist() == output[:, :4].argmax(1).tolist()
    assert torch.equal(network.q_values(obs), output[:, :4])
    with torch.no_grad():
        assert torch.equal(network.state_values(obs), output[:, 4])


@pytest.mark.parametrize("network", ["mlp", "nature", "impala", "minatar"])
def test_every_torso_carries_the_head(network: str) -> None:
    spec = EnvSpec("image", (2, 36, 36), "uint8", 3, frame_stack=2)
    net = build_network(spec, configure(network=network))
    obs = torch.randint(256, (2, *spec.obs_shape), dtype=torch.uint8)
    output = net(obs)
    assert output.shape == (2, 4)
    assert net.q_values(obs).shape == (2, 3)
    assert net.state_values(obs).shape == (2,)


# --- returns and the target network -----------------------------------------------------------


def make_learner(config: Config) -> tuple[Learner, Rollout, Clock]:
    clock = Clock()
    online = make_network(config, SPEC, CPU, 0)
    memory = Rollout(
        SPEC,
        config.envs,
        config.train_freq // config.envs,
        config.gamma,
        config.td_lambda,
        lambda obs: learner.state_values(obs),
        [1],
        CPU,
        batch_size=config.batch_size,
        epochs=1,
    )
    learner = Learner(
        config=config,
        online=online,
        target=make_network(config, SPEC, CPU, 0) if config.target_network else online,
        memory=memory,
        objective=make_objective(config, CPU, 2),
        updater_factory=lambda weights: make_updater(config, weights, capturable=False),
        clock=clock,
        timers=Timers(),
        device=CPU,
        seed=3,
    )
    return learner, memory, clock


def all_zero_but_the_last_bias(learner: Learner, values: list[float]) -> None:
    """Every observation is then worth the same: the head's bias."""
    learner.weights.data.zero_()
    learner.weights.data[-len(values) :] = tensor(values)


def short_rollout() -> Block:
    """Five steps of one env with rewards 1 to 5, in the middle of an episode."""
    return Block(
        obs=torch.zeros(5, 1, 3),
        action=torch.zeros(5, 1, dtype=torch.int64),
        reward=torch.arange(1.0, 6.0).unsqueeze(1),
        flags=torch.zeros(5, 1, dtype=torch.uint8),
    )


def returns_of(learner: Learner, memory: Rollout) -> list[float]:
    """Of all starts, oldest first, once the learner has learnt from them."""
    learner.learn(1)
    returns: list[float] = memory.state_dict()["returns"].tolist()
    return returns


ONE_ENV: dict[str, Any] = {"envs": 1, "train_freq": 5, "batch_size": 5, "gamma": 0.5}


@pytest.mark.parametrize(
    ("algo", "outputs"),
    [("a3c", [7.0, 0.0, 0.0, 0.0, 8.0]), ("n-step-q", [1.0, 8.0, 2.0, 3.0])],
)
def test_returns_by_hand(algo: str, outputs: list[float]) -> None:
    """They go to the rollout's end, where the value 8 waits; the newest row is no start yet."""
    config = configure(algo, **ONE_ENV, target_network=False)
    learner, memory, _ = make_learner(config)
    all_zero_but_the_last_bias(learner, outputs)
    memory.extend(short_rollout())
    # The first rollout has a row less: the oldest start is empty, and SKIP.
    # r: 1 2 3 4, then 8: 4 + ½·8 = 8; 3 + ½·8 = 7; 2 + ½·7 = 5.5; 1 + ½·5.5 = 3.75
    assert returns_of(learner, memory)[1:] == [3.75, 5.5, 7.0, 8.0]
    block = short_rollout()
    block.flags[1] |= TERMINATED
    block.flags[3] |= SKIP  # what followed row 2 is the end of a truncated episode
    memory.extend(block)
    all_zero_but_the_last_bias(learner, outputs)
    # Starts are the 5 that waited, then 1, 2 (terminated), 3 (truncated: 3 + ½·8), and a SKIP:
    # 2; 1 + ½·2 = 2; 5 + ½·2 = 6
    assert returns_of(learner, memory)[:4] == [6.0, 2.0, 2.0, 7.0]


def test_a_target_network_is_asked_instead_and_moves_by_tau() -> None:
    learner, memory, clock = make_learner(configure("n-step-q", **ONE_ENV))
    all_zero_but_the_last_bias(learner, [0.0, 8.0, 0.0, 0.0])
    learner._target_weights.data.zero_()
    memory.extend(short_rollout())
    # The target network gives 0 with any newest weights: 4; 3 + ½·4 = 5; 2 + 2.5; 1 + 2.25
    assert returns_of(learner, memory)[1:] == [3.25, 4.5, 5.0, 4.0]
    clock.env_steps = 50
    all_zero_but_the_last_bias(learner, [0.0, 8.0, 0.0, 0.0])
    memory.extend(short_rollout())
    # One interval of 50 has passed: half way (τ) to 8, before the returns are found.
    # 4 + ½·4 = 6; 3 + ½·6 = 6; 2 + ½·6 = 5; 1 + ½·5 = 3.5; the 5 that waited + ½·3.5 = 6.75
    assert returns_of(learner, memory) == [6.75, 3.5, 5.0, 6.0, 6.0]
    assert learner._target_weights.data.max() == 4.0
    clock.env_steps = 150
    all_zero_but_the_last_bias(learner, [0.0, 8.0, 0.0, 0.0])
    memory.extend(short_rollout())
    learner.learn(1)
    # Two more: by 1 − (1 − ½)² = ¾ of the way.
    assert float(learner._target_weights.data.max()) == pytest.approx(7.0, abs=1e-6)


@pytest.mark.parametrize("algo", ROWS)
def test_with_a_target_network_something_else_is_learnt(algo: str) -> None:
    learnt = []
    for target_network in (False, True):
        parts, state = state_after(configure(algo, target_network=target_network))
        assert ("target_weights" in state) == target_network
        assert len(parts.learner.networks) == 1 + target_network
        learnt.append(state)
    assert not torch.equal(learnt[0]["weights"], learnt[1]["weights"])
    assert not torch.equal(learnt[1]["target_weights"], learnt[1]["weights"])
    assert learnt[1]["target_updates"] == 640 // 50


def test_a_target_network_that_follows_at_once_is_none() -> None:
    """Copied before every update, it is the newest weights: bit for bit the same run."""
    for algo in ROWS:
        _, without = state_after(configure(algo, target_network=False))
        _, copied = state_after(
            configure(algo, target_network=True, tau=1.0, target_update_interval=20)
        )
        assert torch.equal(without["weights"], copied["weights"])


# --- engines and runs -------------------------------------------------------------------------


def state_after(config: Config) -> tuple[Parts, StateDict]:
    parts = build(validate(config), FaultLog())
    try:
        registry.run(parts, lambda: parts.clock.env_steps < config.steps)
        noise = parts.collector.state_dict()["noise"]
        return parts, {**parts.memory.state_dict(), **parts.learner.state_dict(), "drawn by": noise}
    finally:
        parts.close()


@pytest.mark.parametrize(
    ("algo", "changes"),
    [
        ("a3c", {}),
        ("n-step-q", {"noisy": True}),
        pytest.param(
            "a3c",
            {"target_network": True, "frame_stack": 2, "vectorize": "async"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_in_lockstep_the_pipeline_is_serial_bit_for_bit(
    algo: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what the actor draws by: that inference was timed at the start must not show."""
    monkeypatch.setattr(placement, "MEASURE_S", 0.01)
    _, serial = state_after(configure(algo, **changes))
    parts, pipeline = state_after(configure(algo, engine="pipeline", lockstep=True, **changes))
    assert parts.clock.updates == 32
    for name in ("weights", "frames", "action", "flags", "returns", "drawn by"):
        assert torch.equal(serial[name], pipeline[name]), name


@pytest.mark.parametrize("algo", ROWS)
def test_the_device_engine_runs_it(algo: str) -> None:
    """It draws by other numbers, so what is learnt is not that of serial."""
    (one, first), (_, second) = (
        state_after(configure(algo, engine="device", device="cpu")) for _ in range(2)
    )
    assert one.clock.updates == 32
    assert torch.equal(first["weights"], second["weights"])
    assert first["weights"].isfinite().all()


def test_a_run_logs_its_entropy_and_gives_a_policy_that_acts(tmp_path: Path) -> None:
    config = configure(log_interval=200)
    trained = qfleet.train(config=config, run_dir=tmp_path / "run")
    assert trained.result.faults == {}
    rows = read_run(tmp_path / "run").metrics
    logged = [row["train/entropy"] for row in rows if row.get("train/n_updates")]
    assert logged
    assert all(0 < value <= math.log(2) + 1e-6 for value in logged)
    policy = qfleet.load(tmp_path / "run", "last")
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    logits = policy.q_values(obs)
    assert logits.shape == (5, 2)
    assert np.array_equal(policy.act(obs), logits.argmax(1))
    assert policy.evaluate(episodes=2).returns == policy.evaluate(episodes=2).returns
