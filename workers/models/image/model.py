"""Images with diffusers: text-to-image and image-to-image from one loaded pipeline.

Prompts are encoded before the pipeline runs: equal ones once, and recent ones are cached.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch

from shared.blob import Blob
from shared.catalog import Model
from shared.diffusion_schedulers import OWN_SCHEDULER, SCHEDULER_NAMES, SCHEDULERS
from shared.errors import BadInput, ConfigurationError, ModelFailed, PenstockError
from shared.settings import ModelSettings, read_settings
from shared.tasks import Result
from shared.tasks.image import ImageResult
from workers.models.base import OnStep, OutOfMemory, PreparedImage, PreparedItem, RgbImage
from workers.models.device import Device, memory_errors
from workers.models.image.compilation import cheapest_cover, only_what_is_compiled
from workers.models.image.families import load_family
from workers.models.image.family import Encoded, Family, KeptEncodings
from workers.models.image.masks import is_trained_with_masks
from workers.models.image.pipeline import draws_text, load_pipelines
from workers.models.image.plan import capability_of, plan_for
from workers.models.image.vae import (
    draw_previews,
    encode_all,
    own_type,
    sources_on,
    spare_memory,
    to_host,
)
from workers.models.kernel_store import KernelStore


class OptionCheck:
    """Checks the options of items against a pipeline.

    Args:
        pipeline: the one for text. One of no known family takes negative prompts, or ignores them.
    """

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._family = load_family(pipeline)
        self._schedulers = _schedulers_of(pipeline.scheduler)

    def refusal(self, item: PreparedImage) -> BadInput | None:
        """Returns why the pipeline can't draw an item. None if it can."""
        if item.scheduler not in self._schedulers:
            known = " or ".join(map(repr, self._schedulers))
            return BadInput(f"this model takes only scheduler {known}", field="scheduler")
        takes = {"negative_prompt"} if self._family is None else self._family.options
        for name in ("negative_prompt", "clip_skip", "guidance_rescale"):
            if getattr(item, name) and name not in takes:
                return BadInput(f"{name}: this model takes none; leave it out", field=name)
        if self._family is None:
            return None
        if item.clip_skip:
            most = self._family.max_clip_skip(self._pipeline)
            if item.clip_skip > most:
                reason = f"clip_skip {item.clip_skip} is above {most}, the most of this model"
                return BadInput(reason, field="clip_skip")
        return self._family.refusal(self._pipeline, item)


def _schedulers_of(own: Any) -> tuple[str, ...]:
    """The names of requests that stand for a scheduler which can take the place of `own`."""
    if isinstance(own, diffusers.FlowMatchEulerDiscreteScheduler):
        return (OWN_SCHEDULER, "euler")
    is_flow = own.config.get("prediction_type") == "flow_prediction"
    return SCHEDULER_NAMES if "beta_start" in own.config and not is_flow else (OWN_SCHEDULER,)


KEPT_BYTES = 64 * 1024 * 1024
"""Device memory for the cache of prompts.

In 16 bits it holds 540 of Stable Diffusion 1.5, 200 of SDXL, 24 of Stable Diffusion 3, or 15 of
FLUX.1.
"""

Prompt = tuple[str, int | None]
"""A text, and how many of the last layers of CLIP do not read it."""


