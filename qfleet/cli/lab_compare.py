"""``qfleet lab compare``: two configurations on the same batches."""

from __future__ import annotations

import json
from typing import Annotated, Any

import tyro

from qfleet.cli.parsing import parse
from qfleet.cli.start import config_file
from qfleet.config.config import Config
from qfleet.config.files import read_fields
from qfleet.config.presets import resolve
from qfleet.config.trust import OUTWARD, check_trust
from qfleet.config.words import rename
from qfleet.core.errors import ConfigError
from qfleet.envs.short_names import full_id

_DESCRIPTION = """Train two configurations from the same weights on the same batches, and report
after which update their weights first differ, and by how much.

A and B are fields of the configuration, as name=value separated by commas, or a JSON, YAML or TOML
file, or a run. B takes what it does not name from A. --steps counts updates.

Examples:
  qfleet lab compare engine=serial engine=all-reduce,workers=2
  qfleet lab compare precision=fp64,engine=serial engine=all-reduce,workers=2 --steps 100
  qfleet lab compare env=ALE/Pong-v5,device=cuda,engine=serial,precision=fp32 precision=bf16
"""


def compare(
    first: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")],
    second: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")],
    steps: int = 100,
    trust: bool = False,
    json_: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Compare two configurations.

    Args:
        first: fields of the first configuration, a file or a run.
        second: those in which the second one differs, a file or a run.
        steps: updates of each.
        trust: accept the code that a file or a run imports.
        json_: print machine-readable output only.
    """
    if not 1 <= steps <= 10_000:  # the weights of each are kept
        raise ConfigError(f"steps must be ≥ 1 and ≤ 10000, got {steps}")
    fields = _fields(first, trust)
    configs = [_config(fields), _config(fields | _fields(second, trust))]
    from qfleet.lab.compare import compare as run_both

    report = run_both(configs[0], configs[1], steps)
    if json_:
        told = {"largest": report.largest, "relative": report.relative}
        print(json.dumps({"first_difference": report.first_difference, **told}))
        return 0
    at = report.first_difference
    if at is None:
        print(f"no bit differs in {steps} updates")
        return 0
    print(f"first difference  after update {at}")
    print(f"{'update':>8}  {'largest':>10}  {'relative':>10}")
    shown = {at, *(10**k for k in range(6)), steps}
    for update in sorted(u for u in shown if at <= u <= steps):
        largest, relative = report.largest[update - 1], report.relative[update - 1]
        print(f"{update:>8}  {largest:>10.3g}  {relative:>10.3g}")
    print("largest: of a weight; relative: norms, to how far A has moved from its start")
    return 0


def _fields(text: str, trust: bool) -> dict[str, Any]:
    """Return the fields that one argument names."""
    if "=" not in text:
        stored = read_fields(config_file(text))
        outward = {name: getattr(Config, name) for name in OUTWARD}  # which is not used
        check_trust(Config(**{**stored, **outward}), trust)
        return stored
    pairs = [pair.partition("=") for pair in text.split(",")]
    for name, equals, value in pairs:
        if not equals or not value:
            raise ConfigError(f"'{name}' must be name=value, as in precision=fp64,batch_size=64")
    return rename({name.strip(): value for name, _, value in pairs})


def _config(fields: dict[str, Any]) -> Config:
    fields = dict(fields)
    env = full_id(fields.pop("env", "CartPole-v1"))
    return resolve(env, fields.pop("algo", None), "none", fields=fields)[0]


def run(argv: list[str]) -> int:
    return parse(compare, argv, "lab compare", _DESCRIPTION)
