"""The model card of a policy: README.md in the form that the Hugging Face Hub reads."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from qfleet.agent.policy import Policy
from qfleet.core.errors import CheckpointError
from qfleet.deploy.models import version_of
from qfleet.storage.checkpoint import load_policy
from qfleet.telemetry.runs import EVAL_RETURN, read_metrics

ONNX, CONFIG, CARD = "policy.onnx", "config.json", "README.md"
VIDEOS = ("replay.mp4", "replay.gif")

_BODY = """
# {title}

A policy for `{env}`, trained with qfleet (`{algo}`).
Mean return: **{score}**.
{video}
## Use

```
qfleet pull {where} --out policy
qfleet evaluate policy
```

Observations: {shape} {dtype}. Actions: {actions}. Version of the weights: `{version}`.
{onnx}
## Reproduce

`config.json` holds every option of the run ({steps:,} env steps, seed {seed}):

```
qfleet train --config policy/config.json
```
"""
_ONNX = """
`policy.onnx` runs without qfleet:

```python
import onnxruntime

session = onnxruntime.InferenceSession("policy/policy.onnx")
q_values, actions = session.run(None, {{{inputs}}})
```
"""


class Score(NamedTuple):
    """An evaluation of the policy during training."""

    mean: float
    std: float | None
    env_steps: int


def score_of(run: Path, which: str) -> Score | None:
    """Return the evaluation of a run's best policy, or its last one; None if it is not known."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if EVAL_RETURN in row]
    if which == "best":
        try:
            steps = load_policy(run / "best").meta.get("env_steps")
        except CheckpointError:
            return None
        rows = [row for row in rows if row["env_steps"] == steps]
    if not rows:
        return None
    return Score(rows[-1][EVAL_RETURN], rows[-1].get("eval/std_reward"), rows[-1]["env_steps"])


def model_card(policy: Policy, score: Score | None, files: Collection[str], where: str) -> str:
    """Return the card. ``files``: names of the files beside it; ``where``: what pull takes."""
    config, bare = policy.config, policy.spec.unmasked
    title, text, metrics = f"{config.algo} on {config.env}", "not measured", []
    if score is not None:
        value = f"{score.mean:.2f}" + ("" if score.std is None else f" +/- {score.std:.2f}")
        metrics = [{"type": "mean_reward", "name": "mean_reward", "value": value}]
        text = f"{value.replace('+/-', '±')} after {score.env_steps:,} env steps"
    task = "reinforcement-learning"
    result: dict[str, Any] = {"task": {"type": task, "name": task}, "metrics": metrics}
    result["dataset"] = {"name": config.env, "type": config.env}
    front: dict[str, Any] = {
        "library_name": "qfleet",
        "pipeline_tag": task,
        "tags": [config.env, config.algo, task, f"deep-{task}", "qfleet"],
        "model-index": [{"name": title, "results": [result]}],
    }
    masks = ', "action_masks": action_masks' if policy.spec.is_masked else ""
    body = _BODY.format(
        title=title, env=config.env, algo=config.algo, score=text, where=shlex.quote(where),
        video="".join(f"\n![An episode]({name})\n" for name in VIDEOS if name in files),
        shape="×".join(map(str, bare.obs_shape)) or "one number,",
        dtype=bare.obs_dtype, actions=bare.num_actions, version=version_of(policy),
        onnx=_ONNX.format(inputs=f'"observations": observations{masks}') if ONNX in files else "",
        steps=config.steps, seed=config.seed,
    )  # fmt: skip
    # JSON is YAML: it quotes whatever an environment is called.
    yaml = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in front.items()]
    return "\n".join(["---", *yaml, "---", body])
