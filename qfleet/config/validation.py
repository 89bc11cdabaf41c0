"""Validation: ``validate`` raises ConfigError at the first invalid value of a Config.

``config.check_fields`` checks types; this module checks ranges, and combinations of fields that
exclude each other.
"""

from __future__ import annotations

import math
import re

from qfleet.config.config import FIELDS, Config, check_fields
from qfleet.core.errors import ConfigError

_IN_POPULATIONS = (
    (
        "engine",
        ("auto", "device"),
        "its environments are one batch on a device; use --engine device",
    ),
    ("replay", (False,), "its agents learn from rollouts; use --algo pqn"),
    ("head", ("q",), "its agents learn Q-values; use --algo pqn"),
    ("target_network", (False,), "its agents have no target network; switch it off"),
    ("noisy", (False,), "its agents explore with ε; switch it off"),
    ("lr_plateau_patience", (0,), "agents do not reach a plateau together; use 0"),
    ("exploration_ladder", (False,), "switch it off and vary exploration_final_eps instead"),
    ("step_latency_s", (0.0,), "its environments are tensors and step on the device; use 0"),
)
"""Field, its allowed values, and the tail of the message: the reason and what to do."""
_WITH_WORKERS = (
    ("population", (1,), "a population is one batch on a device; use --engine device"),
    ("env_groups", (0, 1), "a worker steps all its envs together; leave it out"),
    ("lockstep", (False,), "workers collect and learn in turn anyway; leave it out"),
    ("inference_device", ("auto",), "a worker does everything on --device; leave it out"),
)
"""Field, its allowed values, and the tail of the message: the reason and what to do."""
_GRADIENTS_OR_WAYS = ("sync", "async", "ssp", "hybrid", "local-sgd", "admm")
_OF_UPDATES = {
    "backup_workers": ("sync",),
    "balance": ("sync",),
    "staleness": ("ssp",),
    "hybrid_workers": ("hybrid",),
    "hybrid_window_s": ("hybrid",),
    "local_steps": ("easgd", "local-sgd", "admm"),
    "easgd_alpha": ("easgd",),
    "outer_learning_rate": ("local-sgd",),
    "outer_momentum": ("local-sgd",),
    "admm_rho": ("admm",),
    # At a barrier no gradient is stale. easgd has no admission policy and no compression.
    "max_gradient_age": ("async", "ssp", "hybrid"),
    "outlier_sigmas": _GRADIENTS_OR_WAYS,
    "gradient_compression": _GRADIENTS_OR_WAYS,
    "weight_compression": _GRADIENTS_OR_WAYS,
}
"""Fields of a parameter server → the values of ``update`` that use them."""
_OF_SERVERS = (*_OF_UPDATES, "update", "top_k_share", "snapshot_s")
"""Fields that only the parameter server uses."""
_OF_PROCESSES = ("workers", "servers", "address", "worker_timeout_s", "straggler")
"""Fields that only the engines with several processes use."""
_WITHOUT_REPLAY = (
    ("double", False, "λ-returns use a single network; switch it off"),
    ("munchausen", False, "it is defined for bootstrap targets, not for λ-returns; switch it off"),
    ("prioritized_replay", False, "every step of a rollout is used equally often; switch it off"),
    ("n_steps", 1, "for rollouts, td_lambda sets how far returns look ahead; use 1"),
    ("replay_dir", "", "a rollout is not kept in files; leave it out"),
    ("replay_device", "auto", "a rollout is always on the learner's device; leave it out"),
    ("replay_compression", "none", "rollouts are not compressed; use none"),
    ("replay_slack", 0, "a rollout must be learnt from before the next one; use 0"),
)
"""Field, its only allowed value, and the tail of the message: the reason and what to do."""
_WITH_ACTORS = (
    ("replay", (True,), "actors fill a replay memory; choose an algorithm with replay"),
    ("env_groups", (0, 1), "an actor steps all its envs together; use 1"),
    ("lockstep", (False,), "actors do not wait for each other; leave it out"),
    ("inference_device", ("auto",), "actors choose actions on CPUs; leave it out"),
    (
        "replay_device",
        ("auto", "cpu"),
        "replay shards are in RAM; use cpu or leave it out",
    ),
    ("replay_dir", ("",), "replay shards are in RAM; leave it out"),
)
"""Field, its allowed values, and the tail of the message: the reason and what to do."""
_WITH_A_POLICY = (
    ("replay", False, "it learns on-policy; use --no-replay"),
    ("dueling", False, "it already has a separate state value; switch it off"),
    ("noisy", False, "its stochastic policy explores; switch it off"),
    ("exploration_ladder", False, "its stochastic policy explores, without ε; switch it off"),
)
"""Field, its only allowed value with head actor-critic, and the tail of the message."""
# fmt: off
_POSITIVE = (
    "frame_skip", "n_steps", "n_quantiles", "iqn_samples", "iqn_act_samples",
    "iqn_embedding", "munchausen_tau", "batch_size", "buffer_size", "train_freq",
    "gradient_steps", "target_update_interval", "steps", "learning_rate", "n_eval_episodes",
    "log_interval", "checkpoint_freq", "keep_checkpoints", "max_env_restarts", "env_timeout_s",
    "max_abs_q", "prioritized_replay_eps", "lr_plateau_factor", "workers", "servers",
    "local_steps", "hybrid_window_s", "outer_learning_rate", "admm_rho", "snapshot_s",
    "worker_timeout_s",
)
_NON_NEGATIVE = (
    "envs", "env_groups", "block_rows", "replay_slack", "max_episode_steps", "frame_stack",
    "noop_max", "lr_plateau_patience", "optimizer_eps",
    "max_grad_norm", "learning_starts", "eval_freq", "patience", "threads", "noisy_sigma", "seed",
    "prioritized_replay_alpha", "pbt_interval", "halving_interval", "step_latency_s",
    "value_weight", "entropy_weight", "backup_workers", "staleness", "hybrid_workers",
    "max_gradient_age", "outlier_sigmas",
)
_FRACTIONS = (
    "sticky_actions", "gamma", "munchausen_alpha", "prioritized_replay_beta0", "tau",
    "exploration_fraction", "exploration_initial_eps", "exploration_final_eps", "eval_eps",
    "max_fault_rate", "lr_plateau_factor", "td_lambda", "easgd_alpha",
)
# fmt: on


