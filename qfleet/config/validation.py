"""Validation: ``validate`` raises ConfigError at the first invalid value of a Config.

``config.check_fields`` checks types and the metadata of a field holds its range; rules about
several fields are in the table ``_rules``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator

from qfleet.config.config import FIELDS, OPTIONS, Config, check_fields
from qfleet.core.errors import ConfigError

_GRADIENT_UPDATES = ("sync", "async", "ssp", "hybrid")
_COMPARE = {"≥": operator.ge, ">": operator.gt, "≤": operator.le, "<": operator.lt}


def validate(config: Config) -> Config:
    """Raise ConfigError at the first invalid value; return the configuration, in its types."""
    given = {name: getattr(config, name) for name in FIELDS}
    # By their texts: 1.0 equals 1, but a field that is a whole number must be 1.
    converted = {k: v for k, v in check_fields(given).items() if repr(v) != repr(given[k])}
    config = config.replace(**converted) if converted else config
    for rules in (_ranges(config), _rules(config)):
        for holds, name, message in rules:
            if not holds:
                raise ConfigError(_sentence(name, getattr(config, name), message))
    if config.address:
        check_address(config.address)
    return config


def _sentence(name: str, value: object, message: str) -> str:
    """Return "gamma must be ≤ 1, got 2; …" or "noisy True does not go with …; …"."""
    problem, semicolon, advice = message.partition(";")
    if problem.startswith("must"):
        return f"{name} {problem}, got {value!r}{semicolon}{advice}"
    return f"{name} {value!r} {message}"


Rules = Iterator[tuple[bool, str, str]]
"""Whether a rule holds, the field to blame if not, and the message: "problem; advice"."""


def _ranges(config: Config) -> Rules:
    for name, option in OPTIONS.items():
        value = getattr(config, name)
        if FIELDS[name] is float:
            yield math.isfinite(value), name, "must be finite"
            yield abs(value) < 1e38, name, "must fit into 32 bits, below 1e38"
        allowed = " and ".join(f"{sign} {bound:g}" for sign, bound in option.bounds.items())
        for number in value if isinstance(value, tuple) else (value,):
            if number is None:
                continue
            if isinstance(number, int):
                yield number < 2**63, name, "must be < 2^63"
            holds = all(_COMPARE[sign](number, bound) for sign, bound in option.bounds.items())
            yield holds, name, f"must be {allowed}"


# fmt: off
def _rules(c: Config) -> Rules:
    """Yield all rules about several fields; the ranges of single fields hold already."""
    default = Config()
    c.json_object("env_kwargs")
    c.json_object("eval_env_kwargs")
    yield c.discretize_actions != 1, "discretize_actions", "must be 0 (off) or ≥ 2"
    yield c.image_max <= 127 or c.image_max == 255, "image_max", (
        "must be ≤ 127 or 255; larger codes are scaled by a whole number, which is 1")
    for path in c.wrappers:
        yield ":" in path, "wrappers", f"must be package.module:Class; correct {path!r}"
    yield not c.json_object("vary") or c.population > 1, "vary", (
        "is for --population above 1; set that or leave it out")
    yield c.straggler == 1 or c.step_latency_s > 0, "straggler", (
        "multiplies step_latency_s, which is 0; set step_latency_s too, or use 1")
    for name, option in OPTIONS.items():
        unset = getattr(c, name) == getattr(default, name)
        if option.engines and c.engine not in option.engines:
            yield unset, name, (
                f"is for --engine {' or '.join(option.engines)}, not {c.engine}; choose that "
                "engine or leave it out")
        elif c.engine == "parameter-server" and not option.used_with(c.update):
            yield unset, name, (
                f"is for --update {' or '.join(option.updates)}, not {c.update}; leave it out")
    for name in ("width", "depth"):
        yield c.network == "impala" or getattr(c, name) == getattr(default, name), name, (
            f"is for --network impala, not {c.network}; choose that network, set net_arch for an "
            "mlp, or leave it out")
    yield c.v_min < c.v_max, "v_min", f"must be < v_max ({c.v_max})"
    yield c.exploration_final_eps <= c.exploration_initial_eps, "exploration_final_eps", (
        f"must be ≤ exploration_initial_eps ({c.exploration_initial_eps})")
    if c.head == "actor-critic":
        no = "does not go with head actor-critic"
        yield not c.replay, "replay", f"{no}, which learns on-policy; use --no-replay"
        yield not c.dueling, "dueling", f"{no}, which has its own state value; switch it off"
        for name in ("noisy", "exploration_ladder"):
            yield not getattr(c, name), name, (
                f"{no}, whose stochastic policy explores; switch it off")
    else:
        yield not c.separate_networks, "separate_networks", (
            f"is for head actor-critic, not {c.head}; switch it off")
    yield c.value_learning_rate == 0 or c.separate_networks, "value_learning_rate", (
        "needs separate_networks, because shared layers have one rate; set that or use 0")
    yield bool(c.data) or c.engine != "offline", "engine", "needs a dataset; set --data"
    if c.loss == "cross-entropy":
        no = "does not go with loss cross-entropy, which imitates actions"
        yield bool(c.data), "loss", "imitates the actions of a dataset; set --data"
        yield c.head == "q", "head", f"{no}; use q"
        for name in ("double", "munchausen"):
            yield not getattr(c, name), name, f"{no}; switch it off"
    for name, heads in {"cql_alpha": ("q", "qr"), "bcq_threshold": ("q",)}.items():
        if getattr(c, name):
            yield bool(c.data), name, "is for training from a dataset; set --data or use 0"
            yield c.head in heads, "head", f"must be {' or '.join(heads)} with {name}"
            yield not c.munchausen, "munchausen", f"does not go with {name}; switch it off"
            yield c.loss != "cross-entropy", "loss", (
                f"does not go with {name}, which corrects TD errors; use huber or mse")
    if c.data:
        yield c.replay, "replay", (
            "does not go with --data, because rollouts must be of the newest policy; choose an "
            "algorithm with replay")
        yield not c.prioritized_replay, "prioritized_replay", (
            "does not go with --data, where every transition comes once per epoch; switch it off")
        yield not c.record, "record", "is for training in environments; leave it out with --data"
        yield not c.balance, "balance", (
            "does not go with --data, whose rows are shared by speed anyway; leave it out")
        yield not c.baseline, "baseline", (
            "is for training in environments; leave it out with --data, and compare time/fps")
    if c.replay:
        least = (c.n_steps + 2) * c.envs + c.batch_size
        yield c.buffer_size >= least, "buffer_size", (
            f"must be ≥ {least} with {c.envs} envs and batch_size {c.batch_size}; raise it")
    else:
        yield from _rollout_rules(c, default)
    if c.engine == "actors":
        no = "does not go with --engine actors"
        yield c.replay, "replay", (
            f"{no}, because actors fill a replay memory; choose an algorithm with replay")
        in_ram = "whose replay shards are in RAM; leave it out, or use --servers 0"
        yield c.servers == 0 or c.replay_device in ("auto", "cpu"), "replay_device", (
            f"{no}, {in_ram}")
        yield c.servers == 0 or not c.replay_dir, "replay_dir", f"{no}, {in_ram}"
        yield c.servers <= c.workers, "servers", (
            f"must be ≤ workers ({c.workers}); every replay shard needs an actor")
    kind = c.gradient_compression
    for name, word in {"top_k_share": "top-k", "powersgd_rank": "powersgd"}.items():
        yield kind == word or getattr(c, name) == getattr(default, name), name, (
            f"is for --gradient-compression {word}, not {kind}; leave it out")
    if c.engine == "parameter-server":
        yield c.servers >= 1, "servers", "must be ≥ 1: they hold the weights"
        yield c.backup_workers < c.workers, "backup_workers", f"must be < workers ({c.workers})"
        yield c.hybrid_workers <= c.workers, "hybrid_workers", f"must be ≤ workers ({c.workers})"
        yield kind != "powersgd", "gradient_compression", (
            "is for --engine all-reduce; use fp16, bf16 or top-k")
        yield kind != "top-k" or c.update in _GRADIENT_UPDATES, "gradient_compression", (
            f"is for gradients, but --update {c.update} sends weights; use fp16 or bf16")
        yield c.replay or not c.overlap, "overlap", (
            "needs replay: a rollout's gradient is of the weights that acted; leave it out")
        yield c.replay or not c.balance, "balance", (
            "needs replay, because a rollout is always used as a whole; leave it out")
    if c.engine == "all-reduce":
        yield not c.sum_gradients, "sum_gradients", (
            "is not for --engine all-reduce, whose ranks average; raise learning_rate instead")
        batch_size = c.batch_per_rank * c.workers or c.batch_size
        yield batch_size >= c.workers, "workers", (
            f"must be ≤ batch_size ({batch_size}), because ranks share every batch; raise it or "
            "set batch_per_rank")
        yield c.replay or (batch_size % c.workers == 0 and c.batch_per_rank == 0), "workers", (
            f"must divide batch_size {batch_size} without replay, and batch_per_rank be 0, "
            "because every step of a rollout is used equally often")
        yield not c.prioritized_replay or batch_size % c.workers == 0, "workers", (
            f"must divide batch_size {batch_size} with prioritized_replay, where all ranks draw "
            "their samples together; change one of them")
        yield ":" not in c.device, "device", (
            "has no number with --engine all-reduce, which gives each rank a GPU of its own; use "
            "cuda, and CUDA_VISIBLE_DEVICES to choose among GPUs")
        yield c.lr_scaling == "none" or c.batch_per_rank > 0, "lr_scaling", (
            "is for a batch that grows with the ranks; set batch_per_rank or use none")
    for name in ("micro_batches", "pipeline_schedule"):
        yield c.pipeline_parallel > 1 or getattr(c, name) == getattr(default, name), name, (
            "is for stages, but pipeline_parallel is 1; raise that or leave it out")
    if c.ranks_per_copy > 1:
        yield from _split_rules(c)
    if c.population > 1:
        no = "does not go with a population"
        yield c.head in ("q", "c51", "qr"), "head", f"{no}; use q, c51 or qr"
        yield not c.replay_dir, "replay_dir", f"{no}, which has a memory per agent; leave it out"
        yield c.lr_plateau_patience == 0, "lr_plateau_patience", (
            f"{no}, whose agents do not reach a plateau together; use 0")
        yield c.dropout == 0, "dropout", f"{no}; use 0"
        yield not c.exploration_ladder, "exploration_ladder", (
            f"{no}; switch it off and vary exploration_final_eps instead")
        yield not (c.pbt_interval and c.halving_interval), "halving_interval", (
            f"does not go with pbt_interval {c.pbt_interval}; set one of the two to 0")
    else:
        for name in ("pbt_interval", "halving_interval"):
            yield getattr(c, name) == 0, name, "needs several agents; set --population or use 0"
    if c.engine == "device" or c.population > 1:
        yield c.step_latency_s == 0, "step_latency_s", (
            "is for environments on the host, not for --engine device or a population; use 0")
    yield c.env_groups <= 1 or c.engine in ("auto", "pipeline", "all-reduce"), "env_groups", (
        f"is for --engine pipeline, not {c.engine}, which steps all envs together; leave it out")
    yield c.env_groups <= 1 or not c.lockstep, "env_groups", (
        "does not go with lockstep, where one group steps at a time; use 1")
    yield c.env_groups <= c.envs or c.envs == 0, "env_groups", f"must be ≤ envs ({c.envs})"
    yield c.learning_starts < c.steps, "learning_starts", (
        f"must be < steps ({c.steps}); lower it or raise steps")
    by_return = c.plateau_metric == "return"
    for name in ("patience", "lr_plateau_patience"):
        yield getattr(c, name) == 0 or c.eval_freq > 0 or not by_return, name, (
            "needs evaluations; set eval_freq")
    yield by_return or bool(c.validation_data), "plateau_metric", (
        "is measured on a dataset; set validation_data or use return")
    yield by_return or bool(c.patience or c.lr_plateau_patience), "plateau_metric", (
        "has no effect alone; set patience or lr_plateau_patience, or use return")
    yield bool(c.data) or not c.validation_data, "validation_data", (
        "is for training from a dataset; set --data or leave it out")
    if c.batch_plateau_factor > 1:
        yield c.lr_plateau_patience > 0, "batch_plateau_factor", (
            "needs a number of evaluations; set lr_plateau_patience")
        yield c.replay, "batch_plateau_factor", (
            "needs replay, because a rollout is always used as a whole; use 1")
    yield not c.exploration_ladder or 0 < c.exploration_final_eps < 1, "exploration_final_eps", (
        "must be > 0 and < 1 with exploration_ladder; Ape-X uses 0.4")
    yield not (c.exploration_ladder and c.noisy), "exploration_ladder", (
        "does not go with noisy, which explores without ε; switch one of them off")


def _split_rules(c: Config) -> Rules:
    """Yield the rules of networks that are split among ranks."""
    name = "tensor_parallel" if c.tensor_parallel > 1 else "pipeline_parallel"
    no = f"does not go with {name}"
    batch_size = c.batch_per_rank * c.workers or c.batch_size
    yield c.workers % c.ranks_per_copy == 0, "workers", (
        f"must be a multiple of tensor_parallel × pipeline_parallel, {c.ranks_per_copy}; change "
        "one of the three")
    yield batch_size % c.workers == 0, "workers", (
        f"must divide batch_size {batch_size} with {name}, where ranks draw equal shares; change "
        "one of them")
    copy = batch_size // c.workers * c.ranks_per_copy
    yield c.micro_batches <= copy, "micro_batches", (
        f"must be ≤ {copy}, the samples of a copy; lower it or raise batch_size")
    yield c.replay, "replay", f"{no}, whose ranks gather batches; choose an algorithm with replay"
    yield ":" not in c.network, "network", f"{no}, which splits qfleet's own networks; use one"
    yield c.precision in ("auto", "fp32", "fp64"), "precision", f"{no}; use fp32"
    yield c.compile != "on", "compile", f"{no}; switch it off"
    yield c.replay_device in ("auto", "cpu"), "replay_device", (
        f"{no}, whose replay is on the host; use cpu")
    yield c.gradient_compression in ("none", "fp16", "bf16"), "gradient_compression", (
        f"{no}, whose ranks would send different entries of the layers that all hold; use bf16")
    for field in ("noisy", "normalize_observations", "dropout"):
        yield not getattr(c, field), field, (
            f"{no}, because ranks would have different noise or statistics; switch it off")
    yield not c.data, "data", f"{no}, whose ranks gather batches of replay; leave one of them out"
    yield c.head != "iqn", "head", f"{no}, because ranks would draw different fractions; use qr"


def _rollout_rules(c: Config, default: Config) -> Rules:
    """Yield the rules of algorithms without replay."""
    yield c.head in ("q", "actor-critic"), "head", (
        "needs replay, because λ-returns are of expected values; use q or actor-critic")
    yield not c.double, "double", (
        "needs replay, because λ-returns use a single network; switch it off")
    yield not c.munchausen, "munchausen", (
        "needs replay, because it is not defined for λ-returns; switch it off")
    yield not c.prioritized_replay, "prioritized_replay", (
        "needs replay, because every step of a rollout is used equally often; switch it off")
    yield c.n_steps == 1, "n_steps", "needs replay, because rollouts use td_lambda; use 1"
    for name in ("replay_dir", "replay_device", "replay_compression"):
        yield getattr(c, name) == getattr(default, name), name, (
            "needs replay, because a rollout is on the learner's device; leave it out")
    yield c.replay_slack == 0, "replay_slack", (
        "needs replay, because a rollout must be learnt from before the next one; use 0")
    yield c.target_update_interval > 0 or c.gradient_steps == 1, "target_update_interval", (
        f"must be > 0 with gradient_steps {c.gradient_steps}, because all gradients of a rollout "
        "have the same returns")
    samples, steps = c.gradient_steps * c.batch_size, c.train_freq
    yield samples % steps == 0, "gradient_steps", (
        f"× batch_size {c.batch_size} = {samples} must be a multiple of train_freq {steps}, "
        "so that every step of a rollout is used equally often; set gradient_steps × batch_size "
        f"to {steps} times the number of epochs")
    if c.envs == 0:
        return  # the number of envs is chosen when the run is planned
    envs = c.envs * (c.workers if c.engine == "all-reduce" else 1)
    yield steps % envs == 0 and steps >= 2 * envs, "train_freq", (
        f"must be a multiple of envs ({envs}), at least {2 * envs}; all envs make the same "
        "number of steps")
    rows = steps // envs
    yield c.block_rows == 0 or rows % c.block_rows == 0, "block_rows", (
        f"must divide a rollout of {rows} rows; use 0 to choose automatically")
    # All envs step together, so the last step may exceed ``steps`` a little. A worker of a
    # parameter server also begins with a whole rollout, even if its share of the steps is smaller.
    taken = -(-c.steps // c.envs) * c.envs
    starts = -(-c.learning_starts // (c.workers if c.engine == "parameter-server" else 1))
    after = f" after learning_starts {c.learning_starts}" if starts else ""
    yield taken - starts >= steps, "train_freq", (
        f"leaves no whole rollout to learn from within steps {c.steps}{after}; lower it or "
        "raise steps")
# fmt: on


_HOST_AND_PORT = re.compile(r"(?:\[[\w:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
"""Host name or IPv4 address, or an IPv6 address in brackets, which separate it from the port."""


def check_address(address: str) -> None:
    """Raise ConfigError unless ``address`` is ``host:port`` or ``auto``. Does not connect."""
    found = _HOST_AND_PORT.fullmatch(address)
    if address != "auto" and (found is None or not 1 <= int(found[1]) <= 65535):
        raise ConfigError(f"address must be host:port, as in 10.0.0.1:6379, got {address!r}")
