"""A trained policy, read back from a run's folder or from a file, and ready to act."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.agent.actor import draw_actions, legal_actions
from qfleet.agent.devices import resolve_device
from qfleet.agent.evaluation import MOST_ENVS, Evaluation, evaluate_policy, evaluation_config
from qfleet.agent.inference import make_greedy
from qfleet.agent.weights import FlatWeights, buffers_of
from qfleet.algorithms.exploration import sample_actions
from qfleet.config.config import Config, check_fields
from qfleet.config.files import read_fields
from qfleet.config.trust import check_trust
from qfleet.config.validation import validate
from qfleet.core.errors import CheckpointError, ConfigError, one_line
from qfleet.core.seeding import Seeds
from qfleet.core.types import EnvSpec, StateDict
from qfleet.envs.adapters import stored_converters
from qfleet.envs.factory import make_envs
from qfleet.envs.objects import env_fields
from qfleet.networks.factory import make_network
from qfleet.storage.checkpoint import (
    POLICY_SUFFIX,
    PUBLISHED_POLICY,
    has_checkpoint,
    load_checkpoint,
    load_policy,
    load_policy_file,
    save_policy_file,
)
from qfleet.storage.rundir import agent_folder, population_folder
from qfleet.storage.spec_json import spec_from_json, spec_to_json
from qfleet.storage.state_checks import check_like, reading
from qfleet.telemetry.faults import FaultLog


class Policy:
    """Observations in, actions out, both with the environment's own numbering.

    Acting needs no environment. ``trust`` allows ``evaluate`` and videos to import the code that
    the configuration names for one.
    """

    def __init__(
        self,
        config: Config,
        spec: EnvSpec,
        state: StateDict,
        device: str | None = None,
        trust: bool = False,
    ) -> None:
        self.config, self.spec, self.trust = config, spec, trust
        self.device = _usable_device(config, spec, device)
        self._observations, self._actions = stored_converters(spec)
        # Not compiled: compiling takes minutes, and most policies act only a few times.
        plain = config.replace(compile="off")
        try:
            self.network = make_network(plain, spec, self.device, Seeds.of(config.seed).network)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            # A stored configuration may ask for any size.
            raise CheckpointError(f"the network cannot be built: {one_line(error)}") from None
        self.network.eval()
        self.weights = FlatWeights(self.network)
        own = {"weights": self.weights.data, "buffers": self.weights.buffers()}
        check_like({name: state[name] for name in own}, own, "the saved policy")
        self.weights.data.copy_(state["weights"])
        for name, buffer in self.weights.buffers().items():
            buffer.copy_(state["buffers"][name])
        self._random = np.random.default_rng(config.seed)
        self.greedy = make_greedy(self.network, self.device)
        """Batches of observations in, actions out, both counted from 0 as inside qfleet."""

    def __repr__(self) -> str:
        weights = self.weights.data.numel()
        return f"Policy({self.config.env}, {self.config.algo}, {weights:,} weights, {self.device})"

    def act(self, obs: Any, action_masks: Any = None) -> int | NDArray[Any]:
        """Return the greedy action of one observation (int), or of a batch (int64 ``[B]``).

        Observations are the environment's own, also those of Dict and Tuple spaces; a batch of
        these has parts ``[B, …]``, a frame stack ``[stack, …]``. Actions of other than Discrete
        spaces are arrays.
        ``action_masks``: which actions are legal, ``[actions]`` or ``[B, actions]``; None: all.
        """
        batch, is_single = self._batch(obs, action_masks)
        actions = self._own(self.greedy(batch))
        if self._actions is None and is_single:
            return int(actions[0])
        return actions[0] if is_single else actions

    def _own(self, actions: NDArray[np.int64]) -> NDArray[Any]:
        """Return the environment's own actions."""
        if self._actions is None:
            return actions + self.spec.first_action
        return self._actions.table[actions]

    @property
    def action_table(self) -> NDArray[Any]:
        """The environment's own action of each index ``[actions, …]``."""
        return self._own(np.arange(self.spec.num_actions))

    def predict(
        self,
        obs: Any,
        state: Any = None,  # noqa: ARG002 (Stable-Baselines3's, for recurrent policies)
        episode_start: Any = None,  # noqa: ARG002
        deterministic: bool = True,
        action_masks: Any = None,
    ) -> tuple[NDArray[Any], None]:
        """Return ``act`` as Stable-Baselines3 does: an array, also of one action, and no state.

        ``deterministic`` False explores with ``exploration_final_eps``, or draws actions from the
        policy of an actor-critic.
        """
        batch, is_single = self._batch(obs, action_masks)
        actions = self.greedy(batch)
        if not deterministic:
            chance = self._random.random(len(batch))
            if self.config.head == "actor-critic":
                logits = torch.from_numpy(self._values(batch))
                actions = sample_actions(logits, torch.from_numpy(chance)).numpy()
            else:
                drawn = draw_actions(self.spec, self._random, len(batch))
                others = legal_actions(self.spec, batch, drawn)
                explores = chance < self.config.exploration_final_eps
                actions = np.where(explores, others, actions)
        own = self._own(actions)
        return (own.squeeze(axis=0) if is_single else own), None

    def q_values(self, obs: Any) -> NDArray[np.float32]:
        """Return the expected return of every action: ``[actions]``, or ``[B, actions]``."""
        batch, is_single = self._batch(obs)
        values = self._values(batch)
        return values[0] if is_single else values

    @torch.inference_mode()
    def _values(self, batch: NDArray[Any]) -> NDArray[np.float32]:
        values = self.network.q_values(torch.from_numpy(batch).to(self.device))
        result: NDArray[np.float32] = values.cpu().numpy()
        return result

    def _batch(self, obs: Any, action_masks: Any = None) -> tuple[NDArray[Any], bool]:
        """Return the network's input, and whether ``obs`` was a single observation."""
        shape = self.spec.unmasked.obs_shape
        if self._observations is not None:
            try:
                obs = self._observations.batch(obs)
            except (ValueError, TypeError, LookupError) as error:
                raise ConfigError(
                    f"observation must be one of the environment's own: {one_line(error)}"
                ) from None
        array = _numbers("observation", obs, self.spec.obs_dtype)
        if self.spec.obs_dtype == "uint8" and np.asarray(obs).dtype == np.bool_:
            raise ConfigError("observation must hold pixels of 0 to 255, got booleans; use × 255")
        is_single = array.shape == shape
        if not is_single and array.shape[1:] != shape:
            raise ConfigError(
                f"observation must have shape {shape} or [B, *{shape}], got {array.shape}"
            )
        batch = np.ascontiguousarray(array[None] if is_single else array)
        if self.spec.num_obs_values:
            batch = batch - self.spec.first_obs_value
            if batch.size and not 0 <= batch.min() <= batch.max() < self.spec.num_obs_values:
                last = self.spec.first_obs_value + self.spec.num_obs_values - 1
                raise ConfigError(
                    f"observation must be one of {self.spec.first_obs_value} … {last}, got {obs!r}"
                )
        elif batch.dtype.kind == "f" and not np.isfinite(batch).all():
            raise ConfigError("observation must be finite, got NaN or Inf")
        if action_masks is not None and not self.spec.is_masked:
            raise ConfigError("this policy was trained without action masks; leave them out")
        return (self._masked(batch, action_masks) if self.spec.is_masked else batch), is_single

    def _masked(self, batch: NDArray[Any], action_masks: Any) -> NDArray[Any]:
        """Return masked observations, as the network takes them."""
        count, stack, actions = len(batch), self.spec.frame_stack, self.spec.num_actions
        given = np.ones(actions) if action_masks is None else action_masks
        legal = _numbers("action_masks", given, "float32") != 0
        if legal.shape not in ((actions,), (count, actions)) or not legal.any(-1).all():
            raise ConfigError(
                f"action_masks must have shape ({actions},) or ({count}, {actions}) and a legal "
                f"action each, got shape {legal.shape} with {legal.sum(-1)} legal"
            )
        legal = np.broadcast_to(
            legal if legal.ndim < 2 else legal[:, None], (count, stack, actions)
        )
        frames = batch.reshape(count, stack, -1)
        rows = np.concatenate((frames, legal.astype(batch.dtype)), axis=2)
        return rows.reshape(count, *self.spec.obs_shape)

    def save(self, path: Path | str) -> Path:
        """Write one safetensors file, without pickle, that ``qfleet.load`` reads; return its path.

        It holds weights, configuration and spec. The suffix .safetensors is added if missing.
        """
        path = Path(path)
        if path.suffix != POLICY_SUFFIX:
            path = path.with_name(path.name + POLICY_SUFFIX)
        state = {"weights": self.weights.data, "buffers": self.weights.buffers()}
        meta = {"config": asdict(self.config), "spec": spec_to_json(self.spec)}
        save_policy_file(path, state, meta)
        return path

    @property
    def env_config(self) -> Config:
        """The configuration of environments to play in: with masks if the policy has them."""
        return self.config.replace(action_masks=self.spec.is_masked)

    def check_trust(self) -> None:
        """Raise ConfigError if making the stored environment imports code without consent."""
        check_trust(self.config, self.trust, training=False)

    def check_spec(self, spec: EnvSpec) -> None:
        """Raise ConfigError if an environment has other observations or actions."""
        if spec.spaces != self.spec.spaces:
            raise ConfigError(
                f"environment '{spec.env_id}' has observations {spec.spaces}; this policy needs "
                f"{self.spec.spaces}"
            )

    def evaluate(
        self,
        episodes: int = 10,
        seed: int = 0,
        epsilon: float | None = None,
        env: Any = None,
        on_step: Callable[[int], None] = lambda _: None,
    ) -> Evaluation:
        """Play episodes in new environments: the policy's own, or ``env`` (an id or an object).

        ``epsilon`` None: the run's own ``eval_eps``.
        ``on_step`` is called at every step with the number of finished episodes.
        """
        epsilon = self.config.eval_eps if epsilon is None else epsilon
        if episodes < 1 or seed < 0 or not 0 <= epsilon <= 1:
            raise ConfigError(
                f"cannot evaluate {episodes} episodes with seed {seed} and epsilon {epsilon}; "
                "episodes must be at least 1, the seed at least 0, epsilon in [0, 1]"
            )
        config, count = self.env_config, min(episodes, MOST_ENVS)
        if env is None:
            self.check_trust()
            config = evaluation_config(config)
        else:
            imports, wrappers = (config.imports, config.wrappers) if self.trust else ((), ())
            given = {"env_kwargs": "{}", "imports": imports, "wrappers": wrappers}
            given |= env_fields(env)
            config = validate(config.replace(**given))
        faults = FaultLog(_print_alert)
        envs = make_envs(config, count, seed, training=False, on_fault=faults)
        with contextlib.closing(envs):
            self.check_spec(envs.spec)
            max_steps, device = self.config.eval_max_steps, self.device
            played = evaluate_policy(
                self.network, envs, episodes, epsilon, device, seed, max_steps, on_step,
                faults, config.max_env_restarts,
            )  # fmt: skip
        assert played is not None, "an evaluation without a limit ends"
        return played


