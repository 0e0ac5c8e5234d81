"""llama.cpp's requests and replies (tools/server/README.md in its repository, `POST /completion`).

Every field is sent, because the defaults would change the request (`top_k` 40, `min_p` 0.05,
temperature last). Requests contain only token IDs, because llama.cpp's own templates and plain text
would turn `<|im_end|>` in a caller's message into a control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shared.errors import MALFORMED, ConfigurationError, ModelFailed, PenstockError
from shared.models.catalog import Model
from workers.models.base import OutOfMemory, PreparedPrompt
from workers.models.engines.dialect import (
    CUT,
    EngineDialect,
    EngineRequest,
    Hardware,
    Launch,
    Post,
    Reply,
    TakeReplies,
    follow_events,
)
from workers.models.generation.schemas import walk_schemas
from workers.models.generation.vocabulary import WHITESPACE
from workers.models.generation.writing import NO_NUMBERS

PATH = "/completion"
_ORDER = ("penalties", "temperature", "top_k", "top_p", "min_p")
"""Samplers in transformers' order. The bias is applied before all of them."""
_NEUTRAL = {
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0.0,
    "dynatemp_range": 0.0,
    "mirostat": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": False,
    "stop": [],
}
_FIELDS = (
    *("tokens", "content", "tokens_predicted", "stop", "stop_type", "timings"),
    "completion_probabilities",
)
"""The fields to include in a complete reply and in a stream's last event, which would otherwise
also contain the prompt.
"""
_SEEDS = 2**32 - 1
"""The largest 32-bit value means a random seed."""
_CACHE_STEP = 256
"""A slot's cache size is a multiple of this many tokens."""
_FULL = "Context size has been exceeded"
_SPACES = {"whitespace_pattern": WHITESPACE}
_ALLOWED_BIAS = 1000.0
"""Added to the logits of all allowed tokens, if there are only a few of them. This way, no other
token is chosen, and the allowed tokens' relative probabilities stay the same (to within 1e-4).
"""
_EXCLUDED_BIAS = -1e9
_FORCING = 1e4
_LOOKED_UP = 256
"""Nearly every chosen token is among this many of the most likely tokens."""
_MAX_ELEMENTS = 10_000
"""Maximum sum of all minItems and maxItems in an engine's grammar. The engines' llguidance makes a
rule for each element: for two million, it takes 13 s and 1.4 GB, during which all texts wait.
"""
_SAFE_LINES = re.compile(r"[\d.]+ [EW] +(srv|slot|que|init|load)\b|GGML_ASSERT|.*\.cpp:\d+: ")


