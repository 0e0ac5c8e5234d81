"""Evaluates an image model's variants by the images they draw."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from PIL import Image

from shared.errors import ConfigurationError
from shared.models.catalog import Model
from workers.models.artifact import Variant
from workers.models.device import Device
from workers.models.image.hub import Hub
from workers.models.image.own_pipeline import Interception
from workers.models.image.pipeline import load_pipelines
from workers.models.image.plan import ImagePlan
from workers.optimize.options import OptimizeOptions, choose_variants, tolerance_of
from workers.optimize.quality import feature_distance, psnr_db, ssim
from workers.optimize.report import Made, Verdict

PROMPTS = (
    "a lighthouse on a cliff at dusk, oil painting",
    "a red bicycle against a white wall",
    "portrait of an old sailor, soft light",
    "a bowl of lemons on a wooden table",
)
"""The evaluation prompts, each with its own seed. The first two are also drawn from a source image.
"""
_STRENGTH = 0.5
_PLANS: dict[str, tuple[torch.dtype, dict[str, bool]]] = {
    "tuned": (torch.float32, {"is_tuned": True}),
    "bf16": (torch.bfloat16, {"is_tuned": True}),
    "int8": (torch.float32, {"is_int8": True}),
    "compiled": (torch.float32, {"is_compiled": True}),
}
_PRECISIONS: dict[str, Literal["fp32", "bf16", "int8"]] = {"bf16": "bf16", "int8": "int8"}
_NOTES = {
    "tuned": "channels-last weights, fused query-key-value projections",
    "bf16": "all of it in bf16, tuned",
    "int8": "linear layers of the UNet's transformers in INT8 by torchao",
    "compiled": "UNet and VAE through torch.compile",
}


def make_variants(
    entry: Model, folder: Path, target: Path, options: OptimizeOptions, say: Callable[[str], None]
) -> Made:
    """Compares each variant with the fp32 pipeline on this machine's device.

    Nothing is written to `target`.

    Raises:
        ConfigurationError: the folder does not contain a pipeline, or an option is invalid.
    """
    names = choose_variants(entry, options)
    device, device_name = Device("auto", options.threads, 1.0).open()
    say(f"generating the reference images in fp32 on {device_name}")
    original = _Studio(entry, folder, device, _plan("", entry))
    features = _VaeFeatures(original.text_to_image.vae)
    verdicts = []
    for name in names:
        say(f"drawing with {name}")
        verdicts.append(_judge(entry, folder, device, original, features, name, options))
    figures = {
        "variant": "torch-fp32",
        "weights MB": f"{original.weights_bytes / 1e6:.1f}",
        "s/image": f"{original.time_s():.3f}",
        "speed": "1.00",
        "PSNR dB": "100.0",
        "SSIM": "1.0000",
        "features": "0.0000",
    }
    return Made(verdicts, figures)


def _plan(name: str, entry: Model) -> ImagePlan:
    """Returns a variant's plan, or the reference's plan for an empty name."""
    dtype, options = _PLANS.get(name, (torch.float32, {}))
    chosen = {"is_tuned": False, "is_int8": False, "is_compiled": False} | options
    return ImagePlan(dtype=dtype, batch_sizes=(1,), **chosen)


@dataclass(frozen=True)
class _Quality:
    """Minimum PSNR of all images, mean SSIM, and mean distance of VAE features."""

    psnr_db: float
    ssim: float
    features: float


class _Studio:
    """A pipeline and the images it draws, each float32 [height, width, 3] from 0 to 1."""

    def __init__(self, entry: Model, folder: Path, device: torch.device, plan: ImagePlan) -> None:
        self._usual = entry.image
        pipelines = load_pipelines(folder, device, plan).without_edits()
        self.text_to_image = pipelines.main
        self._image_to_image = pipelines.by_mode.get("image")
        # The VAE may use fp32, which only an item's own pipeline knows.
        self._own = Interception(Hub()).own
        self.images = [self._draw(seed, prompt) for seed, prompt in enumerate(PROMPTS)]
        if self._image_to_image is not None:
            self.images += [self._redraw(seed, prompt) for seed, prompt in enumerate(PROMPTS[:2])]

    @property
    def weights_bytes(self) -> int:
        """Memory used by the model's parameters. INT8 parameters report their own size."""
        parts = (
            part
            for part in self.text_to_image.components.values()
            if isinstance(part, torch.nn.Module)
        )
        return sum(_count_stored_bytes(weight) for part in parts for weight in part.parameters())

    def time_s(self) -> float:
        """Returns the seconds it takes to draw one image from text."""
        began_s = time.perf_counter()
        self._draw(0, PROMPTS[0])
        return time.perf_counter() - began_s

    def _draw(self, seed: int, prompt: str) -> np.ndarray:
        size = {"width": self._usual.width, "height": self._usual.height}
        return self._run(self.text_to_image, seed, prompt=prompt, **size)

    def _redraw(self, seed: int, prompt: str) -> np.ndarray:
        return self._run(
            self._image_to_image,
            seed,
            prompt=prompt,
            image=_source(self._usual.width, self._usual.height),
            strength=_STRENGTH,
        )

    def _run(self, pipeline: Any, seed: int, **options: Any) -> np.ndarray:
        with torch.inference_mode():
            output = self._own(pipeline)(
                **options,
                num_inference_steps=self._usual.steps,
                guidance_scale=self._usual.guidance_scale,
                generator=torch.Generator("cpu").manual_seed(seed),
                output_type="np",
            )
        return np.asarray(output.images[0], np.float32)


