"""Reads a sentence-transformers folder: the steps before and after the transformer.

modules.json lists the modules in order, each with its folder. sentence_bert_config.json (or another
family's equivalent) has the maximum length. config_sentence_transformers.json has the prompts. As
in sentence-transformers, a folder without modules.json gets mean pooling.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigurationError

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens")
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")


@dataclass(frozen=True)
class SentenceFolder:
    """The settings in a sentence-transformers folder."""

    transformer: Path
    """The folder with config.json, the weights, and tokenizer.json."""
    max_length: int
    """Maximum number of tokens per text, including special tokens."""
    lower_case: bool
    prompt: str
    """A prefix for every text, usually empty."""
    pooling: tuple[str, ...]
    """Names from POOLING_MODES. If there are several, their vectors are concatenated in this order.
    """
    normalize: bool


def read_sentence_folder(folder: Path) -> SentenceFolder:
    """Reads an embedding model's folder.

    Raises:
        ConfigurationError: a file is missing or broken, or Penstock does not support a module.
    """
    with _value_errors(folder):
        return _read_folder(folder)


@contextmanager
def _value_errors(folder: Path) -> Iterator[None]:
    """Translates errors about a file that is JSON but has unexpected values."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigurationError(
            f"{folder}: one of its JSON files has an unexpected value: {reason}", field="source"
        ) from error


def _read_folder(folder: Path) -> SentenceFolder:
    modules = _read_json(folder / "modules.json", []) or [{"type": "Transformer", "path": ""}]
    kinds = [str(module["type"]).rsplit(".", 1)[-1] for module in modules]
    paths = {
        kind: folder / str(module["path"]) for kind, module in zip(kinds, modules, strict=True)
    }
    if kinds not in (
        ["Transformer"],
        ["Transformer", "Pooling"],
        ["Transformer", "Pooling", "Normalize"],
    ):
        raise ConfigurationError(
            f"{folder}: unsupported modules {', '.join(kinds)}", field="source"
        )
    transformer = paths["Transformer"]
    if not (transformer / "tokenizer.json").is_file():
        raise ConfigurationError(f"{transformer}: tokenizer.json is missing", field="source")
    limits: dict[str, Any] = {}
    for family in _FAMILIES:
        limits = limits or _read_json(transformer / f"sentence_{family}_config.json", {})
    pooling = _read_json(paths["Pooling"] / "config.json", {}) if "Pooling" in paths else {}
    return SentenceFolder(
        transformer=transformer,
        max_length=int(limits.get("max_seq_length") or longest_text(transformer)),
        lower_case=bool(limits.get("do_lower_case", False)),
        prompt=_prompt(folder),
        pooling=_pooling(folder, pooling),
        normalize="Normalize" in kinds,
    )


def longest_text(transformer: Path) -> int:
    """Returns the token limit per text that both the tokenizer and the position table support.

    Raises:
        ConfigurationError: a file is broken.
    """
    with _value_errors(transformer):
        limits = [
            _read_json(transformer / "tokenizer_config.json", {}).get("model_max_length"),
            _read_json(transformer / "config.json", {}).get("max_position_embeddings"),
        ]
        return int(min((limit for limit in limits if limit), default=512))


def vocabulary_size(transformer: Path) -> int | None:
    """Returns the row count of the embedding table, or None if config.json doesn't specify it.

    Raises:
        ConfigurationError: the file is broken.
    """
    with _value_errors(transformer):
        size = _read_json(transformer / "config.json", {}).get("vocab_size")
        return int(size) if size else None


def _prompt(folder: Path) -> str:
    config = _read_json(folder / "config_sentence_transformers.json", {})
    name = config.get("default_prompt_name")
    return str(config["prompts"][name]) if name else ""


def _pooling(folder: Path, config: dict[str, Any]) -> tuple[str, ...]:
    """Returns the modes in 1_Pooling/config.json: flags, or the newer `pooling_mode`."""
    named = config.get("pooling_mode")
    if named is None:
        modes = tuple(mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)) or (
            "mean",
        )
    else:
        modes = (named,) if isinstance(named, str) else tuple(named)
    unknown = [mode for mode in modes if mode not in POOLING_MODES]
    if unknown or not config.get("include_prompt", True):
        wrong = f"pooling {', '.join(unknown)}" if unknown else "pooling without the prompt"
        raise ConfigurationError(f"{folder}: unsupported: {wrong}", field="source")
    return modes


def _read_json(path: Path, missing: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return missing
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: {error}", field="source") from error
