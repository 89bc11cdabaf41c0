"""The environment factory: ``make_envs`` makes a ``core.VectorEnv`` from a configuration.

base       the parts that all vector environments share
registry   from a name to an Atari game, a Gymnasium environment or a user's class
spaces     the supported spaces, and their canonical form
adapters   conversion of other spaces to supported ones
guard      one environment with fault handling
sync       N guarded environments, stepped one after another
processes  N environments in worker processes, which are replaced when they die or hang
worker     the code that runs inside a worker process
native     Gymnasium's own vector environments
atari      ale-py's C++ pool, in this process or, with many games, in worker processes
envpool    EnvPool's C++ pool
threads    the number of threads and processes of C++ pools
latency    a wrapper that delays the steps of any of these
device     tensor environments: MinAtar, some classic control tasks, the user's own
grid       the maze of ``qfleet lab maze``
state      the exact state of an environment, for resumes
"""

from __future__ import annotations

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError
from qfleet.core.types import VectorEnv
from qfleet.envs.device.names import is_tensor_env, make_tensor_env
from qfleet.envs.device.protocol import TensorEnv
from qfleet.envs.device.vector import TensorEnvs
from qfleet.envs.guard import OnFault
from qfleet.envs.latency import DelayedEnvs
from qfleet.envs.registry import ale_game, env_kwargs, has_vector_entry_point, import_modules

_NATIVE_MIN_ENVS = 8
"""Fewest envs for which ``auto`` chooses ``native``. With few envs numpy's cost per call makes a
vectorised CartPole slower than single ones: with one env, five times; they break even between four
and eight."""
PROCESSES_FROM = 32
"""Fewest training envs of all groups for which Atari pools live in worker processes. ale-py creates
one game after another, 0.16 to 0.24 s each, and holds the GIL meanwhile: in this process 128 games
took 20 s in which no other thread ran."""


def make_envs(
    config: Config,
    num_envs: int,
    seed: int,
    *,
    training: bool,
    on_fault: OnFault,
    apart: bool = False,
) -> VectorEnv:
    """Make ``num_envs`` environments from a configuration.

    ``training`` False (evaluation) disables episodic life and latency. ``on_fault`` is called for
    every fault that was handled; other faults raise EnvironmentFault. ``apart``: in a process of
    their own, if creating them would stop the threads of this one.
    """
    envs = _make_quick(config, num_envs, seed, training, on_fault, apart)
    if training and config.step_latency_s > 0:
        return DelayedEnvs(envs, config.step_latency_s)
    return envs


def _make_quick(
    config: Config, num_envs: int, seed: int, training: bool, on_fault: OnFault, apart: bool
) -> VectorEnv:
    import_modules(config)
    if is_tensor_env(config.env):
        return TensorEnvs(make_tensors(config), num_envs, seed)
    game = ale_game(config.env)
    if game is None:
        _refuse_atari_fields(config)
    else:
        _refuse_single_fields(config)
        if config.vectorize in ("sync", "async"):
            raise ConfigError(
                f"vectorize {config.vectorize!r} does not work with Atari game '{config.env}', "
                "which has a pool of its own; use auto"
            )
        if config.vectorize == "envpool":
            from qfleet.envs.envpool import EnvPoolEnvs

            return EnvPoolEnvs(config, game, num_envs, seed, training=training)
        is_large = config.envs >= PROCESSES_FROM and num_envs > 1  # a single env shows the spec
        is_alone = config.engine not in ("actors", "parameter-server")  # which have processes
        is_alone &= (config.engine, config.threads) != ("serial", 1)  # as a worker's own settings
        in_processes = apart or (training and is_large and is_alone)
        if in_processes and config.vectorize == "auto":
            from qfleet.envs.processes import ProcessEnvs

            return ProcessEnvs(config, num_envs, seed, on_fault, game, training=training)
        # Imported only when needed, because importing ale-py takes a fifth of a second.
        from qfleet.envs.atari import AtariEnvs

        return AtariEnvs(config, game, num_envs, seed, training=training)
    if config.vectorize == "envpool":
        raise ConfigError(
            f"vectorize 'envpool' supports only Atari games, not '{config.env}'; use auto"
        )
    mode = _choose(config, num_envs) if config.vectorize == "auto" else config.vectorize
    if mode == "native":
        from qfleet.envs.native import NativeEnvs

        _refuse_single_fields(config)
        return NativeEnvs(config, num_envs, seed)
    if mode == "async":
        from qfleet.envs.processes import ProcessEnvs

        return ProcessEnvs(config, num_envs, seed, on_fault)
    from qfleet.envs.sync import SyncEnvs

    return SyncEnvs(config, num_envs, seed, on_fault)


def make_tensors(config: Config) -> TensorEnv:
    """Make a tensor environment, or raise ConfigError for options that it does not support."""
    import_modules(config)
    env = make_tensor_env(config)
    _refuse_atari_fields(config)
    _refuse_single_fields(config)
    if config.vectorize != "auto" or config.frame_stack > 1:
        raise ConfigError(
            f"'{config.env}' is vectorised as tensors and does not support frame stacks; leave "
            "vectorize and frame_stack alone"
        )
    return env


def steps_in_background(config: Config) -> bool:
    """Return whether these envs step, or wait, without the Python of this process."""
    is_elsewhere = ale_game(config.env) is not None or config.vectorize == "async"
    return is_elsewhere or config.step_latency_s > 0


def _refuse_atari_fields(config: Config) -> None:
    """Raise ConfigError if a field is set that has an effect for Atari games only."""
    plain = Config()
    for name in ("sticky_actions", "episodic_life", "full_action_space", "frame_skip", "noop_max"):
        if getattr(config, name) != getattr(plain, name):
            raise ConfigError(
                f"{name} applies only to Atari games and has no effect on '{config.env}'; remove it"
            )


def _refuse_single_fields(config: Config) -> None:
    """Raise ConfigError if a field is set that pools of environments do not support."""
    for name in ("wrappers", "discretize_actions", "image_max"):
        if getattr(config, name) != getattr(Config(), name):
            raise ConfigError(
                f"{name} applies to single Gymnasium environments, and '{config.env}' is stepped "
                "as a pool here; remove it or use --vectorize sync"
            )


def _choose(config: Config, num_envs: int) -> str:
    is_plain = not env_kwargs(config) and config.frame_stack <= 1
    is_plain = is_plain and not config.wrappers and not config.discretize_actions
    is_plain = is_plain and config.image_max == 255
    if num_envs >= _NATIVE_MIN_ENVS and is_plain and has_vector_entry_point(config.env):
        return "native"
    return "sync"
