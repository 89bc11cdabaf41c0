"""One experiment, written down: a frozen dataclass with a line of documentation per field.

Names follow Stable-Baselines3. The command line, presets, ``config.json`` and ``qfleet.train`` all
speak these fields, and nothing here imports torch, so ``--help`` stays quick.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qfleet.core.errors import ConfigError, UnknownNameError

Head = Literal["q", "c51", "qr", "iqn", "actor-critic"]


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run computes."""

    # --- task -------------------------------------------------------------------------------
    env: str = "CartPole-v1"
    """Gymnasium id, ALE/<Game>-v5, <Game>NoFrameskip-v4, or package.module:EnvClass."""
    imports: tuple[str, ...] = ()
    """Modules to import first, so that they can register environments."""
    env_kwargs: str = "{}"
    """Keyword arguments of the environment, as JSON."""
    envs: int = 1
    """Number of environments stepped together; 0: as many as suit the engine and the machine."""
    vectorize: Literal["auto", "native", "sync", "async", "envpool"] = "auto"
    """How envs are stepped: their own vector entry point, one after another, in processes, or (for
    Atari, where it is installed) by EnvPool."""
    max_episode_steps: int = 0
    """Truncate episodes after this many env steps; 0 keeps the environment's own limit."""
    frame_stack: int = 0
    """Frames stacked into an observation; 0 means 4 on Atari and none elsewhere."""
    frame_skip: int = 4
    """Atari: emulator frames per env step."""
    sticky_actions: float = 0.0
    """Atari: probability that the emulator repeats the previous action."""
    noop_max: int = 30
    """Atari: at most this many no-op frames at an episode's start."""
    episodic_life: bool = False
    """Atari: losing a life ends the task for learning (reports still count whole games)."""
    full_action_space: bool = False
    """Atari: use all 18 actions."""
    clip_rewards: bool = False
    """Learn from the sign of rewards; reports stay unclipped."""

    # --- algorithm --------------------------------------------------------------------------
    algo: str = "dqn"
    """Row of the algorithm table; it sets the switches below, which still combine freely."""
    double: bool = False
    """Choose the next action with the online network, value it with the target network."""
    dueling: bool = False
    """Split the head into a state value and advantages."""
    noisy: bool = False
    """Explore with factorised noise in the head's weights instead of ε."""
    prioritized_replay: bool = False
    """Sample transitions in proportion to their last error."""
    replay: bool = True
    """Learn from a memory of old transitions; off: from each rollout, then forget it."""
    munchausen: bool = False
    """Add the scaled log-policy to the reward and bootstrap softly."""
    head: Head = "q"
    """What the network predicts: values, 51 atoms, fixed quantiles or sampled quantiles; or a
    policy, from which actions are drawn, and the state's value."""
    n_steps: int = 1
    """Length of n-step returns."""
    td_lambda: float = 0.65
    """Without replay: how far returns look ahead, 0 one step, 1 the whole rollout."""
    target_network: bool = False
    """Without replay: returns bootstrap from a target network, not from the newest weights. (With
    replay there always is one.)"""
    gamma: float = 0.99
    """Discount per env step."""
    loss: Literal["huber", "mse"] = "huber"
    """Loss on TD errors of head q; the other heads have their own (docs/algorithms)."""
    value_weight: float = 0.5
    """Actor-critic: weight of the squared error of the state's value."""
    entropy_weight: float = 0.01
    """Actor-critic: weight of the policy's entropy, which keeps it from settling too early."""
    n_atoms: int = 51
    """C51: number of atoms."""
    v_min: float = -10.0
    """C51: lowest atom."""
    v_max: float = 10.0
    """C51: highest atom."""
    n_quantiles: int = 200
    """QR-DQN: number of quantiles."""
    iqn_samples: int = 64
    """IQN: quantile fractions drawn for predictions and for targets."""
    iqn_act_samples: int = 32
    """IQN: quantile fractions used to choose an action."""
    iqn_embedding: int = 64
    """IQN: cosine features of a quantile fraction."""
    munchausen_alpha: float = 0.9
    """Munchausen: weight of the log-policy term."""
    munchausen_tau: float = 0.03
    """Munchausen: temperature of the softmax policy."""
    munchausen_clip: float = -1.0
    """Munchausen: lower bound of the scaled log-policy."""
    noisy_sigma: float = 0.5
    """Noisy nets: initial noise scale σ₀."""
    prioritized_replay_alpha: float = 0.6
    """Prioritised replay: exponent of priorities."""
    prioritized_replay_beta0: float = 0.4
    """Prioritised replay: initial exponent of importance weights, raised to 1 over the run."""
    prioritized_replay_eps: float = 1e-6
    """Prioritised replay: added to every error."""

    # --- network ----------------------------------------------------------------------------
    network: str = "auto"
    """mlp, nature, impala, minatar, or package.module:Class; auto picks by what is seen."""
    net_arch: tuple[int, ...] = (64, 64)
    """Hidden layers of the MLP."""
    layer_norm: bool = False
    """Layer normalisation after every hidden layer of mlp, nature and minatar."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile: auto tries it on accelerators and keeps it where it pays."""
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """Of products and convolutions; auto is fp32 on a CPU, tf32 for kernels of our own, and else
    measured."""

    # --- learning ---------------------------------------------------------------------------
    learning_rate: float = 1e-4
    """Step size at the start."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the step size falls towards the end of the run."""
    lr_plateau_patience: int = 0
    """Lower the step size after this many evaluations without a new best; 0: never."""
    lr_plateau_factor: float = 0.5
    """Factor applied to the step size on a plateau."""
    optimizer: Literal["adam", "radam", "rmsprop", "sgd"] = "adam"
    """Optimiser."""
    optimizer_eps: float = 1e-8
    """Added to the optimiser's denominator (adam, radam, rmsprop)."""
    max_grad_norm: float = 10.0
    """Clip the gradient's norm; 0: never."""
    batch_size: int = 32
    """Transitions per update."""
    buffer_size: int = 1_000_000
    """Transitions kept for replay, over all envs."""
    learning_starts: int = 100
    """Env steps collected before the first update."""
    train_freq: int = 4
    """Env steps (over all envs, so the replay ratio never depends on --envs) between bursts;
    without replay, the length of a rollout."""
    gradient_steps: int = 1
    """Updates per burst."""
    target_update_interval: int = 10_000
    """Env steps between updates of the target network."""
    tau: float = 1.0
    """How far the target network moves at each of its updates; 1 copies."""

    # --- exploration ------------------------------------------------------------------------
    exploration_fraction: float = 0.1
    """Share of the run over which ε falls."""
    exploration_initial_eps: float = 1.0
    """ε at the start."""
    exploration_final_eps: float = 0.05
    """ε at the end."""
    exploration_ladder: bool = False
    """Give env i of N its own ε, final_eps^(1 + 7i/(N−1)), constant over the run (Ape-X)."""

    # --- replay storage ---------------------------------------------------------------------
    replay_dir: str = ""
    """Keep the replay memory in memory-mapped files in this folder instead of RAM."""
    replay_device: str = "auto"
    """Where the replay memory lives: cpu, cuda …; auto: beside the learner if it fits there."""
    replay_compression: Literal["none", "lz4"] = "none"
    """Keep frames compressed, without loss, in a replay memory in RAM."""

    # --- evaluation and stopping ------------------------------------------------------------
    steps: int = 100_000
    """Env steps of the whole run; every schedule refers to it."""
    eval_freq: int = 10_000
    """Env steps between evaluations; 0: only at the end."""
    n_eval_episodes: int = 10
    """Episodes per evaluation."""
    eval_eps: float = 0.0
    """ε during evaluation."""
    target_return: float | None = None
    """Stop when an evaluation's mean return reaches this."""
    patience: int = 0
    """Stop after this many evaluations without a new best; 0: never."""

    # --- run --------------------------------------------------------------------------------
    engine: Literal["auto", "serial", "pipeline", "device", "parameter-server", "actors"] = "auto"
    """Who advances the loop and where each part lives; auto measures and says what it chose."""
    env_groups: int = 0
    """Pipeline: groups of envs that step in turn, one while another is inferred; 0 picks."""
    block_rows: int = 0
    """Steps of every env that are collected at once; 0 picks (one train_freq on serial)."""
    replay_slack: int = 0
    """Updates that collecting may run ahead of the exact replay ratio; 0 holds it exactly."""
    inference_device: str = "auto"
    """Pipeline: where actions are chosen: cpu, cuda …; auto measures both."""
    population: int = 1
    """Device: so many agents, each with a seed of its own, trained together as one batch."""
    vary: str = "{}"
    """Population: values of its agents, as JSON: {"learning_rate": [1e-4, 1e-3]} gives each as many
    agents; {"gamma": {"from": 0.9, "to": 0.99}} draws them evenly, with "log": true log-evenly."""
    pbt_interval: int = 0
    """Population: env steps between exploitations (population-based training); 0: never."""
    pbt_share: float = 0.25
    """Share of the agents, the worst, that take over weights and values of as many of the best."""
    pbt_factor: float = 1.25
    """What taken-over values are multiplied or divided by (gamma and td_lambda: 1 − them)."""
    halving_interval: int = 0
    """Population: env steps after which, time and again, the worse half stops; 0: never."""
    graphs: bool = True
    """Pipeline, device: record bursts of updates (and device: steps) as graphs, where possible."""
    lockstep: bool = False
    """Pipeline: collect and learn in turn, which on a CPU gives the very numbers of serial."""
    seed: int = 0
    """Seed of everything random."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps …"""
    threads: int = 0
    """CPU threads for tensor work; 0 picks by the network's size."""
    log_interval: int = 1000
    """Env steps between log lines."""
    checkpoint_freq: int = 50_000
    """Env steps between checkpoints; one is always written at the end."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints to keep."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    track: Literal["none", "wandb", "mlflow"] = "none"
    """Also report to an experiment tracker, if it is installed."""

    # --- many processes ---------------------------------------------------------------------
    workers: int = 4
    """Parameter server, actors: processes that step environments, --envs each."""
    servers: int = 1
    """Parameter server: processes that share the weights; actors: that share the replay memory."""
    address: str = ""
    """Ray cluster to join, as host:port; empty: one of our own on this machine, for this run."""
    update: Literal["sync", "async", "ssp", "hybrid", "easgd", "local-sgd", "admm"] = "async"
    """Parameter server: how workers' gradients become weights (docs/parameter-server.md)."""
    backup_workers: int = 0
    """Sync: so many of the slowest are not waited for in each round."""
    balance: bool = False
    """Sync: workers that turn out slower collect and learn from less in each round."""
    staleness: int = 4
    """Ssp: gradients that a worker may be ahead of the slowest."""
    hybrid_workers: int = 0
    """Hybrid: gradients that make an update; 0: half as many as there are workers."""
    hybrid_window_s: float = 0.5
    """Hybrid: an update is made at the latest so long after its first gradient."""
    local_steps: int = 10
    """Easgd, local-sgd, admm: a worker's own updates between two exchanges."""
    easgd_alpha: float = 0.0
    """Easgd: share of the way that worker and centre move towards each other; 0: 0.9 / workers."""
    outer_learning_rate: float = 0.7
    """Local-sgd: step size of the servers."""
    outer_momentum: float = 0.9
    """Local-sgd: Nesterov momentum of the servers."""
    admm_rho: float = 0.1
    """Admm: how strongly workers are pulled towards their consensus."""
    max_gradient_age: int = 0
    """Servers drop a gradient of weights more than so many updates old; 0: none."""
    outlier_sigmas: float = 0.0
    """Servers drop a gradient whose loss or norm is so many σ above the newest ones; 0: none."""
    gradient_compression: Literal["none", "fp16", "bf16", "top-k"] = "none"
    """How gradients travel; top-k sends the largest and keeps the rest for later."""
    top_k_share: float = 0.01
    """Top-k: share of a gradient's entries that is sent."""
    weight_compression: Literal["none", "fp16", "bf16"] = "none"
    """How weights travel from servers to workers."""
    snapshot_s: float = 10.0
    """Seconds between snapshots of the servers; one that dies goes on from its last."""
    worker_timeout_s: float = 60.0
    """A worker that was not heard of for so long is replaced."""
    step_latency_s: float = 0.0
    """Every step of the environments takes so much longer: for lessons and measurements."""
    straggler: float = 1.0
    """Parameter server, actors: the latency of worker 0 is so many times as long."""

    # --- tolerance --------------------------------------------------------------------------
    max_fault_rate: float = 0.01
    """Stop when more than this share of all transitions or updates was bad (NaN, Inf)."""
    max_env_restarts: int = 10
    """Consecutive failures of one environment before the run stops."""
    env_timeout_s: float = 60.0
    """Deadline of one step of an environment that runs in its own process."""
    max_abs_q: float = 1e7
    """Raise the alarm when Q-values or targets exceed this, and stop when they stay there."""

    def __post_init__(self) -> None:
        for name in ("imports", "net_arch"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed; an unknown or ill-typed one is a ConfigError."""
        check_fields(changes)
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @property
    def updates_per_env_step(self) -> float:
        return self.gradient_steps / self.train_freq

    def plugins(self) -> tuple[str, ...]:
        """Code outside qfleet that this configuration imports."""
        named = (*self.imports, self.env, self.network)
        return tuple(n for n in named if ":" in n or n in self.imports)

    def json_object(self, name: str) -> dict[str, Any]:
        """A field that holds a JSON object as text."""
        text = getattr(self, name)
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name} {text!r} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{name} {text!r} must be a JSON object")
        fields: dict[str, Any] = value
        return fields


FIELDS: dict[str, Any] = typing.get_type_hints(Config)
"""Field name → type."""


def check_fields(values: dict[str, Any]) -> None:
    """Refuse unknown names and values of the wrong type, naming the nearest field."""
    for name, value in values.items():
        if name not in FIELDS:
            raise UnknownNameError("configuration field", name, FIELDS)
        if not _matches(value, FIELDS[name]):
            expected = getattr(FIELDS[name], "__name__", str(FIELDS[name])).replace("typing.", "")
            raise ConfigError(f"{name} {value!r} is not of type {expected}")


def _matches(value: object, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return value in typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, option) for option in typing.get_args(kind))
    if origin is tuple:
        element = typing.get_args(kind)[0]
        return isinstance(value, (tuple, list)) and all(_matches(v, element) for v in value)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def read_fields(path: Path) -> dict[str, Any]:
    """Fields from a JSON file such as a run's ``config.json``; a part of them is enough."""
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read configuration '{path}': {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration '{path}' is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"configuration '{path}' must hold a JSON object")
    check_fields(values)
    return values
