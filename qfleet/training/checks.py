"""The checks of a whole configuration, before anything starts."""

from __future__ import annotations

import contextlib
from pathlib import Path

from qfleet.config.algorithms import algorithm_switches
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import ConfigError
from qfleet.core.files import change_folder
from qfleet.engines.cluster.baseline import stored_rate
from qfleet.engines.torch_settings import TorchSettings
from qfleet.envs.factory import make_envs
from qfleet.envs.registry import check_env
from qfleet.envs.short_names import full_id
from qfleet.telemetry.faults import FaultLog
from qfleet.training.run_folders import find_one_run


def check_config(config: Config) -> Config:
    """Raise if a run with this configuration would be refused: first by its environment's id."""
    if not config.imports:
        config = config.replace(eval_env=full_id(config.eval_env))
    if not config.data:
        check_env(config)
    elif config.eval_env:  # the dataset's own environment may be missing: then none are played
        check_env(config.replace(env=config.eval_env, eval_env=""))
    config = validate(config)
    switches = algorithm_switches(config.algo)[1]
    if switches and all(getattr(config, name) == getattr(Config, name) for name in switches):
        stands_for = ", ".join(f"{name} {value}" for name, value in switches.items())
        raise ConfigError(
            f"algo '{config.algo}' stands for {stands_for}, of which nothing is set; set it, use "
            f"qfleet.train(algo='{config.algo}'), or name another algo"
        )
    if config.baseline:
        folder = find_one_run(config.baseline, Path("runs"), "summary").absolute()
        stored_rate(folder, config)  # refused now, not at the end of the run
        config = config.replace(baseline=str(folder))
    return config


def check_can_start(config: Config) -> None:
    """Raise unless the environment can be made, before a run that is there is removed."""
    if config.data:
        return
    with contextlib.ExitStack() as after:
        after.callback(change_folder, Path.cwd())  # an environment may change it
        after.callback(TorchSettings().restore)
        make_envs(config, 1, config.seed, training=True, on_fault=FaultLog()).close()
