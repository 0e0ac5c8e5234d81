"""`penstock models check NAME` for a text model: how much memory it uses, and how much text fits.

Starts the model the way a worker does, with one model process and all cores. The size of a token's
keys and values is derived from the layers in the model's configuration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shared.models.catalog import Model
from shared.models.catalog_file import read_catalog
from shared.process.cores import usable_cores
from shared.settings import ModelSettings, read_settings
from workers.models.source import resolve
from workers.runtime.pool import HostedModel, ModelPool
from workers.runtime.resident_models import free_host_bytes
from workers.tasks import WORKER_TASKS, preparer_for

_MIB = 2**20
_LLAMA_CPP_ELEMENT_BYTES = 2
"""llama.cpp's default type for keys and values is f16."""


def check_text_model(name: str, device: str) -> Iterator[str]:
    """Starts a text model and stops it again. Yields human-readable lines.

    Args:
        device: auto, cpu, cuda, or cuda:N.

    Raises:
        ConfigurationError: the entry, the source, or the device is invalid.
        ModelFailed: the model did not start in time.
    """
    settings = read_settings(ModelSettings)
    entry = read_catalog(settings.models_file).find_deployed(name)
    task = WORKER_TASKS[entry.task]
    folder = resolve(
        entry.source,
        entry.revision,
        settings.models_dir,
        weights_dir=settings.weights_dir,
        open_gguf=task.open_gguf(entry),
    )
    task.provide(entry, folder)
    preparer_for(entry, folder)
    started = asyncio.run(_start(HostedModel(entry, folder), device))
    yield from _describe(entry, started, measure_cache(entry, folder, started.device))


class _Started(NamedTuple):
    """A model that became ready. `free_bytes`: the machine's free memory while it was running."""

    device: str
    load_s: float
    memory_bytes: int
    free_bytes: int


async def _start(model: HostedModel, device: str) -> _Started:
    timeout_s = model.entry.startup_s
    async with ModelPool(
        [model], device=device, processes=1, threads=usable_cores(), start_timeout_s=timeout_s
    ) as pool:
        (process,) = pool.processes
        load_s = sum(process.residency.load_s.values())
        return _Started(pool.device_name, load_s, pool.memory_bytes, free_host_bytes())


class Cache(NamedTuple):
    """Room for keys and values. `is_taken`: True if all of it is allocated at startup."""

    token_bytes: int
    tokens: int
    is_taken: bool

    @property
    def size_bytes(self) -> int:
        return self.token_bytes * self.tokens


def measure_cache(entry: Model, folder: Path, device: str) -> Cache:
    """Returns how much room a text model has for keys and values.

    Args:
        folder: local folder with the model's files.
        device: `cpu`, or the name of a GPU.
    """
    if entry.engine == "llama.cpp":
        from workers.models.engines.llama_cpp import settings_of

        settings = settings_of(entry, folder, usable_cores())
        elements = count_elements_in_gguf(Path(settings["model"]))
        return Cache(_LLAMA_CPP_ELEMENT_BYTES * elements, settings["cache_tokens"], is_taken=True)
    element_bytes = _find_element_bytes(entry.precision, device)
    token_bytes = element_bytes * count_elements_in_config(folder)
    if entry.engine == "vllm":
        from workers.models.engines.vllm import BLOCK_TOKENS, count_blocks

        return Cache(token_bytes, BLOCK_TOKENS * count_blocks(entry), is_taken=True)
    tokens = min(entry.batch.max_items, entry.budget) * entry.generation.context_tokens
    return Cache(token_bytes, tokens, is_taken=device != "cpu")


def _find_element_bytes(precision: str, device: str) -> int:
    from workers.models.generation.decoder import choose_dtype

    return choose_dtype(precision, "cpu" if device == "cpu" else "cuda").itemsize


def count_elements_in_config(folder: Path) -> int:
    """Returns the number of key and value elements per token, from a folder's config.json."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width)


def count_elements_in_gguf(path: Path) -> int:
    """Returns the number of key and value elements per token, from a GGUF file's metadata.

    Layers with a sliding window are counted like all others, although llama.cpp stores less for
    them.
    """
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    architecture = fields["general.architecture"].contents()

    def read(name: str, default: Any = None) -> Any:
        field = fields.get(f"{architecture}.{name}")
        return default if field is None else field.contents()

    layers, heads = read("block_count"), read("attention.head_count")
    per_layer = read("attention.head_count_kv", heads)
    total = sum(per_layer) if isinstance(per_layer, list) else layers * per_layer
    usual = read("embedding_length") // (max(heads) if isinstance(heads, list) else heads)
    widths = read("attention.key_length", usual) + read("attention.value_length", usual)
    return int(total * widths)


def _describe(entry: Model, started: _Started, cache: Cache) -> Iterator[str]:
    context_tokens, budget = entry.generation.context_tokens, entry.budget
    whole = min(entry.batch.max_items, budget // context_tokens)
    yield f"{entry.name}: started in {started.load_s:.1f} s on {started.device}"
    yield f"memory: {started.memory_bytes / _MIB:,.0f} MiB resident after the start"
    yield (
        f"keys and values: {cache.token_bytes:,} bytes per token, up to "
        f"{cache.size_bytes / _MIB:,.0f} MiB for {cache.tokens:,} tokens, "
        f"{'allocated at the start' if cache.is_taken else 'allocated as they are written'}"
    )
    yield (
        f"at a time: {whole} texts of {context_tokens:,} tokens each, prompt included, or up to "
        f"{entry.batch.max_items} shorter ones with {budget:,} tokens in total"
    )
    yield f"free memory while it was running: {started.free_bytes / _MIB:,.0f} MiB"
    if not cache.is_taken and cache.size_bytes > started.free_bytes:
        yield (
            "too little memory is free for all keys and values: lower batch.max_items or "
            "generation.context_tokens"
        )
