"""Item options that a loaded model supports, based on the arguments its pipelines accept."""

from __future__ import annotations

import math
from typing import Any

import diffusers

from shared.errors import BadInput
from shared.models.image_interface import ImageInterface, ImageUsuals, refuse_mode
from shared.models.schedulers import OWN_SCHEDULER, SCHEDULER_NAMES
from workers.models.base import PreparedImage
from workers.models.image.pipeline import (
    LoadedPipelines,
    denoiser_of,
    guidance_name,
    mode_of,
    parameters_of,
)

_UNGUIDED = 1.0
"""The `guidance_scale` of unguided images, which every pipeline supports."""
_MAX_USUAL_PX = 1024
"""The largest default side, because catalog entries allow 1024 x 1024 pixels by default."""
_USUAL_STEPS = 20

_GUIDED_WITHOUT_A_PROMPT = 1.0
"""The default `true_cfg_scale` of pipelines that ignore negative prompts."""
_EVEN_LATENTS = frozenset({"QwenImage21Pipeline"})
"""Pipelines that round sides down to an even number of latents, although a token has only one
(diffusers 0.42.1).
"""


class OptionCheck:
    """Checks items' options against what a model's pipelines support.

    Args:
        usual_guidance: the `guidance_scale` for requests that don't set it.
    """

    def __init__(self, pipelines: LoadedPipelines, usual_guidance: float) -> None:
        self._pipelines = pipelines
        self._usual_guidance = usual_guidance
        self._schedulers = schedulers_of(pipelines.main.scheduler)
        self._fields = fields_of(pipelines)

    def refusal(self, item: PreparedImage) -> BadInput | None:
        """Returns the reason none of the model's pipelines can draw an item, or None if one can."""
        return self._refusal_of_mode(item) or self._refusal_of_option(item) or self._of_size(item)

    def _refusal_of_mode(self, item: PreparedImage) -> BadInput | None:
        mode, known = mode_of(item), tuple(self._pipelines.by_mode)
        if reason := refuse_mode(mode, known):
            return BadInput(reason, field="mask" if "mask" in (mode, *known[:1]) else "image")
        return None

    def _refusal_of_option(self, item: PreparedImage) -> BadInput | None:
        if item.scheduler not in self._schedulers:
            known = " or ".join(map(repr, self._schedulers))
            return BadInput(f"scheduler must be {known} for this model", field="scheduler")
        uses = {
            "negative_prompt": bool(item.negative_prompt),
            "clip_skip": bool(item.clip_skip),
            "guidance_rescale": bool(item.guidance_rescale),
            "guidance_scale": item.guidance_scale not in (self._usual_guidance, _UNGUIDED),
        }
        for name, is_used in uses.items():
            if is_used and name not in self._fields:
                return BadInput(f"{name}: is not supported by this model; omit it", field=name)
        if item.clip_skip and item.clip_skip > (max_skip := _max_clip_skip(self._pipelines.main)):
            reason = f"clip_skip must be at most {max_skip} for this model, got {item.clip_skip}"
            return BadInput(reason, field="clip_skip")
        return None

    def _of_size(self, item: PreparedImage) -> BadInput | None:
        pipeline = self._pipelines.main
        multiple, largest = _multiple_px(pipeline), _largest_px(pipeline)
        for name in ("width", "height"):
            side = getattr(item, name)
            if side % multiple:
                reason = f"{name} must be a multiple of {multiple} for this model, got {side}"
                return BadInput(reason, field=name)
            if largest is not None and side > largest:
                reason = f"{name} must be at most {largest} for this model, got {side}"
                return BadInput(reason, field=name)
        return None


def fields_of(pipelines: LoadedPipelines) -> tuple[str, ...]:
    """Returns the names in OPTIONS that have an effect for a model."""
    known = parameters_of(pipelines.main)
    fields = [name for name in ("clip_skip", "guidance_rescale") if name in known]
    guidance, true_scale = guidance_name(pipelines.main), known.get("true_cfg_scale")
    if guidance is not None:
        fields.append("guidance_scale")
    is_guided = (
        guidance == "true_cfg_scale"
        or true_scale is None
        or true_scale.default > _GUIDED_WITHOUT_A_PROMPT
    )
    if "negative_prompt" in known and is_guided:
        fields.append("negative_prompt")
    # If one of two pipelines ignores an option, requests can't use that option, because the charge
    # depends on it.
    edited = [pipeline for mode, pipeline in pipelines.by_mode.items() if mode != "text"]
    if edited and all("strength" in parameters_of(pipeline) for pipeline in edited):
        fields.append("strength")
    return tuple(sorted(fields))


