"""Short names of environments: ``CartPole`` → ``CartPole-v1``, ``breakout`` → ``ALE/Breakout-v5``.

In: what a person typed. Out: an id. An id is returned as it is, before anything is imported.
"""

from __future__ import annotations

import re
import sys

_SHORT = re.compile(r"(?!.*-v\d+$)[A-Za-z][\w-]*", re.ASCII)
_ID = re.compile(r"(?:(?P<space>.*)/)?(?P<name>.*?)(?:-v(?P<version>\d+))?")


def full_id(name: str) -> str:
    """Return the newest registered id of this name, and print it; without one, return ``name``.

    Ids of Gymnasium itself win over Atari games, and these over those of other namespaces; a name
    in several of the latter is ambiguous, so it is returned as it is.
    """
    if not _SHORT.fullmatch(name):
        return name
    import ale_py  # noqa: F401 (registers the Atari games)
    import gymnasium

    if name in gymnasium.registry:
        return name
    newest: dict[str, tuple[int, str]] = {}
    for env_id, spec in gymnasium.registry.items():
        found = _ID.fullmatch(env_id)
        if found is None or _plain(found["name"]) != _plain(name):
            continue
        space = found["space"] or ""
        if space == "ALE" or not str(spec.entry_point).startswith("ale_py"):
            newest[space] = max(newest.get(space, (-1, "")), (int(found["version"] or 0), env_id))
    first = next((space for space in ("", "ALE") if space in newest), None)
    if first is None and len(newest) != 1:
        return name
    _, chosen = newest[first if first is not None else next(iter(newest))]
    print(f"qfleet: '{name}' is {chosen}", file=sys.stderr)
    return chosen


def _plain(name: str) -> str:
    return re.sub("[_-]", "", name).lower()
