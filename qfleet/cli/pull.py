"""``qfleet pull``: fetch a policy that ``qfleet push`` published."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from pathlib import Path

import tyro

from qfleet.cli.parsing import parse

HELP = "fetch a published policy and verify it"

DESCRIPTION = """Fetch what qfleet push stored into a new folder, and verify every file.

Examples:
  qfleet pull hf://USER/REPOSITORY
  qfleet pull s3://bucket/pong --out pong
"""


@dataclass(frozen=True)
class PullOptions:
    source: tyro.conf.Positional[str]
    """hf://USER/REPOSITORY or a URL."""
    out: Path | None = None
    """Folder to create; default: the last part of the source's name."""
    json: bool = False
    """Print one JSON object and nothing else."""


def run(argv: list[str]) -> int:
    options = parse(PullOptions, argv, "pull", DESCRIPTION)
    from qfleet.deploy.hub import pull

    out = options.out or Path(Path(options.source).name)
    pull(options.source, out)
    if options.json:
        print(json_module.dumps({"path": str(out)}))
    else:
        print(f"{out}  (play with it: qfleet evaluate {out})")
    return 0
