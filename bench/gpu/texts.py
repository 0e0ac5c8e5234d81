"""Tokens/s of embedding models on a GPU: transformers compared with our EmbeddingModel."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, BertConfig, BertModel

from bench.gpu.card import DTYPES, in_turns
from bench.gpu.scale import Scale
from shared.models.catalog import Model
from shared.models.catalog_file import read_catalog
from shared.models.entry import Batch
from workers.models.base import PreparedText
from workers.models.embedding.model_folder import read_sentence_folder
from workers.models.source import resolve
from workers.tasks import model_for

VOCABULARY = 30522
_CATALOG = Path(__file__).resolve().parents[2] / "models.yaml"


def measure(scale: Scale, folder: Path) -> list[dict[str, Any]]:
    """Returns a row per model and length: tokens/s, plain and ours in each precision."""
    rows = []
    for name, model_folder, dimensions in (
        ("BERT-large", write_bert(folder, scale), 1024 if scale.is_full_width else 32),
        ("MiniLM", minilm_folder(), 384),
    ):
        runners: dict[str, Any] = {f"plain {scale.precision}": _plain(model_folder, scale)}
        for precision in ("fp32",) if scale.device == "cpu" else ("fp32", "fp16", "bf16"):
            model = model_for(
                text_entry(name, model_folder, dimensions, precision, scale),
                model_folder,
                scale.device,
            )
            model.setup()
            model.warmup()
            runners[f"ours {precision}"] = model
        for length in scale.lengths:
            batch = texts(length, max(1, scale.tokens // length))
            rows.append(
                {"model": name, "length": length, "batch": len(batch)}
                | _rates(scale, runners, batch)
            )
    return rows


def _rates(scale: Scale, runners: dict[str, Any], batch: list[PreparedText]) -> dict[str, float]:
    taken = in_turns(
        scale, {name: partial(_embed, runner, batch) for name, runner in runners.items()}
    )
    tokens = sum(text.length for text in batch)
    return {name: tokens / call_s for name, call_s in taken.items()}


def _embed(runner: Any, batch: list[PreparedText]) -> None:
    if callable(runner):
        runner(batch)
        return
    for group in runner.groups(batch):
        runner.predict([batch[index] for index in group], lambda step, steps: None)


def _plain(folder: Path, scale: Scale) -> Any:
    """Returns transformers as its documentation runs it, mean-pooled, with vectors fetched."""
    model = AutoModel.from_pretrained(
        read_sentence_folder(folder).transformer, dtype=DTYPES[scale.precision]
    )
    model = model.to(scale.device).eval()

    def embed(batch: list[PreparedText]) -> Any:
        ids = torch.tensor(
            np.stack([np.frombuffer(text.ids, "<u4") for text in batch]).astype(np.int64)
        )
        mask = torch.ones_like(ids)
        with torch.no_grad():
            states = model(
                input_ids=ids.to(scale.device), attention_mask=mask.to(scale.device)
            ).last_hidden_state
            return torch.nn.functional.normalize(states.mean(1), dim=1).cpu()

    return embed


def texts(length: int, count: int) -> list[PreparedText]:
    random = np.random.default_rng(length)
    ids = random.integers(1000, VOCABULARY, (count, length), dtype=np.uint32).astype("<u4")
    return [PreparedText(key="", length=length, ids=row.tobytes()) for row in ids]


def text_entry(name: str, folder: Path, dimensions: int, precision: str, scale: Scale) -> Model:
    return Model.model_validate(
        {
            "name": name,
            "task": "embedding",
            "source": f"local:{folder}",
            "backend": "torch",
            "precision": precision,
            "dimensions": dimensions,
            "batch": Batch(
                max_tokens=scale.tokens, max_items=max(1, scale.tokens // min(scale.lengths))
            ),
        }
    )


def minilm_folder() -> Path:
    entry = read_catalog(_CATALOG).default("embedding")
    return resolve(entry.source, entry.revision, Path("var/models"))


def write_bert(folder: Path, scale: Scale) -> Path:
    """Writes BERT-large with random weights (tiny: two narrow layers), with MiniLM's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    shape = (1024, 24, 16, 4096) if scale.is_full_width else (32, 2, 4, 64)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape[0],
        num_hidden_layers=shape[1],
        num_attention_heads=shape[2],
        intermediate_size=shape[3],
    )
    BertModel(config).save_pretrained(folder)
    shutil.copy(read_sentence_folder(minilm_folder()).transformer / "tokenizer.json", folder)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"type": kind, "path": "" if kind == "Transformer" else kind} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    return folder
