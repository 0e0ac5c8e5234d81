"""Exports a transformer from torch to an ONNX graph, fused by ONNX Runtime's passes."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import torch
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.onnx_model import OnnxModel
from onnxruntime.transformers.optimizer import optimize_model
from transformers import AutoModel
from transformers.utils import logging as transformers_logging

from shared.errors import ConfigurationError

OPSET = 17
STATES = "last_hidden_state"
_BERT_LIKE = frozenset(
    {"bert", "camembert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta"}
)
"""Families (config.model_type) that ONNX Runtime's fusions for BERT know.

Others stay as exported.
"""


def load_transformer(folder: Path) -> Any:
    """The transformer of `folder` in torch fp32, with the attention that exports.

    Raises:
        ConfigurationError: it can't be loaded.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        model = AutoModel.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{folder}: {error}", field="source") from error
    return model.eval().requires_grad_(False)


def export_graph(model: Any, path: Path, *, has_types: bool) -> None:
    """Writes the graph: token ids and mask [items, tokens] to states [items, tokens, width].

    Args:
        model: a transformer of load_transformer.
        path: the .onnx file to write.
        has_types: whether the graph takes token_type_ids too. Without it they are 0.

    Raises:
        ConfigurationError: torch can't export this family.
    """
    names = ["input_ids", "attention_mask"] + (["token_type_ids"] if has_types else [])
    # Two rows of unequal length, so that no dimension and no mask can be taken for a constant.
    ids = torch.ones(2, 16, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    given = (ids, mask, torch.zeros_like(ids))[: len(names)]
    axes = {name: {0: "items", 1: "tokens"} for name in (*names, STATES)}
    try:
        with _quiet(), torch.inference_mode():
            torch.onnx.export(
                _States(model, names),
                given,
                str(path),
                input_names=names,
                output_names=[STATES],
                dynamic_axes=axes,
                opset_version=OPSET,
                dynamo=False,
            )
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{model.config.model_type} can't be exported to ONNX: {error}"
        ) from error


class _States(torch.nn.Module):
    """The model with named inputs turned into positional ones, as the exporter wants them."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self._names = names

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.model(
            **dict(zip(self._names, given, strict=True))
        ).last_hidden_state
        return states


def takes_types(model: Any) -> bool:
    """Returns whether the model has an input for token types at all."""
    return "token_type_ids" in inspect.signature(model.forward).parameters


def fuse_graph(
    source: Path, target: Path, config: Any, *, has_all_heads: bool = True, to_fp16: bool = False
) -> str:
    """Writes `source` with attention, layer norms and activations fused into single operators.

    Args:
        source: a graph of export_graph.
        target: the .onnx file to write.
        config: of the transformer.
        has_all_heads: whether the graph has as many as `config` says. Attention is fused only then.
        to_fp16: narrows weights and inner values. The inputs keep their types and the states come
            out in fp32.

    Returns:
        How many operators of which kind there are now, in words, or why nothing was fused.
    """
    is_known = config.model_type in _BERT_LIKE
    with _quiet():
        # Its own passes only (level 0): those of ONNX Runtime itself suit one machine, and run when
        # a graph is loaded.
        heads, width = (config.num_attention_heads, config.hidden_size) if has_all_heads else (0, 0)
        options = FusionOptions("bert")
        # On a CPU it takes eight times as long as an addition and a layer norm (encoder_onnx.py
        # keeps it out too).
        options.enable_skip_layer_norm = options.enable_bias_skip_layer_norm = to_fp16
        fused = (
            optimize_model(
                str(source),
                model_type="bert",
                num_heads=heads,
                hidden_size=width,
                optimization_options=options,
                opt_level=0,
            )
            if is_known
            else OnnxModel(onnx.load(source))
        )
        if to_fp16:
            fused.convert_float_to_float16(keep_io_types=True)
        fused.save_model_to_file(str(target))
    if not is_known:
        return f"not fused: the passes don't know the family {config.model_type}"
    counts = [
        f"{count} {name}" for name, count in fused.get_fused_operator_statistics().items() if count
    ]
    return "fused: " + (", ".join(counts) or "nothing")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the exporter's warnings about its age and about constants."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