class LlamaCpp(EngineDialect):
    """llama.cpp's server, from the `xllamacpp` wheel."""

    mixes_adapters = False

    def launch(self, hardware: Hardware) -> Launch:
        adapters = [str(path) for path in self.adapters.values()]
        return Launch(
            settings_of(self.entry, self.folder, hardware.threads) | {"adapters": adapters},
            context_path="/props",
            context_keys=("default_generation_settings", "n_ctx"),
            safe_lines=_SAFE_LINES,
        )

    def can_stream(self, item: PreparedPrompt, *, has_written: bool) -> bool:
        """Returns whether all tokens and log probabilities are preserved.

        A stream omits the log probabilities of tokens that end in the middle of a character.
        Penalties also apply to tokens in the prompt. A grammar always starts at its beginning.
        """
        penalizes = bool(item.frequency_penalty or item.presence_penalty)
        is_begun = bool(item.json_schema) and has_written
        return item.logprobs < 0 and not penalizes and not is_begun

    async def ask(self, post: Post, item: PreparedPrompt, request: EngineRequest) -> Reply:
        answer = await _ask(post, self._request_of(item, request))
        reply = Reply(answer.tokens, cached_tokens=answer.cached_tokens, has_ended=answer.has_ended)
        if item.logprobs >= 0 and request.tokens:
            await self._add_chances(post, item, request, answer, reply)
        return reply

    async def stream(
        self, post: Post, item: PreparedPrompt, request: EngineRequest, take: TakeReplies
    ) -> None:
        count, is_whole = 0, False

        def take_events(events: list[bytes]) -> bool:
            nonlocal count, is_whole
            replies = []
            for answer in map(decode_answer, events):
                if answer.prompt_progress is not None:
                    replies.append(Reply(cached_tokens=answer.cached_tokens))
                    continue
                replies.append(self._complete(answer, count))
                count += len(replies[-1].tokens)
                is_whole = answer.stop
            return take(replies)

        async with post(PATH, self._request_of(item, request, streams=True)) as response:
            if response.status != 200:
                decode_answer(await response.read())
            has_enough = await follow_events(response, take_events)
        if not (has_enough or is_whole):
            raise ConnectionError(CUT)

    def _complete(self, answer: Answer, count: int) -> Reply:
        """Adds the tokens that a stream has omitted, if they can be reconstructed.

        A stream omits all of a character's tokens except the last one. They are reconstructed from
        the text, provided that the model generated it the way its tokenizer would split it.

        Args:
            count: number of earlier tokens.
        """
        reply = Reply(answer.tokens, cached_tokens=answer.cached_tokens, has_ended=answer.has_ended)
        missing = answer.tokens_predicted - count - len(answer.tokens)
        if missing <= 0:
            return reply
        ids: list[int] = self.vocabulary.plain_tokenizer.encode(
            answer.content, add_special_tokens=False
        ).ids
        if answer.tokens and len(ids) == missing + 1 and ids[-1] == answer.tokens[-1]:
            return msgspec.structs.replace(reply, tokens=ids)
        return Reply(cached_tokens=answer.cached_tokens, has_lost=True)

    async def _add_chances(
        self, post: Post, item: PreparedPrompt, request: EngineRequest, answer: Answer, reply: Reply
    ) -> None:
        """Adds log probabilities. The server omits tokens that start a character."""
        by_token = iter(answer.completion_probabilities)
        candidate = next(by_token, None)
        rows = []
        for at, token in enumerate(answer.tokens):
            if candidate is not None and candidate.id == token:
                rows.append(candidate.row())
                candidate = next(by_token, None)
            else:
                ids = [*request.ids, *answer.tokens[:at]]
                rows.append(await self._look_up(post, item, replace(request, ids=ids), token))
        reply.chances = rows

    async def _look_up(
        self, post: Post, item: PreparedPrompt, request: EngineRequest, token: int
    ) -> dict[int, float]:
        """Returns the log probabilities for a token and for the most likely tokens.

        The engine is forced to choose a token that is a whole character, but still reports the
        tokens that it would have preferred.
        """
        bias = {self.vocabulary.plain_token: _FORCING}
        forced = replace(request, tokens=1, keeps=True, bias=bias, allowed=None)
        for count in (_LOOKED_UP, self.vocabulary.size):
            answer = await _ask(post, self._request_of(item, forced) | {"n_probs": count})
            best = answer.completion_probabilities[0].top_logprobs
            for candidate in best:
                if candidate.id == token:
                    top = best[: max(1, item.logprobs)]
                    return Chosen(id=token, logprob=candidate.logprob, top_logprobs=top).row()
        raise ModelFailed(NO_NUMBERS)

    def _request_of(
        self, item: PreparedPrompt, request: EngineRequest, *, streams: bool = False
    ) -> dict[str, Any]:
        """Returns a request's body. Always sets all adapters, because the defaults are not 0."""
        scales = [
            {"id": number, "scale": float(name == item.adapter)}
            for number, name in enumerate(self.adapters)
        ]
        return request_of(item, request, streams=streams) | {"lora": scales}


async def _ask(post: Post, body: Mapping[str, Any]) -> Answer:
    async with post(PATH, body) as response:
        return decode_answer(await response.read())


def settings_of(entry: Model, folder: Path, threads: int) -> dict[str, Any]:
    """Returns the settings of workers/models/engines/program.py, except socket and key.

    Raises:
        ConfigurationError: the folder has no GGUF file.
    """
    slots = entry.batch.max_items
    # With separate caches, a token attends only to the text it belongs to. In a shared cache, it
    # attends to all texts' tokens, which yields 17 tokens/s instead of 26 for 16 texts.
    context_tokens = -(-entry.generation.context_tokens // _CACHE_STEP) * _CACHE_STEP
    shares_cache = slots * entry.generation.context_tokens > entry.budget
    return {
        "model": str(weights_in(folder)),
        "slots": slots,
        "shares_cache": shares_cache,
        "cache_tokens": entry.budget if shares_cache else slots * context_tokens,
        # A step has room for part of a prompt, plus a token for each text.
        "batch_tokens": entry.generation.chunk_tokens + slots,
        "threads": threads,
    }


def weights_in(folder: Path) -> Path:
    """Returns a folder's GGUF file, or its first part.

    Raises:
        ConfigurationError: the folder has no GGUF file, or more than one.
    """
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("mmproj"))
    firsts = [file for file in files if "-of-" not in file.name or "-00001-of-" in file.name]
    if len(firsts) == 1:
        return firsts[0]
    if firsts:
        names = ", ".join(file.name for file in firsts)
        raise ConfigurationError(
            f"{folder}: contains {len(firsts)} GGUF files ({names}); set one of them as the source",
            field="source",
        )
    raise ConfigurationError(
        f"{folder}: engine llama.cpp requires a GGUF file, but the folder has none; set "
        "one of this model's GGUF files as the source, or omit engine",
        field="source",
    )


