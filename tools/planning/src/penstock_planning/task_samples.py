"""Each task's typical item: its work, plus an input and a result in message form."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shared.models.blob import INLINE_LIMIT_BYTES, Blob
from shared.models.catalog import Model
from shared.models.tasks import Input, Result
from shared.models.tasks.custom import CUSTOM, CustomInput, CustomResult, FilePlace
from shared.models.tasks.embedding import BYTES_PER_TOKEN, EMBEDDING, EmbeddingResult, TextInput
from shared.models.tasks.image import IMAGE, ImageInput, ImageResult
from shared.models.tasks.similarity import SIMILARITY, SimilarityInput, SimilarityResult
from shared.models.tasks.text import TEXT, GenerationInput, GenerationResult

KEY = "0" * 64
"""Name of an object in the object store."""


class TaskSamples(NamedTuple):
    """Samples for a task, based on one of its models."""

    work: Callable[[Model, float | None], float | None]
    """Returns a typical item's work in the task's unit, or None if unknown. Takes the number of
    units that the operator expects, or None.
    """
    input: Callable[[Model, int], Input]
    """Returns an input of this size, in bytes."""
    result: Callable[[Model, int | None], Result | None]
    """Returns a result, or None if its size is unknown. Takes the size in bytes that the operator
    expects, or None.
    """


def _take_units(model: Model, units: float | None) -> float | None:
    return units


def _make_text(model: Model, size_bytes: int) -> TextInput:
    return TextInput("x" * size_bytes, "none")


def _make_vector(model: Model, size_bytes: int | None) -> EmbeddingResult:
    return EmbeddingResult(bytes(4 * (model.dimensions or 0)), 100)


def _make_pair(model: Model, size_bytes: int) -> SimilarityInput:
    half = size_bytes // 2
    return SimilarityInput("x" * (size_bytes - half), "x" * half, "none")


def _make_score(model: Model, size_bytes: int | None) -> SimilarityResult:
    """Returns a score with full precision."""
    return SimilarityResult(0.1234567890123456, 100)


def _make_prompt(model: Model, size_bytes: int) -> GenerationInput:
    return GenerationInput(model.generation.default_tokens, 0, prompt="x" * size_bytes)


def _make_generation(model: Model, size_bytes: int | None) -> GenerationResult | None:
    if size_bytes is None:
        return None
    tokens = size_bytes // BYTES_PER_TOKEN
    return GenerationResult("x" * size_bytes, "stop", tokens, 0, tokens)


def _count_pixel_steps(model: Model, units: float | None) -> float:
    return model.image.width * model.image.height * model.image.steps


def _make_drawing(model: Model, size_bytes: int) -> ImageInput:
    """Returns a prompt, or an image in the object store."""
    is_large = size_bytes > INLINE_LIMIT_BYTES
    return ImageInput(
        "" if is_large else "x" * size_bytes,
        width=model.image.width,
        height=model.image.height,
        steps=model.image.steps,
        guidance_scale=model.image.guidance_scale,
        seed=2**31,
        scheduler=model.image.scheduler,
        image=Blob("image/png", object_key=KEY) if is_large else None,
    )


def _make_image(model: Model, size_bytes: int | None) -> ImageResult | None:
    """Returns an image, in the reply or in the object store."""
    if size_bytes is None:
        return None
    is_large = size_bytes > model.reply_limit_bytes
    blob = Blob("image/png", object_key=KEY) if is_large else Blob("image/png", bytes(size_bytes))
    return ImageResult(blob, model.image.width, model.image.height, 2**31, 10**6)


def _take_work(model: Model, units: float | None) -> float:
    """Returns the units that the operator expects. A class without `work` counts items."""
    return units or 1


def _make_class_input(model: Model, size_bytes: int) -> CustomInput:
    """Returns a text, or a file in the object store."""
    if size_bytes > INLINE_LIMIT_BYTES:
        file = Blob("application/octet-stream", object_key=KEY)
        return CustomInput({"file": None}, [file], [FilePlace(["file"])])
    return CustomInput({"text": "x" * size_bytes})


def _make_class_result(model: Model, size_bytes: int | None) -> CustomResult | None:
    """Returns a text, or a file in the object store."""
    if size_bytes is None:
        return None
    if size_bytes > INLINE_LIMIT_BYTES:
        file = Blob("application/octet-stream", object_key=KEY)
        return CustomResult(None, [file], [FilePlace([])])
    return CustomResult("x" * size_bytes)


SAMPLES = {
    EMBEDDING.name: TaskSamples(_take_units, _make_text, _make_vector),
    IMAGE.name: TaskSamples(_count_pixel_steps, _make_drawing, _make_image),
    SIMILARITY.name: TaskSamples(_take_units, _make_pair, _make_score),
    TEXT.name: TaskSamples(_take_units, _make_prompt, _make_generation),
    CUSTOM.name: TaskSamples(_take_work, _make_class_input, _make_class_result),
}
"""Samples by task name."""
