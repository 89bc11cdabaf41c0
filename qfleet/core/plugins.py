"""Plugins: objects from outside qfleet, by their path ``package.module:Name``."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from qfleet.core.errors import ConfigError, one_line
from qfleet.core.signals import FOREIGN_ERRORS, raise_if_signal

_LOCAL = "object"
_LOCAL_OBJECTS: dict[str, Any] = {}
"""Path → an object that cannot be imported: a lambda, a class inside a function …"""


def name_object(value: Any, name: str = "") -> str:
    """Return a path by which ``load_object`` finds this class or function.

    An object that cannot be imported gets a path that only this process knows. ``name`` is for
    objects that have none.
    """
    module_name = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", name or type(value).__name__)
    module = sys.modules.get(module_name or "")
    try:
        if functools.reduce(getattr, name.split("."), module) is value:
            return f"{module_name}:{name}"
    except AttributeError:
        pass
    path = f"{_LOCAL}:{name.rpartition('.')[2].strip('<>')}"
    while _LOCAL_OBJECTS.setdefault(path, value) is not value:
        path += "_"
    return path


def load_object(path: str, kind: str) -> Any:
    """Import ``package.module:Name``; ``kind`` ("network", "environment" …) is for messages."""
    if path in _LOCAL_OBJECTS:
        return _LOCAL_OBJECTS[path]
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{kind} '{path}' is not of the form package.module:Name")
    if module_name == _LOCAL:
        raise ConfigError(
            f"{kind} '{path}' is a Python object that only the process that made it knows; define "
            "it in a module, so that other processes can import it"
        )
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
    except FOREIGN_ERRORS as error:
        raise_if_signal(error)
        raise ConfigError(
            f"cannot import {kind} '{path}': {one_line(error)}; fix the module '{module_name}'"
        ) from error
    try:
        return functools.reduce(getattr, name.split("."), module)
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
