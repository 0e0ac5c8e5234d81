"""One item's output: chooses the next token from the logits, and decides when the text ends.

It determines where a text stops, and how much of the text readers may see before that is known. It
also limits the length of a number at the end of an incomplete JSON text.

Randomness depends only on the item's seed and the token's position, so an item gets the same random
numbers on its own, in a batch, and on any worker that resumes it.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from shared.errors import BadInput, ModelFailed, SchemaNotMatched
from shared.models.tasks.text import FinishReason, GenerationResult, TokenChunk, TokenLogprob
from workers.models.base import PreparedPrompt
from workers.models.generation.schemas import why_not_matched
from workers.models.generation.vocabulary import Vocabulary

IdArray = npt.NDArray[np.int64]
Row = npt.NDArray[np.float32]
"""One number per token in the vocabulary."""
_FIRST_TRY = 64
"""Number of tokens to sort first when applying top_p. This is usually enough."""

MIN_LOGPROB = -9999.0
"""Replaces negative infinity, which JSON doesn't have. OpenAI's API returns the same number:
https://platform.openai.com/docs/api-reference/chat/object
"""
NO_NUMBERS = "the model produced invalid numbers for this text"
MAX_DIGITS = 20
"""A double has 17 digits. A repetitive model would otherwise write digits until it runs out of
tokens.
"""
_IN_NUMBERS = frozenset("+-.eE")

IDS = np.dtype("<u4")


def uniform(seed: int, position: int) -> float:
    """Returns the random number, from 0 to 1 (exclusive), for an item's token at `position`.

    Philox 4x64-10 with the seed as its key and the position as its counter (Salmon et al., Parallel
    random numbers: as easy as 1, 2, 3, 2011).
    """
    numbers = np.random.Philox(key=seed & (2**64 - 1), counter=[0, 0, position, 0])
    return float(np.random.Generator(numbers).random())


def adjust(logits: Row, written: Sequence[int], prompt: IdArray, item: PreparedPrompt) -> Row:
    """Returns the logits with an item's bias and penalties applied, in vLLM's order.

    First logit_bias is added. Then repetition_penalty divides or multiplies the logits of tokens in
    the prompt or the text (Keskar et al., CTRL, 2019, section 4.1). Last come OpenAI's penalties
    for tokens in the text: count * frequency_penalty + (count > 0) * presence_penalty.

    Args:
        logits: float32 [vocabulary].
        written: the text's tokens so far.
        prompt: the prompt's tokens, each once.
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
    """Returns the token for `position`. Disallowed tokens have logits of -inf.

    top_k is applied first, then top_p to the remaining tokens, then min_p, as in transformers.
    (vLLM applies min_p first.)
    """
    if item.temperature == 0 or item.top_k == 1:
        return int(np.argmax(logits))
    # Smaller temperatures overflow. At this temperature, a difference of 1e-3 in the logits already
    # decides the choice, just as at 0.
    temperature = max(item.temperature, 1e-5)
    scaled = (logits.astype(np.float64) - float(logits.max())) / temperature
    tokens = _top_k(scaled, item.top_k)
    weights = np.exp(scaled if tokens is None else scaled[tokens])
    if item.top_p < 1:
        likeliest = _top_p(weights, item.top_p)
        tokens, weights = likeliest if tokens is None else tokens[likeliest], weights[likeliest]
    if item.min_p > 0:
        weights = np.where(weights >= item.min_p * weights.max(), weights, 0.0)
    sums = np.cumsum(weights)
    # A token with zero weight is never chosen, because its cumulative sum does not exceed the
    # previous token's.
    at = int(np.searchsorted(sums, uniform(item.seed, position) * sums[-1], side="right"))
    at = min(at, int(np.flatnonzero(weights)[-1]))
    return at if tokens is None else int(tokens[at])


def _top_k(scaled: npt.NDArray[np.float64], top_k: int) -> npt.NDArray[np.int64] | None:
    """Returns the `top_k` most likely tokens, ordered by ID. None means all."""
    if not 0 < top_k < len(scaled):
        return None
    return np.sort(largest(scaled, top_k))


