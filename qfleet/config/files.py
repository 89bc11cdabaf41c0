"""Configuration files: JSON, YAML or TOML, by suffix. In: a path. Out: fields of a Config.

A file may have been written by anyone: it is read as data, and no tag of YAML makes an object.
"""

from __future__ import annotations

import importlib
import json
import reprlib
import tomllib
from pathlib import Path
from typing import Any

from qfleet.config.config import check_fields
from qfleet.core.errors import ConfigError, one_line
from qfleet.core.files import read_text

SUFFIXES = {".json": "JSON", ".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}


def read_fields(path: Path) -> dict[str, Any]:
    """Read fields from a file such as a run's ``config.json``; it need not hold all fields."""
    kind = SUFFIXES.get(path.suffix.lower(), "JSON")
    try:
        text = read_text(path)
        values: Any = _parse(text, kind)
    except OSError as error:
        raise ConfigError(f"cannot read configuration '{path}': {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"configuration '{path}' is not {kind}: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"configuration '{path}' must be a {kind} object, got {reprlib.repr(values)}"
        )
    return check_fields(values)


def _parse(text: str, kind: str) -> Any:
    if kind == "YAML":
        return _parse_yaml(text)
    return tomllib.loads(text) if kind == "TOML" else json.loads(text)


def _parse_yaml(text: str) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ConfigError("a YAML file needs a package: `pip install pyyaml`") from None
    try:
        # A few lines of aliases of aliases stand for more values than fit into memory.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("aliases (*name) are not read; write the value")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
