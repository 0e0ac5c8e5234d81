"""Loads a diffusers pipeline according to its plan: precision, layout, INT8, compilation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines import auto_pipeline

from shared.errors import ConfigurationError
from shared.models.image_interface import ImageMode
from workers.models.base import PreparedImage
from workers.models.image.compilation import EagerCalls, compile_parts, keep_compiled_in
from workers.models.image.plan import ImagePlan
from workers.models.image.vae import needs_fp32
from workers.models.loading import folder_errors

_TURING = (7, 5)
"""The first GPUs with INT8 matrix units."""
_TEXT_PARTS = ("text_encoder", "tokenizer")
_WITHOUT = {
    "StableDiffusionXL": {"text_encoder", "tokenizer"},
    "StableDiffusion3": {"text_encoder_3", "tokenizer_3"},
}
"""Text encoders, with their tokenizers, that families can draw without. diffusers marks more of
them as optional, for callers that have already encoded their prompts.
"""


def denoiser_of(pipeline: Any) -> Any | None:
    """Returns a pipeline's UNet or transformer, or None if it has neither."""
    unet = getattr(pipeline, "unet", None)
    return getattr(pipeline, "transformer", None) if unet is None else unet


def inner_pipelines(pipeline: Any) -> dict[str, Any]:
    """Returns the pipelines that a combined pipeline runs one after the other, by attribute.

    The last one uses the combined pipeline's scheduler.
    """
    parts = vars(pipeline).items()
    return {name: part for name, part in parts if isinstance(part, diffusers.DiffusionPipeline)}


@dataclass(frozen=True)
class LoadedPipelines:
    """One model's pipelines, which share their parts."""

    main: Any
    """A pipeline with all parts, for any of the tasks."""
    by_mode: Mapping[ImageMode, Any]
    eager_calls: EagerCalls
    """Stays at 0 if nothing is compiled."""

    def of(self, item: PreparedImage) -> Any | None:
        """Returns the pipeline that draws an item, or None if none can."""
        return self.by_mode.get(mode_of(item))

    def with_images_of(self, is_kept: Callable[[Any], bool]) -> LoadedPipelines:
        """Returns a copy with only some of the pipelines for images and masks."""
        modes = self.by_mode.items()
        kept_pipelines = {
            mode: pipeline for mode, pipeline in modes if mode == "text" or is_kept(pipeline)
        }
        return replace(self, by_mode=kept_pipelines)

    def without_edits(self) -> LoadedPipelines:
        """Returns a copy without pipelines that ignore the strength and redraw whole images."""
        return self.with_images_of(lambda pipeline: "strength" in parameters_of(pipeline))

    def only(self, tasks: Collection[ImageMode]) -> LoadedPipelines:
        """Returns a copy that is restricted to these tasks."""
        return replace(
            self, by_mode={name: self.by_mode[name] for name in tasks if name in self.by_mode}
        )


def mode_of(item: PreparedImage) -> ImageMode:
    """Returns an item's task: drawing from text, from an image or within a mask."""
    if item.mask is not None:
        return "mask"
    return "text" if item.source is None else "image"


def load_pipelines(folder: Path, device: torch.device, plan: ImagePlan) -> LoadedPipelines:
    """Loads the pipelines in `folder`: diffusers classes with safetensors weights.

    Raises:
        ConfigurationError: the folder is not an image pipeline.
    """
    for library in (diffusers.utils.logging, transformers.utils.logging):
        # By default, both libraries print a lot about parts that aren't needed here.
        library.set_verbosity_error()
        library.disable_progress_bar()
    pipeline, config = _load_pipeline(folder, device, plan.dtype)
    if needs_fp32(pipeline):
        pipeline.vae.to(torch.float32)
    eager_calls = apply_plan(pipeline, folder, plan)
    by_mode = _pipelines_of(pipeline, refines=bool(config.get("requires_aesthetics_score")))
    if not by_mode:
        name = type(pipeline).__name__
        reason = f"{folder}: {name} can't draw from a prompt or from an image"
        raise ConfigurationError(reason, field="source")
    for loaded in (pipeline, *by_mode.values()):
        loaded.set_progress_bar_config(disable=True)
        # Stable Diffusion XL pipelines watermark their images if a specific package is installed.
        if getattr(loaded, "watermark", None) is not None:
            loaded.watermark = None
    return LoadedPipelines(pipeline, by_mode, eager_calls)