def _top_p(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.int64]:
    """Returns the smallest set of positions whose weights add up to `top_p` of the total, in order.

    Contains at least one.
    """
    wanted = top_p * float(weights.sum())
    count = min(_FIRST_TRY, len(weights))
    while True:
        best = largest(weights, count)
        sums = np.cumsum(weights[best])
        if sums[-1] >= wanted or count == len(weights):
            return np.sort(best[: int(np.searchsorted(sums, wanted)) + 1])
        count = min(8 * count, len(weights))


def largest(values: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.int64]:
    """Returns the positions of the `count` largest values, largest first.

    Equal values are ordered by position.
    """
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    edge = values[np.argpartition(values, -count)[-count:]].min()
    above = np.flatnonzero(values > edge)
    level = np.flatnonzero(values == edge)[: count - len(above)]
    above = above[np.argsort(-values[above], kind="stable")]
    return np.concatenate([above, level])


def log_probabilities(logits: Row) -> Row:
    """Returns the natural logs of the probabilities before temperature, penalties, and masks."""
    shifted = logits - logits.max()
    logprobs: Row = shifted - np.log(np.exp(shifted, dtype=np.float32).sum(dtype=np.float64))
    return logprobs


class NumberLength:
    """Reads JSON as it arrives, and counts the digits at its end. Digits in strings don't count."""

    def __init__(self) -> None:
        self._is_in_string = False
        self._is_escaped = False
        self._digits = 0

    @property
    def is_full(self) -> bool:
        """True if the number at the end should not get any more digits."""
        return self._digits >= MAX_DIGITS

    def read(self, text: str) -> None:
        for character in text:
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string and character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_in_string = not self._is_in_string
            if self._is_in_string or character not in _IN_NUMBERS:
                is_digit = not self._is_in_string and "0" <= character <= "9"
                self._digits = self._digits + 1 if is_digit else 0


class StopFinder:
    """Looks for the first of several stop sequences in a growing text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max((len(stop) for stop in self._stops), default=0)

    def find(self, text: str, known: int) -> tuple[int, str] | None:
        """Returns the position of the first stop sequence and the sequence itself, or None.

        Args:
            text: all of the text so far.
            known: number of characters at the start that are known to contain no complete stop
                sequence.
        """
        if not self._stops:
            return None
        start = max(0, known - self._longest + 1)
        starts = [(at, stop) for stop in self._stops if (at := text.find(stop, start)) >= 0]
        # If two sequences start there, the shorter one was completed first.
        return min(starts, default=None)

    def visible(self, text: str) -> int:
        """Returns how many characters can't be part of a stop sequence that is completed later."""
        if not self._stops:
            return len(text)
        first = max(0, len(text) - self._longest + 1)
        for at in range(first, len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)


