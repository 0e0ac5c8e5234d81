"""Tokens/s of embedding models on a GPU: transformers compared with ours, run by a model process.

The texts have the benchmarks' mix of lengths (bench/load/texts.py). The weights are random because
speed doesn't depend on them. All contenders in a row embed the same batches:

- `plain`: 16-bit transformers on texts sorted by length, 64 at a time. `first` is its first pass,
  during which cuDNN builds a plan for each new shape. `without plans` excludes cuDNN's attention
  implementation.
- `bare`: only the operators for packed texts, with all copies and kernels queued at once.
- `ours, one at a time` and `ours`: EmbeddingModel, with one batch and with two batches in flight,
  respectively.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BertConfig, BertModel

from bench.gpu.card import DTYPES, in_turns, medians
from bench.gpu.scale import Scale
from bench.load.texts import MIX
from bench.report import Figure
from shared.models.catalog import Model
from shared.models.catalog_file import read_catalog
from shared.models.entry import Batch
from shared.models.tasks.embedding import EmbeddingResult
from tests.workers.models.packed_attention import attend
from workers.models.base import PreparedText
from workers.models.embedding.bert_weights import read_bert_folder
from workers.models.embedding.model import EmbeddingModel
from workers.models.embedding.model_folder import read_sentence_folder
from workers.models.embedding.packed_bert import PackedBert
from workers.models.embedding.packed_encoder import attend_packed, pack_texts
from workers.models.source import resolve
from workers.runtime.protocol import IN_FLIGHT
from workers.tasks import model_for

VOCABULARY = 30522
MAX_BATCHES = 16
"""Maximum number of batches in a pass. cuDNN needs up to 90 ms for each new shape."""
OF_A_BATCH = 64
"""Number of texts per batch for plain transformers."""
_CATALOG = Path(__file__).resolve().parents[2] / "models.yaml"
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Shape(NamedTuple):
    """Dimensions of a BERT."""

    name: str
    width: int
    layers: int
    heads: int


SHAPES = (
    Shape("MiniLM", 384, 6, 12),
    Shape("BERT-base", 768, 12, 12),
    Shape("BERT-large", 1024, 24, 16),
)
TINY_SHAPES = (Shape("tiny", 32, 2, 4),)


def measure(scale: Scale, folder: Path) -> Iterator[Figure]:
    """Yields each contender's tokens/s by model and batch size.

    The lowest cosine similarity is the one between one of our vectors and the vector that
    transformers computes in fp32.
    """
    for shape in SHAPES if scale.is_full_width else TINY_SHAPES:
        bert = write_bert(folder / shape.name, shape)
        ours = model_for(
            text_entry(shape, bert, scale, max(scale.batch_tokens)), bert, scale.device
        )
        assert isinstance(ours, EmbeddingModel)
        ours.setup()
        ours.warmup()
        plain = PlainBert(bert, scale.device, DTYPES[scale.precision])
        contest = _Contest(plain, ours, _pack(bert, scale), scale)
        yield Figure(f"{shape.name}, lowest cosine", _lowest_cosine(bert, ours, scale), "")
        for tokens in scale.batch_tokens:
            label, rates = f"{shape.name}, batches of {tokens} tokens", contest.run(tokens)
            for name, rate in rates.items():
                yield Figure(f"{label}, {name}", rate, "tokens/s")
            for name, other in (("bare", "bare"), ("plain", "plain without plans")):
                yield Figure(f"{label}, ours over {name}", rates["ours"] / rates[other], "times")


class PlainBert:
    """transformers, run as its documentation shows: mean pooling, with vectors fetched."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        model = BertModel.from_pretrained(folder, dtype=dtype, add_pooling_layer=False)
        self._model = model.to(device).eval()
        self._device = device

    def embed(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the vectors for token IDs (float32 [texts, width])."""
        vectors = np.zeros((len(texts), self._model.config.hidden_size), np.float32)
        ordered = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        for first in range(0, len(ordered), OF_A_BATCH):
            numbers = ordered[first : first + OF_A_BATCH]
            vectors[numbers] = self._embed([texts[number] for number in numbers])
        return vectors

    def _embed(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        ids = np.zeros((len(texts), max(map(len, texts))), np.int64)
        mask = np.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        on_device = torch.from_numpy(mask).to(self._device)
        with torch.inference_mode():
            states = self._model(
                input_ids=torch.from_numpy(ids).to(self._device), attention_mask=on_device
            ).last_hidden_state
            weights = on_device[..., None].to(states.dtype)
            pooled = (states * weights).sum(1) / weights.sum(1)
            vectors = torch.nn.functional.normalize(pooled, dim=1)
            return vectors.float().cpu().numpy()


class _Contest:
    """Runs all contenders on the same batches."""

    def __init__(
        self, plain: PlainBert, ours: EmbeddingModel, packed: PackedBert, scale: Scale
    ) -> None:
        self._plain, self._ours, self._packed, self._scale = plain, ours, packed, scale

    def run(self, batch_tokens: int) -> dict[str, float]:
        """Returns each contender's tokens/s, with batches of about this many tokens."""
        batches = draw_batches(batch_tokens, self._scale.pass_tokens)
        tokens = sum(len(text) for batch in batches for text in batch)
        prepared = [[prepare(text) for text in batch] for batch in batches]
        bare = _BareLoop(self._packed, batches, self._scale.device)
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            contenders: dict[str, Callable[[], Any]] = {
                "plain": lambda: self._run_plain(batches),
                "plain without plans": lambda: self._run_plain(batches, sdpa_kernel(WITHOUT_PLANS)),
                "bare": bare.run,
                "ours, one at a time": lambda: list(map(self._predict, prepared)),
                "ours": lambda: list(threads.map(self._predict, prepared)),
            }
            taken_s = in_turns(self._scale, contenders)
        rates = {name: tokens / pass_s for name, pass_s in medians(taken_s).items()}
        return rates | {"plain, first": tokens / taken_s["plain"][0]}

    def _run_plain(
        self,
        batches: Sequence[Sequence[np.ndarray]],
        choice: AbstractContextManager[None] | None = None,
    ) -> None:
        with choice or nullcontext():
            for batch in batches:
                self._plain.embed(batch)

    def _predict(self, batch: list[PreparedText]) -> list[Any]:
        results = list[Any]()
        for group in self._ours.groups(batch):
            results += self._ours.predict(
                [batch[index] for index in group], lambda step, steps: None
            )
        return results


class _BareLoop:
    """Queues the copies and operators for packed texts, and waits once at the end."""

    def __init__(
        self, packed: PackedBert, batches: Sequence[Sequence[np.ndarray]], device: str
    ) -> None:
        self._packed, self._device = packed, device
        self._inputs = [_pack_for(batch, device) for batch in batches]

    def run(self) -> None:
        results = []
        with torch.inference_mode():
            for buffer, tokens, longest in self._inputs:
                on_device = buffer.to(self._device, non_blocking=True)
                vectors = self._packed.vectors(on_device, tokens, longest)
                results.append(vectors.to("cpu", non_blocking=True))


def _pack_for(batch: Sequence[np.ndarray], device: str) -> tuple[torch.Tensor, int, int]:
    lengths = np.array([len(text) for text in batch])
    buffer = torch.from_numpy(pack_texts(np.concatenate(batch), None, lengths))
    if device != "cpu":
        buffer = buffer.pin_memory()
    return buffer, int(lengths.sum()), int(lengths.max())


def _pack(folder: Path, scale: Scale) -> PackedBert:
    bert = read_bert_folder(folder)
    assert bert is not None, "this benchmark wrote a plain BERT"
    return PackedBert(
        *bert,
        ("mean",),
        normalize=True,
        device=torch.device(scale.device),
        dtype=DTYPES[scale.precision],
        attend=attend if scale.device == "cpu" else attend_packed,
    )


def _lowest_cosine(folder: Path, ours: EmbeddingModel, scale: Scale) -> float:
    [batch, *_] = draw_batches(min(scale.batch_tokens), min(scale.batch_tokens))
    exact = PlainBert(folder, scale.device, torch.float32).embed(batch)
    results = ours.predict([prepare(text) for text in batch], lambda step, steps: None)
    vectors = [
        np.frombuffer(result.vector, "<f4")
        for result in results
        if isinstance(result, EmbeddingResult)
    ]
    return float((np.stack(vectors) * exact).sum(1).min())


def draw_batches(batch_tokens: int, pass_tokens: int) -> list[list[np.ndarray]]:
    """Returns batches of the mix, each of about `batch_tokens` and at most `pass_tokens` in all."""
    random = np.random.default_rng(batch_tokens)
    shares = np.array([share for share, _, _ in MIX])
    batches = []
    for _ in range(min(MAX_BATCHES, max(1, pass_tokens // batch_tokens))):
        batch, tokens = list[np.ndarray](), 0
        while tokens < batch_tokens:
            _, low, high = MIX[random.choice(len(MIX), p=shares)]
            # Each word is one token, and each text also has two special tokens.
            length = min(int(random.integers(low, high + 1)) + 2, max(2, batch_tokens - tokens))
            batch.append(random.integers(1000, VOCABULARY, length, dtype=np.uint32))
            tokens += length
        batches.append(batch)
    return batches


def prepare(ids: np.ndarray) -> PreparedText:
    return PreparedText(key="", length=len(ids), ids=ids.astype("<u4").tobytes())


def text_entry(shape: Shape, folder: Path, scale: Scale, batch_tokens: int) -> Model:
    return Model.model_validate(
        {
            "name": shape.name,
            "task": "embedding",
            "source": f"local:{folder}",
            "backend": "torch",
            "precision": scale.precision,
            "dimensions": shape.width,
            "batch": Batch(max_tokens=batch_tokens, max_items=batch_tokens),
        }
    )


def write_bert(folder: Path, shape: Shape) -> Path:
    """Writes a BERT with random weights and MiniLM's tokenizer, for sentence-transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
    )
    BertModel(config).save_pretrained(folder)
    shutil.copy(_tokenizer(), folder)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"type": kind, "path": "" if kind == "Transformer" else kind} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    return folder


def _tokenizer() -> Path:
    entry = read_catalog(_CATALOG).default("embedding")
    folder = resolve(entry.source, entry.revision, Path("var/models"))
    return read_sentence_folder(folder).transformer / "tokenizer.json"