def validate(config: Config) -> Config:
    """Raise ConfigError at the first invalid value; return the configuration."""
    check_fields({name: getattr(config, name) for name in FIELDS})
    _check_rules(config)
    return config


def _check_rules(config: Config) -> None:
    for name, kind in FIELDS.items():
        if kind is float:
            value = getattr(config, name)
            _require(math.isfinite(value), name, value, "must be a finite number")
    for name in _POSITIVE:
        _require(getattr(config, name) > 0, name, getattr(config, name), "must be positive")
    for name in _NON_NEGATIVE:
        _require(getattr(config, name) >= 0, name, getattr(config, name), "must not be negative")
    for name in _FRACTIONS:
        _require(0 <= getattr(config, name) <= 1, name, getattr(config, name), "must lie in [0, 1]")
    _require(config.tau > 0, "tau", config.tau, "must be above 0; use 1 to copy the network")
    _require(
        config.v_min < config.v_max, "v_min", config.v_min, f"must be below v_max {config.v_max}"
    )
    _require(config.n_atoms >= 2, "n_atoms", config.n_atoms, "must be at least 2")
    _require(config.munchausen_clip <= 0, "munchausen_clip", config.munchausen_clip, "must be ≤ 0")
    _require(bool(config.net_arch), "net_arch", config.net_arch, "must have at least one layer")
    _require(
        all(w > 0 for w in config.net_arch),
        "net_arch",
        config.net_arch,
        "must hold positive widths",
    )
    _require(
        config.exploration_final_eps <= config.exploration_initial_eps,
        "exploration_final_eps",
        config.exploration_final_eps,
        f"must not exceed exploration_initial_eps {config.exploration_initial_eps}",
    )
    if config.head == "actor-critic":
        for name, allowed, why in _WITH_A_POLICY:
            value = getattr(config, name)
            _require(value == allowed, name, value, f"does not go with head actor-critic: {why}")
    if config.replay:
        _require(
            config.buffer_size >= (config.n_steps + 2) * config.envs + config.batch_size,
            "buffer_size",
            config.buffer_size,
            f"is too small for {config.envs} envs and batch_size {config.batch_size}; raise it",
        )
    else:
        _check_rollouts(config)
    _require(
        config.engine not in ("serial", "device") or config.env_groups <= 1,
        "env_groups",
        config.env_groups,
        f"is for --engine pipeline; {config.engine} steps all envs together, so leave it out",
    )
    _require(
        config.engine != "device" or not config.lockstep,
        "lockstep",
        config.lockstep,
        "is for --engine pipeline; device always collects and learns in turn, so leave it out",
    )
    _require(
        config.engine != "device" or config.inference_device == "auto",
        "inference_device",
        config.inference_device,
        "is for --engine pipeline; device chooses actions on --device, so leave it out",
    )
    _require(
        config.engine != "device" or config.step_latency_s == 0,
        "step_latency_s",
        config.step_latency_s,
        "is for environments on the host, not --engine device; use another engine or 0",
    )
    _require(
        0 <= config.outer_momentum < 1,
        "outer_momentum",
        config.outer_momentum,
        "must lie in [0, 1); at 1 momentum would never decay",
    )
    _require(config.straggler >= 1, "straggler", config.straggler, "must be at least 1")
    _require(
        config.straggler == 1 or config.step_latency_s > 0,
        "straggler",
        config.straggler,
        "multiplies step_latency_s, which is 0; set step_latency_s too, or use 1",
    )
    _check_fields_of_engines(config)
    if config.address:
        check_address(config.address)
    if config.engine == "parameter-server":
        _check_workers(config)
    if config.engine == "actors":
        _check_actors(config)
    if config.population != 1:
        _check_population(config)
    _require(
        config.json_object("vary") == {} or config.population != 1,
        "vary",
        config.vary,
        "is for --population above 1; set that or leave it out",
    )
    for name in ("pbt_interval", "halving_interval"):
        value = getattr(config, name)
        _require(
            config.population > 1 or value == 0,
            name,
            value,
            "needs several agents; set --population or use 0",
        )
    _require(
        not config.lockstep or config.env_groups <= 1,
        "env_groups",
        config.env_groups,
        "does not go with lockstep, where one group steps at a time; use 1",
    )
    _require(
        config.env_groups <= max(config.envs, 1) or config.envs == 0,
        "env_groups",
        config.env_groups,
        f"must not exceed envs ({config.envs})",
    )
    _require(
        config.learning_starts < config.steps,
        "learning_starts",
        config.learning_starts,
        f"must be less than steps {config.steps}; lower it or raise steps",
    )
    _require(
        config.patience == 0 or config.eval_freq > 0,
        "patience",
        config.patience,
        "needs evaluations: set eval_freq",
    )
    _require(
        config.lr_plateau_patience == 0 or config.eval_freq > 0,
        "lr_plateau_patience",
        config.lr_plateau_patience,
        "needs evaluations: set eval_freq",
    )
    _require(
        config.exploration_ladder is False or 0 < config.exploration_final_eps < 1,
        "exploration_final_eps",
        config.exploration_final_eps,
        "must lie strictly between 0 and 1 with exploration_ladder (Ape-X: 0.4)",
    )
    _require(
        not (config.noisy and config.exploration_ladder),
        "exploration_ladder",
        config.exploration_ladder,
        "does not go with noisy, which explores without ε; switch one of them off",
    )
    config.json_object("env_kwargs")


