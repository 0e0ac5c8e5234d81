"""Loads a diffusers pipeline as its plan says: precision, layout, INT8, compilation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from shared.errors import ConfigurationError
from workers.models.base import PreparedImage
from workers.models.image.compilation import compile_parts, keep_compiled_in
from workers.models.image.plan import ImagePlan
from workers.models.image.vae import needs_fp32

_TURING = (7, 5)
"""The first GPUs with INT8 matrix units."""


def denoiser_of(pipeline: Any) -> Any | None:
    """Returns the UNet or the transformer of a pipeline. None if it has neither."""
    unet = getattr(pipeline, "unet", None)
    return getattr(pipeline, "transformer", None) if unet is None else unet


@dataclass(frozen=True)
class LoadedPipelines:
    """The pipelines of one model. They share their parts."""

    for_text: Any
    for_image: Any | None
    """None: its class has none."""
    for_mask: Any | None
    draws_text: bool
    """Whether it draws from text alone. An SDXL refiner does not."""
    needs_mask: bool
    """Whether the denoiser takes a mask and a masked image beside the latents."""

    def of(self, item: PreparedImage) -> Any:
        """The one that draws an item."""
        if item.mask is not None:
            return self.for_mask
        return self.for_text if item.source is None else self.for_image

    def without(self, broken: Collection[type]) -> LoadedPipelines:
        """The same without those for images and masks that are of these classes."""
        for_image, for_mask = (
            None if type(one) in broken else one for one in (self.for_image, self.for_mask)
        )
        return replace(self, for_image=for_image, for_mask=for_mask)


def load_pipelines(folder: Path, device: torch.device, plan: ImagePlan) -> LoadedPipelines:
    """Loads the pipelines of `folder`.

    Raises:
        ConfigurationError: the folder is not a text-to-image pipeline.
    """
    for library in (diffusers.utils.logging, transformers.utils.logging):
        # By default both print much about parts that are not needed here.
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        config = diffusers.DiffusionPipeline.load_config(folder, local_files_only=True)
        # What a folder leaves out, such as the T5 of Stable Diffusion 3, must be said.
        without: dict[str, Any] = dict.fromkeys(
            name for name, place in config.items() if place == [None, None]
        )
        if "safety_checker" in config:
            without |= {"safety_checker": None, "requires_safety_checker": False}
        pipeline = diffusers.AutoPipelineForText2Image.from_pretrained(
            folder, dtype=plan.dtype, local_files_only=True, **without
        ).to(device)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{folder}: {error}", field="source") from error
    if needs_fp32(pipeline):
        pipeline.vae.to(torch.float32)
    apply_plan(pipeline, folder, plan)
    # The pipeline for text does not know this setting, so it does not hand it on.
    refines = bool(config.get("requires_aesthetics_score"))
    for_image, for_mask = (
        _counterpart(pipeline, auto, ending, refines=refines)
        for auto, ending in (
            (diffusers.AutoPipelineForImage2Image, "Img2ImgPipeline"),
            (diffusers.AutoPipelineForInpainting, "InpaintPipeline"),
        )
    )
    for each in (pipeline, for_image, for_mask):
        if each is None:
            continue
        each.set_progress_bar_config(disable=True)
        # Pipelines of Stable Diffusion XL mark their images if a certain package is installed.
        if getattr(each, "watermark", None) is not None:
            each.watermark = None
    return LoadedPipelines(
        pipeline,
        for_image,
        for_mask,
        draws_text=for_image is None or not for_image.config.get("requires_aesthetics_score"),
        needs_mask=_is_trained_with_masks(pipeline),
    )


def _counterpart(pipeline: Any, auto: Any, ending: str, *, refines: bool) -> Any | None:
    """The pipeline for images or masks with the same components. None if there is none.

    diffusers' own list of them leaves some out, whose class is named after that for text.
    """
    named = type(pipeline).__name__.removesuffix("Pipeline") + ending
    try:
        counterpart = auto.from_pipe(pipeline)
    except ValueError:
        kind = getattr(diffusers, named, None)
        if kind is None or set(kind._get_signature_keys(kind)[0]) != set(pipeline.components):
            return None
        counterpart = kind(**pipeline.components)
    if "requires_aesthetics_score" in counterpart.config:
        counterpart.register_to_config(requires_aesthetics_score=refines)
    return counterpart


def _is_trained_with_masks(pipeline: Any) -> bool:
    denoiser, vae = denoiser_of(pipeline), getattr(pipeline, "vae", None)
    if denoiser is None or vae is None:
        return False
    channels = vae.config.get("latent_channels")
    return channels is not None and denoiser.config.get("in_channels") == 2 * channels + 1


def apply_plan(pipeline: Any, folder: Path, plan: ImagePlan) -> None:
    """Changes the denoiser and the VAE in place.

    Pipelines with a VAE of another kind than Stable Diffusion's do not change.
    """
    denoiser: Any = denoiser_of(pipeline)
    vae = getattr(pipeline, "vae", None)
    has_unet = isinstance(denoiser, diffusers.UNet2DConditionModel)
    if not isinstance(vae, diffusers.AutoencoderKL) or not isinstance(
        denoiser, diffusers.ModelMixin
    ):
        return
    if plan.is_tuned:
        vae.to(memory_format=torch.channels_last)
        if has_unet:
            # Transformers have no convolutions to speak of, and the fused processor of diffusers
            # leaves out their norms of queries and keys.
            if not plan.has_adapters:
                pipeline.fuse_qkv_projections()
            denoiser.to(memory_format=torch.channels_last)
    if plan.is_int8:
        _quantize_linears(denoiser)
    if plan.is_compiled:
        keep_compiled_in(folder.parent / f".{folder.name}.compiled")
        compile_parts(denoiser, vae, shapes=2 * len(plan.batch_sizes))


def _quantize_linears(denoiser: Any) -> None:
    """Converts the linear layers in transformer blocks to INT8, by torchao, in place.

    Weights per channel. On GPUs with INT8 matrix units also activations, per token. Other layers
    (time embedding, modulation of the norms) get one row per image, which gains nothing and is
    below the 17 rows that CUDA's INT8 product needs.
    """
    # torchao takes a second to import, and only INT8 needs it.
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    device = denoiser.device
    has_units = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _TURING
    config = Int8DynamicActivationInt8WeightConfig() if has_units else Int8WeightOnlyConfig()
    quantize_(denoiser, config, filter_fn=_is_in_transformer)


def _is_in_transformer(module: torch.nn.Module, name: str) -> bool:
    parts = name.split(".")
    is_inside = any(part.endswith("transformer_blocks") for part in parts)
    is_modulation = any(part.startswith("norm") for part in parts)
    return isinstance(module, torch.nn.Linear) and is_inside and not is_modulation
