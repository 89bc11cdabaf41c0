"""How many workers a parameter-server run may have."""

from __future__ import annotations

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError

MOST_GROWTH = 4
"""How many times as many workers as it began with a run may have: servers keep calls for them."""


def several(workers: int) -> str:
    return f"{workers} worker{'s' if workers != 1 else ''}"


def check_engine(config: Config) -> None:
    """Whether a run may have other workers at all."""
    if config.engine != "parameter-server":
        raise ConfigError(
            f"a run on {config.engine} keeps its number of workers; only one on parameter-server "
            "takes others in"
        )


def check(config: Config, workers: int) -> None:
    """Whether a run may have so many."""
    check_engine(config)
    most = MOST_GROWTH * config.workers
    if not 1 <= workers <= most:
        raise ConfigError(
            f"{workers} workers: a run that began with {config.workers} may have 1 to {most}; for "
            f"other numbers stop it, then: qfleet resume RUN --workers {max(workers, 1)}"
        )
