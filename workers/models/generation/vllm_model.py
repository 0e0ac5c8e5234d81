"""A language model that vLLM computes, step by step.

vLLM schedules, keeps keys and values in pages, chooses tokens and follows JSON schemas. The meaning
of a generation, its stop conditions and the data for its readers are decided here, as for every
language model.

The engine is `LLMEngine`, in this process: one call of its `step` is one of ours. Its options
follow from the catalog entry and the device.

vLLM is not installed with Penstock, because its versions pin other libraries. This was written for
0.32.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import BadInput, ConfigurationError, ModelFailed, PenstockError
from shared.models.catalog import Model
from shared.models.tasks import Result
from shared.models.tasks.text import TokenChunk
from workers.models.base import OutOfMemory, PreparedItem, PreparedPrompt, StepEnd
from workers.models.device import Device, memory_errors
from workers.models.generation.vocabulary import Vocabulary
from workers.models.generation.writing import IDS, Writing

_BLOCK_TOKENS = 32
_GPU_MEMORY_SHARE = 0.9
_FP32_BYTES = 4
_ENVIRONMENT = {
    # The engine runs in this process, so that a step is a call.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Cores are given out by the worker.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_COMPILE_LIMIT_S = 10.0
_LOOK_EVERY_S = 0.001
_SEED_STEP = 0x9E3779B97F4A7C15
"""Another worker resumes a generation with other random numbers, instead of repeating the first
ones.
"""


def import_vllm() -> Any:
    """The `vllm` package, set up for an engine in this process.

    Raises:
        ConfigurationError: it is not installed here.
    """
    os.environ.update(_ENVIRONMENT)
    try:
        import vllm
        import vllm.config
        import vllm.exceptions
        import vllm.sampling_params
    except ImportError as error:
        raise ConfigurationError(
            f"backend vllm requires vLLM in the environment of the worker: {error}", field="backend"
        ) from error
    return vllm


def open_engine(
    vllm: Any, entry: Model, vocabulary: Vocabulary, device: str, memory_fraction: float
) -> Any:
    """An `LLMEngine` that has loaded the model.

    Args:
        device: `cpu`, or the kind of GPU.
        memory_fraction: the part of the GPU's memory that it may take.

    Raises:
        ConfigurationError: vLLM can't compute this model.
    """
    try:
        with memory_errors():
            arguments = _arguments(vllm, entry, vocabulary, device, memory_fraction)
            return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
    except (ValueError, TypeError, NotImplementedError, KeyError, OSError) as error:
        raise ConfigurationError(
            f"{vocabulary.folder}: vLLM can't compute it: {error}", field="source"
        ) from error


def _arguments(
    vllm: Any, entry: Model, vocabulary: Vocabulary, device: str, memory_fraction: float
) -> dict[str, Any]:
    budget = entry.batch.max_tokens or entry.generation.context_tokens
    items = min(entry.batch.max_items, budget)
    # Room for the budget, with a block of each generation that is not full.
    blocks = -(-budget // _BLOCK_TOKENS) + items + 1
    is_cpu = device == "cpu"
    return {
        "model": str(vocabulary.folder),
        "dtype": _DTYPES[entry.precision],
        "max_model_len": entry.generation.context_tokens,
        "max_num_seqs": items,
        "max_num_batched_tokens": entry.generation.chunk_tokens + items,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "block_size": _BLOCK_TOKENS,
        "num_gpu_blocks_override": blocks,
        "gpu_memory_utilization": min(_GPU_MEMORY_SHARE, memory_fraction),
        # Without it vLLM wants the share above of the whole machine to be free on a CPU.
        "kv_cache_memory_bytes": _cache_bytes(vocabulary.config, blocks) if is_cpu else None,
        # The library of our engine. Its JSON has no spaces between two parts: some models would
        # write spaces until their tokens end.
        "structured_outputs_config": vllm.config.StructuredOutputsConfig(
            backend="guidance", disable_any_whitespace=True
        ),
        # Compiling for a CPU needs a compiler.
        "enforce_eager": is_cpu and shutil.which("g++") is None,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": 0,
    }


def _cache_bytes(config: dict[str, Any], blocks: int) -> int | None:
    """Returns the bytes of keys and values in fp32, which is the maximum. None if unknown."""
    try:
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        values = config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * width
    except (KeyError, TypeError):
        return None
    return int(2 * values * _FP32_BYTES * blocks * _BLOCK_TOKENS)


class _Generation:
    """An item that is in."""

    def __init__(self, item: PreparedPrompt, writing: Writing, request_id: str) -> None:
        self.item = item
        self.writing = writing
        self.request_id = request_id
        self.prompt_tokens = len(item.ids) // IDS.itemsize
        self.cached_tokens = item.written_cached_tokens
        self._has_begun = False

    def take(self, output: Any) -> int:
        """Processes the tokens returned by a step. Returns how many it read and wrote.

        vLLM reports a prompt when it was read. Of one that took several steps, that is the last.

        Raises:
            ModelFailed: vLLM ended the generation for another reason.
        """
        is_first = not self._has_begun
        self._has_begun = True
        if not self.item.written_ids:
            self.cached_tokens = min(output.num_cached_tokens or 0, self.prompt_tokens)
        if is_first and output.prompt_logprobs:
            self.writing.echo_chosen(list(map(_chances, output.prompt_logprobs)))
        (output_,) = output.outputs
        logprobs = output_.logprobs or [None] * len(output_.token_ids)
        for token, chances in zip(output_.token_ids, logprobs, strict=True):
            if self.writing.finish is None:
                self.writing.add_chosen(token, _chances(chances))
        if output.finished and self.writing.finish is None:
            raise ModelFailed(f"vLLM ended the generation: {output_.finish_reason}")
        read = self.prompt_tokens - self.cached_tokens if is_first else 0
        return read + len(output_.token_ids)

    def chunk(self) -> TokenChunk | None:
        """Returns what it has written since the last call. None if nothing."""
        chunk = self.writing.take_chunk()
        if chunk is not None and not chunk.first:
            chunk.input_tokens, chunk.cached_tokens = self.prompt_tokens, self.cached_tokens
        return chunk


def _chances(logprobs: Any) -> dict[int, float] | None:
    """Returns log probabilities in our form."""
    return (
        None if logprobs is None else {token: chance.logprob for token, chance in logprobs.items()}
    )


class VllmModel:
    """A causal language model in an engine of vLLM.

    Args:
        device: where to compute. vLLM takes the first GPU that it sees.
    """

    device_name = ""

    def __init__(self, entry: Model, folder: Path, device: Device) -> None:
        self._entry = entry
        self._folder = folder
        self._wanted = device
        self._budget = entry.batch.max_tokens or entry.generation.context_tokens
        self._shares_with_all = entry.cache.scope == "global"
        self._numbers = itertools.count()
        self._generations: dict[int, _Generation] = {}

    def setup(self) -> None:
        """Loads the model.

        Raises:
            ConfigurationError: vLLM is not installed here, or can't compute this model.
        """
        self._vocabulary = Vocabulary(self._folder)
        device, self.device_name = self._wanted.open()
        self._vllm = import_vllm()
        fraction = self._wanted.memory_fraction
        self._engine = open_engine(self._vllm, self._entry, self._vocabulary, device.type, fraction)

    def warmup(self) -> None:
        """Writes a few tokens: the first steps compile what they need."""
        room = min(16, self._entry.generation.context_tokens - 4)
        for tokens in (room, 1):
            item = PreparedPrompt(
                key="",
                length=tokens + 2,
                ids=np.zeros(tokens, IDS).tobytes(),
                max_tokens=2,
                seed=0,
                temperature=0.0,
            )
            self.admit(0, item)
            while self._generations:
                self.step()

    def admit(self, slot: int, item: PreparedItem) -> None:
        """Takes a prompt in.

        Raises:
            OutOfMemory: the budget of tokens is spent.
            BadInput: vLLM can't follow the schema.
            PenstockError: the item can't be computed.
        """
        if not isinstance(item, PreparedPrompt):
            raise ModelFailed(f"a text model can't compute {type(item).__name__}")
        used_tokens = sum(generation.item.length for generation in self._generations.values())
        is_full = len(self._generations) >= self._entry.batch.max_items
        if is_full or used_tokens + item.length > self._budget:
            raise OutOfMemory(f"{used_tokens} of {self._budget} tokens are taken")
        writing = Writing(item, self._vocabulary, checks_schema=False)
        generation = _Generation(item, writing, f"{slot}-{next(self._numbers)}")
        if writing.finish is None:
            try:
                self._add(generation)
            except PenstockError:
                self._engine.abort_request([generation.request_id])
                raise
        self._generations[slot] = generation

    def _add(self, generation: _Generation) -> None:
        item, written = generation.item, generation.writing.ids
        ids = [*np.frombuffer(item.ids, IDS).tolist(), *written]
        # Only requests of the same salt share keys and values.
        salt = "*" if self._shares_with_all else item.owner or generation.request_id
        try:
            key = self._engine.add_request(
                generation.request_id,
                {"prompt_token_ids": ids, "cache_salt": salt},
                self._parameters(item, len(written)),
            )
            if item.json_schema and written:
                self._follow(key, written)
        except (ValueError, self._vllm.exceptions.VLLMClientError) as error:
            if item.json_schema:
                reason = (
                    "the JSON schema can't be used: it is too complex for the engine of this model"
                )
                raise BadInput(reason, field=item.schema_field) from error
            raise ModelFailed(f"vLLM rejected the generation: {error}") from error

    def _follow(self, key: str, written: list[int]) -> None:
        """Moves a generation's schema behind the tokens that another worker wrote.

        To vLLM they are a part of the prompt, which it does not look at. It has no call for this,
        but the engine runs in this process.

        Args:
            key: key of the request inside vLLM.
            written: those tokens.

        Raises:
            ValueError: the schema can't be used.
            ModelFailed: it does not allow them.
        """
        scheduler = self._engine.engine_core.engine_core.scheduler
        grammar_request = scheduler.requests[key].structured_output_request
        until_s = time.monotonic() + _COMPILE_LIMIT_S
        while not grammar_request.is_grammar_ready:  # a thread of vLLM compiles it
            if time.monotonic() > until_s:
                raise ValueError(f"it was not compiled within {_COMPILE_LIMIT_S:g} s")
            time.sleep(_LOOK_EVERY_S)
        if isinstance(grammar_request.grammar, Exception):
            raise ValueError(str(grammar_request.grammar)) from grammar_request.grammar
        if not grammar_request.grammar.accept_tokens(key, written):
            raise ModelFailed("the JSON schema does not allow the text written by another worker")

    def _parameters(self, item: PreparedPrompt, written: int) -> Any:
        parameters = self._vllm.sampling_params
        schema = None
        if item.json_schema:
            schema = parameters.StructuredOutputsParams(json=item.json_schema)
        return parameters.SamplingParams(
            max_tokens=item.max_tokens - written,
            temperature=item.temperature,
            top_p=item.top_p,
            top_k=item.top_k,
            seed=(item.seed + _SEED_STEP * written) % 2**63,
            frequency_penalty=item.frequency_penalty,
            presence_penalty=item.presence_penalty,
            repetition_penalty=item.repetition_penalty,
            min_p=item.min_p,
            logit_bias=item.logit_bias or None,
            prompt_logprobs=item.logprobs if item.is_echoed and item.logprobs >= 0 else None,
            logprobs=None if item.logprobs < 0 else item.logprobs,
            structured_outputs=schema,
            # `Writing` detects end tokens and stop strings.
            ignore_eos=True,
            stop_token_ids=sorted(self._vocabulary.ends),
            detokenize=False,
            output_kind=parameters.RequestOutputKind.DELTA,
        )

    def step(self) -> StepEnd:
        """Reads parts of prompts and writes a token of each generation, as vLLM schedules them.

        Raises:
            Exception: the model failed. All generations that are in are dropped.
        """
        end = StepEnd()
        slots = {generation.request_id: slot for slot, generation in self._generations.items()}
        try:
            with memory_errors():
                outputs = self._engine.step() if self._engine.has_unfinished_requests() else []
            for output in outputs:
                slot = slots[output.request_id]
                try:
                    end.work += self._generations[slot].take(output)
                except ModelFailed as error:
                    self.drop(slot)
                    end.results[slot] = error
            for slot, generation in list(self._generations.items()):
                if generation.writing.finish is not None:
                    end.results[slot] = _result(generation)
                    self.drop(slot)
        except BaseException:
            for slot in list(self._generations):
                self.drop(slot)
            raise
        return end

    def take_chunks(self) -> dict[int, TokenChunk]:
        """Returns what each streamed generation has written since the last call."""
        chunks = {
            slot: generation.chunk()
            for slot, generation in self._generations.items()
            if generation.item.is_streamed
        }
        return {slot: chunk for slot, chunk in chunks.items() if chunk is not None}

    def interrupt(self, slot: int) -> TokenChunk | None:
        """Removes a generation that is in. Returns what it has written since the last call."""
        chunk = self._generations[slot].chunk()
        self.drop(slot)
        return chunk

    def drop(self, slot: int) -> None:
        generation = self._generations.pop(slot, None)
        if generation is not None:
            self._engine.abort_request([generation.request_id])


def _result(generation: _Generation) -> Result:
    return generation.writing.result(generation.prompt_tokens, generation.cached_tokens)
