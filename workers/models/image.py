"""Images in diffusers, in the model process: text-to-image and image-to-image from one loaded pipeline."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image

from shared.catalogue import Model as Entry
from shared.errors import BadInput, ConfigurationError, ModelFailed, PenstockError
from shared.messages import Blob, ImageResult, Result
from shared.schedulers import OWN_SCHEDULER, SCHEDULERS
from workers.models.base import OnStep, PreparedImage, PreparedItem
from workers.models.device import DTYPES, Device, memory_errors

PNG_LEVEL = 1
"""zlib's level: 512 x 512 like a photograph takes 23 ms, against 44 ms at the default 6 for 12 % less."""


class ImageModel:
    """A diffusers pipeline; the other half is ImagePreparer."""

    device_name = ""

    def __init__(self, entry: Entry, folder: Path, device: Device) -> None:
        self._entry = entry
        self._folder = folder
        self._place = device

    def setup(self) -> None:
        """Loads the pipeline, whatever its class, without its safety checker.

        Raises:
            ConfigurationError: the folder is no text-to-image pipeline.
        """
        for library in (diffusers.utils.logging, transformers.utils.logging):
            # At their default level both tell at length of parts that no pipeline here needs.
            library.set_verbosity_error()
            library.disable_progress_bar()
        device, self.device_name = self._place.open()
        try:
            config = diffusers.DiffusionPipeline.load_config(self._folder, local_files_only=True)
            without = {"safety_checker": None, "requires_safety_checker": False} if "safety_checker" in config else {}
            pipeline = diffusers.AutoPipelineForText2Image.from_pretrained(
                self._folder, dtype=DTYPES[self._entry.precision], local_files_only=True, **without
            ).to(device)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigurationError(f"{self._folder}: {error}", field="source") from error
        self._own_scheduler = pipeline.scheduler
        self._text_to_image = _quiet(pipeline)
        self._image_to_image: Any = None
        if type(pipeline) in _with_image_to_image():
            self._image_to_image = _quiet(diffusers.AutoPipelineForImage2Image.from_pipe(pipeline))

    def warmup(self) -> None:
        """Draws once at the default size, from text and from an image."""
        usual = self._entry.image
        pixels = usual.width * usual.height
        first = PreparedImage(
            key="",
            length=0,
            work=0,
            prompt="warm up",
            negative_prompt="",
            width=usual.width,
            height=usual.height,
            steps=2,
            guidance_scale=usual.guidance_scale,
            seed=0,
            scheduler=usual.scheduler,
        )
        self.predict([first], _ignore_step)
        if self._image_to_image is not None:
            first.source, first.strength = bytes(3 * pixels), 1.0
            self.predict([first], _ignore_step)

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        """Images of one key have one shape, so a batch is drawn as it is."""
        return [list(range(len(batch)))]

    def predict(self, batch: Sequence[PreparedItem], on_step: OnStep) -> list[Result | PenstockError]:
        """One ImageResult per item, in order; each has its own generator, so its noise depends on its seed alone."""
        items = [item for item in batch if isinstance(item, PreparedImage)]
        first = items[0]
        if first.source is not None and self._image_to_image is None:
            return [BadInput("this model draws from text only", field="image") for _ in items]
        if first.scheduler != OWN_SCHEDULER and "beta_start" not in self._own_scheduler.config:
            return [BadInput(f"this model takes only scheduler {OWN_SCHEDULER!r}", field="scheduler") for _ in items]
        pipeline = self._text_to_image if first.source is None else self._image_to_image
        pipeline.scheduler = self._scheduler(first.scheduler)
        with torch.inference_mode(), memory_errors():
            drawn = pipeline(**_arguments(pipeline, items, on_step)).images
        return [_result(item, pixels) for item, pixels in zip(items, drawn, strict=True)]

    def _scheduler(self, name: str) -> Any:
        """A fresh scheduler, for its state must not pass from batch to batch, with the settings of the folder's own."""
        config = self._own_scheduler.config
        if name == OWN_SCHEDULER:
            return type(self._own_scheduler).from_config(config)
        choice = SCHEDULERS[name]
        return getattr(diffusers, choice.class_name).from_config(config, **choice.options)


def _quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _with_image_to_image() -> set[type]:
    """The text-to-image pipelines that have an image-to-image one over the same components."""
    from diffusers.pipelines import auto_pipeline

    names = auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING.keys()
    return {kind for name, kind in auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING.items() if name in names}


def _arguments(pipeline: Any, items: Sequence[PreparedImage], on_step: OnStep) -> dict[str, Any]:
    """The pipeline's arguments for items of one key; what this class of pipeline does not know is left out."""
    first = items[0]
    arguments: dict[str, Any] = {
        "prompt": [item.prompt for item in items],
        "num_inference_steps": first.steps,
        "guidance_scale": first.guidance_scale,
        "generator": [torch.Generator("cpu").manual_seed(item.seed) for item in items],
        "output_type": "np",
        "callback_on_step_end": _callback(on_step),
        "width": first.width,
        "height": first.height,
    }
    if first.negative_prompt:
        arguments["negative_prompt"] = [item.negative_prompt for item in items]
    if first.source is not None:
        size = (first.width, first.height)
        arguments["image"] = [Image.frombytes("RGB", size, item.source or b"") for item in items]
        arguments["strength"] = first.strength
    known = inspect.signature(pipeline.__call__).parameters
    return {name: value for name, value in arguments.items() if name in known}


def _callback(on_step: OnStep) -> Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]:
    def after_step(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        on_step(step + 1, pipeline.num_timesteps)
        return tensors

    return after_step


def _result(item: PreparedImage, pixels: np.ndarray) -> Result | PenstockError:
    """`pixels`: [height, width, 3] from 0 to 1."""
    if not np.isfinite(pixels).all():
        return ModelFailed("the image is not a number; this precision may be too low for the model")
    encoded = io.BytesIO()
    Image.fromarray((pixels * 255).round().astype(np.uint8)).save(encoded, "PNG", compress_level=PNG_LEVEL)
    return ImageResult(
        image=Blob("image/png", encoded.getvalue()),
        width=pixels.shape[1],
        height=pixels.shape[0],
        seed=item.seed,
        pixel_steps=item.work,
    )


def _ignore_step(step: int, steps: int) -> None:
    """Warm-up has nobody to tell."""
