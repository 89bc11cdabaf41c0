"""``qfleet push``: publish a policy with its model card."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from qfleet.cli.parsing import parse
from qfleet.core.urls import public_url

HELP = "publish a policy and its model card on the Hugging Face Hub or at a URL"

DESCRIPTION = """Store a run's policy, its model card, configuration, result, newest video and ONNX
export on the Hugging Face Hub (HF_TOKEN) or at any fsspec URL.

Examples:
  qfleet push runs/NAME hf://USER/REPOSITORY
  qfleet push NAME s3://bucket/pong
  qfleet push policy.safetensors file:///models/pong
"""


@dataclass(frozen=True)
class PushOptions:
    run: tyro.conf.Positional[str]
    """Name or folder of the run, or a file that policy.save wrote."""
    target: tyro.conf.Positional[str]
    """hf://USER/REPOSITORY or a URL."""
    which: Literal["best", "last"] | None = None
    """The best evaluated policy, or the newest checkpoint's; default: best, if there is one."""
    private: bool = False
    """Create the hub's repository as a private one; one that exists keeps its visibility."""
    trust: bool = False
    """Import the code (module:Class) of the network that the run's configuration names."""
    json: bool = False
    """Print one JSON object and nothing else."""


def run(argv: list[str]) -> int:
    options = parse(PushOptions, argv, "push", DESCRIPTION)
    from qfleet.agent.policy import best_or_last
    from qfleet.deploy.hub import push
    from qfleet.training import api
    from qfleet.training.run_folders import find_run

    source, which = None, options.which
    if not api.is_policy_file(options.run):
        source = find_run(options.run, api.RUNS, options.which or "best")
        which = which or best_or_last(source)
    policy = api.load(source or Path(options.run), which, options.trust, "cpu")
    names = push(
        policy, source, which or "best", options.target,
        lambda line: print(f"qfleet: {line}", file=sys.stderr), options.private,
    )  # fmt: skip
    if options.json:
        print(json_module.dumps({"target": public_url(options.target), "files": names}))
    else:
        print(f"{public_url(options.target)}  ({', '.join(names)})")
    return 0