def _numbers(name: str, value: Any, dtype: str) -> NDArray[Any]:
    try:
        array = np.asarray(value)
        wraps = dtype == "uint8" and array.dtype != np.uint8
        if wraps and not ((array >= 0) & (array <= 255) & (array == np.floor(array))).all():
            raise ValueError("its values must be whole, from 0 to 255")
        return array.astype(dtype, copy=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} must be an array of {dtype}: {one_line(error)}") from None


def _usable_device(config: Config, spec: EnvSpec, name: str | None) -> torch.device:
    """Return the device ``name``, else the run's own, or ``auto`` if this machine lacks it."""
    if name is not None:
        return resolve_device(name, spec)
    try:
        return resolve_device(config.device, spec)
    except ConfigError:
        return resolve_device("auto", spec)


def best_or_last(folder: Path) -> Literal["best", "last"]:
    """Return which policy of a run to use by default; print a line if there is no best one."""
    has_best = any((folder / name).exists() for name in ("best", ".old-best"))
    if has_best or not has_checkpoint((population_folder(folder) or folder) / "checkpoints"):
        return "best"
    _print_alert(f"'{folder}' has no best policy yet; using the last one (--which last)")
    return "last"


def load_run_policy(
    folder: Path,
    which: Literal["best", "last"] | None,
    trust: bool,
    device: str | None = None,
) -> Policy:
    """Return the policy in the folder of a run or of ``qfleet pull``, without its environment."""
    if which not in (None, "best", "last"):
        raise ConfigError(f"which must be 'best', 'last' or None, got {which!r}")
    is_run = any((folder / name).exists() for name in ("best", "checkpoints"))
    if which != "last" and not is_run and (folder / PUBLISHED_POLICY).is_file():
        return load_saved_policy(folder / PUBLISHED_POLICY, trust, device)
    config = validate(Config(**read_fields(folder / "config.json")))
    which = which or best_or_last(folder)
    with reading(f"the {which} policy of '{folder}' cannot be loaded"):
        if which == "best":
            best = load_policy(folder / "best")
            state, meta = best.parts["policy"], best.meta
        else:
            state, meta = _newest_policy(folder, config)
        if "spec" in meta:
            return _make_policy(config, meta["spec"], state, trust, device)
        # qfleet 0.1.0 stored no spec: ask the environment.
        check_trust(config, trust, training=False)
        envs = make_envs(config, 1, 0, training=False, on_fault=FaultLog())
        with contextlib.closing(envs):
            return Policy(config, envs.spec, state, device, trust)


