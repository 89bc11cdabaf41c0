"""Matching messages by their key words, so that a sentence can be reworded."""

from __future__ import annotations

import re


def says(*words: str) -> str:
    """Return a pattern for ``match=``: the message holds all of these words, in any order.

    A word that begins or ends with a letter, digit or underscore is matched as a whole: "-1" is
    not found in "-10", nor "step" in "steps".
    """
    return "(?s)" + "".join(f"(?=.*{_whole(word)})" for word in words)


def holds(message: str, *words: str) -> bool:
    """Return whether a message has all of these key words."""
    return re.search(says(*words), message) is not None


def _whole(word: str) -> str:
    before = r"(?<!\w)" if re.match(r"\w", word) else ""
    after = r"(?!\w)" if re.search(r"\w$", word) else ""
    return before + re.escape(word) + after