class Writing:
    """One item's tokens, one after another.

    Tokens in `item.written_ids` are adopted as if they had been generated here.

    Raises:
        BadInput: the schema can't be used.
        ModelFailed: the tokens generated earlier don't match the schema.
    """

    def __init__(self, item: PreparedPrompt, vocabulary: Vocabulary) -> None:
        self._item = item
        self._vocabulary = vocabulary
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopFinder(item.stop)
        self._matcher = _matcher(item, vocabulary)
        if self._matcher is not None:
            self._mask = np.empty(-(-vocabulary.grammar_size // 32), np.uint32)
        self._number = NumberLength()
        self._prompt_ids: list[int] = []
        self._prompt: IdArray = np.empty(0, np.int64)
        """The prompt's tokens, each once."""
        self._prompt_logprobs: list[TokenLogprob] = []
        if item.is_echoed or item.repetition_penalty != 1:
            self._prompt_ids = np.frombuffer(item.ids, IDS).tolist()
            self._prompt = np.unique(np.array(self._prompt_ids, np.int64))
        self.ids: list[int] = []
        self._text = ""
        self._logprobs = list(item.written_logprobs)
        self.finish: FinishReason | None = None
        """The reason the text ended, or None if it has not."""
        self._stop_sequence = ""
        try:
            for token in np.frombuffer(item.written_ids, IDS).tolist():
                self.add(token)
        except BadInput as error:
            raise ModelFailed(error.message) from error
        # Tokens that readers already received from another worker.
        self._reported_ids = len(self.ids)
        self._reported_text = len(item.written_text)
        self._reported_logprobs = len(self._logprobs)

    def write(self, logits: Row) -> int:
        """Chooses the next token from its logits (float32 [vocabulary]), and returns it.

        Raises:
            ModelFailed: the logits are not numbers.
            BadInput: the schema can't be followed.
        """
        logits = logits[: self._vocabulary.size]
        if not np.isfinite(logits.max()) or np.isnan(logits).any():
            raise ModelFailed(NO_NUMBERS)
        adjusted = adjust(logits, self.ids, self._prompt, self._item)
        token = choose(self._mask_disallowed(adjusted), self._item, self._at)
        if self._item.logprobs >= 0 and token not in self._vocabulary.ends:
            self._logprobs.append(self._logprob_in(log_probabilities(logits), token))
        self.add(token)
        return token

    def echo(self, logits: Any, tokens: Sequence[int]) -> None:
        """Processes the prompt's log probabilities.

        Args:
            logits: float32 [tokens, vocabulary], one row for each token to be predicted.
            tokens: the prompt's next tokens.
        """
        for row, token in zip(logits, tokens, strict=True):
            chances = log_probabilities(row[: self._vocabulary.size])
            self._prompt_logprobs.append(self._logprob_in(chances, token))

    def echo_chosen(self, chances: Sequence[Mapping[int, float] | None]) -> None:
        """Processes the prompt's log probabilities from an engine.

        Args:
            chances: for each token, the log probabilities of the most likely tokens and of the
                token itself. None for the first token.
        """
        for token, row in zip(self._prompt_ids, chances, strict=False):
            if row is not None:
                self._prompt_logprobs.append(self._make_logprob(token, row))

    def _logprob_in(self, row: Row, token: int) -> TokenLogprob:
        count = self._item.logprobs
        return self._logprob_of(row, token, largest(row, count).tolist() if count > 0 else [])

    def add_chosen(self, token: int, chances: Mapping[int, float] | None) -> None:
        """Processes a token that an engine chose.

        Args:
            chances: the log probabilities of the most likely tokens and of the chosen token. None
                if not requested.
        """
        if chances is not None and token not in self._vocabulary.ends:
            self._logprobs.append(self._make_logprob(token, chances))
        self.add(token)

    def _make_logprob(self, token: int, chances: Mapping[int, float]) -> TokenLogprob:
        best = sorted(chances, key=lambda choice: (-chances[choice], choice))[: self._item.logprobs]
        return self._logprob_of(chances, token, best)

    @property
    def _at(self) -> int:
        return len(self.ids)

    def _mask_disallowed(self, logits: Row) -> Row:
        if self._matcher is None:
            return logits
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: len(logits)]
        allowed: Row = np.where(bits.view(np.bool_), logits, np.float32(-np.inf))
        if not np.isfinite(allowed.max()):
            raise self._cannot_follow()
        return self._without_digits(allowed) if self._number.is_full else allowed

    @property
    def must_end_number(self) -> bool:
        """Returns whether the JSON ends with an overlong number, which a grammar can't detect."""
        return self._matcher is not None and self._number.is_full

    def allows(self, token: int) -> bool:
        """Returns whether the schema allows a token next. Without a schema, always True."""
        if self._matcher is None:
            return True
        if token in self._vocabulary.ends:
            return bool(self._matcher.is_accepting())
        return bool(self._matcher.validate_tokens([token]) == 1)

    def mask_allowed(self) -> npt.NDArray[np.bool_] | None:
        """Returns a mask of tokens that the schema allows next, [vocabulary] bool. None means all.

        Raises:
            BadInput: the schema can't be followed.
        """
        if self._matcher is None:
            return None
        return np.isfinite(self._mask_disallowed(np.zeros(self._vocabulary.size, np.float32)))

    def _without_digits(self, allowed: Row) -> Row:
        """Masks digits to end a long number.

        If the number can't end yet (0.000 where it must be above 0), masks zeros.
        """
        for unwanted in (self._vocabulary.digits, self._vocabulary.zeros):
            masked: Row = np.where(unwanted, np.float32(-np.inf), allowed)
            if np.isfinite(masked.max()):
                return masked
        return allowed

    def _cannot_follow(self) -> BadInput:
        """Returns the error for a schema that contradicts itself or exceeds llguidance's limits."""
        return BadInput(
            "the JSON schema can't be followed: no text can continue from here, or finding one "
            "takes too long; simplify the schema",
            field=self._item.schema_field,
        )

    def add(self, token: int) -> None:
        """Adds a token, and checks whether the text ends with it.

        Raises:
            BadInput: the schema does not allow the token.
            SchemaNotMatched: the text has ended but does not match the schema.
        """
        self.ids.append(token)
        if self._matcher is not None and not self._matcher.consume_token(token):
            raise self._cannot_follow()
        known = len(self._text)
        self._text += self._characters.decode(self._vocabulary.token_bytes(token))
        if self._matcher is not None:
            self._number.read(self._text[known:])
        ended = token in self._vocabulary.ends
        if ended or len(self.ids) >= self._item.max_tokens:
            self._finish("stop" if ended else "length")
        stopped = self._stops.find(self._text, known)
        if stopped is not None:
            at, self._stop_sequence = stopped
            self._text = self._text[:at]
            self.finish = "stop"

    def end(self) -> None:
        """Ends the text here, because an engine recognizes additional end-of-text tokens.

        Raises:
            SchemaNotMatched: the text does not match the schema.
        """
        if self.finish is None:
            self._finish("stop")

    def _finish(self, reason: FinishReason) -> None:
        self._text += self._characters.decode(b"", final=True)
        self.finish = reason
        if reason == "stop" and self._item.checked_schema:
            self._check_whole()

    def _check_whole(self) -> None:
        reason = why_not_matched(self._text, self._item.checked_schema)
        if reason:
            raise SchemaNotMatched(
                f"the model generated text that does not match the JSON schema: {reason}. Try "
                "again or use a different seed"
            )

    def take_chunk(self) -> TokenChunk | None:
        """Returns the text added since the last call. None if there is no new text."""
        visible = self._stops.visible(self._text) if self.finish is None else len(self._text)
        if len(self.ids) == self._reported_ids and visible <= self._reported_text:
            return None
        chunk = TokenChunk(
            self._reported_ids,
            self.ids[self._reported_ids :],
            self._text[self._reported_text : visible],
            self._logprobs[self._reported_logprobs :],
        )
        self._reported_ids = len(self.ids)
        self._reported_text = max(self._reported_text, visible)
        self._reported_logprobs = len(self._logprobs)
        return chunk

    def result(self, input_tokens: int, cached_tokens: int) -> GenerationResult:
        assert self.finish is not None, "the text has not ended; this is a bug"
        return GenerationResult(
            text=self._text,
            finish_reason=self.finish,
            tokens=input_tokens + len(self.ids),
            input_tokens=input_tokens,
            output_tokens=len(self.ids),
            cached_tokens=cached_tokens,
            logprobs=self._logprobs,
            prompt_text=self._prompt_text() if self._item.is_echoed else "",
            prompt_logprobs=self._list_prompt_logprobs(),
            stop_sequence=self._stop_sequence,
        )

    def _prompt_text(self) -> str:
        data = b"".join(map(self._vocabulary.read_shown_bytes, self._prompt_ids))
        return data.decode(errors="replace")

    def _list_prompt_logprobs(self) -> list[TokenLogprob]:
        if not self._item.is_echoed or self._item.logprobs < 0:
            return []
        return [
            self._name_token({self._prompt_ids[0]: 0.0}, self._prompt_ids[0]),
            *self._prompt_logprobs,
        ]

    def _logprob_of(
        self, row: Row | Mapping[int, float], token: int, best: list[int]
    ) -> TokenLogprob:
        named = self._name_token(row, token)
        named.top = [self._name_token(row, alternative) for alternative in best]
        return named

    def _name_token(self, row: Row | Mapping[int, float], token: int) -> TokenLogprob:
        """Returns a token's name and its log probability.

        Raises:
            ModelFailed: the log probability is not a number.
        """
        data, logprob = self._vocabulary.read_shown_bytes(token), float(row[token])
        if math.isnan(logprob):
            raise ModelFailed(NO_NUMBERS)
        return TokenLogprob(data.decode(errors="replace"), max(logprob, MIN_LOGPROB), data)


def _matcher(item: PreparedPrompt, vocabulary: Vocabulary) -> LLMatcher | None:
    if not item.json_schema:
        return None
    try:
        return vocabulary.matcher(item.json_schema)
    except ValueError as error:
        raise BadInput(str(error), field=item.schema_field) from error
