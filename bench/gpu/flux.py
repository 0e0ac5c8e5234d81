"""FLUX.1 with random weights: eager diffusers compared with our model.

It has the published shapes, but only 5 of the 19 blocks, 10 of the 38 blocks, and 4 of T5's 24
layers, because more would only take longer to write. Our model produces PNG files and is compiled
for the timed batches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from bench.gpu.card import DTYPES, in_turns
from bench.gpu.company import distances, drawn, gradient, masked, text_image
from bench.gpu.images import SEED, WARMUP_LIMIT_S, draw_plain
from bench.gpu.scale import Scale
from models.shapes import PIPELINE
from shared.models.catalog import Model
from shared.models.entry import Batch
from shared.models.image_entry import ImageDefaults
from workers.models.base import PreparedImage
from workers.models.device import Device
from workers.models.image.model import ImageModel

FAMILY = "flux.1"
GUIDANCE = 4.5
LATENT_CHANNELS = 16
CONTRAST = 20.0
"""Scale factor for the last layer of a VAE with random weights. Without it, all pixels are nearly
gray.
"""
FULL = {
    "transformer": (5, 10, 24, 128, 4096, 768, (16, 56, 56)),
    "clip": (768, 12, 12),
    "t5": (4096, 10240, 4, 64),
    "vae": (128, 256, 512, 512),
}
"""Numbers of blocks, layers, and heads, and their widths (see `write_pipeline`)."""
TINY = {
    "transformer": (1, 1, 2, 16, 32, 16, (4, 4, 8)),
    "clip": (16, 2, 2),
    "t5": (32, 32, 2, 2),
    "vae": (8, 8, 8, 8),
}


def measure(scale: Scale, folder: Path) -> dict[str, Any]:
    """Returns `rates`: images/s for plain diffusers, and ours by batch size.

    `distances`: see bench.gpu.company.

    The distances are measured without compiling, because their batches have other sizes.

    Args:
        folder: a new folder for the pipeline.
    """
    write_pipeline(folder, scale)
    eager = _model(folder, scale, compile="never")
    apart = distances(eager, _kinds(scale))
    print(f"{FAMILY}: {json.dumps(apart)}", file=sys.stderr)  # the rest may take minutes
    del eager
    return {"family": FAMILY, "distances": apart, "rates": _rates(folder, scale)}


def _rates(folder: Path, scale: Scale) -> list[dict[str, Any]]:
    plain: Any = diffusers.FluxPipeline.from_pretrained(
        folder, dtype=_dtype(scale), local_files_only=True
    ).to(scale.device)
    plain.set_progress_bar_config(disable=True)
    ours = _model(folder, scale, compile="auto")
    ours.warmup()
    rows = []
    for count in scale.flow_batches:
        batch = [msgspec.structs.replace(_text(scale), seed=seed) for seed in range(count)]
        contenders: dict[str, Callable[[], Any]] = {
            "plain": partial(draw_plain, plain, batch),
            "ours": partial(drawn, ours, batch),
        }
        taken = in_turns(scale, contenders)
        rates = {name: count / taken_s for name, taken_s in taken.items()}
        rows.append({"batch": count} | rates | {"ratio": rates["ours"] / rates["plain"]})
    return rows


def _model(pipeline: Path, scale: Scale, **image: Any) -> ImageModel:
    side, largest = scale.flow_side, max(scale.flow_batches)
    entry = Model(
        name="flux-random",
        task="image",
        source=f"local:{pipeline}",
        backend="torch",
        batch=Batch(max_items=largest, max_pixel_steps=largest * side * side * scale.flow_steps),
        image=ImageDefaults(
            width=side,
            height=side,
            steps=scale.flow_steps,
            guidance_scale=GUIDANCE,
            scheduler="default",
            **image,
        ),
    )
    device = Device(scale.device, threads=1, memory_fraction=1.0)
    model = ImageModel(entry, pipeline, device, warmup_limit_s=WARMUP_LIMIT_S)
    model.setup()
    return model


def _text(scale: Scale) -> PreparedImage:
    return text_image(scale.flow_side, scale.flow_steps, GUIDANCE, scheduler="default")


def _kinds(scale: Scale) -> dict[str, PreparedImage]:
    text, side = _text(scale), scale.flow_side
    source = gradient(side, side)
    return {
        "text": text,
        "image": msgspec.structs.replace(text, seed=2, source=source, strength=0.6),
        "mask": msgspec.structs.replace(masked(text), seed=3),
    }


def _dtype(scale: Scale) -> torch.dtype:
    """Returns the precision that a worker uses for images by default."""
    return DTYPES["fp32" if scale.device == "cpu" else "bf16"]


def write_pipeline(folder: Path, scale: Scale) -> None:
    torch.manual_seed(SEED)
    torch.set_default_dtype(_dtype(scale))
    try:
        with torch.device(scale.device):
            parts = _parts(FULL if scale.is_full_width else TINY)
    finally:
        torch.set_default_dtype(torch.float32)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15
    )
    diffusers.FluxPipeline(scheduler=scheduler, **parts).save_pretrained(folder)


def _parts(sizes: dict[str, Any]) -> dict[str, Any]:
    blocks, single_blocks, heads, head_width, text_width, pooled_width, axes = sizes["transformer"]
    width, layers, clip_heads = sizes["clip"]
    t5_width, t5_inner, t5_layers, t5_heads = sizes["t5"]
    tokenizer = CLIPTokenizer.from_pretrained(PIPELINE / "tokenizer")
    clip = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=clip_heads,
        projection_dim=width,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    t5 = T5Config(
        vocab_size=30,
        d_model=t5_width,
        d_kv=t5_width // t5_heads,
        d_ff=t5_inner,
        num_layers=t5_layers,
        num_heads=t5_heads,
    )
    return {
        "transformer": diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * LATENT_CHANNELS,
            num_layers=blocks,
            num_single_layers=single_blocks,
            num_attention_heads=heads,
            attention_head_dim=head_width,
            joint_attention_dim=text_width,
            pooled_projection_dim=pooled_width,
            axes_dims_rope=axes,
            guidance_embeds=True,
        ),
        "text_encoder": CLIPTextModel(clip),
        "text_encoder_2": T5EncoderModel(t5),
        "tokenizer": tokenizer,
        "tokenizer_2": _letters(),
        "vae": _vae(sizes["vae"]),
    }


def _letters() -> T5Tokenizer:
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    letters = [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return T5Tokenizer(vocab=specials + letters, extra_ids=0, model_max_length=512)


def _vae(widths: tuple[int, ...]) -> diffusers.AutoencoderKL:
    vae = diffusers.AutoencoderKL(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        layers_per_block=2,
        norm_num_groups=min(32, widths[0] // 2),
        latent_channels=LATENT_CHANNELS,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1159,
        scaling_factor=0.3611,
    )
    with torch.no_grad():
        vae.decoder.conv_out.weight *= CONTRAST
    return vae