def _load_pipeline(
    folder: Path, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Mapping[str, Any]]:
    """Returns the pipeline in `folder`, on `device`, and its config.

    Raises:
        ConfigurationError: the folder is not an image pipeline.
        OutOfMemory: the device has too little memory.
    """
    with folder_errors(folder):
        config = diffusers.DiffusionPipeline.load_config(folder, local_files_only=True)
        kind = _class_of(folder, config)
        _check_parts(folder, config)
        # Parts that a folder omits, such as Stable Diffusion 3's T5, must be passed as None
        # explicitly.
        components: dict[str, Any] = dict.fromkeys(_null_parts(folder, config, kind))
        if "safety_checker" in config:
            components |= {"safety_checker": None, "requires_safety_checker": False}
        parts = kind._get_signature_keys(kind)[0]
        for name in (parts & config.keys()) - components.keys():
            if (part := _class_of_part(config[name])) is not None:
                components[name] = load_part(part, folder / name, device, dtype)
        pipeline = kind.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, **components
        ).to(device)
    return pipeline, config


def _class_of_part(place: Any) -> Any | None:
    """Returns the diffusers model at a place in model_index.json. None if it is something else."""
    library, name = place if isinstance(place, list | tuple) else (None, None)
    kind = getattr(diffusers, name, None) if library == "diffusers" else None
    return kind if isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin) else None


