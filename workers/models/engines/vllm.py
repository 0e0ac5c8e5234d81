"""vLLM's requests and replies (vllm/entrypoints/openai/completion/protocol.py in its repository).

vLLM's dependencies conflict with ours, so its command runs in a separate environment. This module
was written for version 0.32.

Prompts are token IDs, and so are all replies. A stream reports the number of cached tokens only at
its end, which a stopped text never reaches, so a separate, non-streamed reply reports it first.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shared.errors import MALFORMED, BadInput, ConfigurationError, ModelFailed, PenstockError
from shared.models.catalog import Model
from shared.models.entry import MAX_STARTUP_S
from workers.models.base import PreparedPrompt
from workers.models.engines.adapters import RANKS, read_rank
from workers.models.engines.dialect import (
    CUT,
    Chances,
    EngineDialect,
    EngineRequest,
    Hardware,
    Launch,
    Post,
    Reply,
    TakeReplies,
    follow_events,
)
from workers.models.engines.engine_http import EngineResponse
from workers.models.engines.llama_cpp import grammar_of
from workers.models.generation.writing import NO_NUMBERS
from workers.models.gpus import gpu_variables

COMMAND = "vllm"
PATH = "/v1/completions"
BLOCK_TOKENS = 32
_GPU_MEMORY_SHARE = 0.9
_GPU_PART_TOKENS = 2048
"""Default for `generation.chunk_tokens` on a GPU, which smaller parts would not fill."""
_FP32_BYTES = 4
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_COLOR": "0",
    # The worker assigns the cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The worker's own limit ends the start.
    "VLLM_ENGINE_READY_TIMEOUT_S": str(int(MAX_STARTUP_S)),
    # Requests with seeds don't use it, but vLLM would compile it at the start, with nvcc and ninja.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
_WITHOUT_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}
"""Some functions are compiled even with --enforce-eager, which made log probabilities crash the
engine.
"""
_DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_NEUTRAL = {"n": 1, "stop": [], "min_tokens": 0, "ignore_eos": True, "return_token_ids": True}
_SPACES = {"whitespace_flexible": False}
"""Allows no whitespace between parts of the JSON, because vLLM's llguidance (below 1.8) allows more
than WHITESPACE.
"""
_MIN_TOP_P = 1e-6
"""Minimum `top_p`, because vLLM rejects 0."""
_TOKEN_PREFIX = "token_id:"
_DEAD = "EngineCore encountered an issue"
_ENDING = "abort"
"""The finish reason for a text that ended because the server is shutting down. Nothing else aborts
texts.
"""
_CAUSES = re.compile(r"\([\w-]+ pid=\d+\) ERROR [^\]]+\] [\w.]*(Error|Exception): ")
"""The last lines of its processes' tracebacks. A longer one of the process that started them, which
does not have the cause, follows.
"""
_SAFE_LINES = re.compile(
    r"\(\w+ pid=\d+\) (ERROR|CRITICAL) [\d-]+ [\d:]+ \[(core|core_client|utils|launcher)\.py:\d+\]"
)


class Vllm(EngineDialect):
    """The server that `vllm serve` starts."""

    mixes_adapters = True

    def launch(self, hardware: Hardware) -> Launch:
        command = shutil.which(COMMAND)
        if command is None:
            raise ConfigurationError(
                f"engine vllm requires the command `{COMMAND}` on the worker's PATH; install "
                "vLLM in a separate environment and link its command into a folder on the PATH",
                field="engine",
            )
        is_cpu = hardware.device == "cpu"
        options = _options(self.entry, hardware.memory_fraction, self.part_tokens(hardware))
        items = self.entry.batch.max_items
        options |= _options_of_adapters(self.adapters, items, is_cpu=is_cpu)
        environment = _ENVIRONMENT
        if is_cpu:
            options |= _options_of_cpu(self.vocabulary.config, count_blocks(self.entry))
            if shutil.which("g++") is None:
                options["enforce-eager"] = True
                environment = environment | _WITHOUT_COMPILER
        else:
            gpus = self.entry.gpu.count
            options["tensor-parallel-size"] = gpus
            environment = environment | gpu_variables(hardware.device, gpus)
        arguments = [part for name, value in options.items() for part in _argument(name, value)]
        return Launch(
            {
                "command": [command, "serve", str(self.folder), *arguments],
                "key_variable": "VLLM_API_KEY",
            },
            context_path="/v1/models",
            context_keys=("data", 0, "max_model_len"),
            safe_lines=_SAFE_LINES,
            environment=environment,
            has_metrics=True,
            causes=_CAUSES,
        )

    def part_tokens(self, hardware: Hardware) -> int:
        generation = self.entry.generation
        if hardware.device == "cpu" or "chunk_tokens" in generation.model_fields_set:
            return generation.chunk_tokens
        return _GPU_PART_TOKENS

    def can_stream(self, item: PreparedPrompt, *, has_written: bool) -> bool:
        """Returns whether the grammar and penalties apply to the whole text.

        Tokens generated earlier are part of the prompt, which the grammar and penalties ignore.
        """
        penalizes = bool(item.frequency_penalty or item.presence_penalty)
        return not has_written or not (item.json_schema or penalizes)

    async def ask(self, post: Post, item: PreparedPrompt, request: EngineRequest) -> Reply:
        if not request.tokens:
            return await self._read(post, item, request)
        async with post(PATH, self._request_of(item, request)) as response:
            return _reply_of(await _answer_of(response), item)

    async def _read(self, post: Post, item: PreparedPrompt, request: EngineRequest) -> Reply:
        """Reads tokens. Drops the one token that vLLM always generates.

        The request has no seed, because on a CPU, vLLM crashed when it read a seeded prompt in more
        than one step.
        """
        changed = {"temperature": 0.0, "seed": None, "echo": request.echoes}
        async with post(PATH, self._request_of(item, request) | changed) as response:
            reply = _reply_of(await _answer_of(response), item)
        return Reply(prompt_chances=reply.prompt_chances, cached_tokens=reply.cached_tokens)

    async def stream(
        self, post: Post, item: PreparedPrompt, request: EngineRequest, take: TakeReplies
    ) -> None:
        if request.counts or request.echoes:
            take([await self._read(post, item, replace(request, tokens=0))])
        body = self._request_of(item, request) | {
            "stream": True,
            "frequency_penalty": item.frequency_penalty,
            "presence_penalty": item.presence_penalty,
        }
        if item.json_schema:
            body["structured_outputs"] = {"grammar": grammar_of(item.json_schema, _SPACES)}
        schema_field = item.schema_field if item.json_schema else ""
        is_whole = False

        def take_events(events: list[bytes]) -> bool:
            nonlocal is_whole
            replies = []
            for data in events:
                answer = _decode(data, schema_field)
                for choice in answer.choices:
                    is_whole = is_whole or bool(choice.finish_reason)
                replies.append(_reply_of(answer, item))
            return take(replies)

        async with post(PATH, body) as response:
            if response.status != 200:
                await _answer_of(response, schema_field)
            has_enough = await follow_events(response, take_events)
        if not (has_enough or is_whole):
            raise ConnectionError(CUT)

    def _request_of(self, item: PreparedPrompt, request: EngineRequest) -> dict[str, Any]:
        # The random numbers used for earlier tokens are not reused.
        seed = np.random.SeedSequence((item.seed % 2**64, len(request.ids))).generate_state(1)[0]
        bias = item.logit_bias if request.bias is None else request.bias
        allowed = None if request.allowed is None else np.flatnonzero(request.allowed).tolist()
        return {
            **_NEUTRAL,
            # None selects the model without adapters.
            "model": item.adapter or None,
            "prompt": request.ids,
            "cache_salt": hashlib.blake2b(request.salt.encode(), digest_size=32).hexdigest(),
            "max_tokens": max(1, request.tokens),
            "temperature": item.temperature,
            "top_k": item.top_k,
            "top_p": max(item.top_p, _MIN_TOP_P),
            "min_p": item.min_p,
            "repetition_penalty": item.repetition_penalty,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "logit_bias": {str(token): value for token, value in bias.items()},
            "allowed_token_ids": allowed,
            "seed": int(seed),
            # `Writing` detects end tokens and stop strings.
            "stop_token_ids": sorted(self.vocabulary.ends),
            "logprobs": item.logprobs if item.logprobs >= 0 else None,
            "return_tokens_as_token_ids": True,
        }


def _options(entry: Model, gpu_share: float, part_tokens: int) -> dict[str, Any]:
    items = entry.batch.max_items
    return {
        "dtype": _DTYPES[entry.precision],
        "max-model-len": entry.generation.context_tokens,
        "max-num-seqs": items,
        # A step has room for part of a prompt, plus the partial last block of each text.
        "max-num-batched-tokens": part_tokens + items * (BLOCK_TOKENS + 1),
        "enable-chunked-prefill": True,
        "enable-prefix-caching": True,
        "enable-prompt-tokens-details": True,
        "block-size": BLOCK_TOKENS,
        # A fraction of the whole GPU, even with MPS, which limits the free memory that
        # cudaMemGetInfo returns but not the total. vLLM starts only if the product is free.
        "gpu-memory-utilization": min(_GPU_MEMORY_SHARE, gpu_share),
        # Its grammars come from llguidance, which also enforces the schema here.
        "structured-outputs-config": json.dumps({"backend": "guidance"}),
        "generation-config": "vllm",
        "disable-uvicorn-access-log": True,
        "disable-fastapi-docs": True,
        "seed": 0,
    }


def _options_of_adapters(
    adapters: Mapping[str, Path], items: int, *, is_cpu: bool
) -> dict[str, Any]:
    """Returns options with room for a different adapter in each concurrent text.

    On a CPU, texts without an adapter use the last slot if they are computed together with others
    (https://github.com/vllm-project/vllm/pull/48421), so one slot more than there are adapters
    leaves it empty.
    """
    if not adapters:
        return {}
    rank = max(map(read_rank, adapters.values()))
    modules = [{"name": name, "path": str(path)} for name, path in adapters.items()]
    slots = len(adapters) + 1 if is_cpu else min(len(adapters), items)
    return {
        "enable-lora": True,
        "lora-modules": list(map(json.dumps, modules)),
        "max-lora-rank": next(size for size in RANKS if size >= rank),
        "max-loras": slots,
        "max-cpu-loras": max(len(adapters), slots),
    }


def _options_of_cpu(config: dict[str, Any], blocks: int) -> dict[str, Any]:
    """Returns options with the size of the keys and values in fp32, the maximum.

    Otherwise, vLLM requires a share of the whole machine to be free. On a GPU, vLLM measures how
    much memory is left for them.
    """
    number = {"num-gpu-blocks-override": blocks}
    try:
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        values = config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * width
    except (KeyError, TypeError):
        return number
    return number | {"kv-cache-memory-bytes": 2 * values * _FP32_BYTES * blocks * BLOCK_TOKENS}


def _argument(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    if isinstance(value, list):
        return [f"--{name}", *value]
    return [f"--{name}", str(value)]


def count_blocks(entry: Model) -> int:
    """Returns the number of key and value blocks: enough for the budget, plus one for each text."""
    items = min(entry.batch.max_items, entry.budget)
    return -(-entry.budget // BLOCK_TOKENS) + items + 1


def _echoes(item: PreparedPrompt) -> bool:
    return item.is_echoed and item.logprobs >= 0


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Fault(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Fault | None = None


_decoder: msgspec.json.Decoder[_Answer] = msgspec.json.Decoder(_Answer)


async def _answer_of(response: EngineResponse, schema_field: str = "") -> _Answer:
    """Reads and decodes a whole response, like `_decode`."""
    answer = _decode(await response.read(), schema_field)
    if response.status != 200:  # an error in an unknown format
        raise ModelFailed(f"the engine returned status {response.status}")
    return answer


def _decode(body: bytes | bytearray, schema_field: str = "") -> _Answer:
    """Decodes a response, or an event's data.

    Args:
        schema_field: name of the field with the JSON schema whose grammar was sent. Empty if none
            was sent.

    Raises:
        ConnectionError: the engine is about to exit.
        PenstockError: the engine returned an error instead, or the response is malformed.
    """
    try:
        answer = _decoder.decode(body)
    except MALFORMED as error:
        raise ModelFailed("the engine returned a response that is not valid JSON") from error
    if answer.error is not None:
        if answer.error.message.startswith(_DEAD):
            raise ConnectionError("the engine's core has exited")
        raise _error_of(answer.error, schema_field)
    return answer


def _error_of(fault: _Fault, schema_field: str) -> PenstockError:
    if schema_field and fault.code == 400:
        return BadInput(
            "the JSON schema can't be used: it is too complex for this model's engine",
            field=schema_field,
        )
    # Its message may contain words from the request.
    return ModelFailed("the engine rejected the text or failed to process it")


def _reply_of(answer: _Answer, item: PreparedPrompt) -> Reply:
    details = None if answer.usage is None else answer.usage.prompt_tokens_details
    reply = Reply(cached_tokens=None if details is None else details.cached_tokens or 0)
    for choice in answer.choices:
        if choice.finish_reason == _ENDING:
            raise ConnectionError("the engine is shutting down")
        if choice.finish_reason not in (None, "stop", "length"):
            raise ModelFailed(f"the engine stopped generating the text: {choice.finish_reason}")
        reply.tokens = choice.token_ids or []
        reply.has_ended = choice.finish_reason == "stop"
        if choice.logprobs is not None:
            rows = _rows_of(choice.logprobs)
            echoed = len(rows) - len(reply.tokens)
            reply.prompt_chances = rows[:echoed]
            reply.chances = [row for row in rows[echoed:] if row is not None]
    if _echoes(item):
        reply.cached_tokens = 0
    return reply


def _rows_of(logprobs: _Logprobs) -> list[Chances | None]:
    """Returns each token's log probabilities. None for the first token of an echoed prompt.

    Raises:
        ModelFailed: the log probabilities are not numbers, which JSON represents as null.
    """
    rows: list[Chances | None] = []
    for name, chance, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        if top is None:
            rows.append(None)
            continue
        row = {**top, name: chance}
        numbers = {_token_of(key): value for key, value in row.items() if value is not None}
        if len(numbers) < len(row):
            raise ModelFailed(NO_NUMBERS)
        rows.append(numbers)
    return rows


def _token_of(name: str) -> int:
    return int(name.removeprefix(_TOKEN_PREFIX))
