"""Creates and evaluates an embedding model's variants: one graph each, from the same export.

The transformer is exported from torch to an ONNX graph and fused by ONNX Runtime's passes. A
variant is compared with the original in speed, and in quality on unseen texts.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import onnx
import torch
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.onnx_model import OnnxModel
from onnxruntime.transformers.optimizer import optimize_model
from transformers import AutoModel
from transformers.utils import logging as transformers_logging

from shared.errors import ConfigurationError, PenstockError
from shared.models.catalog import Model
from shared.models.tasks.embedding import EmbeddingResult
from workers.models.artifact import Calibration, Variant, write_calibration
from workers.models.base import PreparedText
from workers.models.device import Device
from workers.models.embedding.encoder_onnx import OnnxEncoder
from workers.models.embedding.encoder_torch import TorchEncoder
from workers.models.embedding.model import EmbeddingModel, Encoder
from workers.models.embedding.model_folder import SentenceFolder, read_sentence_folder
from workers.models.embedding.tokenization import TextPreparer
from workers.models.loading import folder_errors
from workers.optimize.calibration import (
    INPUTS,
    calibration_texts,
    equal_feeds,
    feed_of,
    list_held_out_texts,
    prepare_texts,
    vocabulary,
    word_lists,
)
from workers.optimize.options import OptimizeOptions, choose_variants, tolerance_of
from workers.optimize.pruning import prune
from workers.optimize.quality import VectorQuality, compare_vectors
from workers.optimize.quantization import Feed, quantize_calibrated, quantize_per_call, smooth_graph
from workers.optimize.report import Made, Verdict

OPSET = 17
STATES = "last_hidden_state"
_BERT_LIKE = frozenset(
    {"bert", "camembert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta"}
)
"""Families (config.model_type) that ONNX Runtime's BERT fusions support.

Others remain as exported.
"""

_JUDGED_TOGETHER = 8
_TIMED_EVERY = 4
"""Every n-th text is timed, in batches like a worker's, so each round takes a tenth of a second."""
_ROUNDS = 3

_Precision = Literal["fp32", "fp16", "int8"]
_EQUAL_TOKENS = 32
"""Length of the inputs if calibration requires a single shape."""


def load_transformer(folder: Path) -> Any:
    """Returns the transformer in `folder` in torch fp32, with an attention that can be exported.

    Raises:
        ConfigurationError: the transformer can't be loaded.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    with folder_errors(folder):
        model = AutoModel.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    return model.eval().requires_grad_(False)


def export_graph(model: Any, path: Path, *, has_types: bool) -> None:
    """Writes the graph: token IDs and mask [items, tokens] to states [items, tokens, width].

    Args:
        has_types: True if the graph also takes token_type_ids. Otherwise they are 0.

    Raises:
        ConfigurationError: torch can't export this family.
    """
    names = ["input_ids", "attention_mask"] + (["token_type_ids"] if has_types else [])
    # Two rows of unequal length, so that no dimension or mask looks constant.
    ids = torch.ones(2, 16, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    arguments = (ids, mask, torch.zeros_like(ids))[: len(names)]
    axes = {name: {0: "items", 1: "tokens"} for name in (*names, STATES)}
    try:
        with _quiet(), torch.inference_mode():
            torch.onnx.export(
                _States(model, names),
                arguments,
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
    """Wraps the model so that its named inputs are positional, as the exporter requires."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self._names = names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.model(
            **dict(zip(self._names, tensors, strict=True))
        ).last_hidden_state
        return states


def takes_types(model: Any) -> bool:
    """Returns whether the model has an input for token types."""
    return "token_type_ids" in inspect.signature(model.forward).parameters