def load_saved_policy(path: Path, trust: bool, device: str | None = None) -> Policy:
    """Return the policy in a file that ``Policy.save`` wrote."""
    stored = load_policy_file(path)
    fields = stored.meta["config"]
    try:
        config = validate(Config(**check_fields(dict(fields))))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"'{path}' has a malformed config: {one_line(error)}") from None
    with reading(f"policy '{path}' cannot be loaded"):
        return _make_policy(config, stored.meta["spec"], stored.parts["policy"], trust, device)


def _make_policy(
    config: Config, spec: object, state: StateDict, trust: bool, device: str | None
) -> Policy:
    """Return a policy after a check of its stored spec. Only the network may be imported code."""
    if ":" in config.network:
        check_trust(config, trust, training=False)
    return Policy(config, spec_from_json(spec), state, device, trust)


def _newest_policy(folder: Path, config: Config) -> tuple[StateDict, dict[str, Any]]:
    """Return weights and buffers of the newest checkpoint, and its meta.

    The checkpoint of an agent is its population's.
    """
    if config.population > 1:
        raise ConfigError(
            f"'{folder}' has {config.population} newest policies; give an agent's folder, e.g. "
            f"{agent_folder(folder, 0)}, or use the best"
        )
    run = population_folder(folder)
    checkpoint = load_checkpoint((run or folder) / "checkpoints", None, on_alert=_print_alert)
    learner = checkpoint.parts["learner"]
    if run is None:
        return learner, checkpoint.meta
    members = checkpoint.parts["agents"]["members"]
    if int(folder.name) not in members:
        raise CheckpointError(
            f"agent {folder.name} had stopped before the newest checkpoint of '{run}'; "
            "its best policy is kept"
        )
    # Rows are padded at their end.
    length = sum(math.prod(shape) for _, shape in checkpoint.meta["layout"])
    row = members.index(int(folder.name))
    own = {
        "weights": learner["weights"][row, :length],
        "buffers": buffers_of(learner["buffers"], row),
    }
    return own, checkpoint.meta


def _print_alert(alert: str) -> None:
    print(f"qfleet: {alert}", file=sys.stderr)
