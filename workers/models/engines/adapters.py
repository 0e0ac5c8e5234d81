"""A text model's LoRA adapters: finds their files, and checks that they are plain LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.errors import ConfigurationError, PenstockError
from shared.models.catalog import Model
from shared.models.entry import TextAdapter
from shared.settings import ModelSettings, read_settings
from workers.models.generation.gguf import read_fields
from workers.models.source import resolve, resolve_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum ranks that vLLM can be started with."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "alora_invocation_tokens": (None,),
}
"""Values of options that change more than the low-rank product, in adapters without such changes.
"""


def find_adapters(entry: Model) -> dict[str, Path]:
    """Returns each adapter's file or folder, by name.

    Downloads any missing ones, which may take minutes.

    Raises:
        ConfigurationError: a source doesn't exist, or is not a plain LoRA adapter.
    """
    paths = {}
    for name, adapter in entry.generation.adapters.items():
        try:
            paths[name] = _find_file(adapter) if _is_file(adapter) else _find_folder(adapter)
        except PenstockError as error:
            field = f"generation.adapters.{name}"
            raise type(error)(f"{field}: {error.message}", field=field) from error
    return paths


def _is_file(adapter: TextAdapter) -> bool:
    return adapter.source.endswith(".gguf")


def _find_file(adapter: TextAdapter) -> Path:
    settings = read_settings(ModelSettings)
    path = resolve_file(
        adapter.source, adapter.revision, settings.models_dir, weights_dir=settings.weights_dir
    ).resolve()
    try:
        fields = read_fields(path)
    except (OSError, ConfigurationError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    kind = fields.get("adapter.type")
    if kind is None or kind.contents() != "lora" or "adapter.alora.invocation_tokens" in fields:
        raise ConfigurationError(f"{path} does not contain a plain LoRA adapter")
    return path


def _find_folder(adapter: TextAdapter) -> Path:
    settings = read_settings(ModelSettings)
    folder = resolve(
        adapter.source, adapter.revision, settings.models_dir, weights_dir=settings.weights_dir
    )
    if not (folder / WEIGHTS).is_file():  # vLLM would fall back to pickled files
        raise ConfigurationError(f"{folder} has no {WEIGHTS}")
    config = _read_config(folder)
    if config.get("peft_type") != "LORA":
        raise ConfigurationError(
            f"{folder / CONFIG} describes {config.get('peft_type')!r}; only LORA is supported"
        )
    for name, values in _PLAIN.items():
        if config.get(name) not in values:
            raise ConfigurationError(
                f"{folder / CONFIG}: {name} {config[name]!r} is not supported; only plain LoRA is"
            )
    if (rank := read_rank(folder)) > RANKS[-1]:
        raise ConfigurationError(f"{folder} has rank {rank}; the maximum is {RANKS[-1]}")
    return folder


def read_rank(folder: Path) -> int:
    """Returns the maximum rank of an adapter's layers.

    Raises:
        ConfigurationError: the folder's adapter_config.json does not specify it.
    """
    config = _read_config(folder)
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise ConfigurationError(f"{folder / CONFIG} does not specify the rank")
    return int(max(ranks))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} is not a JSON object")
    return config