def _count_stored_bytes(weight: torch.Tensor) -> int:
    inner = getattr(weight, "__tensor_flatten__", None)
    if inner is None:
        return weight.numel() * weight.element_size()
    return sum(_count_stored_bytes(getattr(weight, name)) for name in inner()[0])


def _source(width: int, height: int) -> Image.Image:
    """Returns an image with smooth colors and hard edges."""
    down, across = np.mgrid[0:height, 0:width]
    stripes = ((down // max(1, height // 8) + across // max(1, width // 8)) % 2) * 64
    pixels = np.stack(
        [
            down * 191 // height + stripes,
            across * 191 // width + stripes,
            191 - down * 191 // height,
        ],
        -1,
    )
    return Image.fromarray(pixels.astype(np.uint8))


class _VaeFeatures:
    """An image's features after each block of the reference's own VAE encoder."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae

    def of(self, image: np.ndarray) -> list[np.ndarray]:
        seen: list[np.ndarray] = []
        hooks = [
            block.register_forward_hook(
                lambda module, inputs, output: seen.append(output[0].float().cpu().numpy())
            )
            for block in self._vae.encoder.down_blocks
        ]
        try:
            with torch.inference_mode():
                pixels = torch.from_numpy(image).permute(2, 0, 1)[None] * 2 - 1
                self._vae.encoder(pixels.to(self._vae.device, self._vae.dtype))
        finally:
            for hook in hooks:
                hook.remove()
        return seen


def _judge(
    entry: Model,
    folder: Path,
    device: torch.device,
    original: _Studio,
    features: _VaeFeatures,
    name: str,
    options: OptimizeOptions,
) -> Verdict:
    """Returns the verdict on one variant, using images drawn on this device."""
    plan = _plan(name, entry)
    variant = Variant(
        name=f"torch-{name}",
        backend="torch",
        precision=_PRECISIONS.get(name, "fp32"),
        note=_NOTES[name],
        recipe={
            "is_tuned": plan.is_tuned,
            "is_int8": plan.is_int8,
            "is_compiled": plan.is_compiled,
        },
    )
    missing = _missing(plan, device)
    if missing:
        return Verdict(variant, refusal=f"could not be created: {missing}")
    try:
        studio = _Studio(entry, folder, device, plan)
    except ConfigurationError as error:
        return Verdict(variant, refusal=f"could not be created: {error.message}")
    return _measure(variant, studio, original, features, tolerance_of(entry, options), device)


def _measure(
    variant: Variant,
    studio: _Studio,
    original: _Studio,
    features: _VaeFeatures,
    tolerance_db: float,
    device: torch.device,
) -> Verdict:
    """Evaluates a working variant by its images and its speed."""
    quality = _compare(studio.images, original.images, features)
    # Alternates between the two, so any other load on the machine affects both equally.
    times_s = [(original.time_s(), studio.time_s()) for _ in range(2)]
    original_s, variant_s = (min(column) for column in zip(*times_s, strict=True))
    measured = msgspec.structs.replace(
        variant,
        size_bytes=studio.weights_bytes,
        relative_speed=original_s / variant_s,
        recipe=variant.recipe
        | {
            "psnr_db": quality.psnr_db,
            "ssim": quality.ssim,
            "feature_distance": quality.features,
            "tolerance_db": tolerance_db,
            "device": device.type,
        },
    )
    figures = {
        "weights MB": f"{studio.weights_bytes / 1e6:.1f}",
        "s/image": f"{variant_s:.3f}",
        "speed": f"{original_s / variant_s:.2f}",
        "PSNR dB": f"{quality.psnr_db:.1f}",
        "SSIM": f"{quality.ssim:.4f}",
        "features": f"{quality.features:.4f}",
    }
    refusal = (
        ""
        if quality.psnr_db >= tolerance_db
        else f"minimum PSNR of {quality.psnr_db:.1f} dB is below {tolerance_db:g} dB"
    )
    return Verdict(measured, figures, refusal)


def _missing(plan: ImagePlan, device: torch.device) -> str:
    """Describes any features the plan needs that this machine lacks. Empty if there are none."""
    if plan.is_int8 and importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    if (
        plan.is_compiled
        and device.type == "cpu"
        and not (shutil.which("c++") or shutil.which("g++"))
    ):
        return "a C++ compiler is not installed"
    if plan.is_compiled and device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return ""


def _compare(
    images: Sequence[np.ndarray], reference: Sequence[np.ndarray], features: _VaeFeatures
) -> _Quality:
    pairs = list(zip(images, reference, strict=True))
    return _Quality(
        psnr_db=min(psnr_db(ours, theirs) for ours, theirs in pairs),
        ssim=float(np.mean([ssim(ours, theirs) for ours, theirs in pairs])),
        features=float(
            np.mean(
                [feature_distance(features.of(ours), features.of(theirs)) for ours, theirs in pairs]
            )
        ),
    )