def means_nothing(name: str, update: str) -> bool:
    """Return whether a parameter server ignores this field with this ``update``."""
    return name in _OF_UPDATES and update not in _OF_UPDATES[name]


def _is_set(config: Config, name: str) -> bool:
    return bool(getattr(config, name) != Config.__dataclass_fields__[name].default)


def _check_fields_of_engines(config: Config) -> None:
    """Raise ConfigError if a field is set that the engine does not use."""
    names: tuple[str, ...] = ()
    engines = "parameter-server"
    if config.engine == "actors":
        names = _OF_SERVERS
    elif config.engine != "parameter-server":
        names, engines = (*_OF_PROCESSES, *_OF_SERVERS), "parameter-server or actors"
    for name in names:
        whose = "parameter-server" if name in _OF_SERVERS else engines
        _require(
            not _is_set(config, name),
            name,
            getattr(config, name),
            f"is for --engine {whose}, not {config.engine}; use that engine or leave it out",
        )


def _check_workers(config: Config) -> None:
    """Check the fields of a parameter server."""
    for name, allowed, why in _WITH_WORKERS:
        value = getattr(config, name)
        _require(value in allowed, name, value, f"does not go with {config.engine}: {why}")
    for name, updates in _OF_UPDATES.items():
        _require(
            config.update in updates or not _is_set(config, name),
            name,
            getattr(config, name),
            f"is for --update {' or '.join(updates)}, not {config.update}; leave it out",
        )
    _require(
        config.backup_workers < config.workers,
        "backup_workers",
        config.backup_workers,
        f"must be smaller than workers ({config.workers})",
    )
    _require(
        config.hybrid_workers <= config.workers,
        "hybrid_workers",
        config.hybrid_workers,
        f"must not exceed workers ({config.workers})",
    )
    _require(
        0 < config.top_k_share <= 1,
        "top_k_share",
        config.top_k_share,
        "must lie in (0, 1]",
    )
    _require(
        config.gradient_compression == "top-k" or not _is_set(config, "top_k_share"),
        "top_k_share",
        config.top_k_share,
        f"is for --gradient-compression top-k, not {config.gradient_compression}; leave it out",
    )
    _require(
        config.update in ("sync", "async", "ssp", "hybrid")
        or config.gradient_compression != "top-k",
        "gradient_compression",
        config.gradient_compression,
        f"is for gradients, but workers of --update {config.update} send weights; use fp16 or bf16",
    )
    _require(
        config.replay or not config.balance,
        "balance",
        config.balance,
        "needs replay: a rollout is always used as a whole; leave it out",
    )


