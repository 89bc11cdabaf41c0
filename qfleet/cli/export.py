"""``qfleet export``: write a policy for another runtime, with proof that it acts alike."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro

from qfleet.cli.parsing import parse
from qfleet.cli.run_options import quiet_stdout
from qfleet.core.errors import ConfigError

HELP = "write a policy as ONNX, torch.export or safetensors, and verify that it acts alike"

DESCRIPTION = """Write the policy of a run to a file that takes the environment's own observations
and returns Q-values and actions. The file is compared with the policy; if they differ, it is
removed.

Examples:
  qfleet export runs/NAME --to onnx
  qfleet export NAME --to torch --compile --out pong.pt2
  qfleet export policy.safetensors --to onnx --tolerance 1e-5
"""


@dataclass(frozen=True)
class ExportOptions:
    run: tyro.conf.Positional[str]
    """Name, folder or URL of the run, or a file that policy.save wrote."""
    to: Literal["onnx", "torch", "safetensors"]
    """Format: ONNX (onnxruntime), torch.export (.pt2) or a file for qfleet.load."""
    out: Path | None = None
    """File to write; default: policy with the format's suffix, in exports/ of the run, beside the
    file, or for a URL in this folder."""
    tolerance: float = 1e-4
    """Largest allowed difference of a Q-value (absolute)."""
    which: Literal["best", "last"] | None = None
    """The best evaluated policy, or the newest checkpoint's; default: best, if there is one."""
    compile: bool = False
    """With --to torch: compile to machine code of this computer (AOTInductor; takes a minute)."""
    trust: bool = False
    """Import the code (module:Class, --import) that the run's configuration names."""
    json: bool = False
    """Print one JSON object and nothing else."""


def run(argv: list[str]) -> int:
    options = parse(ExportOptions, argv, "export", DESCRIPTION)
    from qfleet.core.urls import is_url
    from qfleet.deploy.export import FOLDER, SUFFIXES, export_policy
    from qfleet.training import api
    from qfleet.training.run_folders import find_run

    if api.is_policy_file(options.run):
        source = Path(options.run)
        default = source.with_suffix(SUFFIXES[options.to])
        if options.out is None and default == source:
            raise ConfigError(f"--to {options.to} needs --out: '{source}' is that format already")
    else:
        source = find_run(options.run, api.RUNS, options.which or "best")
        # The copy of a run at a URL is no place for files that nobody would find there.
        exports = Path() if is_url(options.run) else source / FOLDER
        default = exports / f"policy{SUFFIXES[options.to]}"
    with quiet_stdout(options.json):
        policy = api.load(source, options.which, options.trust, "cpu")
        done = export_policy(
            policy, options.out or default, options.to, options.tolerance, options.compile
        )
    if options.json:
        print(json_module.dumps(asdict(done)))
        return 0
    if done.not_recorded is not None:
        print(f"qfleet: compared on random observations only: {done.not_recorded}", file=sys.stderr)
    counts = " and ".join(f"{count} {kind}" for kind, count in done.observations.items())
    print(
        f"{done.path}  ({done.size_bytes:,} bytes, version {done.version}; {counts} "
        f"observations: actions equal, Q-values within {done.largest_difference:.1g})"
    )
    return 0
