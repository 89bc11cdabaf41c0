"""``qfleet.DQN``: train, continue, predict, save and load in the way of Stable-Baselines3.

The class only translates arguments: ``qfleet.train`` and ``qfleet.resume`` do the work.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from numpy.typing import NDArray

from qfleet.agent.policy import Policy
from qfleet.config.config import Config, check_fields
from qfleet.config.trust import check_trust
from qfleet.config.words import rename
from qfleet.core.errors import ConfigError, UserError, require
from qfleet.engines.offline import LOOP
from qfleet.networks.torsos import ACTIVATIONS
from qfleet.storage.checkpoint import POLICY_SUFFIX
from qfleet.training import api
from qfleet.training.callbacks import Callbacks
from qfleet.training.trained import Trained

POLICIES = {"MlpPolicy": "mlp", "CnnPolicy": "nature", "MultiInputPolicy": "auto"}
"""Policy of Stable-Baselines3 → network."""
OPTIMISERS: dict[Any, str] = {
    getattr(torch.optim, name): name.lower() for name in ("Adam", "AdamW", "RAdam", "SGD")
}
"""``optimizer_class`` → optimizer. Not RMSprop, whose smoothing constant differs from ours."""
NO_COUNTERPART = {"features_extractor_class", "features_extractor_kwargs", "normalize_images"}
NO_COUNTERPART |= {"replay_buffer_class", "replay_buffer_kwargs", "stats_window_size"}
NOT_CHECKED = ("algo", "preset", "name", "run_dir", "network")
"""Arguments of ``qfleet.train`` that are no fields of Config, or may be other objects."""


class DQN:
    """A model that learns, predicts, saves and loads: ``DQN("CartPole-v1").learn(50_000)``.

    Arguments are those of Stable-Baselines3's DQN, ``policy_kwargs`` also one by one, and those of
    ``qfleet.train``: other fields of Config, ``algo``, ``preset``, ``name`` and ``run_dir``. The
    preset that suits the environment sets the rest; ``preset="none"`` gives Stable-Baselines3's
    defaults.
    """

    def __init__(
        self, policy: Any = None, env: Any = None, *, verbose: int = 0, **arguments: Any
    ) -> None:
        """``policy``: a name as in POLICIES; or the environment, if ``env`` is not given."""
        if env is None:
            policy, env = None, policy
        if env is None or (isinstance(env, str) and env in POLICIES):
            raise ConfigError("env is missing; use DQN('CartPole-v1') or DQN('MlpPolicy', env)")
        network = {} if policy is None else {"network": _look_up("policy", policy, POLICIES)}
        self.trained: Trained | None = None
        """The run so far; None before ``learn``."""
        self._policy: Policy | None = None
        self._steps, self._verbose = 0, verbose
        self._board: str | None = arguments.pop("tensorboard_log", None)
        self._arguments = {"env": env, **network, **_translate(arguments)}
        """Arguments of ``qfleet.train``."""
        self._stored = Config()
        """Those that were loaded; they may need consent."""

    def learn(
        self,
        total_timesteps: Any = None,
        callback: Callbacks = None,
        log_interval: int | None = None,  # noqa: ARG002 (counts episodes; our field counts steps)
        tb_log_name: str = "DQN",
        reset_num_timesteps: bool = False,
        progress_bar: bool = False,
    ) -> DQN:
        """Train for this many env steps, or continue the run for as many more; return the model.

        ``total_timesteps`` None: the preset's; when called again, the rest of a run that was
        stopped, else as many as before. ``log_interval``, in episodes, has no effect.
        """
        if reset_num_timesteps and self.trained is not None:
            raise ConfigError("reset_num_timesteps True has no counterpart; learn() continues")
        if total_timesteps is not None:
            total_timesteps = check_fields({"steps": total_timesteps})["steps"]
            require(total_timesteps > 0, "total_timesteps", total_timesteps, "> 0")
        shown: dict[str, Any] = {"callbacks": callback}
        shown["progress"] = progress_bar or self._verbose > 0
        if self.trained is not None:
            done, planned = self.trained.result.env_steps, self.trained.config.steps
            steps = done + (total_timesteps or max(planned - done, 0) or self._steps)
            shown["trust"] = True
            place = self.trained.url or self.trained.folder
            self.trained = cast(Trained, api.resume(place, steps=steps, **shown))
        else:
            given = {**self._arguments, **shown}
            check_trust(self._stored, given.get("trust", False))
            if self._board is not None and not given.keys() & {"run_dir", "name"}:
                folders = (Path(self._board, f"{tb_log_name}_{i}") for i in itertools.count(1))
                given["run_dir"] = next(folder for folder in folders if not folder.exists())
            if total_timesteps is not None:
                given["steps"] = total_timesteps
            self.trained = api.train(**given)
        self._steps = total_timesteps or self._steps or self.trained.config.steps
        # A run that a signal stopped may have no evaluated policy.
        has_best = self.trained.result.best_eval_return is not None
        self._policy = self.trained.policy("best" if has_best else "last")
        return self

    @property
    def num_timesteps(self) -> int:
        """Env steps of the run so far."""
        return 0 if self.trained is None else self.trained.result.env_steps

    @property
    def policy(self) -> Policy:
        """The best policy so far, which predicts and is saved."""
        if self._policy is None:
            raise UserError("the model is not trained; call learn(), or use DQN.load(path)")
        return self._policy

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None,
        deterministic: bool = False, action_masks: Any = None,
    ) -> tuple[NDArray[Any], None]:  # fmt: skip
        """Return ``Policy.predict``; like Stable-Baselines3's, it explores by default."""
        return self.policy.predict(observation, state, episode_start, deterministic, action_masks)

    def save(self, path: Path | str) -> Path:
        """Write the best policy as one file, as ``Policy.save``; return its path."""
        return self.policy.save(path)

    @classmethod
    def load(
        cls, path: Path | str, env: Any = None, device: Any = None, *, trust: bool = False,
        verbose: int = 0, **arguments: Any,
    ) -> DQN:  # fmt: skip
        """Return a model with the policy of a saved file or of a run; ``learn`` starts from it.

        ``env`` and ``arguments`` replace stored values. ``trust``: see ``qfleet.load``.
        """
        file = Path(path if str(path).endswith(POLICY_SUFFIX) else f"{path}{POLICY_SUFFIX}")
        source = file if file.is_file() else path
        named = {} if device is None else {"device": str(device)}
        policy = api.load(source, trust=trust, device=named.get("device"))
        given = {**named, **({} if env is None else {"env": env}), **rename(arguments)}
        replaced = given.keys() | (set() if env is None else {"env_kwargs", "imports"})
        if policy.config.data or "data" in given:  # which sets these, and the length by epochs
            replaced |= {*LOOP, "train_freq", "engine", "epochs"}
            replaced |= {"steps"} if "epochs" in given else set()
        stored = {name: v for name, v in asdict(policy.config).items() if name not in replaced}
        model = cls(verbose=verbose, **stored, **given)
        model._arguments |= {"preset": "none", "init_from": str(source), "trust": trust}
        model._stored, model._policy = Config(**stored), policy
        return model

    def __repr__(self) -> str:
        return f"DQN({self.trained or self._policy or self._arguments['env']})"

    def __getattr__(self, name: str) -> Any:
        # Only for names that do not exist, such as Stable-Baselines3's get_env.
        hint = "its run is .trained (folder, config, result), and what acts is .policy"
        if "env" in name or "space" in name:
            hint = "environments are made by gymnasium"
        raise AttributeError(f"qfleet's DQN has no '{name}'; {hint}")


