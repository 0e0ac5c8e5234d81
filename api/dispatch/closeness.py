"""Chooses which results from two revisions to compare, and decides whether they are close.

Image pixels are compared in canary_comparison.py, because images must be decoded first. Custom
class outputs are compared by workers (workers/jobs/canary_comparison.py).
"""

from __future__ import annotations

import math
import operator
import re
import struct

import msgspec

from shared.models.entry import Tolerance
from shared.models.tasks import Input, Result
from shared.models.tasks.embedding import EmbeddingResult
from shared.models.tasks.image import ImageResult
from shared.models.tasks.similarity import SimilarityResult
from shared.models.tasks.text import GenerationInput, GenerationResult

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+|[^\w\s]")
"""A word, a punctuation mark, or a character in a script without spaces between words."""


def repeat_input(value: Input, result: Result, tolerance: Tolerance) -> Input | None:
    """Returns the input to run on the other revision for comparison with `result`.

    Returns None if the result can't be compared. Text is compared only if the entry sets `rouge_l`
    and the model chose the most likely tokens.
    """
    match value, result:
        case _, EmbeddingResult() | SimilarityResult() | ImageResult():
            return value
        case GenerationInput(temperature=0), GenerationResult() if tolerance.rouge_l is not None:
            return msgspec.structs.replace(value, is_streamed=False)
    return None


def is_close(ours: Result, theirs: Result, tolerance: Tolerance) -> bool | None:
    """Returns whether two results for the same input are within a tolerance, or None if unknown."""
    match ours, theirs:
        case EmbeddingResult(), EmbeddingResult():
            is_as_long = len(ours.vector) == len(theirs.vector)
            return is_as_long and _cosine(ours.vector, theirs.vector) >= tolerance.cosine
        case SimilarityResult(), SimilarityResult():
            # The maximum change in the score if both vectors are rotated by the tolerance.
            turn = math.sqrt(2 * (1 - tolerance.cosine))
            return abs(ours.score - theirs.score) <= 2 * turn
        case GenerationResult(), GenerationResult() if tolerance.rouge_l is not None:
            return rouge_l(ours.text, theirs.text) >= tolerance.rouge_l
    return None


def rouge_l(ours: str, theirs: str) -> float:
    """Returns ROUGE-L: the F1 of the longest common subsequence of words, from 0 to 1 (equal).

    Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries" (2004), section 3, with
    beta 1. Two texts that both contain no words are considered equal.
    """
    first, second = _WORD.findall(ours), _WORD.findall(theirs)
    if not first and not second:
        return 1.0
    return 2 * _common(first, second) / (len(first) + len(second))


def _common(first: list[str], second: list[str]) -> int:
    """Returns the length of the longest common subsequence.

    Uses one bit per word of `first`, updated in one step per word of `second`: 1 ms for 1,000
    words. Source: Hyyro, "Bit-Parallel LCS-length Computation Revisited" (2004).
    """
    positions: dict[str, int] = {}
    for position, word in enumerate(first):
        positions[word] = positions.get(word, 0) | 1 << position
    everywhere = (1 << len(first)) - 1
    unmatched = everywhere
    for word in second:
        matched = unmatched & positions.get(word, 0)
        unmatched = (unmatched + matched | unmatched - matched) & everywhere
    return len(first) - unmatched.bit_count()


def _cosine(first: bytes, second: bytes) -> float:
    """Returns the cosine of two float32 vectors, or NaN if either is a zero vector."""
    ours, theirs = (struct.unpack(f"<{len(each) // 4}f", each) for each in (first, second))
    length = math.hypot(*ours) * math.hypot(*theirs)
    return sum(map(operator.mul, ours, theirs)) / length if length else math.nan
