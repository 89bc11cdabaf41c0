"""Consent to values of a stored configuration that import code or reach outside the run's folder.

A run's folder or a ``--config`` file may come from another person, and the owner of a file need not
be the author of its contents. These values therefore need consent in every stored configuration;
a value that the user gives on the command line or as an argument needs none.
"""

from __future__ import annotations

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError

OUTWARD = {
    "address": (
        "joins the Ray cluster at address {!r}, which can run code in this process",
        "--address HOST:PORT ('' for a cluster of our own)",
    ),
    "replay_dir": ("writes files to replay_dir {!r}", "--replay-dir DIR ('' for RAM)"),
    "record": ("writes a dataset to record {!r}", "--record URL ('' for none)"),
    "track": ("sends data to track {!r}", "--track none|wandb|mlflow"),
}
"""Fields that reach outside the run's folder: what they do, and the option that sets them."""


def needs_trust(config: Config, training: bool = True) -> bool:
    """Return whether a stored configuration has values that need consent.

    Only training uses the fields of OUTWARD: without it, imported code alone needs consent.
    """
    return bool(config.plugins() or (training and _outward(config)))


def check_trust(stored: Config, trust: bool, training: bool = True) -> None:
    """Raise ConfigError if ``stored`` has values that need consent and ``trust`` is not set.

    ``stored`` holds the values from the file only: the caller leaves out each field that the user
    has set anew.
    """
    if trust or not needs_trust(stored, training):
        return
    plugins, outward = stored.plugins(), _outward(stored) if training else []
    deeds = [f"imports code ({', '.join(map(repr, plugins))})"] if plugins else []
    deeds += [OUTWARD[name][0].format(getattr(stored, name)) for name in outward]
    remedy = "accept it with --trust (library: trust=True)"
    if outward:
        options = ", ".join(OUTWARD[name][1] for name in outward)
        # An option does not replace the consent that code needs.
        keep = " if you want other values, and" if plugins else " yourself, or"
        remedy = f"set {options}{keep} {remedy}"
    raise ConfigError(f"the stored configuration {', and '.join(deeds)}; {remedy}")


def _outward(config: Config) -> list[str]:
    default = Config()
    return [name for name in OUTWARD if getattr(config, name) != getattr(default, name)]