def fuse_graph(
    source: Path, target: Path, config: Any, *, has_all_heads: bool = True, to_fp16: bool = False
) -> str:
    """Writes `source` with attention, layer norms, and activations fused into single operators.

    Args:
        has_all_heads: True if the graph has all the heads specified in `config`. Attention is fused
            only in that case.
        to_fp16: converts weights and intermediate values to fp16. The inputs keep their types, and
            the states are returned in fp32.

    Returns:
        A description of the resulting operators by kind, or of why nothing was fused.
    """
    is_known = config.model_type in _BERT_LIKE
    # A head count of 0 means that attention is not fused.
    heads, width = (config.num_attention_heads, config.hidden_size) if has_all_heads else (0, 0)
    with _quiet():
        fused = (
            _fuse_operators(source, heads, width, skips_layer_norm=to_fp16)
            if is_known
            else OnnxModel(onnx.load(source))
        )
        if to_fp16:
            fused.convert_float_to_float16(keep_io_types=True)
        fused.save_model_to_file(str(target))
    if not is_known:
        return f"not fused: the passes do not support the family {config.model_type}"
    counts = [
        f"{count} {name}" for name, count in fused.get_fused_operator_statistics().items() if count
    ]
    return "fused: " + (", ".join(counts) or "nothing")


