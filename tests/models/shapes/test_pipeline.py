"""The model folder in the repository: its size, its files, and the scores on its card."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CLIPTokenizer

from models.shapes import PIPELINE
from models.shapes.score import (
    BEGIN,
    CARD,
    END,
    GUIDANCE,
    SCORES,
    SHEET,
    STEPS,
    TARGETS,
    Accuracy,
    as_text,
    weights_sha256,
)
from shared.models.catalog_file import read_catalog

pytestmark = pytest.mark.slow

MAX_BYTES = 12_000_000
OTHER_WEIGHTS = {".bin", ".ckpt", ".pt", ".pth", ".pkl"}


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PIPELINE / SCORES).read_text())
    return found


@pytest.fixture(scope="module")
def table(kept: dict[str, Any]) -> dict[str, Accuracy]:
    return {name: Accuracy(**counted) for name, counted in kept["scores"].items()}


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in PIPELINE.rglob("*") if path.is_file()) <= MAX_BYTES


def test_weights_are_fp16_safetensors() -> None:
    files = [path for path in PIPELINE.rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in OTHER_WEIGHTS]
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert {path.parent.name for path in weights} == {"text_encoder", "unet", "vae"}
    for path in weights:
        tensors = load_file(path).values()
        assert {tensor.dtype for tensor in tensors} == {torch.float16}
        assert all(torch.isfinite(tensor).all() for tensor in tensors)


def test_every_part_is_of_a_library() -> None:
    index = json.loads((PIPELINE / "model_index.json").read_text())
    parts = {
        name: part for name, part in index.items() if isinstance(part, list) and part[0] is not None
    }
    assert {library for library, _ in parts.values()} == {"diffusers", "transformers"}
    assert set(parts) == {"scheduler", "text_encoder", "tokenizer", "unet", "vae"}


def test_scores_are_of_these_weights_and_reach_the_targets(
    kept: dict[str, Any], table: dict[str, Accuracy]
) -> None:
    assert kept["weights_sha256"] == weights_sha256(PIPELINE)
    assert (kept["steps"], kept["guidance"]) == (STEPS, GUIDANCE)
    assert table["one object right"].of + table["two objects both right"].of == 500
    assert table["recolored, place kept"].of >= 100
    assert {
        name: table[name].part for name, target in TARGETS.items() if table[name].part < target
    } == {}


def test_card_tells_the_scores(table: dict[str, Accuracy]) -> None:
    card = (PIPELINE / CARD).read_text()
    assert card.partition(BEGIN)[2].partition(END)[0].strip() == as_text(table)
    assert (PIPELINE / SHEET).stat().st_size > 0
    assert f"]({SHEET})" in card


def test_catalog_draws_as_the_score_does() -> None:
    entry = read_catalog(Path("models.yaml")).default("image")
    assert entry.source == "package:models/shapes/pipeline"
    assert (entry.image.width, entry.image.height, entry.image.steps) == (64, 64, STEPS)
    assert (entry.image.guidance_scale, entry.image.scheduler) == (GUIDANCE, "default")


def test_limit_in_the_card_is_the_tokenizers() -> None:
    tokenizer = CLIPTokenizer.from_pretrained(PIPELINE / "tokenizer")
    assert f"truncated to {tokenizer.model_max_length} tokens" in (PIPELINE / CARD).read_text()
