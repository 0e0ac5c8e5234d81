"""Shortcuts of image models (`deep_cache`, `guidance_stop`): what they gain, and what they cost.

The same held-out captions are drawn with each in turn, in batches, in one process on one thread.
The gain is in images per CPU second over those of the plain entry. The judge of shapes says how
many images are right.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from bench.report import Figure, Outcome
from models.shapes.judge import Pixels
from models.shapes.score import Asked, held_out, score_drawn
from shared.catalog import Model
from shared.catalog_file import read_catalog
from shared.image_entry import DeepCacheSettings
from shared.tasks.image import ImageInput, ImageResult
from workers.models.base import PreparedImage
from workers.models.image.stepped import SteppedImageModel
from workers.models.source import resolve
from workers.tasks import model_for, preparer_for

IMAGES, AT_ONCE = 160, 8
PLAIN = "plain"
CHOICES: Mapping[str, Mapping[str, object]] = {
    PLAIN: {},
    "deep_cache 2": {"deep_cache": DeepCacheSettings(cache_interval=2)},
    "deep_cache 3": {"deep_cache": DeepCacheSettings(cache_interval=3)},
    "deep_cache 5": {"deep_cache": DeepCacheSettings(cache_interval=5)},
    "deep_cache 3, branch 1": {
        "deep_cache": DeepCacheSettings(cache_interval=3, cache_branch_id=1)
    },
    "guidance_stop 0.5": {"guidance_stop": 0.5},
    "deep_cache 3, guidance_stop 0.5": {
        "deep_cache": DeepCacheSettings(cache_interval=3),
        "guidance_stop": 0.5,
    },
}
"""Fields of the entry by what the figures call them."""


@dataclass
class _Drawn:
    """The images of a choice, and what they took."""

    model: SteppedImageModel
    cpu_s: float = 0.0
    images: list[Pixels] = field(default_factory=list)

    @property
    def per_cpu_s(self) -> float:
        return len(self.images) / self.cpu_s


def run() -> Outcome:
    """Draws with all choices in turn."""
    torch.set_num_threads(1)
    entry = read_catalog(Path("models.yaml")).default("image")
    drawn = {name: _Drawn(_model(entry, fields)) for name, fields in CHOICES.items()}
    asked = held_out(IMAGES)
    for at in range(0, IMAGES, AT_ONCE):
        items = _items(entry, asked[at : at + AT_ONCE])
        for one in drawn.values():
            began_s = time.process_time()
            results = _results(one.model, items)
            one.cpu_s += time.process_time() - began_s
            one.images += [_pixels(result) for result in results]
    figures = []
    for name, one in drawn.items():
        gain = one.per_cpu_s / drawn[PLAIN].per_cpu_s
        figures.append(Figure(f"{name}: images per CPU second", one.per_cpu_s, "/s"))
        figures.append(Figure(f"{name}: the same over plain", gain, ""))
        figures += _judged(name, asked, one.images)
    return Outcome(figures, {"images": IMAGES, "in_a_batch": AT_ONCE, "steps": entry.image.steps})


def _judged(name: str, asked: Sequence[Asked], images: Sequence[Pixels]) -> list[Figure]:
    table = score_drawn(asked, images)
    both = table["one object right"], table["two objects both right"]
    whole = sum(one.right for one in both) / sum(one.of for one in both)
    parts = {part: table[part].part for part in ("color right", "shape right")}
    judged = {"images right as a whole": whole, **parts}
    return [Figure(f"{name}: {measure}", part, "") for measure, part in judged.items()]


def _model(entry: Model, fields: Mapping[str, object]) -> SteppedImageModel:
    changed = entry.model_copy(update={"image": entry.image.model_copy(update=dict(fields))})
    model = model_for(changed, resolve(entry.source, entry.revision, Path("unused")), "cpu")
    assert isinstance(model, SteppedImageModel), "the shipped model joins images; this is a bug"
    model.setup()
    return model


def _items(entry: Model, asked: Sequence[Asked]) -> list[PreparedImage]:
    image = entry.image
    values = [
        ImageInput(
            prompt=one.caption,
            width=image.width,
            height=image.height,
            steps=image.steps,
            guidance_scale=image.guidance_scale,
            seed=one.seed,
            scheduler=image.scheduler,
        )
        for one in asked
    ]
    folder = resolve(entry.source, entry.revision, Path("unused"))
    prepared = preparer_for(entry, folder).prepare(values)
    return [item for item in prepared if isinstance(item, PreparedImage)]


def _results(model: SteppedImageModel, items: Sequence[PreparedImage]) -> list[ImageResult]:
    for slot, item in enumerate(items):
        model.admit(slot, item)
    drawn: dict[int, object] = {}
    while len(drawn) < len(items):
        drawn |= model.step().results
    results = [drawn[slot] for slot in range(len(items))]
    return [result for result in results if isinstance(result, ImageResult)]


def _pixels(result: ImageResult) -> Pixels:
    with Image.open(io.BytesIO(result.image.data or b"")) as image:
        return np.asarray(image.convert("RGB"))