class PromptEncoder:
    """The text encoders of one pipeline, with an LRU cache.

    Pipelines of no known family get their prompts as text.
    """

    def __init__(self, pipeline: Any, kept_bytes: int = KEPT_BYTES) -> None:
        self._pipeline = pipeline
        self._family = load_family(pipeline)
        self._kept = KeptEncodings[tuple[str, Prompt]](kept_bytes)
        """By variant and prompt."""

    def arguments(self, items: Sequence[PreparedImage], variant: str = "") -> dict[str, Any]:
        """The pipeline's prompt arguments for `items`. Either all or none have a negative prompt.

        Args:
            items: one or more.
            variant: what the text encoders are changed by, as an adapter and its scale. Empty: by
                nothing.

        Returns:
            `prompt_embeds` [items, tokens, width], `pooled_prompt_embeds` [items, width] if the
            encoders have them, and `negative_…` of both if the family takes negative prompts. For
            pipelines of no known family, the prompts as text.
        """
        has_negative = bool(items[0].negative_prompt)
        if self._family is None:
            texts = {"prompt": [item.prompt for item in items]}
            if has_negative:
                texts["negative_prompt"] = [item.negative_prompt for item in items]
            return texts
        prompts: list[Prompt] = [(item.prompt, item.clip_skip) for item in items]
        negatives: list[Prompt] = []
        if "negative_prompt" in self._family.options:
            negatives = [(item.negative_prompt, None) for item in items]
        encoded = self._encoded(self._family, [*prompts, *negatives], variant)
        positive = _rows([encoded[prompt] for prompt in prompts])
        if not negatives:
            return positive
        negative = _rows([encoded[prompt] for prompt in negatives])
        if not has_negative and self._pipeline.config.get("force_zeros_for_empty_prompt", False):
            negative = {name: torch.zeros_like(part) for name, part in positive.items()}
        return positive | {f"negative_{name}": part for name, part in negative.items()}

    def truncated_tokens(self, item: PreparedImage) -> int | None:
        """Returns how many tokens of the prompts the encoders drop.

        None for pipelines of no known family.
        """
        if self._family is None:
            return None
        tokenizer, most = self._family.widest_reader(self._pipeline)
        texts = [text for text in (item.prompt, item.negative_prompt) if text]
        counts = [len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]] if texts else []
        return sum(max(0, count - most) for count in counts)

    def _encoded(
        self, family: Family, prompts: Sequence[Prompt], variant: str
    ) -> dict[Prompt, Encoded]:
        """The embeddings of all prompts. Encodes those that are not cached, equal skips at once."""
        wanted = dict.fromkeys(prompts)
        kept = {prompt: self._kept.get((variant, prompt)) for prompt in wanted}
        known = {prompt: encoded for prompt, encoded in kept.items() if encoded is not None}
        missing = [prompt for prompt in wanted if prompt not in known]
        for clip_skip in dict.fromkeys(clip_skip for _, clip_skip in missing):
            texts = [text for text, skips in missing if skips == clip_skip]
            parts = family.encode(self._pipeline, texts, clip_skip)
            for row, text in enumerate(texts):
                known[text, clip_skip] = tuple(part[row : row + 1].clone() for part in parts)
        self._kept.keep({(variant, prompt): encoded for prompt, encoded in known.items()})
        return known


def _rows(encoded: Sequence[Encoded]) -> dict[str, torch.Tensor]:
    """One row for each prompt, by the names that pipelines have for them."""
    parts = [torch.cat(part) for part in zip(*encoded, strict=True)]
    names = ("prompt_embeds", "pooled_prompt_embeds")[: len(parts)]
    return dict(zip(names, parts, strict=True))


_NO_UNET = "{}: adapters need a pipeline of Stable Diffusion or Stable Diffusion XL"
AfterStep = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]
WARMUP_LIMIT_S = 100.0
"""No further size is started after this.

Compiling one can take a minute if it is not cached on disk.
"""
_WARMUP_STEPS = 4

log = logging.getLogger(__name__)


