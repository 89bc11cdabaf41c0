"""One experiment, written down: a frozen dataclass with a line of documentation per field.

Names follow Stable-Baselines3. The command line, presets, ``config.json`` and ``qfleet.train`` all
speak these fields, and nothing here imports torch, so ``--help`` stays quick.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qfleet.errors import ConfigError, UnknownNameError

Head = Literal["q", "c51", "qr", "iqn"]


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
    """What the network predicts: values, 51 atoms, fixed quantiles or sampled quantiles."""
    n_steps: int = 1
    """Length of n-step returns."""
    td_lambda: float = 0.65
    """Without replay: how far returns look ahead, 0 one step, 1 the whole rollout."""
    gamma: float = 0.99
    """Discount per env step."""
    loss: Literal["huber", "mse"] = "huber"
    """Loss on TD errors of head q; the other heads have their own (docs/algorithms)."""
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
    engine: Literal["auto", "serial", "pipeline", "device"] = "auto"
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

    def validate(self) -> Config:
        """Raise ConfigError at the first value that cannot work; return self."""
        check_fields({name: getattr(self, name) for name in FIELDS})
        for name, kind in FIELDS.items():
            if kind is float:
                value = getattr(self, name)
                _require(math.isfinite(value), name, value, "must be a finite number")
        for name in _POSITIVE:
            _require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")
        for name in _NON_NEGATIVE:
            _require(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        for name in _FRACTIONS:
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "must lie in [0, 1]")
        _require(self.tau > 0, "tau", self.tau, "must be above 0; 1 copies the network")
        _require(self.v_min < self.v_max, "v_min", self.v_min, f"must be below v_max {self.v_max}")
        _require(self.n_atoms >= 2, "n_atoms", self.n_atoms, "must be at least 2")
        _require(self.munchausen_clip <= 0, "munchausen_clip", self.munchausen_clip, "is at most 0")
        _require(bool(self.net_arch), "net_arch", self.net_arch, "needs at least one layer")
        _require(all(w > 0 for w in self.net_arch), "net_arch", self.net_arch, "must be positive")
        _require(
            self.exploration_final_eps <= self.exploration_initial_eps,
            "exploration_final_eps",
            self.exploration_final_eps,
            f"must not exceed exploration_initial_eps {self.exploration_initial_eps}",
        )
        if self.replay:
            _require(
                self.buffer_size >= (self.n_steps + 2) * self.envs + self.batch_size,
                "buffer_size",
                self.buffer_size,
                f"is too small for {self.envs} envs and batches of {self.batch_size}",
            )
        else:
            self._validate_rollouts()
        _require(
            self.engine not in ("serial", "device") or self.env_groups <= 1,
            "env_groups",
            self.env_groups,
            f"is for --engine pipeline; {self.engine} steps all envs together",
        )
        _require(
            self.engine != "device" or not self.lockstep,
            "lockstep",
            self.lockstep,
            "is for --engine pipeline; device collects and learns in turn anyway",
        )
        _require(
            self.engine != "device" or self.inference_device == "auto",
            "inference_device",
            self.inference_device,
            "is for --engine pipeline; device does everything on --device",
        )
        if self.population != 1:
            self._validate_population()
        _require(
            self._json_object("vary") == {} or self.population != 1,
            "vary",
            self.vary,
            "is for --population",
        )
        for name in ("pbt_interval", "halving_interval"):
            value = getattr(self, name)
            _require(
                self.population > 1 or value == 0, name, value, "needs agents: set --population"
            )
        _require(
            not self.lockstep or self.env_groups <= 1,
            "env_groups",
            self.env_groups,
            "does not go with lockstep, where one group steps at a time",
        )
        _require(
            self.env_groups <= max(self.envs, 1) or self.envs == 0,
            "env_groups",
            self.env_groups,
            f"is more than there are envs ({self.envs})",
        )
        _require(
            self.learning_starts < self.steps,
            "learning_starts",
            self.learning_starts,
            f"leaves no step to learn from before steps {self.steps}; lower it or raise steps",
        )
        _require(
            self.patience == 0 or self.eval_freq > 0,
            "patience",
            self.patience,
            "needs evaluations: set eval_freq",
        )
        _require(
            self.lr_plateau_patience == 0 or self.eval_freq > 0,
            "lr_plateau_patience",
            self.lr_plateau_patience,
            "needs evaluations: set eval_freq",
        )
        _require(
            self.exploration_ladder is False or 0 < self.exploration_final_eps < 1,
            "exploration_final_eps",
            self.exploration_final_eps,
            "is the base of the ladder and must lie strictly between 0 and 1 (Ape-X: 0.4)",
        )
        _require(
            not (self.noisy and self.exploration_ladder),
            "exploration_ladder",
            self.exploration_ladder,
            "does not go with noisy, which explores without ε; switch one of them off",
        )
        self._json_object("env_kwargs")
        return self

    def _json_object(self, name: str) -> dict[str, Any]:
        text = getattr(self, name)
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name} {text!r} is not JSON: {error}") from None
        _require(isinstance(value, dict), name, text, "must be a JSON object")
        fields: dict[str, Any] = value
        return fields

    def _validate_population(self) -> None:
        """What cannot work for many agents at once."""
        _require(self.population > 0, "population", self.population, "must be positive")
        for name, allowed, why in _IN_POPULATIONS:
            value = getattr(self, name)
            _require(value in allowed, name, value, f"does not go with a population: {why}")
        _require(
            self.pbt_interval == 0 or self.halving_interval == 0,
            "halving_interval",
            self.halving_interval,
            f"does not go with pbt_interval {self.pbt_interval}: agents either take over from each "
            "other or stop; set one of them to 0",
        )
        _require(
            0 < self.pbt_share <= 0.5, "pbt_share", self.pbt_share, "must lie above 0, at most 0.5"
        )
        _require(self.pbt_factor > 1, "pbt_factor", self.pbt_factor, "must be above 1")

    def _validate_rollouts(self) -> None:
        """What cannot work without replay."""
        for name, allowed, why in _WITHOUT_REPLAY:
            value = getattr(self, name)
            _require(value == allowed, name, value, f"does not go without replay: {why}")
        samples, steps = self.gradient_steps * self.batch_size, self.train_freq
        _require(
            samples % steps == 0,
            "gradient_steps",
            self.gradient_steps,
            f"× batch_size {self.batch_size} = {samples} is no multiple of train_freq {steps}, so "
            f"not every step of a rollout counts alike; take gradient_steps × batch_size = {steps} "
            "times the epochs",
        )
        if self.envs == 0:
            return  # a number that suits is found when the run is planned
        _require(
            steps % self.envs == 0 and steps >= 2 * self.envs,
            "train_freq",
            steps,
            f"does not give each of {self.envs} envs two steps or more, all as many; make it a "
            f"multiple of {self.envs}, at least {2 * self.envs}",
        )
        rows = steps // self.envs
        _require(
            self.block_rows == 0 or rows % self.block_rows == 0,
            "block_rows",
            self.block_rows,
            f"does not divide a rollout of {rows} rows; leave it 0",
        )


_IN_POPULATIONS = (
    ("engine", ("auto", "device"), "its environments are one batch; use --engine device"),
    ("replay", (False,), "its agents learn from rollouts; use --algo pqn"),
    ("noisy", (False,), "its agents explore by ε; switch it off"),
    ("lr_plateau_patience", (0,), "agents do not reach a plateau together; use 0"),
    ("exploration_ladder", (False,), "vary exploration_final_eps instead"),
)
"""Field, the values it may have, why and what to do."""
_WITHOUT_REPLAY = (
    ("head", "q", "λ-returns are of expected values; use head q"),
    ("double", False, "there is no target network; switch it off"),
    ("munchausen", False, "its policy is the target network's; switch it off"),
    ("prioritized_replay", False, "every step counts alike; switch it off"),
    ("n_steps", 1, "td_lambda says how far returns look; use 1"),
    ("replay_dir", "", "there is nothing to keep in files; leave it out"),
    ("replay_device", "auto", "a rollout lives beside the learner; leave it out"),
    ("replay_compression", "none", "rollouts are small; use none"),
    ("replay_slack", 0, "a rollout that is not learnt from at once is lost; use 0"),
)
"""Field, its only value, why and what to do."""
# fmt: off
_POSITIVE = (
    "frame_skip", "n_steps", "n_quantiles", "iqn_samples", "iqn_act_samples",
    "iqn_embedding", "munchausen_tau", "batch_size", "buffer_size", "train_freq",
    "gradient_steps", "target_update_interval", "steps", "learning_rate", "n_eval_episodes",
    "log_interval", "checkpoint_freq", "keep_checkpoints", "max_env_restarts", "env_timeout_s",
    "max_abs_q", "prioritized_replay_eps", "lr_plateau_factor",
)
_NON_NEGATIVE = (
    "envs", "env_groups", "block_rows", "replay_slack", "max_episode_steps", "frame_stack",
    "noop_max", "lr_plateau_patience", "optimizer_eps",
    "max_grad_norm", "learning_starts", "eval_freq", "patience", "threads", "noisy_sigma", "seed",
    "prioritized_replay_alpha", "pbt_interval", "halving_interval",
)
_FRACTIONS = (
    "sticky_actions", "gamma", "munchausen_alpha", "prioritized_replay_beta0", "tau",
    "exploration_fraction", "exploration_initial_eps", "exploration_final_eps", "eval_eps",
    "max_fault_rate", "lr_plateau_factor", "td_lambda",
)
# fmt: on


def _require(ok: bool, name: str, value: object, why: str) -> None:
    if not ok:
        raise ConfigError(f"{name} {value!r} {why}")


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
