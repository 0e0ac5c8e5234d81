"""Reads the weights of BERT and related models from a folder, without importing transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.functional import gelu, layer_norm, relu

from workers.models.device import Product

FAMILIES = frozenset({"bert", "camembert", "roberta", "xlm-roberta"})
"""Families whose weights have the names used here."""

_ACTIVATIONS: Mapping[str, Product] = {"gelu": gelu, "relu": relu}
_UNUSED = frozenset({"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"})
"""Weights that don't affect any hidden state."""
_USUAL = {
    "add_cross_attention": False,
    "auto_map": None,
    "is_decoder": False,
    "position_embedding_type": "absolute",
    "quantization_config": None,
}
"""The settings in config.json for which only these values are supported."""


class BertWeights(NamedTuple):
    """The weights and settings of BERT and related models, in fp32.

    `tensors` uses the names of transformers' BertModel. `epsilon` applies to all layer norms.
    """

    tensors: Mapping[str, torch.Tensor]
    layers: int
    heads: int
    epsilon: float
    activate: Product

    def norm(self, name: str) -> Product:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return partial(
            layer_norm, normalized_shape=weight.shape, weight=weight, bias=bias, eps=self.epsilon
        )

    def dense(self, *names: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the named linear layers joined into one: weight and bias, in this order."""
        parts = [[self.tensors[f"{name}.{part}"] for name in names] for part in ("weight", "bias")]
        weight, bias = (part[0] if len(part) == 1 else torch.cat(part) for part in parts)
        return weight, bias


class LoadedBert(NamedTuple):
    """A model's weights. `first_position`: the position of a text's first token."""

    weights: BertWeights
    first_position: int

    @property
    def width(self) -> int:
        return self.weights.tensors["embeddings.word_embeddings.weight"].shape[1]


def read_bert_folder(folder: Path) -> LoadedBert | None:
    """Reads the weights from a transformers folder, without importing transformers.

    Returns None unless the folder fully describes a plain model in FAMILIES: config.json has the
    usual settings, and model.safetensors has only BertModel's weights, under its names. In all
    other cases, including invalid files, transformers must read the folder or report why that is
    impossible.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not _is_usual(config) or (folder / "adapter_config.json").exists():
            return None
        # Positions start at 0 in BERT, and at the padding token's ID plus 1 in RoBERTa.
        first_position = 0 if config["model_type"] == "bert" else 1 + config["pad_token_id"]
        shapes = _shapes(config)
        with safe_open(folder / "model.safetensors", "pt") as file:
            if set(file.keys()) - _UNUSED != shapes.keys():
                return None
            tensors = {name: file.get_tensor(name).float() for name in shapes}
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        epsilon, activate = float(config["layer_norm_eps"]), _ACTIVATIONS[config["hidden_act"]]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        SafetensorError,
    ):
        return None
    if any(tensors[name].shape != shape for name, shape in shapes.items()):
        return None
    weights = BertWeights(tensors, layers, heads, epsilon, activate)
    return LoadedBert(weights, first_position)


def _is_usual(config: dict[str, Any]) -> bool:
    return (
        config["model_type"] in FAMILIES
        and config["hidden_act"] in _ACTIVATIONS
        and config["hidden_size"] % config["num_attention_heads"] == 0
        and all(config.get(name, usual) == usual for name, usual in _USUAL.items())
    )


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of BertModel's weights, according to config.json."""
    width, wide = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], width),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], width),
    }
    sizes: dict[str, tuple[int, ...]] = {"embeddings.LayerNorm": (width,)}
    for number in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{number}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            sizes[f"{name}.attention.{part}"] = (width, width)
        sizes[f"{name}.intermediate.dense"] = (wide, width)
        sizes[f"{name}.output.dense"] = (width, wide)
        sizes[f"{name}.attention.output.LayerNorm"] = (width,)
        sizes[f"{name}.output.LayerNorm"] = (width,)
    for name, size in sizes.items():
        shapes |= {f"{name}.weight": size, f"{name}.bias": size[:1]}
    return shapes
