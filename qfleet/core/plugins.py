"""Plugins: import an object from outside qfleet by its path, ``package.module:Name``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from qfleet.core.errors import ConfigError, one_line


def load_object(path: str, kind: str) -> Any:
    """Import ``package.module:Name``; ``kind`` ("network", "environment" …) is for messages."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{kind} '{path}' is not of the form package.module:Name")
    add_current_folder()
    importlib.invalidate_caches()  # the file may be newer than the import system's listing
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        fix = (
            "run from the folder that holds it, or install it"
            if error.name and (module_name + ".").startswith(error.name + ".")
            else "install what it imports"
        )
        raise ConfigError(f"cannot import {kind} '{path}': {one_line(error)}; {fix}") from error
    except Exception as error:
        raise ConfigError(
            f"cannot import {kind} '{path}': {one_line(error)}; fix the module '{module_name}'"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(
            f"{kind} '{path}': module '{module_name}' has no '{name}'; check the name behind ':'"
        ) from None


def add_current_folder() -> None:
    """Append the current folder to sys.path, which a console script lacks.

    It comes last, so that it shadows no other module.
    """
    current = os.getcwd()
    if current not in sys.path and "" not in sys.path:
        sys.path.append(current)