def request_of(
    item: PreparedPrompt, request: EngineRequest, *, streams: bool = False
) -> dict[str, Any]:
    """Returns a request's body, without adapters. Only a stream follows the item's schema."""
    # The random numbers used for earlier tokens are not reused.
    seed = np.random.SeedSequence((item.seed % 2**64, len(request.ids))).generate_state(1)[0]
    return {
        **_NEUTRAL,
        "prompt": request.ids,
        "id_slot": request.slot,
        "cache_prompt": request.keeps,
        "n_predict": request.tokens,
        "stream": streams,
        "return_progress": streams,
        "return_tokens": True,
        "response_fields": _FIELDS,
        "samplers": _ORDER,
        "temperature": item.temperature,
        "top_k": item.top_k,
        "top_p": item.top_p,
        "min_p": item.min_p,
        "repeat_penalty": item.repetition_penalty,
        # All tokens in the prompt and the text.
        "repeat_last_n": item.length if item.repetition_penalty != 1 else 0,
        "logit_bias": list(_bias(item, request).items()),
        "seed": int(seed) % _SEEDS,
        "n_probs": max(1, item.logprobs) if item.logprobs >= 0 else 0,
        "grammar": grammar_of(item.json_schema, _SPACES) if streams and item.json_schema else "",
    }


def _bias(item: PreparedPrompt, request: EngineRequest) -> Mapping[int, float]:
    bias = item.logit_bias if request.bias is None else request.bias
    if request.allowed is None:
        return bias
    excluded = np.flatnonzero(~request.allowed)
    if 2 * len(excluded) <= len(request.allowed):
        return {**bias, **dict.fromkeys(excluded.tolist(), _EXCLUDED_BIAS)}
    return {
        token: bias.get(token, 0.0) + _ALLOWED_BIAS
        for token in np.flatnonzero(request.allowed).tolist()
    }


def grammar_of(json_schema: str, spaces: Mapping[str, Any]) -> str:
    """Returns the schema for llguidance, the library that our own matcher uses.

    Large element counts are left out, because our matcher enforces them anyway.

    Args:
        spaces: the library's options for whitespace, unless the schema sets them.
    """
    schema, unused = json.loads(json_schema), _MAX_ELEMENTS
    for part in walk_schemas(schema):
        for keyword in ("minItems", "maxItems"):
            # In fields that are not keywords, counts may also be negative.
            if isinstance(count := part.get(keyword), int) and count > 0:
                if count > unused:
                    del part[keyword]
                else:
                    unused -= count
    options = {**spaces, **schema.get("x-guidance", {})}
    return "%llguidance {}\nstart: %json " + json.dumps(schema | {"x-guidance": options})


class Progress(msgspec.Struct):
    """How much of a prompt has been read. `cache`: number of tokens that the slot already had."""

    cache: int = 0


class Timings(msgspec.Struct):
    """`cache_n`: number of prompt tokens that the slot already had."""

    cache_n: int = 0


class Chance(msgspec.Struct):
    """The log probability of a token."""

    id: int
    logprob: float


class Chosen(Chance):
    """Log probabilities of a token and the most likely tokens."""

    top_logprobs: list[Chance] = []

    def row(self) -> dict[int, float]:
        return {chance.id: chance.logprob for chance in self.top_logprobs} | {self.id: self.logprob}


class Fault(msgspec.Struct):
    """The error returned instead of a response."""

    message: str = ""


class Answer(msgspec.Struct):
    """A response, either whole or as one event in a stream."""

    tokens: list[int] = []
    content: str = ""
    tokens_predicted: int = 0
    """Number of tokens so far, including tokens that a stream omitted."""
    stop: bool = False
    stop_type: str = ""
    completion_probabilities: list[Chosen] = []
    prompt_progress: Progress | None = None
    timings: Timings | None = None
    error: Fault | None = None

    @property
    def has_ended(self) -> bool:
        """True if the engine recognized an end-of-text token that our files don't specify."""
        return self.stop and self.stop_type == "eos"

    @property
    def cached_tokens(self) -> int | None:
        """Number of prompt tokens that the slot already had. None if not reported."""
        if self.prompt_progress is not None:
            return self.prompt_progress.cache
        return None if self.timings is None else self.timings.cache_n


_decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def decode_answer(body: bytes | bytearray) -> Answer:
    """Decodes a response, or an event's data.

    Raises:
        PenstockError: the engine returned an error instead, or the response is malformed.
    """
    try:
        answer = _decoder.decode(body)
    except msgspec.ValidationError as error:  # its JSON uses null for NaN
        raise ModelFailed(NO_NUMBERS) from error
    except MALFORMED as error:
        raise ModelFailed("the engine returned a response that is not valid JSON") from error
    if answer.error is not None:
        raise _error_of(answer.error.message)
    return answer


def _error_of(message: str) -> PenstockError:
    if _FULL in message:
        return OutOfMemory("the engine does not have enough memory for all texts")
    # Its message may contain words from the request.
    return ModelFailed("the engine rejected the text or failed to process it")
