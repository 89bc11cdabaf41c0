"""The configuration of an experiment: a frozen dataclass with a line of documentation per field.

Names follow Stable-Baselines3. The command line, presets, ``config.json`` and ``qfleet.train`` all
use these fields. This module does not import torch, so that ``--help`` is fast.
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
    """All settings that determine what a run computes."""

    # --- task -------------------------------------------------------------------------------
    env: str = "CartPole-v1"
    """Gymnasium id, ALE/<Game>-v5, <Game>NoFrameskip-v4, or package.module:EnvClass."""
    imports: tuple[str, ...] = ()
    """Modules to import before the environment is made, e.g. to register environments."""
    env_kwargs: str = "{}"
    """Keyword arguments of the environment, as JSON."""
    envs: int = 1
    """Number of environments stepped together; 0: chosen by engine and machine."""
    vectorize: Literal["auto", "native", "sync", "async", "envpool"] = "auto"
    """How envs are stepped: by their own vector entry point, one after another, in processes, or by
    EnvPool (for Atari, if installed)."""
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
    """Learn from the sign of rewards; reported returns stay unclipped."""

    # --- algorithm --------------------------------------------------------------------------
    algo: str = "dqn"
    """Row of the algorithm table; it sets the fields below, which can still be combined freely."""
    double: bool = False
    """Choose the next action with the online network, evaluate it with the target network."""
    dueling: bool = False
    """Split the head into a state value and advantages."""
    noisy: bool = False
    """Explore with factorised noise in the head's weights instead of ε."""
    prioritized_replay: bool = False
    """Sample transitions in proportion to a power of their last TD error."""
    replay: bool = True
    """Learn from a replay memory; off: learn from each rollout once collected, then discard it."""
    munchausen: bool = False
    """Add the scaled log-policy to the reward and bootstrap softly."""
    head: Head = "q"
    """What the network predicts: values, 51 atoms, fixed quantiles or sampled quantiles; or a
    policy, from which actions are drawn, and the state's value."""
    n_steps: int = 1
    """Length of n-step returns."""
    td_lambda: float = 0.65
    """Without replay: λ of the returns; 0 looks one step ahead, 1 to the end of the rollout."""
    target_network: bool = False
    """Without replay: returns bootstrap from a target network instead of the newest weights. (With
    replay there is always a target network.)"""
    gamma: float = 0.99
    """Discount per env step."""
    loss: Literal["huber", "mse"] = "huber"
    """Loss on TD errors of head q; the other heads have their own (docs/algorithms)."""
    value_weight: float = 0.5
    """Actor-critic: weight of the squared error of the state's value."""
    entropy_weight: float = 0.01
    """Actor-critic: weight of the policy's entropy, which prevents premature convergence."""
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
    """Prioritised replay: constant added to every absolute TD error."""

    # --- network ----------------------------------------------------------------------------
    network: str = "auto"
    """mlp, nature, impala, minatar, or package.module:Class; auto chooses by the observations."""
    net_arch: tuple[int, ...] = (64, 64)
    """Hidden layers of the MLP."""
    layer_norm: bool = False
    """Layer normalisation after every hidden layer of mlp, nature and minatar."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile: auto measures it on accelerators and uses it where it is faster."""
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """Precision of matrix products and convolutions; auto is fp32 on a CPU, tf32 for qfleet's own
    kernels, and measured otherwise."""

    # --- learning ---------------------------------------------------------------------------
    learning_rate: float = 1e-4
    """Learning rate at the start."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls towards the end of the run."""
    lr_plateau_patience: int = 0
    """Lower the learning rate after this many evaluations without a new best; 0: never."""
    lr_plateau_factor: float = 0.5
    """Factor applied to the learning rate on a plateau."""
    optimizer: Literal["adam", "radam", "rmsprop", "sgd"] = "adam"
    """Optimiser."""
    optimizer_eps: float = 1e-8
    """Added to the optimiser's denominator (adam, radam, rmsprop)."""
    max_grad_norm: float = 10.0
    """Maximum norm of the gradient, which is clipped above it; 0: no clipping."""
    batch_size: int = 32
    """Transitions per update."""
    buffer_size: int = 1_000_000
    """Transitions kept for replay, over all envs."""
    learning_starts: int = 100
    """Env steps collected before the first update."""
    train_freq: int = 4
    """Env steps between bursts of updates, counted over all envs, so that the replay ratio does not
    depend on --envs; without replay, env steps of a rollout."""
    gradient_steps: int = 1
    """Updates per burst."""
    target_update_interval: int = 10_000
    """Env steps between updates of the target network."""
    tau: float = 1.0
    """Polyak factor of target network updates: share of the online weights; 1 copies them."""

    # --- exploration ------------------------------------------------------------------------
    exploration_fraction: float = 0.1
    """Fraction of the run over which ε falls."""
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
    """Device of the replay memory: cpu, cuda …; auto: the learner's device if it fits there."""
    replay_compression: Literal["none", "lz4"] = "none"
    """Lossless compression of frames in a replay memory in RAM."""

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
    """How collecting and learning are divided among threads, processes and devices; auto measures
    and reports its choice."""
    env_groups: int = 0
    """Pipeline: groups of envs; one steps while actions of another are computed; 0: automatic."""
    block_rows: int = 0
    """Steps of every env per block; 0: automatic (one train_freq on serial)."""
    replay_slack: int = 0
    """Number of updates by which collecting may be ahead of the exact replay ratio; 0: exact."""
    inference_device: str = "auto"
    """Pipeline: device that computes actions: cpu, cuda …; auto measures both."""
    population: int = 1
    """Device: number of agents, each with its own seed, trained together as one batch."""
    vary: str = "{}"
    """Population: field values of its agents, as JSON: {"learning_rate": [1e-4, 1e-3]} gives each
    value to the same number of agents; {"gamma": {"from": 0.9, "to": 0.99}} draws values
    uniformly, with "log": true log-uniformly."""
    pbt_interval: int = 0
    """Population: env steps between exploitations (population-based training); 0: never."""
    pbt_share: float = 0.25
    """Population-based training: share of worst agents that copy weights and values of the best."""
    pbt_factor: float = 1.25
    """Factor that multiplies or divides copied values (for gamma and td_lambda: 1 − value)."""
    halving_interval: int = 0
    """Population: env steps between halvings, where the worse half of agents stops; 0: never."""
    graphs: bool = True
    """Pipeline, device: capture updates (device: also env steps) as CUDA graphs where possible."""
    lockstep: bool = False
    """Pipeline: collect and learn in turn, which on a CPU gives the same numbers as serial."""
    seed: int = 0
    """Seed of all random number generators."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps …"""
    threads: int = 0
    """CPU threads for tensor work; 0: chosen by the network's size."""
    log_interval: int = 1000
    """Env steps between log lines."""
    checkpoint_freq: int = 50_000
    """Env steps between checkpoints; one is always written at the end."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    track: Literal["none", "wandb", "mlflow"] = "none"
    """Experiment tracker to report to; it must be installed."""

    # --- many processes ---------------------------------------------------------------------
    workers: int = 4
    """Parameter server, actors: number of processes that step environments, --envs each."""
    servers: int = 1
    """Processes that hold the weights (parameter server) or the replay memory (actors)."""
    address: str = ""
    """Ray cluster to join, as host:port; empty: start one on this machine for this run."""
    update: Literal["sync", "async", "ssp", "hybrid", "easgd", "local-sgd", "admm"] = "async"
    """Parameter server: how workers' gradients become weights (docs/parameter-server.md)."""
    backup_workers: int = 0
    """Sync: number of slowest workers that each round does not wait for."""
    balance: bool = False
    """Sync: give slower workers a smaller share of each round's env steps and samples."""
    staleness: int = 4
    """Ssp: number of gradients by which a worker may be ahead of the slowest."""
    hybrid_workers: int = 0
    """Hybrid: number of gradients per update; 0: half the number of workers."""
    hybrid_window_s: float = 0.5
    """Hybrid: longest time from the first gradient of an update to the update, in seconds."""
    local_steps: int = 10
    """Easgd, local-sgd, admm: local updates of a worker between two exchanges."""
    easgd_alpha: float = 0.0
    """Easgd: fraction of their distance by which worker and centre move; 0: 0.9 / workers."""
    outer_learning_rate: float = 0.7
    """Local-sgd: learning rate of the servers."""
    outer_momentum: float = 0.9
    """Local-sgd: Nesterov momentum of the servers."""
    admm_rho: float = 0.1
    """Admm: how strongly workers are pulled towards their consensus."""
    max_gradient_age: int = 0
    """Servers drop gradients computed with weights older than this many updates; 0: none."""
    outlier_sigmas: float = 0.0
    """Servers drop gradients whose loss or norm is this many σ above recent ones; 0: none."""
    gradient_compression: Literal["none", "fp16", "bf16", "top-k"] = "none"
    """Compression of gradients sent to servers; top-k sends the largest entries and adds the rest
    to later gradients."""
    top_k_share: float = 0.01
    """Top-k: fraction of a gradient's entries that is sent."""
    weight_compression: Literal["none", "fp16", "bf16"] = "none"
    """Compression of weights sent from servers to workers."""
    snapshot_s: float = 10.0
    """Seconds between snapshots of the servers; a server that dies is restored from its last."""
    worker_timeout_s: float = 60.0
    """Seconds without a report after which a worker is replaced."""
    step_latency_s: float = 0.0
    """Seconds added to every step of the environments, for measurements and teaching."""
    straggler: float = 1.0
    """Parameter server, actors: factor on step_latency_s of worker 0."""

    # --- tolerance --------------------------------------------------------------------------
    max_fault_rate: float = 0.01
    """Stop when more than this fraction of all transitions or updates was NaN or Inf."""
    max_env_restarts: int = 10
    """Number of consecutive failures of one environment that a run survives."""
    env_timeout_s: float = 60.0
    """Timeout of a step of an environment in its own process, in seconds."""
    max_abs_q: float = 1e7
    """Warn when absolute Q-values or targets exceed this, and stop when they stay above it."""

    def __post_init__(self) -> None:
        for name in ("imports", "net_arch"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def replace(self, **changes: Any) -> Config:
        """Return a copy with some fields changed; raise if a name is unknown or a type is wrong."""
        check_fields(changes)
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @property
    def updates_per_env_step(self) -> float:
        return self.gradient_steps / self.train_freq

    def plugins(self) -> tuple[str, ...]:
        """Return the names of code outside qfleet that this configuration imports."""
        named = (*self.imports, self.env, self.network)
        return tuple(n for n in named if ":" in n or n in self.imports)

    def json_object(self, name: str) -> dict[str, Any]:
        """Return the value of a field that holds a JSON object as text."""
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
    """Raise if a name is unknown, naming the nearest field, or if a value has the wrong type."""
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
    """Read fields from a JSON file such as a run's ``config.json``; it need not hold all fields."""
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