def _fuse_operators(source: Path, heads: int, width: int, *, skips_layer_norm: bool) -> OnnxModel:
    options = FusionOptions("bert")
    # On a CPU, the fused operator takes eight times as long as an addition and a layer norm
    # (encoder_onnx.py also disables it).
    options.enable_skip_layer_norm = options.enable_bias_skip_layer_norm = skips_layer_norm
    return optimize_model(
        str(source),
        model_type="bert",
        num_heads=heads,
        hidden_size=width,
        optimization_options=options,
        # Only the optimizer's own passes, because ONNX Runtime's passes depend on the machine and
        # run when a graph is loaded.
        opt_level=0,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the exporter's warnings about its own age and about constants."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class Baseline:
    """A model's torch fp32 version, the evaluation texts, and its vectors for those texts."""

    def __init__(
        self, entry: Model, settings: SentenceFolder, texts: Sequence[PreparedText], threads: int
    ) -> None:
        self.texts = texts
        self._entry = entry
        self._original = self._open(TorchEncoder(settings, Device("cpu", threads, 1.0), "fp32"))
        self.vectors = self._alone(self._original)

    def _open(self, encoder: Encoder) -> EmbeddingModel:
        model = EmbeddingModel(self._entry, encoder)
        model.setup()
        model.warmup()
        return model

    def _alone(self, model: EmbeddingModel) -> np.ndarray:
        """Returns all texts' vectors, float32 [texts, dimensions], each computed on its own."""
        return np.concatenate([_vectors(model, [text]) for text in self.texts])

    def measure(self, encoder: Encoder) -> tuple[VectorQuality, float, float]:
        """Returns a variant's quality, its texts/s, and the original's texts/s.

        Quality is the worse of two results, one for individual texts and one for batches, because
        padding and the scaling of INT8 activations matter only in batches. Speed is the best of
        several alternating rounds, so any other load on the machine affects both equally.

        Raises:
            ConfigurationError: the variant can't be loaded.
        """
        model = self._open(encoder)
        unbatched = compare_vectors(self._alone(model), self.vectors)
        batched = compare_vectors(self._together(model), self.vectors)
        times_s = [(self._time_s(self._original), self._time_s(model)) for _ in range(_ROUNDS)]
        original_s, variant_s = (min(column) for column in zip(*times_s, strict=True))
        count = len(self.texts[::_TIMED_EVERY])
        return (
            min(unbatched, batched, key=lambda quality: quality.cosine_min),
            count / variant_s,
            count / original_s,
        )

    def _together(self, model: EmbeddingModel) -> np.ndarray:
        order = np.argsort([text.length for text in self.texts], kind="stable")
        vectors = np.empty_like(self.vectors)
        for at in range(0, len(order), _JUDGED_TOGETHER):
            indices = order[at : at + _JUDGED_TOGETHER]
            vectors[indices] = _vectors(model, [self.texts[index] for index in indices])
        return vectors

    def _time_s(self, model: EmbeddingModel) -> float:
        texts = self.texts[::_TIMED_EVERY]
        groups = [[texts[index] for index in indices] for indices in model.groups(texts)]
        began_s = time.perf_counter()
        for group in groups:
            _vectors(model, group)
        return time.perf_counter() - began_s


def _vectors(model: EmbeddingModel, texts: Sequence[PreparedText]) -> np.ndarray:
    results = model.predict(texts, lambda step, steps: None)
    return np.array(
        [
            np.frombuffer(result.vector, "<f4")
            for result in results
            if isinstance(result, EmbeddingResult)
        ]
    )


def make_variants(
    entry: Model, folder: Path, target: Path, options: OptimizeOptions, say: Callable[[str], None]
) -> Made:
    """Writes the graphs of the accepted variants and calibration.npz.

    Args:
        target: an empty folder.
        say: receives a progress line before each step.

    Raises:
        ConfigurationError: the model can't be loaded or exported, or an option is invalid.
    """
    names = choose_variants(entry, options)
    settings = read_sentence_folder(folder)
    preparer = TextPreparer(folder)
    say("computing the reference vectors with torch fp32")
    baseline = Baseline(
        entry, settings, prepare_texts(preparer, list_held_out_texts()), options.threads
    )
    lists = prepare_texts(preparer, word_lists(vocabulary(settings.transformer)))
    builder = _VariantBuilder(
        settings, prepare_texts(preparer, calibration_texts()), lists, target, options
    )
    verdicts, original_rate = [], 0.0
    for name in names:
        say(f"creating and evaluating {name}")
        verdict, rate = _judge(entry, builder, baseline, name, options)
        verdicts.append(verdict)
        original_rate = max(original_rate, rate)
    builder.clear()
    # The texts used to evaluate variants, rather than those used to fit them, because a worker uses
    # these texts to check a variant again.
    write_calibration(target, Calibration(baseline.texts, baseline.vectors))
    size_mb = sum(path.stat().st_size for path in settings.transformer.glob("*.safetensors")) / 1e6
    original = {
        "variant": "torch-fp32",
        "MB": f"{size_mb:.1f}",
        "texts/s": f"{original_rate:.1f}",
        "speed": "1.00",
        "cosine mean": "1.00000",
        "min": "1.00000",
        "top 10": "1.000",
        "rank corr.": "1.00000",
    }
    return Made(verdicts, original)


@dataclass(frozen=True)
class _VariantBuilder:
    """Creates one graph at a time in `target`.

    Inputs shared by several graphs are created only once.
    """

    settings: SentenceFolder
    texts: Sequence[PreparedText]
    lists: Sequence[PreparedText]
    target: Path
    options: OptimizeOptions

    def clear(self) -> None:
        for path in self.target.glob(".*.onnx"):
            path.unlink()

    def discard(self, name: str) -> None:
        (self.target / f"{name}.onnx").unlink(missing_ok=True)

    def encoder(self, variant: Variant) -> OnnxEncoder:
        """Returns the encoder that a worker would use to run the variant."""
        return OnnxEncoder(
            self.settings, self.target / variant.file, device="cpu", threads=self.options.threads
        )

    def make(self, name: str) -> Variant:
        """Writes the graph of the variant called `name`, which has not been measured yet."""
        makers: dict[str, tuple[_Precision, Callable[[Path], tuple[str, dict[str, Any]]]]] = {
            "fp32": ("fp32", self._fp32),
            "int8": ("int8", self._int8),
            "int8-static": ("int8", self._int8_static),
            "fp16": ("fp16", self._fp16),
            "pruned": ("fp32", self._prune),
        }
        precision, maker = makers[name]
        path = self.target / f"{name}.onnx"
        note, recipe = maker(path)
        return Variant(
            name=f"onnx-{name}",
            backend="onnx",
            precision=precision,
            file=path.name,
            size_bytes=path.stat().st_size,
            note=note,
            recipe=recipe,
        )

    def _fp32(self, path: Path) -> tuple[str, dict[str, Any]]:
        return fuse_graph(self._exported, path, self._model.config), {}

    def _fp16(self, path: Path) -> tuple[str, dict[str, Any]]:
        note = fuse_graph(self._exported, path, self._model.config, to_fp16=True)
        return f"for GPUs; timed here on a CPU, which converts at each operator; {note}", {}

    def _int8(self, path: Path) -> tuple[str, dict[str, Any]]:
        quantize_per_call(self._smoothed, path)
        return "activations scaled per call: a vector depends a little on its batch", {
            "smoothed": True
        }

    def _int8_static(self, path: Path) -> tuple[str, dict[str, Any]]:
        method = self.options.calibration
        feeds = (
            self._feeds
            if method == "minmax"
            else equal_feeds(self.texts, self._inputs, _EQUAL_TOKENS)
        )
        quantize_calibrated(self._smoothed, path, feeds, method)
        return "activations scaled once: a vector does not depend on its batch", {
            "smoothed": True,
            "ranges": method,
        }

    def _prune(self, path: Path) -> tuple[str, dict[str, Any]]:
        model = load_transformer(self.settings.transformer)
        parts = {"neurons": self.options.prune_neurons, "heads": self.options.prune_heads}
        pruned = prune(model, self.texts, **parts)
        exported = self.target / ".pruned.onnx"
        export_graph(model, exported, has_types=self._has_types)
        note = fuse_graph(exported, path, model.config, has_all_heads=not parts["heads"])
        words = (
            f"cut {pruned.neurons} of {pruned.of_neurons} inner neurons "
            f"and {pruned.heads} of {pruned.of_heads} heads"
        )
        return f"{words}; {note}", {"pruned": parts}

    @cached_property
    def _model(self) -> Any:
        return load_transformer(self.settings.transformer)

    @cached_property
    def _has_types(self) -> bool:
        """True only if the tokenizer returns token types.

        An input that is always 0 would slow down every call.
        """
        return any(text.type_ids for text in self.texts) and takes_types(self._model)

    @property
    def _inputs(self) -> tuple[str, ...]:
        return (*INPUTS, "token_type_ids") if self._has_types else INPUTS

    @cached_property
    def _feeds(self) -> list[Feed]:
        # Using every other text is as informative as using all of them.
        return [feed_of(text, self._inputs) for text in (*self.texts[::2], *self.lists)]

    @cached_property
    def _exported(self) -> Path:
        path = self.target / ".exported.onnx"
        export_graph(self._model, path, has_types=self._has_types)
        return path

    @cached_property
    def _smoothed(self) -> Path:
        path = self.target / ".smoothed.onnx"
        smooth_graph(self._exported, path, self._feeds)
        return path


def _judge(
    entry: Model, builder: _VariantBuilder, baseline: Baseline, name: str, options: OptimizeOptions
) -> tuple[Verdict, float]:
    """Returns the verdict, and the original's speed in texts/s.

    The graph of a variant that is rejected or can't be measured is deleted.
    """
    try:
        variant = builder.make(name)
        quality, rate, original_rate = baseline.measure(builder.encoder(variant))
    except PenstockError as error:
        builder.discard(name)
        missing = Variant(name=f"onnx-{name}", backend="onnx", precision="fp32")
        return Verdict(missing, refusal=f"could not be created: {error.message}"), 0.0
    tolerance = tolerance_of(entry, options)
    refusal = ""
    if not quality.cosine_min >= tolerance:
        refusal = f"minimum cosine {quality.cosine_min:.5f} is below {tolerance:g}"
        builder.discard(name)
    recipe = variant.recipe | {"rank_correlation": quality.rank_correlation, "tolerance": tolerance}
    measured = msgspec.structs.replace(
        variant,
        cosine_mean=quality.cosine_mean,
        cosine_min=quality.cosine_min,
        ranking_agreement=quality.neighbors,
        relative_speed=rate / original_rate,
        recipe=recipe,
    )
    return Verdict(measured, _figures(measured, quality, rate), refusal), original_rate


def _figures(variant: Variant, quality: VectorQuality, rate: float) -> dict[str, str]:
    return {
        "MB": f"{variant.size_bytes / 1e6:.1f}",
        "texts/s": f"{rate:.1f}",
        "speed": f"{variant.relative_speed:.2f}",
        "cosine mean": f"{quality.cosine_mean:.5f}",
        "min": f"{quality.cosine_min:.5f}",
        "top 10": f"{quality.neighbors:.3f}",
        "rank corr.": f"{quality.rank_correlation:.5f}",
    }
