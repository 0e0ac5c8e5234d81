"""llama.cpp's requests and replies (tools/server/README.md in its repository, `POST /completion`).

Each field is sent: its defaults change what is asked for (`top_k` 40, `min_p` 0.05, the temperature
last). It gets token ids only. Its own templates, and texts, turn `<|im_end|>` within a message of a
caller into a control token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shared.errors import ConfigurationError, ModelFailed, PenstockError
from shared.models.catalog import Model
from workers.models.base import OutOfMemory, PreparedPrompt
from workers.models.generation.vocabulary import WHITESPACE
from workers.models.generation.writing import NO_NUMBERS

PATH = "/completion"
_ORDER = ("penalties", "temperature", "top_k", "top_p", "min_p")
"""As transformers has them. The bias comes before all of them."""
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
"""Maximum size of a whole reply, and of a stream's last event, which also contains the prompt."""
_SEEDS = 2**32 - 1
"""The largest 32-bit value means a random seed."""
_CACHE_STEP = 256
"""A slot's cache has a multiple of this many tokens."""
_FULL = "Context size has been exceeded"


def settings_of(entry: Model, folder: Path, threads: int) -> dict[str, Any]:
    """Returns the arguments of workers/models/engines/llama_program.py, except socket and key.

    Raises:
        ConfigurationError: the folder has no GGUF file.
    """
    slots = entry.batch.max_items
    # With a separate cache, a token attends only over its text. In a shared cache it attends over
    # the tokens of all texts: 17 tokens/s instead of 26 with 16 texts.
    context_tokens = -(-entry.generation.context_tokens // _CACHE_STEP) * _CACHE_STEP
    shares_cache = slots * entry.generation.context_tokens > entry.budget
    return {
        "model": str(weights_in(folder)),
        "slots": slots,
        "shares_cache": shares_cache,
        "cache_tokens": entry.budget if shares_cache else slots * context_tokens,
        # A step has room for a part of a prompt, and a token of each text.
        "batch_tokens": entry.generation.chunk_tokens + slots,
        "threads": threads,
    }


def weights_in(folder: Path) -> Path:
    """Returns a folder's GGUF file, or the first part of one.

    Raises:
        ConfigurationError: the folder has no GGUF file, or several.
    """
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("mmproj"))
    firsts = [file for file in files if "-of-" not in file.name or "-00001-of-" in file.name]
    if len(firsts) == 1:
        return firsts[0]
    if firsts:
        names = ", ".join(file.name for file in firsts)
        raise ConfigurationError(
            f"{folder}: has {len(firsts)} GGUF files ({names}); set one of them as the source",
            field="source",
        )
    raise ConfigurationError(
        f"{folder}: engine llama.cpp requires a GGUF file, but the folder has none; set a GGUF "
        "file of this model as the source, or leave out engine",
        field="source",
    )


@dataclass(frozen=True)
class Asked:
    """A request to the engine: tokens to read, and how many to write after them.

    `keeps`: whether the slot keeps what it has computed of the same tokens. `bias`: added to the
    logits of tokens. `is_free`: whether the engine does without the grammar.
    """

    ids: Sequence[int]
    slot: int
    keeps: bool
    tokens: int = 0
    is_streamed: bool = False
    bias: Mapping[int, float] | None = None
    is_free: bool = True


def request_of(item: PreparedPrompt, asked: Asked) -> dict[str, Any]:
    # The same numbers are not used again behind what was written before.
    seed = np.random.SeedSequence((item.seed, len(asked.ids))).generate_state(1)[0]
    grammar = "" if asked.is_free or not item.json_schema else _grammar(item.json_schema)
    bias = item.logit_bias if asked.bias is None else asked.bias
    return {
        **_NEUTRAL,
        "prompt": asked.ids,
        "id_slot": asked.slot,
        "cache_prompt": asked.keeps,
        "n_predict": asked.tokens,
        "stream": asked.is_streamed,
        "return_progress": asked.is_streamed,
        "return_tokens": True,
        "response_fields": _FIELDS,
        "samplers": _ORDER,
        "temperature": item.temperature,
        "top_k": item.top_k,
        "top_p": item.top_p,
        "min_p": item.min_p,
        "repeat_penalty": item.repetition_penalty,
        # Of the prompt and the text, all tokens.
        "repeat_last_n": item.length if item.repetition_penalty != 1 else 0,
        "logit_bias": list(bias.items()),
        "seed": int(seed) % _SEEDS,
        "n_probs": max(1, item.logprobs) if item.logprobs >= 0 else 0,
        "grammar": grammar,
    }


def _grammar(json_schema: str) -> str:
    """The schema for llguidance, which is also what follows it here."""
    schema = json.loads(json_schema)
    options = {"whitespace_pattern": WHITESPACE} | schema.get("x-guidance", {})
    return "%llguidance {}\nstart: %json " + json.dumps(schema | {"x-guidance": options})


class Progress(msgspec.Struct):
    """How much of a prompt was read. `cache`: tokens that the slot had."""

    cache: int = 0


class Timings(msgspec.Struct):
    """`cache_n`: tokens of the prompt that the slot had."""

    cache_n: int = 0


class Chance(msgspec.Struct):
    """The log probability of a token."""

    id: int
    logprob: float


class Chosen(Chance):
    """Log probabilities of a token and the likeliest tokens."""

    top_logprobs: list[Chance] = []


class Fault(msgspec.Struct):
    """The error returned in place of a reply."""

    message: str = ""


class Reply(msgspec.Struct):
    """A reply, or an event of a stream."""

    tokens: list[int] = []
    content: str = ""
    tokens_predicted: int = 0
    """Number of tokens so far, including tokens that a stream left out."""
    stop: bool = False
    stop_type: str = ""
    completion_probabilities: list[Chosen] = []
    prompt_progress: Progress | None = None
    timings: Timings | None = None
    error: Fault | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Number of prompt tokens that the slot had. None: the engine does not report it."""
        if self.prompt_progress is not None:
            return self.prompt_progress.cache
        return None if self.timings is None else self.timings.cache_n


_decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def decode_reply(body: bytes | bytearray) -> Reply:
    """Decodes a reply, or the data of an event.

    Raises:
        PenstockError: the engine reports why there is no reply, or the reply is malformed.
    """
    try:
        reply = _decoder.decode(body)
    except msgspec.ValidationError as error:  # a NaN is null in its JSON
        raise ModelFailed(NO_NUMBERS) from error
    except msgspec.MsgspecError as error:
        raise ModelFailed("the engine returned an answer that is not JSON") from error
    if reply.error is not None:
        raise _error_of(reply.error.message)
    return reply


def _error_of(message: str) -> PenstockError:
    if _FULL in message:
        return OutOfMemory("the engine does not have enough memory for all texts")
    # Its message may have words of the request.
    return ModelFailed("the engine rejected the text, or failed on it")
