"""The configuration of an experiment: a frozen dataclass with a line of documentation per field.

Names follow Stable-Baselines3. The command line, presets, ``config.json`` and ``qfleet.train`` all
use these fields. A field's metadata holds its range, the engines that use it, and its group in
``--help``. This module does not import torch, so that ``--help`` is fast.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import reprlib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from qfleet.config.words import convert, rename
from qfleet.core.errors import ConfigError, UnknownNameError, one_line

T = TypeVar("T")
Head = Literal["q", "c51", "qr", "iqn", "actor-critic"]
Engine = Literal[
    "auto", "serial", "pipeline", "device", "parameter-server", "actors", "all-reduce", "offline"
]
Update = Literal["sync", "async", "ssp", "hybrid", "easgd", "local-sgd", "admm"]
PipelineSchedule = Literal["gpipe", "1f1b"]
Group = Literal[
    "environment", "algorithm", "exploration", "replay", "optimisation", "evaluation", "engine",
    "cluster", "output",
]  # fmt: skip
"""Groups of fields, in the order in which ``--help`` and docs/options.md show them."""

SERVERS: tuple[Engine, ...] = ("parameter-server",)
RANKS: tuple[Engine, ...] = ("all-reduce",)
EXCHANGING: tuple[Engine, ...] = (*SERVERS, *RANKS)
ON_RAY: tuple[Engine, ...] = ("parameter-server", "actors")
PROCESSES: tuple[Engine, ...] = (*ON_RAY, "all-reduce")
OFFLINE: tuple[Engine, ...] = ("auto", "offline")
DATA: tuple[Engine, ...] = (*OFFLINE, *EXCHANGING)
HOST_EVALUATED: tuple[Engine, ...] = ("serial", "pipeline", *OFFLINE, *PROCESSES)
# easgd has no admission policy and no compression.
ALL_BUT_EASGD: tuple[Update, ...] = ("sync", "async", "ssp", "hybrid", "local-sgd", "admm")


JSON_FIELDS = ("env_kwargs", "eval_env_kwargs", "vary")
"""Fields that hold a JSON object as text; they also take a dict."""
SPARE_ROWS = 8
"""Rows of a replay memory beyond those of a run: the newest row never has its return yet, and a
stack of frames needs earlier ones."""


def split_env(env: str) -> tuple[tuple[str, ...], str]:
    """Return the module, if any, and the id of ``module:id``; ``module:EnvClass`` stays whole."""
    module, colon, name = env.partition(":")
    is_id = colon and module and name and not name.replace(".", "").isidentifier()
    return ((module,), name) if is_id else ((), env)


class Option(NamedTuple):
    """What validation, ``--help`` and docs/options.md need to know about a field."""

    group: Group
    common: bool
    """Whether ``--help`` shows the field; ``--help-all`` shows all fields."""
    bounds: dict[str, float]
    """"≥", ">", "≤" or "<" → bound of the value; of a tuple, of each entry."""
    engines: tuple[Engine, ...]
    """Engines that use the field; with others it must have its default. Empty: all engines."""
    updates: tuple[Update, ...]
    """Values of ``update`` with which a parameter server uses the field. Empty: all values."""

    def used_with(self, update: str) -> bool:
        return not self.updates or update in self.updates


def field(
    default: T,
    group: Group,
    *,
    common: bool = False,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    engines: tuple[Engine, ...] = (),
    updates: tuple[Update, ...] = (),
) -> T:
    """Declare a field of Config: low ≤ value ≤ high, above < value < below."""
    given = {"≥": low, ">": above, "≤": high, "<": below}
    bounds = {sign: bound for sign, bound in given.items() if bound is not None}
    option = Option(group, common, bounds, engines or (SERVERS if updates else ()), updates)
    return dataclasses.field(default=default, metadata={"option": option})


@dataclass(frozen=True)
class Config:
    """All settings that determine what a run computes."""

    env: str = field("CartPole-v1", "environment", common=True)
    """Gymnasium id, package:id, ALE/<Game>-v5, <Game>NoFrameskip-v4, or package.module:EnvClass."""
    imports: tuple[str, ...] = field((), "environment")
    """Modules to import before the environment is made, e.g. to register environments."""
    env_kwargs: str = field("{}", "environment", common=True)
    """Keyword arguments of the environment, as JSON."""
    wrappers: tuple[str, ...] = field((), "environment")
    """Wrappers of the environment, package.module:Class, the first innermost; each is called with
    the environment alone."""
    discretize_actions: int = field(0, "environment", low=0, high=1024)
    """Values per dimension of Box actions, evenly spaced from bound to bound; 0: none."""
    image_max: int = field(255, "environment", low=1, high=255)
    """Largest value in images, which networks see as 1; 10 where they hold codes (MiniGrid)."""
    envs: int = field(1, "environment", common=True, low=0)
    """Number of environments stepped together; 0: chosen by engine and machine."""
    vectorize: Literal["auto", "native", "sync", "async", "envpool"] = field("auto", "environment")
    """How envs are stepped: by their own vector entry point, one after another, in processes, or by
    EnvPool (for Atari, if installed)."""
    max_episode_steps: int = field(0, "environment", low=0)
    """Truncate episodes after this many env steps; 0 keeps the environment's own limit."""
    frame_stack: int = field(0, "environment", low=0, high=1024)
    """Frames stacked into an observation; 0 means 4 on Atari and none elsewhere."""
    frame_skip: int = field(4, "environment", low=1)
    """Atari: emulator frames per env step."""
    sticky_actions: float = field(0.0, "environment", low=0, high=1)
    """Atari: probability that the emulator repeats the previous action."""
    noop_max: int = field(30, "environment", low=0)
    """Atari: at most this many no-op frames at an episode's start."""
    episodic_life: bool = field(False, "environment")
    """Atari: losing a life ends the task for learning (reports still count whole games)."""
    full_action_space: bool = field(False, "environment")
    """Atari: use all 18 actions."""
    action_masks: bool = field(True, "environment")
    """Never choose actions that are illegal by the environment's masks, if it gives them:
    info["action_mask"] or action_masks()."""
    clip_rewards: bool = field(False, "environment")
    """Learn from the sign of rewards; reported returns stay unclipped."""
    reward_scale: float = field(1.0, "environment", above=0)
    """Factor of the rewards that are learnt from; reported returns stay unscaled."""
    normalize_observations: bool = field(
        False, "environment", engines=("serial", "pipeline", *OFFLINE)
    )
    """Scale observations by their running mean and deviation, or a dataset's, clipped to ±10;
    subtract the mean only from pixels."""

    algo: str = field("dqn", "algorithm", common=True)
    """Row of the algorithm table (docs/algorithms); it sets fields such as head and n_steps, which
    can still be combined freely."""
    double: bool = field(False, "algorithm")
    """Choose the next action with the online network, evaluate it with the target network."""
    dueling: bool = field(False, "algorithm")
    """Split the head into a state value and advantages."""
    noisy: bool = field(False, "exploration")
    """Explore with factorised noise in the head's weights instead of ε."""
    prioritized_replay: bool = field(False, "replay", common=True)
    """Sample transitions in proportion to a power of their last TD error."""
    replay: bool = field(True, "replay")
    """Learn from a replay memory; off: learn from each rollout once collected, then discard it."""
    munchausen: bool = field(False, "algorithm")
    """Add the scaled log-policy to the reward and bootstrap softly."""
    head: Head = field("q", "algorithm")
    """What the network predicts: values, 51 atoms, fixed quantiles or sampled quantiles; or a
    policy, from which actions are drawn, and the state's value."""
    n_steps: int = field(1, "algorithm", common=True, low=1)
    """Length of n-step returns."""
    td_lambda: float = field(0.65, "algorithm", low=0, high=1)
    """Without replay: λ of the returns; 0 looks one step ahead, 1 to the end of the rollout."""
    target_network: bool = field(False, "algorithm")
    """Without replay: returns bootstrap from a target network instead of the newest weights. (With
    replay there is always a target network.)"""
    gamma: float = field(0.99, "algorithm", common=True, low=0, high=1)
    """Discount per env step."""
    loss: Literal["huber", "mse", "cross-entropy"] = field("huber", "algorithm")
    """Loss on TD errors of head q; the other heads have their own (docs/algorithms). cross-entropy
    imitates the actions of a dataset instead."""
    value_weight: float = field(0.5, "algorithm", low=0)
    """Actor-critic: weight of the squared error of the state's value."""
    entropy_weight: float = field(0.01, "algorithm", low=0)
    """Actor-critic: weight of the policy's entropy, which prevents premature convergence."""
    cql_alpha: float = field(0.0, "algorithm", low=0)
    """Offline: weight of discrete CQL's penalty on the values of actions that the data does not
    contain; 0: none."""
    bcq_threshold: float = field(0.0, "algorithm", low=0, below=1)
    """Offline: discrete BCQ takes only actions whose probability, by a model of the data's policy,
    is above this share of the most likely action's; 0: all actions, and no model."""
    separate_networks: bool = field(False, "algorithm")
    """Actor-critic: a network for the policy and one for the value, which share no layers."""
    n_atoms: int = field(51, "algorithm", low=2)
    """C51: number of atoms."""
    v_min: float = field(-10.0, "algorithm")
    """C51: lowest atom."""
    v_max: float = field(10.0, "algorithm")
    """C51: highest atom."""
    n_quantiles: int = field(200, "algorithm", low=1)
    """QR-DQN: number of quantiles."""
    iqn_samples: int = field(64, "algorithm", low=1)
    """IQN: quantile fractions drawn for predictions and for targets."""
    iqn_act_samples: int = field(32, "algorithm", low=1)
    """IQN: quantile fractions used to choose an action."""
    iqn_embedding: int = field(64, "algorithm", low=1)
    """IQN: cosine features of a quantile fraction."""
    munchausen_alpha: float = field(0.9, "algorithm", low=0, high=1)
    """Munchausen: weight of the log-policy term."""
    munchausen_tau: float = field(0.03, "algorithm", above=0)
    """Munchausen: temperature of the softmax policy."""
    munchausen_clip: float = field(-1.0, "algorithm", high=0)
    """Munchausen: lower bound of the scaled log-policy."""
    noisy_sigma: float = field(0.5, "exploration", low=0)
    """Noisy nets: initial noise scale σ₀."""
    prioritized_replay_alpha: float = field(0.6, "replay", low=0)
    """Prioritised replay: exponent of priorities."""
    prioritized_replay_beta0: float = field(0.4, "replay", low=0, high=1)
    """Prioritised replay: initial exponent of importance weights, raised to 1 over the run."""
    prioritized_replay_eps: float = field(1e-6, "replay", above=0)
    """Prioritised replay: constant added to every absolute TD error."""

    network: str = field("auto", "algorithm", common=True)
    """mlp, nature, impala, minatar, or package.module:Class; auto chooses by the observations."""
    net_arch: tuple[int, ...] = field((64, 64), "algorithm", common=True, low=1)
    """Hidden layers of the MLP; none: the values are linear in the observation, or a table."""
    width: int = field(1, "algorithm", low=1)
    """Impala: factor on the channels of every convolution."""
    depth: int = field(2, "algorithm", low=1)
    """Impala: residual blocks in each of the three sections."""
    activation: Literal["relu", "tanh", "elu", "gelu", "silu"] = field("relu", "algorithm")
    """Activation of the hidden layers of an MLP; only relu has fused kernels."""
    layer_norm: bool = field(False, "algorithm")
    """Layer normalisation after every hidden layer of mlp, nature and minatar."""
    dropout: float = field(0.0, "algorithm", low=0, below=1)
    """Share of features set to 0 after every dense hidden layer, in gradients only: not in acting,
    targets and evaluations."""
    init_from: str = field("", "algorithm")
    """Start with the weights of this run's best policy, or of a file that policy.save wrote;
    optimiser, replay and schedules start anew."""
    compile: Literal["auto", "on", "off"] = field("auto", "engine")
    """torch.compile: auto uses it on accelerators, in runs that are long enough to repay it."""
    precision: Literal["auto", "fp64", "fp32", "tf32", "bf16", "fp16"] = field("auto", "engine")
    """Precision of matrix products and convolutions; auto is fp32 on a CPU, tf32 on NVIDIA's GPUs,
    or what `qfleet doctor --tune` found to be faster. tf32 and fp16 (with a loss scale) are for
    accelerators; bf16 is slower than fp32 on a CPU without units for it (AMX, AVX512-BF16); fp64,
    for comparisons on a CPU, is also that of weights."""

    learning_rate: float = field(1e-4, "optimisation", common=True, above=0)
    """Learning rate at the start."""
    value_learning_rate: float = field(0.0, "optimisation", low=0)
    """Actor-critic with separate_networks: learning rate of the value's network at the start; 0:
    the same as the policy's."""
    lr_schedule: Literal["constant", "linear", "cosine"] = field("constant", "optimisation")
    """How the learning rate falls towards the end of the run."""
    lr_plateau_patience: int = field(0, "optimisation", low=0)
    """Lower the learning rate after this many evaluations without a new best; 0: never."""
    lr_plateau_factor: float = field(0.5, "optimisation", above=0, high=1)
    """Factor applied to the learning rate on a plateau."""
    batch_plateau_factor: float = field(
        1.0, "optimisation", low=1, high=1024, engines=("serial", *OFFLINE)
    )
    """Factor applied to batch_size on a plateau of lr_plateau_patience evaluations, up to 8192
    transitions."""
    optimizer: Literal["adam", "adamw", "radam", "rmsprop", "sgd"] = field("adam", "optimisation")
    """Optimiser."""
    optimizer_eps: float = field(1e-8, "optimisation", low=0)
    """Added to the optimiser's denominator (all but sgd)."""
    weight_decay: float = field(0.0, "optimisation", low=0)
    """Weight decay of all parameters, as in torch.optim: added to the gradient after clipping (L2);
    adamw multiplies the weights by 1 − learning_rate · weight_decay instead."""
    max_grad_norm: float = field(10.0, "optimisation", low=0)
    """Maximum norm of the gradient, which is clipped above it; 0: no clipping."""
    batch_size: int = field(32, "optimisation", common=True, low=1)
    """Transitions per update."""
    buffer_size: int = field(1_000_000, "replay", common=True, low=1)
    """Transitions kept for replay, over all envs; at most as many as the run can make."""
    learning_starts: int = field(100, "optimisation", common=True, low=0)
    """Env steps collected before the first update."""
    train_freq: int = field(4, "optimisation", common=True, low=1)
    """Env steps between bursts of updates, counted over all envs, so that the replay ratio does not
    depend on --envs; without replay, env steps of a rollout."""
    gradient_steps: int = field(1, "optimisation", common=True, low=1)
    """Updates per burst."""
    sum_gradients: bool = field(False, "optimisation")
    """Add up the gradients of a batch's samples instead of averaging them. max_grad_norm then
    limits the sum."""
    target_update_interval: int = field(10_000, "optimisation", common=True, low=0)
    """Env steps between updates of the target network; 0: one before every gradient."""
    tau: float = field(1.0, "optimisation", above=0, high=1)
    """Polyak factor of target network updates: share of the online weights; 1 copies them."""

    exploration_fraction: float = field(0.1, "exploration", common=True, low=0, high=1)
    """Fraction of the run over which ε falls."""
    exploration_initial_eps: float = field(1.0, "exploration", low=0, high=1)
    """ε at the start."""
    exploration_final_eps: float = field(0.05, "exploration", common=True, low=0, high=1)
    """ε at the end."""
    exploration_ladder: bool = field(False, "exploration")
    """Give env i of N its own ε, final_eps^(1 + 7i/(N−1)), constant over the run (Ape-X)."""

    replay_dir: str = field("", "replay")
    """Keep the replay memory in memory-mapped files in this folder instead of RAM."""
    replay_device: str = field("auto", "replay")
    """Device of the replay memory: cpu, cuda …; auto: the learner's device if it fits there."""
    replay_compression: Literal["none", "lz4"] = field("none", "replay")
    """Lossless compression of frames in a replay memory in RAM."""
    data: str = field("", "replay", engines=DATA)
    """Train from this dataset (folder or URL, docs/data.md) without playing; env steps then count
    transitions read, and every batch is one update."""
    data_memory_mb: int = field(1024, "replay", low=1, engines=DATA)
    """Offline: most RAM, or memory of a GPU, for rows of the dataset, in MiB."""
    data_readers: int = field(2, "replay", low=1, high=4, engines=DATA)
    """Offline: threads that read the dataset; they do not change the order."""

    steps: int = field(100_000, "optimisation", common=True, low=1)
    """Env steps of the whole run; every schedule refers to it."""
    epochs: int = field(0, "optimisation", low=0, engines=DATA)
    """Offline: passes over the dataset, which set steps; 0: steps is given."""
    eval_freq: int = field(10_000, "evaluation", common=True, low=0)
    """Env steps between evaluations; 0: only at the end."""
    n_eval_episodes: int = field(10, "evaluation", common=True, low=1)
    """Episodes per evaluation."""
    eval_eps: float = field(0.0, "evaluation", low=0, high=1)
    """ε during evaluation."""
    eval_env: str = field("", "evaluation", engines=HOST_EVALUATED)
    """Environment of evaluations, with the same spaces; empty: that of training."""
    eval_env_kwargs: str = field("{}", "evaluation", engines=HOST_EVALUATED)
    """Keyword arguments of evaluations' environments, as JSON; without eval_env, they are merged
    over env_kwargs."""
    eval_max_steps: int = field(125_000, "evaluation", low=1)
    """Env steps, over all envs, after which an evaluation ends; unfinished episodes then count with
    their returns so far. The default is the length of Dopamine's evaluations."""
    target_return: float | None = field(None, "evaluation", common=True)
    """Stop when an evaluation's mean return reaches this."""
    patience: int = field(0, "evaluation", common=True, low=0)
    """Stop after this many evaluations without a new best; 0: never."""
    validation_data: str = field("", "evaluation", engines=DATA)
    """Offline: dataset (folder or URL) on which TD loss, agreement with its actions and Q-values
    are measured after every epoch (docs/offline.md)."""
    plateau_metric: Literal["return", "td_loss", "agreement"] = field(
        "return", "evaluation", engines=DATA
    )
    """Offline: what patience and lr_plateau_patience count: evaluations by their mean return, or
    epochs by the TD loss or agreement on validation_data."""

    engine: Engine = field("auto", "engine", common=True)
    """How collecting and learning are divided among threads, processes and devices; auto measures
    and reports its choice."""
    env_groups: int = field(0, "engine", low=0)
    """Pipeline, ranks on GPUs: groups of envs; one steps while actions of another are computed; 0:
    automatic."""
    block_rows: int = field(0, "engine", low=0)
    """Steps of every env per block; 0: automatic (one train_freq on serial)."""
    replay_slack: int = field(0, "engine", low=0)
    """Number of updates by which collecting may be ahead of the exact replay ratio; 0: exact."""
    inference_device: str = field("auto", "engine", engines=("auto", "serial", "pipeline"))
    """Pipeline: device that computes actions: cpu, cuda …; auto measures both."""
    population: int = field(1, "engine", low=1, engines=("auto", "device"))
    """Device: number of agents, each with its own seed, trained together as one batch."""
    vary: str = field("{}", "engine")
    """Population: field values of its agents, as JSON: {"learning_rate": [1e-4, 1e-3]} gives each
    value to the same number of agents; {"gamma": {"from": 0.9, "to": 0.99}} draws values
    uniformly, with "log": true log-uniformly."""
    pbt_interval: int = field(0, "engine", low=0)
    """Population: env steps between exploitations (population-based training); 0: never."""
    pbt_share: float = field(0.25, "engine", above=0, high=0.5)
    """Population-based training: share of worst agents that copy weights and values of the best."""
    pbt_factor: float = field(1.25, "engine", above=1)
    """Factor that multiplies or divides copied values (for gamma and td_lambda: 1 − value)."""
    halving_interval: int = field(0, "engine", low=0)
    """Population: env steps between halvings, where the worse half of agents stops; 0: never."""
    graphs: bool = field(True, "engine")
    """Record updates (device: also env steps) as CUDA graphs where possible; pipeline, device, and
    ranks with a GPU each."""
    lockstep: bool = field(False, "engine", engines=("auto", "serial", "pipeline"))
    """Pipeline: collect and learn in turn, which on a CPU gives the same numbers as serial."""
    seed: int = field(0, "optimisation", common=True, low=0)
    """Seed of all random number generators."""
    device: str = field("auto", "engine", common=True)
    """auto, cpu, cuda, cuda:1, mps …"""
    threads: int = field(0, "engine", low=0)
    """CPU threads for tensor work, and on serial for a pool of Atari games too; 0: automatic. A
    worker or actor has one."""
    log_interval: int = field(1000, "output", low=1)
    """Env steps between log lines."""
    checkpoint_freq: int = field(50_000, "output", common=True, low=1)
    """Env steps between checkpoints; one is always written at the end."""
    keep_checkpoints: int = field(2, "output", low=1)
    """Number of newest checkpoints to keep."""
    tensorboard: bool = field(True, "output")
    """Write TensorBoard files."""
    track: Literal["none", "wandb", "mlflow"] = field("none", "output", common=True)
    """Experiment tracker to report to; it must be installed."""
    price_per_cpu_hour: float | None = field(None, "output", low=0, high=1e9)
    """Price of a processor-hour, for the cost in result.json and at the end of the report."""
    price_per_gpu_hour: float | None = field(None, "output", low=0, high=1e9)
    """Price of an hour of one accelerator."""
    record: str = field("", "output")
    """Record every transition of training as a dataset in this folder or at this URL."""

    workers: int = field(4, "cluster", common=True, low=1, engines=PROCESSES)
    """Parameter server, actors, all-reduce: number of processes that step environments, --envs
    each; with torchrun or mpirun, as many as those started."""
    servers: int = field(1, "cluster", low=0, engines=ON_RAY)
    """Processes that hold the weights (parameter server) or the replay memory (actors; 0: the
    learner holds it, on its device if it fits)."""
    address: str = field("", "cluster", common=True, engines=ON_RAY)
    """Ray cluster to join, as host:port; empty: start one on this machine for this run."""
    update: Update = field("async", "cluster", common=True, engines=SERVERS)
    """Parameter server: how workers' gradients become weights (docs/parameter-server.md)."""
    pull: Literal["before-gradient", "with-push"] = field(
        "before-gradient", "cluster", updates=("async", "ssp", "hybrid")
    )
    """Parameter server: when workers fetch weights. before-gradient: also after collecting, if they
    have changed; with-push: only with the reply to a gradient (fewer messages, older weights)."""
    overlap: bool = field(False, "cluster", updates=("async", "ssp", "hybrid"))
    """Parameter server: workers go on while their gradient is under way, so that one of a burst is
    of weights without the one before."""
    backup_workers: int = field(0, "cluster", low=0, updates=("sync",))
    """Sync: number of slowest workers that each round does not wait for."""
    balance: bool = field(False, "cluster", updates=("sync",))
    """Sync: give slower workers a smaller share of each round's env steps and samples."""
    staleness: int = field(4, "cluster", low=0, updates=("ssp",))
    """Ssp: number of gradients by which a worker may be ahead of the slowest."""
    hybrid_workers: int = field(0, "cluster", low=0, updates=("hybrid",))
    """Hybrid: number of gradients per update; 0: half the number of workers."""
    hybrid_window_s: float = field(0.5, "cluster", above=0, high=1e6, updates=("hybrid",))
    """Hybrid: longest time from the first gradient of an update to the update, in seconds."""
    local_steps: int = field(10, "cluster", low=1, updates=("easgd", "local-sgd", "admm"))
    """Easgd, local-sgd, admm: local updates of a worker between two exchanges."""
    easgd_alpha: float = field(0.0, "cluster", low=0, high=1, updates=("easgd",))
    """Easgd: fraction of their distance by which worker and centre move; 0: 0.9 / workers."""
    outer_learning_rate: float = field(0.7, "cluster", above=0, updates=("local-sgd",))
    """Local-sgd: learning rate of the servers."""
    outer_momentum: float = field(0.9, "cluster", low=0, below=1, updates=("local-sgd",))
    """Local-sgd: Nesterov momentum of the servers."""
    admm_rho: float = field(0.1, "cluster", above=0, updates=("admm",))
    """Admm: how strongly workers are pulled towards their consensus."""
    max_gradient_age: int = field(0, "cluster", low=0, updates=("async", "ssp", "hybrid"))
    """Servers drop gradients computed with weights older than this many updates; 0: none."""
    outlier_sigmas: float = field(0.0, "cluster", low=0, updates=ALL_BUT_EASGD)
    """Servers drop gradients whose loss or norm is this many σ above recent ones; 0: none."""
    gradient_compression: Literal["none", "fp16", "bf16", "top-k", "powersgd"] = field(
        "none", "cluster", engines=EXCHANGING, updates=ALL_BUT_EASGD
    )
    """Compression of gradients sent to servers or other ranks. top-k sends the largest entries,
    powersgd (all-reduce) thin factors of matrices; both add the rest to later gradients."""
    top_k_share: float = field(0.01, "cluster", above=0, high=1, engines=EXCHANGING)
    """Top-k: fraction of a gradient's entries that is sent."""
    powersgd_rank: int = field(2, "cluster", low=1, engines=RANKS)
    """Powersgd: columns of the factors."""
    weight_compression: Literal["none", "fp16", "bf16"] = field(
        "none", "cluster", updates=ALL_BUT_EASGD
    )
    """Compression of weights sent from servers to workers."""
    snapshot_s: float = field(10.0, "cluster", above=0, high=1e6, engines=SERVERS)
    """Seconds between snapshots of the servers; a server that dies is restored from its last."""
    baseline: str = field("", "cluster", engines=ON_RAY)
    """Run of one process, by name or folder, whose rate is the baseline of speed_up and efficiency;
    empty: measured at the end, for some seconds."""
    worker_timeout_s: float = field(60.0, "cluster", above=0, high=1e6, engines=PROCESSES)
    """Seconds without a report after which a worker is replaced (all-reduce: ends the run)."""
    step_latency_s: float = field(0.0, "cluster", low=0, high=1e6)
    """Seconds added to every step of the environments, or to every transition of a dataset, for
    measurements and teaching."""
    straggler: float = field(1.0, "cluster", low=1, engines=PROCESSES)
    """Parameter server, actors, all-reduce: factor on step_latency_s of worker 0."""
    tensor_parallel: int = field(1, "cluster", low=1, engines=RANKS)
    """All-reduce: ranks that hold parts of each layer of one network (docs/model-parallel.md)."""
    pipeline_parallel: int = field(1, "cluster", low=1, engines=RANKS)
    """All-reduce: stages of consecutive layers, each on tensor_parallel ranks of its own. There are
    workers / (tensor_parallel × pipeline_parallel) copies of the network."""
    pipeline_schedule: PipelineSchedule = field("1f1b", "cluster", engines=RANKS)
    """All-reduce: order of the passes in a stage. 1f1b keeps fewer activations than gpipe."""
    micro_batches: int = field(0, "cluster", low=0, engines=RANKS)
    """All-reduce: parts of a batch that pass the stages one after the other; 0: 4 per stage."""
    batch_per_rank: int = field(0, "cluster", low=0, engines=RANKS)
    """All-reduce: samples of each rank per update; 0: batch_size / workers, so that the number of
    ranks does not change the algorithm."""
    lr_scaling: Literal["none", "sqrt", "linear"] = field("none", "cluster", engines=RANKS)
    """All-reduce: how the learning rate grows with batch_per_rank × workers over batch_size."""

    max_fault_rate: float = field(0.01, "optimisation", low=0, high=1)
    """Stop when more than this fraction of all env steps or updates failed, or was NaN or Inf."""
    max_env_restarts: int = field(10, "environment", low=1)
    """Number of consecutive failures of one environment that a run survives."""
    env_timeout_s: float = field(60.0, "environment", above=0, high=1e6)
    """Timeout of a step of an environment in its own process, in seconds."""
    max_abs_q: float = field(1e7, "optimisation", above=0)
    """Warn when absolute Q-values or targets exceed this, and stop when they stay above it."""

    def __post_init__(self) -> None:
        # Types are checked by ``validate``: values of wrong ones stay as they are.
        named = dict[str, Any]()
        for name in ("imports", "wrappers", "net_arch"):
            value = getattr(self, name)
            named[name] = tuple(value) if isinstance(value, (list, tuple)) else value
        if isinstance(self.env, str):
            module, named["env"] = split_env(self.env)
            if module and isinstance(named["imports"], tuple):
                named["imports"] = tuple(dict.fromkeys((*module, *named["imports"])))
        for name in JSON_FIELDS:
            value = getattr(self, name)
            named[name] = json.dumps(value) if isinstance(value, dict) else value
        for name, value in named.items():
            object.__setattr__(self, name, value)

    def replace(self, **changes: Any) -> Config:
        """Return a copy with some fields changed; raise if a name is unknown or a type is wrong."""
        return dataclasses.replace(self, **check_fields(changes))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that hold the parts of one network."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def updates_per_env_step(self) -> float:
        return self.gradient_steps / self.train_freq

    @property
    def has_learner_replay(self) -> bool:
        """Whether actors in other processes fill a replay memory in the learner's process."""
        return self.engine == "actors" and self.servers == 0

    @property
    def replay_capacity(self) -> int:
        """Transitions that a replay memory has room for: at most as many as the run can make."""
        envs = max(self.envs, 1)
        rows = -(-self.steps // envs) + self.n_steps + self.frame_stack + SPARE_ROWS
        rows += self.block_rows  # recorded blocks are whole, also in a shorter run
        return min(self.buffer_size, rows * envs)

    def plugins(self) -> tuple[str, ...]:
        """Return the names of code outside qfleet that this configuration imports."""
        named = (*self.imports, self.env, self.eval_env, self.network, *self.wrappers)
        return tuple(n for n in named if ":" in n or n in self.imports)

    def json_object(self, name: str) -> dict[str, Any]:
        """Return the value of a field that holds a JSON object as text."""
        return parse_json_object(name, getattr(self, name))


def parse_json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} must be a JSON object, got {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, got {text!r}")
    return value


FIELDS: dict[str, Any] = typing.get_type_hints(Config)
"""Field name → type."""
OPTIONS: dict[str, Option] = {f.name: f.metadata["option"] for f in dataclasses.fields(Config)}
"""Field name → range, group …"""


@functools.cache
def read_docstrings() -> Mapping[str, str]:
    """Return field name → docstring in one line; a field's docstring only exists in the source."""
    (tree,) = ast.parse(inspect.getsource(Config)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        ast.unparse(node.target): " ".join(ast.literal_eval(text.value).split())
        for node, text in itertools.pairwise(tree.body)
        if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def check_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values under the fields' own names and in their types (``lr``, ``"1e6"``).

    Raise if a name is unknown, naming the nearest field, or if a value has the wrong type.
    """
    checked = rename(values)
    for name, value in checked.items():
        if name not in FIELDS:
            raise UnknownNameError("configuration field", name, FIELDS)
        kind = FIELDS[name]
        checked[name] = value = convert(value, kind)
        if name in JSON_FIELDS and isinstance(value, dict):
            try:
                checked[name] = json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigError(f"{name} cannot be written as JSON: {one_line(error)}") from None
        elif not _matches(value, kind):
            expected = kind.__name__ if isinstance(kind, type) else str(kind)
            if typing.get_origin(kind) is Literal:
                expected = "one of " + ", ".join(typing.get_args(kind))
            raise ConfigError(f"{name} must be {expected}, got {reprlib.repr(value)}")
    return checked


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
