"""How close two texts are: ROUGE-L, by their longest common subsequence of words."""

from __future__ import annotations

import re

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+|[^\w\s]")
"""A word, a punctuation mark, or a character of a script that has no spaces between words."""


def rouge_l(ours: str, theirs: str) -> float:
    """ROUGE-L: the F1 of the longest common subsequence of words, from 0 to 1 (equal words).

    Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries" (2004), section 3, with
    beta 1. Two texts without words are equal.
    """
    first, second = _WORD.findall(ours), _WORD.findall(theirs)
    if not first and not second:
        return 1.0
    return 2 * _common(first, second) / (len(first) + len(second))


def _common(first: list[str], second: list[str]) -> int:
    """The length of the longest common subsequence.

    A bit for each word of `first`, and all of them in one step for each word of `second`: 1 ms for
    1,000 words. Source: Hyyro, "Bit-Parallel LCS-length Computation Revisited" (2004).
    """
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    everywhere = (1 << len(first)) - 1
    left = everywhere
    for word in second:
        matched = left & places.get(word, 0)
        left = (left + matched | left - matched) & everywhere
    return len(first) - left.bit_count()