def load_part(kind: Any, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Loads a diffusers model, one tensor at a time from the memory-mapped file to the device.

    Loading the whole model before moving it would need memory for it on the host, because weights
    that are stored in another precision are converted there.
    """
    return kind.from_pretrained(
        folder, dtype=dtype, local_files_only=True, use_safetensors=True, device_map=device
    )


def _class_of(folder: Path, config: Mapping[str, Any]) -> Any:
    """Returns the diffusers class that draws from text with these parts, or the config's class."""
    name = config.get("_class_name") if isinstance(config, Mapping) else None
    kind = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or not issubclass(kind, diffusers.DiffusionPipeline):
        raise ConfigurationError(f"{folder}: {name!r} is not a diffusers pipeline", field="source")
    texts = auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING
    return auto_pipeline._get_task_class(texts, name, throw_error_if_not_exist=False) or kind


def _check_parts(folder: Path, config: Mapping[str, Any]) -> None:
    """Checks that each part has a folder. Otherwise diffusers looks in the pipeline's folder."""
    for name, place in config.items():
        is_part = isinstance(place, list | tuple) and len(place) == 2 and isinstance(place[0], str)
        if is_part and name != "safety_checker" and not (folder / name).is_dir():
            reason = f"{folder}: model_index.json lists {name}, but there is no folder for it"
            raise ConfigurationError(reason, field="source")


def _null_parts(folder: Path, config: Mapping[str, Any], kind: Any) -> list[str]:
    """Returns the parts that a folder sets to null.

    Raises:
        ConfigurationError: the pipeline can't draw from a prompt without one of them.
    """
    parts = kind._get_signature_keys(kind)[0]
    nulls = [name for name in config if name in parts and config[name] in (None, [None, None])]
    optional = {
        "safety_checker",
        *(name for name in kind._optional_components if not name.startswith(_TEXT_PARTS)),
    }
    for family, of_text in _WITHOUT.items():
        if kind.__name__.startswith(family) and of_text <= set(nulls):
            optional |= of_text
    if missing := [name for name in nulls if name not in optional]:
        names = " and ".join(missing)
        reason = f"model_index.json has null for {names}, but {kind.__name__} requires a value"
        raise ConfigurationError(f"{folder}: {reason}", field="source")
    return nulls


def _pipelines_of(pipeline: Any, *, refines: bool) -> dict[ImageMode, Any]:
    """Returns the pipelines that use these parts, by task.

    `refines`: True if the parts are a refiner's, which draws only from images.
    """
    known = parameters_of(pipeline)
    takes_image, takes_mask = "image" in known, "mask_image" in known
    texts = auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING.values()
    for_text = pipeline if type(pipeline) in texts or not takes_image else None
    # The text pipeline doesn't know whether it is a refiner, so it doesn't pass that on.
    for_image = _counterpart(
        pipeline, diffusers.AutoPipelineForImage2Image, "Img2ImgPipeline", refines=refines
    ) or (pipeline if takes_image and not takes_mask else None)
    for_mask = _counterpart(
        pipeline, diffusers.AutoPipelineForInpainting, "InpaintPipeline", refines=refines
    ) or (pipeline if takes_mask else None)
    if _is_trained_with_masks(pipeline):
        for_text = for_image = None
    if refines:
        for_text = None
    every: dict[ImageMode, Any] = {"text": for_text, "image": for_image, "mask": for_mask}
    return {
        mode: candidate
        for mode, candidate in every.items()
        if candidate is not None and "prompt" in parameters_of(candidate)
    }


def _counterpart(pipeline: Any, auto: Any, ending: str, *, refines: bool) -> Any | None:
    """Returns the pipeline for images or masks with the same components, if there is one.

    diffusers' own list omits some pipelines whose class is named after the one for text.
    """
    try:
        counterpart = auto.from_pipe(pipeline)
    except ValueError:
        counterpart = _counterpart_by_name(pipeline, ending)
    if counterpart is None:
        return None
    if "requires_aesthetics_score" in counterpart.config:
        counterpart.register_to_config(requires_aesthetics_score=refines)
    return counterpart


def _counterpart_by_name(pipeline: Any, ending: str) -> Any | None:
    class_name = type(pipeline).__name__.removesuffix("Pipeline") + ending
    kind = getattr(diffusers, class_name, None)
    if kind is None or set(kind._get_signature_keys(kind)[0]) != set(pipeline.components):
        return None
    return kind(**pipeline.components)


def parameters_of(pipeline: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a pipeline's call, by name."""
    return signature_of(type(pipeline).__call__).parameters


@lru_cache(maxsize=512)
def signature_of(function: Any) -> inspect.Signature:
    """Returns a cached signature, because it is slow to create and doesn't change."""
    return inspect.signature(function)


def guidance_name(pipeline: Any) -> str | None:
    """Returns the argument for `guidance_scale`, or None if the pipeline has no guidance.

    It is `true_cfg_scale` if `guidance_scale` is only for distilled models, as in Qwen-Image.
    """
    known = parameters_of(pipeline)
    scale = known.get("guidance_scale")
    if "true_cfg_scale" in known and (scale is None or scale.default is None):
        return "true_cfg_scale"
    return None if scale is None else "guidance_scale"


def _is_trained_with_masks(pipeline: Any) -> bool:
    denoiser, vae = denoiser_of(pipeline), getattr(pipeline, "vae", None)
    if denoiser is None or vae is None:
        return False
    channels = vae.config.get("latent_channels")
    return channels is not None and denoiser.config.get("in_channels") == 2 * channels + 1


def apply_plan(pipeline: Any, folder: Path, plan: ImagePlan) -> EagerCalls:
    """Changes the denoiser and the VAE in place. Returns the counter of calls that run eagerly.

    Pipelines whose VAE is not the Stable Diffusion kind are left unchanged.
    """
    denoiser: Any = denoiser_of(pipeline)
    vae = getattr(pipeline, "vae", None)
    has_unet = isinstance(denoiser, diffusers.UNet2DConditionModel)
    if not isinstance(vae, diffusers.AutoencoderKL) or not isinstance(
        denoiser, diffusers.ModelMixin
    ):
        return EagerCalls()
    if plan.is_tuned:
        vae.to(memory_format=torch.channels_last)
        if has_unet:
            # Transformers have very few convolutions, and diffusers' fused processor drops their
            # query and key norms.
            if not plan.has_adapters:
                pipeline.fuse_qkv_projections()
            denoiser.to(memory_format=torch.channels_last)
    if plan.is_int8:
        _quantize_linears(denoiser)
    if not plan.is_compiled:
        return EagerCalls()
    keep_compiled_in(folder.parent / f".{folder.name}.compiled")
    return compile_parts(denoiser, vae, shapes=plan.compiled_shapes)


def _quantize_linears(denoiser: Any) -> None:
    """Converts the linear layers in transformer blocks to INT8 with torchao, in place.

    Weights are quantized per channel. On GPUs with INT8 matrix units, activations are quantized as
    well, per token. Other layers (time embedding, norm modulation) get one row per image, so they
    would gain nothing and have fewer than the 17 rows that CUDA's INT8 product requires.
    """
    # Importing torchao takes a second, and only INT8 needs it.
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