class ImageModel:
    """Runs batches of images, which ImagePreparer prepared, on a diffusers pipeline."""

    device_name = ""
    pads = True
    draws_masks = False
    """Whether it draws within masks. Only images that join between steps are."""
    takes_adapters = False
    """Whether it draws with adapters. As above."""
    takes_guides = False
    """Whether it takes ControlNets and IP-Adapters. As above."""

    def __init__(
        self, entry: Model, folder: Path, device: Device, *, warmup_limit_s: float = WARMUP_LIMIT_S
    ) -> None:
        self._entry = entry
        self._folder = folder
        self._requested_device = device
        self._warmup_limit_s = warmup_limit_s
        self._call_s: dict[int, float] = {}
        self._between_steps: tuple[Any, torch.Tensor] | None = None
        self._kernels: KernelStore | None = None

    def setup(self) -> None:
        """Loads the pipeline, of any class, without its safety checker.

        Raises:
            ConfigurationError: the folder is not a text-to-image pipeline, it was trained with
                masks or has adapters and can't step, it can't draw with the defaults of the entry,
                or a required package is missing.
        """
        if self._entry.image.has_adapters and not self.takes_adapters:
            raise ConfigurationError(_NO_UNET.format(self._folder), field="image.adapters")
        self._device, self.device_name = self._requested_device.open()
        self._plan = plan_for(self._entry, capability_of(self._device))
        self._text_to_image, self._image_to_image = load_pipelines(
            self._folder, self._device, self._plan
        )
        if self._entry.image.has_adapters and not hasattr(self._text_to_image, "unet"):
            raise ConfigurationError(_NO_UNET.format(self._folder), field="image.adapters")
        self._needs_mask = is_trained_with_masks(self._text_to_image)
        if self._needs_mask and not self.draws_masks:
            raise ConfigurationError(
                f"{self._folder}: it draws within masks only, which needs image.join auto",
                field="image.join",
            )
        for name in ("controls", "ip_adapters"):
            if getattr(self._entry.image, name) and not self.takes_guides:
                raise ConfigurationError(
                    f"{self._folder}: image.{name} need image.join auto, and a pipeline of "
                    "Stable Diffusion or Stable Diffusion XL",
                    field=f"image.{name}",
                )
        if self._plan.is_compiled:
            folder = read_settings(ModelSettings).kernels_dir
            self._kernels = KernelStore(folder, self._entry.name, self._device)
            self._kernels.restore()
        self._draws_text = draws_text(self._image_to_image)
        self._own_scheduler = self._text_to_image.scheduler
        self._unused_schedulers: dict[str, Any] = {}
        self._prompts = PromptEncoder(self._text_to_image)
        self._options = OptionCheck(self._text_to_image)
        refusal = self._options.refusal(self._usual_item(from_image=False))
        if refusal is not None:
            reason = f"{self._folder} can't draw with the defaults of {self._entry.name}: {refusal}"
            raise ConfigurationError(reason, field=f"image.{refusal.field}")

    def warmup(self) -> None:
        """Draws at the default size, from text and from an image.

        Compiles as many batch sizes as time allows, and keeps what it compiled for other workers.
        """
        began_s = time.monotonic()
        for size in self._plan.batch_sizes if self._plan.is_compiled else (1,):
            if time.monotonic() - began_s > self._warmup_limit_s:
                log.warning(
                    "warm-up cut short; the next start finds more compiled",
                    extra={"batch_size": size},
                )
                break
            items = [self._usual_item(from_image=not self._draws_text)] * size
            self._warm(items)
            if self._plan.is_compiled:
                call_began_s = time.monotonic()
                self._warm(items)
                self._call_s[size] = time.monotonic() - call_began_s
        if self._image_to_image is not None and self._draws_text:
            self._warm([self._usual_item(from_image=True)])
        if self._kernels is not None:
            self._kernels.keep()

    def _usual_item(self, *, from_image: bool) -> PreparedImage:
        usual = self._entry.image
        return PreparedImage(
            key="",
            length=0,
            prompt="warm up",
            negative_prompt="",
            width=usual.width,
            height=usual.height,
            steps=_WARMUP_STEPS,
            guidance_scale=usual.guidance_scale,
            seed=0,
            scheduler=usual.scheduler,
            strength=1.0 if from_image else None,
            source=bytes(3 * usual.width * usual.height) if from_image else None,
        )

    def _warm(self, items: Sequence[PreparedImage]) -> None:
        """Draws `items` and discards the results. Compilation is allowed only here."""
        with torch.inference_mode(), memory_errors():
            to_host(self._draw(items, _ignore_step))

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        """One group, or several of the compiled sizes. All images of a key have the same shape."""
        if not self._is_compiled_for(batch[0]):
            return [list(range(len(batch)))]
        ends = [0]
        for size in cheapest_cover(len(batch), self._call_s):
            ends.append(ends[-1] + size)
        return [list(range(start, end)) for start, end in pairwise(ends)]

    def computed_work(self, lengths: Sequence[int]) -> int:
        """In pixel-steps. See workers.models.base.InferenceModel."""
        return max(lengths) * len(lengths)

    def _is_compiled_for(self, item: PreparedItem) -> bool:
        usual = self._entry.image
        is_usual = isinstance(item, PreparedImage) and (item.width, item.height) == (
            usual.width,
            usual.height,
        )
        return is_usual and bool(self._call_s)

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> list[Result | PenstockError]:
        """One ImageResult per item, in order.

        Each has its own generator, so its noise depends only on its seed.
        """
        items = [item for item in batch if isinstance(item, PreparedImage)]
        refusal = self.refusal(items[0]) or self._refusal_of_whole(items[0])
        if refusal is not None:
            return [refusal] * len(items)
        with torch.inference_mode(), self.settled():
            images = self._images(items, on_step)
        return self._results(items, images)

    def refusal(self, item: PreparedImage) -> BadInput | None:
        """Returns why this model can't draw an item. None if it can."""
        if item.mask is not None and not self.draws_masks:
            return BadInput("this model takes no mask", field="mask")
        if item.adapter and not self.takes_adapters:
            return BadInput("this model takes no adapter", field="lora_weights")
        if item.source is not None and self._image_to_image is None:
            return BadInput("this model draws from text only", field="image")
        if item.source is None and not self._draws_text:
            return BadInput("this model draws from an image only", field="image")
        return self._options.refusal(item)

    def _refusal_of_whole(self, item: PreparedImage) -> BadInput | None:
        """Returns why the pipeline's own call can't draw an item."""
        pipeline: Any = self._text_to_image if item.source is None else self._image_to_image
        known = inspect.signature(pipeline.__call__).parameters
        if item.guidance_rescale and "guidance_rescale" not in known:
            reason = "this model takes none with an image; leave it out"
            return BadInput(f"guidance_rescale: {reason}", field="guidance_rescale")
        return None

    def settled(self) -> contextlib.AbstractContextManager[None]:
        """Within it nothing is compiled that the warm-up has not compiled."""
        return only_what_is_compiled() if self._plan.is_compiled else contextlib.nullcontext()

    def _images(self, items: Sequence[PreparedImage], on_step: OnStep) -> list[np.ndarray | None]:
        """As to_host.

        If memory runs out, makes the VAE use less from then on, and tries once more.
        """
        padded = self._padded(items)
        try:
            with memory_errors():
                return to_host(self._draw(padded, on_step)[: len(items)])
        except OutOfMemory:
            if not spare_memory(getattr(self._text_to_image, "vae", None), len(padded)):
                raise
            log.warning(
                "memory is short: the VAE decodes in parts from now on",
                extra={"items": len(padded)},
            )
        with memory_errors():
            return to_host(self._draw(padded, on_step)[: len(items)])

    def _padded(self, items: Sequence[PreparedImage]) -> list[PreparedImage]:
        """`items`, with the last one repeated up to a compiled size."""
        larger = (
            [size for size in self._call_s if size >= len(items)]
            if self._is_compiled_for(items[0])
            else []
        )
        return [*items, *[items[-1]] * (min(larger, default=len(items)) - len(items))]

    def _draw(self, items: Sequence[PreparedImage], on_step: OnStep) -> torch.Tensor:
        """Draws images: [items, 3, height, width] from 0 to 1, on the device."""
        pipeline: Any = self._text_to_image if items[0].source is None else self._image_to_image
        pipeline.scheduler = self._scheduler(items[0].scheduler)
        arguments = _arguments(items, self._callback(on_step)) | self._prompts.arguments(items)
        if items[0].source is not None:
            arguments |= {"image": sources_on(self._device, items), "strength": items[0].strength}
        # Arguments that this class of pipeline does not support are left out.
        known = inspect.signature(pipeline.__call__).parameters
        with own_type(getattr(pipeline, "vae", None)):
            drawn: torch.Tensor = pipeline(
                **{name: value for name, value in arguments.items() if name in known}
            ).images
        return drawn

    def _callback(self, on_step: OnStep) -> AfterStep:
        def after_step(
            pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]
        ) -> dict[str, Any]:
            self._between_steps = pipeline, tensors["latents"]
            try:
                on_step(step + 1, pipeline.num_timesteps)
            finally:
                self._between_steps = None
            return tensors

        return after_step

    def preview(self, indices: Sequence[int]) -> list[RgbImage | None]:
        """Small images between two steps. See workers.models.base.Previewer."""
        if self._between_steps is None:
            return [None] * len(indices)
        return draw_previews(*self._between_steps, indices)

    def _scheduler(self, name: str) -> Any:
        """A new scheduler with the settings of the folder.

        Its state must not pass from batch to batch.
        """
        config = self._own_scheduler.config
        if name == OWN_SCHEDULER or isinstance(
            self._own_scheduler, diffusers.FlowMatchEulerDiscreteScheduler
        ):
            return type(self._own_scheduler).from_config(config)
        # Some look at each timestep of the training as they are made: dpm2 takes half a second.
        if name not in self._unused_schedulers:
            choice = SCHEDULERS[name]
            scheduler = getattr(diffusers, choice.class_name).from_config(config, **choice.options)
            self._unused_schedulers[name] = scheduler
        return copy.deepcopy(self._unused_schedulers[name])

    def _results(
        self, items: Sequence[PreparedImage], images: Sequence[np.ndarray | None]
    ) -> list[Result | PenstockError]:
        drawn = [image for image in images if image is not None]
        files = iter(encode_all(drawn, at_once=self._device.type == "cuda"))
        return [
            ModelFailed("the image is not a number; this precision may be too low for the model")
            if image is None
            else ImageResult(
                image=Blob("image/png", next(files)),
                width=item.width,
                height=item.height,
                seed=item.seed,
                pixel_steps=item.length,
                truncated_tokens=self._prompts.truncated_tokens(item),
                adapter=item.adapter or None,
            )
            for item, image in zip(items, images, strict=True)
        ]


def _arguments(items: Sequence[PreparedImage], after_step: AfterStep) -> dict[str, Any]:
    """The pipeline's arguments for items of one key, without prompts and source images."""
    first = items[0]
    return {
        "num_inference_steps": first.steps,
        "guidance_scale": first.guidance_scale,
        "guidance_rescale": first.guidance_rescale,
        "generator": [torch.Generator("cpu").manual_seed(item.seed) for item in items],
        "output_type": "pt",
        "callback_on_step_end": after_step,
        "width": first.width,
        "height": first.height,
    }


def _ignore_step(step: int, steps: int) -> None:
    """Ignores the steps of a warm-up."""