def _check_population(config: Config) -> None:
    """Check the fields of a population."""
    _require(config.population > 0, "population", config.population, "must be positive")
    for name, allowed, why in _IN_POPULATIONS:
        value = getattr(config, name)
        _require(value in allowed, name, value, f"does not go with a population: {why}")
    _require(
        config.pbt_interval == 0 or config.halving_interval == 0,
        "halving_interval",
        config.halving_interval,
        f"does not go with pbt_interval {config.pbt_interval}: agents either copy others "
        "or stop; set one of the two to 0",
    )
    _require(0 < config.pbt_share <= 0.5, "pbt_share", config.pbt_share, "must lie in (0, 0.5]")
    _require(config.pbt_factor > 1, "pbt_factor", config.pbt_factor, "must be above 1")


def _check_actors(config: Config) -> None:
    """Check the fields of the actors engine."""
    for name, allowed, why in _WITH_ACTORS:
        value = getattr(config, name)
        _require(value in allowed, name, value, f"does not go with --engine actors: {why}")
    _require(
        config.servers <= config.workers,
        "servers",
        config.servers,
        f"must not exceed workers {config.workers}: every replay shard needs an actor",
    )


def _check_rollouts(config: Config) -> None:
    """Check the fields of algorithms without replay."""
    _require(
        config.head in ("q", "actor-critic"),
        "head",
        config.head,
        "needs replay: λ-returns are computed from expected values; use q or actor-critic",
    )
    for name, allowed, why in _WITHOUT_REPLAY:
        value = getattr(config, name)
        _require(value == allowed, name, value, f"needs replay: {why}")
    samples, steps = config.gradient_steps * config.batch_size, config.train_freq
    _require(
        samples % steps == 0,
        "gradient_steps",
        config.gradient_steps,
        f"× batch_size {config.batch_size} = {samples} must be a multiple of train_freq {steps}, "
        "so that every step of a rollout is used equally often; set gradient_steps × batch_size to "
        f"{steps} times the number of epochs",
    )
    if config.envs == 0:
        return  # the number of envs is chosen when the run is planned
    _require(
        steps % config.envs == 0 and steps >= 2 * config.envs,
        "train_freq",
        steps,
        f"must give each of {config.envs} envs the same number of steps, at least two; make it a "
        f"multiple of {config.envs}, at least {2 * config.envs}",
    )
    rows = steps // config.envs
    _require(
        config.block_rows == 0 or rows % config.block_rows == 0,
        "block_rows",
        config.block_rows,
        f"must divide a rollout of {rows} rows; use 0 to choose automatically",
    )
    # All envs step together, so the last step may exceed ``steps`` a little. A worker of a
    # parameter server also begins with a whole rollout, even if its share of the steps is smaller.
    taken = -(-config.steps // config.envs) * config.envs
    workers = config.workers if config.engine == "parameter-server" else 1
    starts = -(-config.learning_starts // workers)
    after = f" after learning_starts {config.learning_starts}" if starts else ""
    _require(
        taken - starts >= steps,
        "train_freq",
        steps,
        f"leaves no whole rollout to learn from within steps {config.steps}{after}; lower it or "
        "raise steps",
    )


def _require(ok: bool, name: str, value: object, why: str) -> None:
    if not ok:
        raise ConfigError(f"{name} {value!r} {why}")


_HOST_AND_PORT = re.compile(r"(?:\[[\w:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
"""Host name or IPv4 address, or an IPv6 address in brackets, which separate it from the port."""


def check_address(address: str) -> None:
    """Raise ConfigError unless ``address`` is ``host:port`` or ``auto``. Does not connect."""
    found = _HOST_AND_PORT.fullmatch(address)
    if address != "auto" and (found is None or not 1 <= int(found[1]) <= 65535):
        raise ConfigError(f"address '{address}' is no host:port, as in 10.0.0.1:6379")
