"""Which options of items a loaded model takes, by what its pipelines can be called with."""

from __future__ import annotations

import math
from typing import Any

import diffusers

from shared.diffusion_schedulers import OWN_SCHEDULER, SCHEDULER_NAMES
from shared.errors import BadInput
from workers.models.base import PreparedImage
from workers.models.image.drawing import parameters_of
from workers.models.image.pipeline import LoadedPipelines

_GUIDED_WITHOUT_A_PROMPT = 1.0
"""The default `true_cfg_scale` of pipelines that ignore negative prompts."""


class OptionCheck:
    """Checks the options of items against the pipelines of a model."""

    def __init__(self, pipelines: LoadedPipelines) -> None:
        self._pipelines = pipelines
        self._schedulers = _schedulers_of(pipelines.for_text.scheduler)

    def takes(self, item: PreparedImage, name: str) -> bool:
        """Returns whether the pipeline of an item can be called with an argument."""
        return name in parameters_of(self._pipelines.of(item))

    def refusal(self, item: PreparedImage) -> BadInput | None:
        """Returns why no pipeline of the model can draw an item. None if one can."""
        return self._refusal_of_kind(item) or self._refusal_of_option(item) or self._of_size(item)

    def _refusal_of_kind(self, item: PreparedImage) -> BadInput | None:
        pipelines = self._pipelines
        if pipelines.needs_mask and item.mask is None:
            return BadInput("this model draws only within the mask of an image", field="mask")
        if item.source is not None and pipelines.for_image is None:
            return BadInput("this model draws from text only", field="image")
        if item.source is None and not pipelines.draws_text:
            return BadInput("this model draws from an image only", field="image")
        if item.mask is not None and pipelines.for_mask is None:
            return BadInput("this model takes no mask", field="mask")
        return None

    def _refusal_of_option(self, item: PreparedImage) -> BadInput | None:
        if item.scheduler not in self._schedulers:
            known = " or ".join(map(repr, self._schedulers))
            return BadInput(f"this model takes only scheduler {known}", field="scheduler")
        for name in ("negative_prompt", "clip_skip", "guidance_rescale"):
            if getattr(item, name) and not self._has_effect(name):
                return BadInput(f"{name}: this model takes none; leave it out", field=name)
        if item.clip_skip and item.clip_skip > (most := _max_clip_skip(self._pipelines.for_text)):
            reason = f"clip_skip {item.clip_skip} is above {most}, the most of this model"
            return BadInput(reason, field="clip_skip")
        return None

    def _has_effect(self, name: str) -> bool:
        known = parameters_of(self._pipelines.for_text)
        if name == "negative_prompt" and (scale := known.get("true_cfg_scale")) is not None:
            return name in known and bool(scale.default > _GUIDED_WITHOUT_A_PROMPT)
        return name in known

    def _of_size(self, item: PreparedImage) -> BadInput | None:
        pipeline = self._pipelines.for_text
        multiple, largest = _multiple_px(pipeline), _largest_px(pipeline)
        for name in ("width", "height"):
            side = getattr(item, name)
            if side % multiple:
                reason = f"{name} {side} is not a multiple of {multiple}, as this model needs"
                return BadInput(reason, field=name)
            if largest is not None and side > largest:
                reason = f"{name} {side} is above {largest}, the most of this model"
                return BadInput(reason, field=name)
        return None


def _schedulers_of(own: Any) -> tuple[str, ...]:
    """The names of requests that stand for a scheduler which can take the place of `own`."""
    if isinstance(own, diffusers.FlowMatchEulerDiscreteScheduler):
        return (OWN_SCHEDULER, "euler")
    is_flow = own.config.get("prediction_type") == "flow_prediction"
    return SCHEDULER_NAMES if "beta_start" in own.config and not is_flow else (OWN_SCHEDULER,)


def _max_clip_skip(pipeline: Any) -> int:
    """How many layers of CLIP can be left out. With two encoders, the last one is so as trained."""
    encoders = [getattr(pipeline, name, None) for name in ("text_encoder", "text_encoder_2")]
    layers = [one.config.num_hidden_layers for one in encoders if one is not None]
    return min(layers, default=0) - int(hasattr(pipeline, "text_encoder_2"))


def _patch(pipeline: Any) -> int | None:
    """How many latents across a token of a transformer stands for. None if it has no tokens."""
    transformer = getattr(pipeline, "transformer", None)
    patch = None if transformer is None else transformer.config.get("patch_size")
    return patch if isinstance(patch, int) else None


def _multiple_px(pipeline: Any) -> int:
    """What sides are multiples of: the pixels of a token. 1 if the model has none."""
    if (patch := _patch(pipeline)) is None:
        return 1
    scale: int = getattr(pipeline, "vae_scale_factor", 1)
    processor = getattr(pipeline, "image_processor", None)
    packed = scale if processor is None else processor.config.get("vae_scale_factor", scale)
    return math.lcm(scale * patch, packed)


def _largest_px(pipeline: Any) -> int | None:
    """The largest side that a transformer knows places for. None: any."""
    if (patch := _patch(pipeline)) is None:
        return None
    places = pipeline.transformer.config.get("pos_embed_max_size")
    return None if places is None else int(places * patch * pipeline.vae_scale_factor)
