"""URLs as text: how they are told from paths, and how they are shown without secrets."""

from __future__ import annotations

import re
from typing import Any


def is_url(text: str) -> bool:
    """Return whether ``text`` is ``scheme://…``, not a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text) is not None


def public_url(url: str) -> str:
    """Return a URL without user, password and query, which may be secret; a path as it is."""
    if not is_url(url):
        return url
    return re.sub("(?<=://)[^/]*@", "", url.partition("?")[0])


def public_value(value: Any) -> Any:
    """Return a field's value as it may be shown: URLs in it without user, password and query."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(public_value, value))
    return public_url(value) if isinstance(value, str) and is_url(value) else value
