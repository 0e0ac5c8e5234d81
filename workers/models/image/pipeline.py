"""Loads a diffusers pipeline as its plan says: precision, layout, INT8, compilation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from shared.errors import ConfigurationError
from workers.models.image.compilation import compile_parts, keep_compiled_in
from workers.models.image.families import load_family
from workers.models.image.family import denoiser_of
from workers.models.image.plan import ImagePlan

_TURING = (7, 5)
"""The first GPUs with INT8 matrix units."""


def load_pipelines(folder: Path, device: torch.device, plan: ImagePlan) -> tuple[Any, Any | None]:
    """The text-to-image pipeline of `folder`, and the image-to-image one, if any.

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
    pipeline.set_progress_bar_config(disable=True)
    apply_plan(pipeline, folder, plan)
    if type(pipeline) not in _with_image_to_image():
        return pipeline, None
    # The pipeline for text does not know this setting, so it does not hand it on.
    scores = {"requires_aesthetics_score": bool(config.get("requires_aesthetics_score"))}
    image_to_image = diffusers.AutoPipelineForImage2Image.from_pipe(pipeline, **scores)
    image_to_image.set_progress_bar_config(disable=True)
    for each in (pipeline, image_to_image):
        # Pipelines of Stable Diffusion XL mark their images if a certain package is installed.
        if getattr(each, "watermark", None) is not None:
            each.watermark = None
    return pipeline, image_to_image


def inpainting(pipeline: Any, image_to_image: Any) -> Any:
    """The pipeline for masks with the components of the other two. It takes no memory.

    Args:
        pipeline: the one for text, of a known family.
        image_to_image: the one for images.
    """
    settings = {}
    if "requires_aesthetics_score" in image_to_image.config:
        settings["requires_aesthetics_score"] = image_to_image.config.requires_aesthetics_score
    for_masks: Any = diffusers.AutoPipelineForInpainting.from_pipe(pipeline, **settings)
    for_masks.set_progress_bar_config(disable=True)
    return for_masks


def draws_text(image_to_image: Any | None) -> bool:
    """Returns whether a pipeline draws from text alone. An SDXL refiner does not."""
    return image_to_image is None or not image_to_image.config.get("requires_aesthetics_score")


def apply_plan(pipeline: Any, folder: Path, plan: ImagePlan) -> None:
    """Changes the denoiser and the VAE in place.

    Pipelines that are neither of a UNet nor of a known family do not change.
    """
    denoiser: Any = denoiser_of(pipeline)
    vae = getattr(pipeline, "vae", None)
    has_unet = isinstance(denoiser, diffusers.UNet2DConditionModel)
    if not isinstance(vae, diffusers.AutoencoderKL) or not (has_unet or load_family(pipeline)):
        return
    if plan.is_tuned:
        vae.to(memory_format=torch.channels_last)
        if has_unet:
            # Transformers have no convolutions to speak of, and the fused processor of diffusers
            # leaves out their norms of queries and keys.
            pipeline.fuse_qkv_projections()
            denoiser.to(memory_format=torch.channels_last)
    if plan.is_int8:
        _quantize_linears(denoiser)
    if plan.is_compiled:
        keep_compiled_in(folder.parent / f".{folder.name}.compiled")
        compile_parts(denoiser, vae, shapes=2 * len(plan.batch_sizes))


def _with_image_to_image() -> set[type]:
    """The text-to-image pipelines that have an image-to-image one with the same components."""
    from diffusers.pipelines import auto_pipeline

    names = auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING.keys()
    return {
        kind
        for name, kind in auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING.items()
        if name in names
    }


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
