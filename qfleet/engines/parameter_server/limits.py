"""Limits of the number of workers of a parameter-server run."""

from __future__ import annotations

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError

MOST_GROWTH = 4
"""Largest number of workers, as a multiple of the first: servers reserve a call for each."""


def count_workers(workers: int) -> str:
    return f"{workers} worker{'s' if workers != 1 else ''}"


def check_engine(config: Config) -> None:
    """Refuse an engine whose number of workers cannot change."""
    if config.engine != "parameter-server":
        raise ConfigError(
            f"the number of workers cannot change on engine {config.engine}; "
            "only parameter-server allows it"
        )


def check(config: Config, workers: int) -> None:
    """Refuse a number of workers that the run may not have."""
    check_engine(config)
    most = MOST_GROWTH * config.workers
    if not 1 <= workers <= most:
        raise ConfigError(
            f"{workers} workers: a run that began with {config.workers} may have 1 to {most}; for "
            f"other numbers stop it, then: qfleet resume RUN --workers {max(workers, 1)}"
        )
