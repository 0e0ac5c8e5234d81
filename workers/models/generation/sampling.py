"""Chooses the next token from logits, on a CPU.

Randomness is a function of the item's seed and of the position of the token alone. So an item gets
the same numbers alone, in company, and on the worker that goes on with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from workers.models.base import PreparedPrompt

IdArray = npt.NDArray[np.int64]
Row = npt.NDArray[np.float32]
"""One number per token of the vocabulary."""
_FIRST_TRY = 64
"""Tokens that are sorted at first for top_p. Mostly they are enough."""


def uniform(seed: int, position: int) -> float:
    """The random number for the token at `position` of an item, from 0 to 1 (excluded).

    Philox 4x64-10 with the seed as its key and the position as its counter (Salmon et al., Parallel
    random numbers: as easy as 1, 2, 3, 2011).
    """
    numbers = np.random.Philox(key=seed & (2**64 - 1), counter=[0, 0, position, 0])
    return float(np.random.Generator(numbers).random())


def adjust(logits: Row, written: Sequence[int], prompt: IdArray, item: PreparedPrompt) -> Row:
    """The logits with the bias and the penalties of an item, in vLLM's order.

    First logit_bias is added. Then repetition_penalty divides or multiplies the logits of tokens
    that the prompt or the text has (Keskar et al., CTRL, 2019, section 4.1). Last go OpenAI's
    penalties for tokens of the text: count * frequency_penalty + (count > 0) * presence_penalty.

    Args:
        logits: float32 [vocabulary].
        written: the tokens of the text so far.
        prompt: the tokens of the prompt, each once.
        item: what is asked for.
    """
    repeats = item.repetition_penalty != 1
    penalizes = bool(written) and bool(item.frequency_penalty or item.presence_penalty)
    if not (item.logit_bias or repeats or penalizes):
        return logits
    logits = logits.copy()
    if item.logit_bias:
        biased = np.fromiter(item.logit_bias, np.int64, len(item.logit_bias))
        logits[biased] += np.fromiter(item.logit_bias.values(), np.float32, len(biased))
    tokens, counts = np.unique(np.asarray(written, np.int64), return_counts=True)
    if repeats:
        seen = np.union1d(prompt, tokens)
        values, penalty = logits[seen], np.float32(item.repetition_penalty)
        logits[seen] = np.where(values < 0, values * penalty, values / penalty)
    if penalizes:
        less = item.frequency_penalty * counts + item.presence_penalty
        logits[tokens] -= less.astype(np.float32)
    return logits


def choose(logits: Row, item: PreparedPrompt, position: int) -> int:
    """The token for `position`. Tokens that are not allowed have logits of -inf.

    top_k is applied first, then top_p to what it leaves, then min_p, as transformers does. (vLLM
    applies min_p first.)
    """
    if item.temperature == 0 or item.top_k == 1:
        return int(np.argmax(logits))
    # Smaller ones overflow. They make a difference of 1e-3 in logits certain, as 0 does.
    temperature = max(item.temperature, 1e-5)
    scaled = (logits.astype(np.float64) - float(logits.max())) / temperature
    tokens = _top_k(scaled, item.top_k)
    weights = np.exp(scaled if tokens is None else scaled[tokens])
    if item.top_p < 1:
        kept = _top_p(weights, item.top_p)
        tokens, weights = kept if tokens is None else tokens[kept], weights[kept]
    if item.min_p > 0:
        weights = np.where(weights >= item.min_p * weights.max(), weights, 0.0)
    sums = np.cumsum(weights)
    # A token without weight is never chosen: its sum does not exceed that of the one before.
    at = int(np.searchsorted(sums, uniform(item.seed, position) * sums[-1], side="right"))
    at = min(at, int(np.flatnonzero(weights)[-1]))
    return at if tokens is None else int(tokens[at])


def _top_k(scaled: npt.NDArray[np.float64], top_k: int) -> npt.NDArray[np.int64] | None:
    """The `top_k` most likely tokens, in order of their ids. None: all."""
    if not 0 < top_k < len(scaled):
        return None
    return np.sort(largest(scaled, top_k))


def _top_p(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.int64]:
    """The fewest positions whose weights are `top_p` of all, in order. At least one."""
    wanted = top_p * float(weights.sum())
    count = min(_FIRST_TRY, len(weights))
    while True:
        best = largest(weights, count)
        sums = np.cumsum(weights[best])
        if sums[-1] >= wanted or count == len(weights):
            return np.sort(best[: int(np.searchsorted(sums, wanted)) + 1])
        count = min(8 * count, len(weights))


def largest(values: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.int64]:
    """The positions of the `count` largest values, the largest first.

    Of equals, the first positions.
    """
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    edge = values[np.argpartition(values, -count)[-count:]].min()
    above = np.flatnonzero(values > edge)
    level = np.flatnonzero(values == edge)[: count - len(above)]
    above = above[np.argsort(-values[above], kind="stable")]
    return np.concatenate([above, level])


def log_probabilities(logits: Row) -> Row:
    """The natural logarithms of the probabilities, before temperature, penalties and masks."""
    shifted = logits - logits.max()
    logprobs: Row = shifted - np.log(np.exp(shifted, dtype=np.float32).sum(dtype=np.float64))
    return logprobs
