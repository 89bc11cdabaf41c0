"""qfleet's PQN beside PureJaxQL's on MinAtar: same machine, same settings, the same evaluator.

    git clone https://github.com/mttga/purejaxql
    pip install jax flax optax chex gymnax==0.0.9
    python benchmarks/against_purejaxql.py --checkout purejaxql --seeds 10

PureJaxQL trains all its seeds at once, as its authors do, compiled before the clock starts; then
qfleet does, as a population. In the end PureJaxQL's weights are put into qfleet's network, which
has the same shape, and both play the same episodes (gymnax's rules: no sticky actions, 1000 steps).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qfleet.config.config import Config
from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.telemetry.aggregate import bootstrap_ci
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions

NOT_STICKY = json.dumps({"sticky_action_prob": 0.0})


def load_peer(checkout: Path) -> Any:
    """PureJaxQL's own module; what is imported for its command line and pictures may be absent."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory as well
    import jax

    if not hasattr(jax, "tree_map"):
        jax.tree_map = jax.tree.map  # removed from JAX after PureJaxQL was written
    for name in ("hydra", "omegaconf", "wandb", "seaborn"):
        if importlib.util.find_spec(name) is None:
            stand_in = types.ModuleType(name)
            stand_in.main = lambda **_: lambda function: function  # type: ignore[attr-defined]
            stand_in.OmegaConf = None  # type: ignore[attr-defined]
            sys.modules[name] = stand_in
    found = importlib.util.spec_from_file_location(
        "pqn_minatar", checkout / "purejaxql" / "pqn_minatar.py"
    )
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["pqn_minatar"] = module
    found.loader.exec_module(module)
    return module


def peer_settings(game: str, config: Config) -> dict[str, Any]:
    """Those of PureJaxQL's ``pqn_minatar.yaml``, taken from ours, so that they are the same."""
    return {
        "ENV_NAME": f"{game}-MinAtar",
        "TOTAL_TIMESTEPS": config.steps,
        "TOTAL_TIMESTEPS_DECAY": config.steps,
        "NUM_ENVS": config.envs,
        "NUM_STEPS": config.train_freq // config.envs,
        "EPS_START": config.exploration_initial_eps,
        "EPS_FINISH": config.exploration_final_eps,
        "EPS_DECAY": config.exploration_fraction,
        "NUM_MINIBATCHES": config.train_freq // config.batch_size,
        "NUM_EPOCHS": config.gradient_steps * config.batch_size // config.train_freq,
        "NORM_TYPE": "layer_norm",
        "LR": config.learning_rate,
        "MAX_GRAD_NORM": config.max_grad_norm,
        "LR_LINEAR_DECAY": config.lr_schedule == "linear",
        "GAMMA": config.gamma,
        "LAMBDA": config.td_lambda,
        "TEST_DURING_TRAINING": True,
        "TEST_INTERVAL": 0.05,
        "TEST_NUM_ENVS": 128,
        "EPS_TEST": 0.0,
        "WANDB_MODE": "disabled",
    }


def train_peer(peer: Any, settings: dict[str, Any], seeds: int) -> dict[str, Any]:
    import jax

    keys = jax.random.split(jax.random.PRNGKey(0), seeds)
    start = time.perf_counter()
    program = jax.jit(jax.vmap(peer.make_train(settings))).lower(keys).compile()
    ready_s = time.perf_counter() - start
    start = time.perf_counter()
    out = jax.block_until_ready(program(keys))
    train_s = time.perf_counter() - start
    state = out["runner_state"][0]
    own = np.asarray(out["metrics"]["test_returned_episode_returns"])[:, -1]
    return {
        "ready_s": ready_s,
        "train_s": train_s,
        "own_returns": own.tolist(),
        "weights": jax.tree.map(np.asarray, state.params),
    }


def in_our_order(params: dict[str, Any]) -> list[np.ndarray]:
    """PureJaxQL's weights ``[seeds, ...]`` in the order and layout of our network's.

    It divides its boards of 0 and 1 by 255; ours come to the first layer as 0 and 1.
    """
    cnn, head = params["CNN_0"], params["Dense_0"]
    convolution, dense = cnn["Conv_0"], cnn["Dense_0"]
    norms = [(cnn[name]["scale"], cnn[name]["bias"]) for name in ("LayerNorm_0", "LayerNorm_1")]
    return [
        convolution["kernel"].transpose(0, 4, 3, 1, 2) / 255, convolution["bias"], *norms[0],
        dense["kernel"].swapaxes(1, 2), dense["bias"], *norms[1],
        head["kernel"], head["bias"],
    ]  # fmt: skip


def play(run: Run, agents: int) -> list[float]:
    """Mean return of every agent's episodes, with the weights that the network has now."""
    played = run.parts.evaluator.play(lambda: False)
    assert played is not None
    return np.array(played.returns).reshape(agents, -1).mean(1).tolist()  # type: ignore[no-any-return]


def put(run: Run, weights: list[np.ndarray]) -> None:
    with torch.no_grad():
        for ours, theirs in zip(run.parts.model.online.parameters(), weights, strict=True):
            agents = theirs if run.config.population > 1 else theirs[0]
            assert agents.shape == ours.shape
            ours.copy_(torch.as_tensor(agents.copy()))


def said(returns: list[float]) -> str:
    low, high = bootstrap_ci(returns, np.mean)
    each = " ".join(f"{value:.1f}" for value in sorted(returns))
    return f"{np.mean(returns):6.1f} [{low:.1f}, {high:.1f}] of {len(returns)} ({each})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=Path, required=True, help="a clone of PureJaxQL")
    parser.add_argument("--game", default="Breakout")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    told = {"population": options.seeds, "steps": options.steps, "env_kwargs": NOT_STICKY}
    told |= {"engine": "device", "eval_freq": 0, "n_eval_episodes": 128, "tensorboard": False}
    config = validate(resolve(f"MinAtar/{options.game}-v1", "pqn", fields=told)[0])

    theirs = train_peer(
        load_peer(options.checkout), peer_settings(options.game, config), options.seeds
    )
    weights = in_our_order(theirs.pop("weights"))
    print(f"PureJaxQL  {theirs['train_s']:6.1f} s, ready in {theirs['ready_s']:.0f} s", flush=True)

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, Path(folder) / "run", RunOptions())
        ours: dict[str, Any] = {"ready_s": time.perf_counter() - start}
        run.go()
        ours["train_s"] = run.wall_s()
        ours["returns"] = play(run, options.seeds)
        put(run, weights)
        theirs["returns"] = play(run, options.seeds)
    print(f"qfleet     {ours['train_s']:6.1f} s, ready in {ours['ready_s']:.0f} s", flush=True)
    print(f"qfleet's pace is {theirs['train_s'] / ours['train_s']:.1f}× PureJaxQL's")
    print("greedy return by one evaluator:")
    print(f"  qfleet    {said(ours['returns'])}")
    print(f"  PureJaxQL {said(theirs['returns'])}")
    print(f"PureJaxQL by its own count: {said(theirs['own_returns'])}")
    if options.json:
        options.json.write_text(json.dumps({"qfleet": ours, "purejaxql": theirs}, indent=1))


if __name__ == "__main__":
    main()
