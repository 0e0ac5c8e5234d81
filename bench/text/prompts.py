"""Short conversations, all different."""

from __future__ import annotations

from typing import Any

_SUBJECTS = ("rivers", "clocks", "bread", "bridges", "owls", "glass", "tides", "maps")
_ASKS = ("Explain", "Write a story about", "List facts about", "Describe the history of")
_WORDS = "the old mill stands by a quiet river where boats carry grain and salt to the town"


def conversations(count: int, words: int = 0) -> list[list[dict[str, Any]]]:
    """`count` conversations of one message each.

    Args:
        count: how many.
        words: of a text that comes before the question.
    """
    found = []
    for number in range(count):
        told = _WORDS.split() * (words // 16 + 1)
        start = number % 16
        question = f"{_ASKS[number % 4]} {_SUBJECTS[number // 4 % 8]} for visitor {number}."
        text = " ".join([*told[start : start + words], question])
        found.append([{"role": "user", "content": text}])
    return found
