"""The form of a cluster's address, looked at before anything starts: text in, or a ConfigError."""

from __future__ import annotations

import re

from qfleet.core.errors import ConfigError

_HOST_AND_PORT = re.compile(r"(?:\[[\w:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
"""A name or IPv4 address, or an IPv6 address in brackets: without them its last part is a port."""


def check_address(address: str) -> None:
    """ConfigError unless it is ``host:port`` or ``auto``; nobody is asked whether it answers."""
    found = _HOST_AND_PORT.fullmatch(address)
    if address != "auto" and (found is None or not 1 <= int(found[1]) <= 65535):
        raise ConfigError(f"address '{address}' is no host:port, as in 10.0.0.1:6379")