def describe(pipelines: LoadedPipelines) -> ImageInterface:
    """Returns a model's tasks and fields, with the defaults from its pipeline."""
    pipeline = pipelines.main
    known, guidance = parameters_of(pipeline), guidance_name(pipeline)
    multiple = _multiple_px(pipeline)
    width, height = (_usual_side(pipeline, name, multiple) for name in ("width", "height"))
    scale = 0.0 if guidance is None else known[guidance].default
    steps = known["num_inference_steps"].default
    return ImageInterface(
        pipeline=type(pipeline).__name__,
        tasks=tuple(pipelines.by_mode),
        fields=fields_of(pipelines),
        schedulers=schedulers_of(pipeline.scheduler),
        defaults=ImageUsuals(
            width=width,
            height=height,
            steps=steps if isinstance(steps, int) else _USUAL_STEPS,
            guidance_scale=scale if isinstance(scale, int | float) else 0.0,
            scheduler=OWN_SCHEDULER,
            multiple=multiple,
        ),
    )


def _usual_side(pipeline: Any, name: str, multiple: int) -> int:
    """Returns the default width or height in pixels, capped at `_MAX_USUAL_PX`."""
    parameter = parameters_of(pipeline).get(name)
    side = None if parameter is None else parameter.default
    if not isinstance(side, int):
        latents = getattr(pipeline, "default_sample_size", None)
        if latents is None and (denoiser := denoiser_of(pipeline)) is not None:
            latents = denoiser.config.get("sample_size")
        side = latents * pipeline.vae_scale_factor if isinstance(latents, int) else _MAX_USUAL_PX
    return max(multiple, min(side, _MAX_USUAL_PX) // multiple * multiple)


def schedulers_of(own: Any) -> tuple[str, ...]:
    """Returns the request names of the schedulers that can be used in place of `own`."""
    if isinstance(own, diffusers.FlowMatchEulerDiscreteScheduler):
        return (OWN_SCHEDULER, "euler")
    is_flow = own.config.get("prediction_type") == "flow_prediction"
    # Denoisers that also predict variances require a scheduler that takes both.
    is_fixed = is_flow or own.config.get("variance_type") in ("learned", "learned_range")
    return SCHEDULER_NAMES if "beta_start" in own.config and not is_fixed else (OWN_SCHEDULER,)


def _max_clip_skip(pipeline: Any) -> int:
    """Returns how many CLIP layers can be skipped.

    With two encoders, the last layer is always skipped.
    """
    encoders = [getattr(pipeline, name, None) for name in ("text_encoder", "text_encoder_2")]
    layers = [encoder.config.num_hidden_layers for encoder in encoders if encoder is not None]
    return min(layers, default=0) - int(hasattr(pipeline, "text_encoder_2"))


def _patch(pipeline: Any) -> int | None:
    """Returns the width, in latents, of a transformer's token.

    None if the transformer has no tokens.
    """
    transformer = getattr(pipeline, "transformer", None)
    patch = None if transformer is None else transformer.config.get("patch_size")
    return patch if isinstance(patch, int) else None


def _multiple_px(pipeline: Any) -> int:
    """Returns the number that sides must be a multiple of: the pixels of one latent or token."""
    if (movq := getattr(pipeline, "movq", None)) is not None:
        # Kandinsky's pipelines round sides up to as many latents as a latent has pixels.
        return int(4 ** (len(movq.config.block_out_channels) - 1))
    scale: int = getattr(pipeline, "vae_scale_factor", 1)
    if type(pipeline).__name__ in _EVEN_LATENTS:
        return 2 * scale
    processor = getattr(pipeline, "image_processor", None)
    packed = scale if processor is None else processor.config.get("vae_scale_factor", scale)
    return math.lcm(scale * (_patch(pipeline) or 1), packed)


def _largest_px(pipeline: Any) -> int | None:
    """Returns the largest side for which a transformer has position embeddings. None means any."""
    if (patch := _patch(pipeline)) is None:
        return None
    places = pipeline.transformer.config.get("pos_embed_max_size")
    if places is None:
        return None
    if isinstance(pipeline.transformer, diffusers.AuraFlowTransformer2DModel):
        places = math.isqrt(places)  # it counts the places in a square, not on a side
    return int(places * patch * pipeline.vae_scale_factor)
