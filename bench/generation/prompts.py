"""Distinct conversations: short ones, and ones with mixed lengths."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

_SUBJECTS = ("rivers", "clocks", "bread", "bridges", "owls", "glass", "tides", "maps")
_ASKS = ("Explain", "Write a story about", "List facts about", "Describe the history of")
_WORDS = "the old mill stands by a quiet river where boats carry grain and salt to the town"


class MixedPrompt(NamedTuple):
    """A conversation, and the number of tokens to generate."""

    messages: list[dict[str, Any]]
    tokens: int


def mixed(count: int, seed: int) -> list[MixedPrompt]:
    """Returns `count` prompts of 20 to 400 tokens (with template), for 16 to 128 output tokens.

    A word in these texts is about one SmolLM2 token. The template and question take about 45
    tokens.
    """
    drawn = random.Random(seed)
    return [
        MixedPrompt(
            conversations(1, max(0, drawn.randint(20, 400) - 45), first=drawn.randrange(10**6))[0],
            drawn.randint(16, 128),
        )
        for _ in range(count)
    ]


def conversations(count: int, words: int = 0, first: int = 0) -> list[list[dict[str, Any]]]:
    """Returns `count` conversations with one message each.

    Args:
        words: number of words before the question.
        first: number of the first conversation.
    """
    prompts = []
    for number in range(first, first + count):
        vocabulary = _WORDS.split() * (words // 16 + 1)
        start = number % 16
        question = f"{_ASKS[number % 4]} {_SUBJECTS[number // 4 % 8]} for visitor {number}."
        text = " ".join([*vocabulary[start : start + words], question])
        prompts.append([{"role": "user", "content": text}])
    return prompts


WARM_UP = mixed(1, seed=99)
"""The prompt that is sent before anything is timed."""