def _translate(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of Stable-Baselines3's DQN as arguments of ``qfleet.train``."""
    given = {**arguments, **(arguments.get("policy_kwargs") or {})}
    for name in ("policy_kwargs", "optimize_memory_usage"):  # our replay always stores frames once
        given.pop(name, None)
    for name in NO_COUNTERPART & given.keys():
        raise ConfigError(f"{name} has no counterpart in qfleet; leave it out")
    if given.get("seed", 0) is None:
        del given["seed"]
    if "device" in given:
        given["device"] = str(given["device"])
    if isinstance(every := given.get("train_freq"), tuple):
        given["train_freq"] = every[0]
        if every[1] != "step":
            raise ConfigError(f"train_freq must count env steps, as in (4, 'step'), got {every}")
    if "activation_fn" in given:
        kinds = {kind: name for name, kind in ACTIVATIONS.items()}
        given["activation"] = _look_up("activation_fn", given.pop("activation_fn"), kinds)
    if "optimizer_class" in given:
        given["optimizer"] = _look_up("optimizer_class", given.pop("optimizer_class"), OPTIMISERS)
        if given["optimizer"] == "adamw":
            given.setdefault("weight_decay", 0.01)  # torch's default
    for name, value in (given.pop("optimizer_kwargs", None) or {}).items():
        known = {"eps": "optimizer_eps", "weight_decay": "weight_decay"}
        given[_look_up("optimizer_kwargs", name, known)] = value
    check_fields({name: value for name, value in given.items() if name not in NOT_CHECKED})
    return given


def _look_up(argument: str, value: Any, table: dict[Any, str]) -> str:
    if value not in table:
        names = ", ".join(getattr(key, "__name__", key) for key in table)
        got = getattr(value, "__name__", repr(value))
        raise ConfigError(f"{argument} must be one of {names}, got {got}")
    return table[value]
