"""Stable Diffusion 3 and FLUX.1 with random weights: eager diffusers compared with our model.

Both are of the published shapes, but for what would only take time to write: Stable Diffusion 3 is
the medium one (2.0 billion parameters) without T5, and FLUX.1 has 5 and 10 of its 19 and 38 blocks
and 4 of T5's 24 layers. Ours ends in PNG files, and is compiled for the batches that are timed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import msgspec
import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from bench.gpu.card import DTYPES, in_turns
from bench.gpu.company import distances, drawn, gradient, masked
from bench.gpu.scale import Scale
from models.shapes import PIPELINE
from shared.models.catalog import Model
from shared.models.entry import Batch
from shared.models.image_entry import ImageDefaults
from workers.models.base import PreparedImage
from workers.models.device import Device
from workers.models.image.model import ImageModel

SEED = 5
GUIDANCE = 4.5
LATENT_CHANNELS = 16
WARMUP_LIMIT_S = 3600.0
CONTRAST = 20.0
"""Of the last layer of a VAE with random weights. Without it, all pixels are nearly one gray."""


class PartSizes(NamedTuple):
    """Sizes of the parts. `clips`: width, layers and heads of each."""

    transformer: dict[str, Any]
    clips: tuple[tuple[int, int, int], ...]
    t5: tuple[int, int, int, int] | None
    vae: tuple[int, ...]


FULL_VAE, TINY_VAE = (128, 256, 512, 512), (8, 8, 8, 8)
SD3 = PartSizes(
    {
        "sample_size": 128,
        "num_layers": 24,
        "num_attention_heads": 24,
        "attention_head_dim": 64,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 192,
    },
    ((768, 12, 12), (1280, 32, 20)),
    None,
    FULL_VAE,
)
TINY_SD3 = PartSizes(
    {
        "sample_size": 8,
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "joint_attention_dim": 32,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 32,
        "pos_embed_max_size": 8,
    },
    ((16, 2, 2), (16, 2, 2)),
    None,
    TINY_VAE,
)
FLUX = PartSizes(
    {
        "num_layers": 5,
        "num_single_layers": 10,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "axes_dims_rope": (16, 56, 56),
    },
    ((768, 12, 12),),
    (4096, 10240, 4, 64),
    FULL_VAE,
)
TINY_FLUX = PartSizes(
    {
        "num_layers": 1,
        "num_single_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 4, 8),
    },
    ((16, 2, 2),),
    (32, 32, 2, 2),
    TINY_VAE,
)


def measure(scale: Scale, folder: Path, family: str) -> dict[str, Any]:
    """`rates`: images/s plain and ours by batch. `distances`: see bench.gpu.company.

    The latter without compiling, as batches of other sizes are computed.

    Args:
        folder: new. It gets the pipeline.
    """
    pipeline = WRITERS[family](folder, scale)
    eager = _model(pipeline, scale, compile="never")
    apart = distances(eager, _kinds(scale))
    print(f"{family}: {json.dumps(apart)}", file=sys.stderr)  # what follows may take minutes
    del eager
    return {"family": family, "distances": apart, "rates": _rates(pipeline, scale)}


def _rates(pipeline: Path, scale: Scale) -> list[dict[str, Any]]:
    index = json.loads((pipeline / "model_index.json").read_text(encoding="utf-8"))
    # diffusers wants to be told which parts a folder does without.
    left_out = {name: None for name, place in index.items() if place == [None, None]}
    plain: Any = diffusers.AutoPipelineForText2Image.from_pretrained(
        pipeline, dtype=_dtype(scale), local_files_only=True, **left_out
    ).to(scale.device)
    plain.set_progress_bar_config(disable=True)
    ours = _model(pipeline, scale, compile="auto")
    ours.warmup()
    rows = []
    for count in scale.flow_batches:
        batch = [msgspec.structs.replace(_text(scale), seed=seed) for seed in range(count)]
        contenders: dict[str, Callable[[], Any]] = {
            "plain": partial(_draw_plain, plain, batch),
            "ours": partial(drawn, ours, batch),
        }
        taken = in_turns(scale, contenders)
        rates = {name: count / taken_s for name, taken_s in taken.items()}
        rows.append({"batch": count} | rates | {"ratio": rates["ours"] / rates["plain"]})
    return rows


def _draw_plain(pipeline: Any, batch: list[PreparedImage]) -> Any:
    first = batch[0]
    return pipeline(
        prompt=[item.prompt for item in batch],
        width=first.width,
        height=first.height,
        num_inference_steps=first.steps,
        guidance_scale=first.guidance_scale,
        generator=[torch.Generator("cpu").manual_seed(item.seed) for item in batch],
    ).images


def _model(pipeline: Path, scale: Scale, **image: Any) -> ImageModel:
    side, largest = scale.flow_side, max(scale.flow_batches)
    entry = Model(
        name="flow-random",
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
    side = scale.flow_side
    return PreparedImage(
        key="",
        length=side * side * scale.flow_steps,
        prompt="a red circle left of a blue star",
        negative_prompt="",
        width=side,
        height=side,
        steps=scale.flow_steps,
        guidance_scale=GUIDANCE,
        seed=1,
        scheduler="default",
    )


def _kinds(scale: Scale) -> dict[str, PreparedImage]:
    text, side = _text(scale), scale.flow_side
    source = gradient(side, side)
    return {
        "text": text,
        "image": msgspec.structs.replace(text, seed=2, source=source, strength=0.6),
        "mask": msgspec.structs.replace(masked(text), seed=3),
    }


def _dtype(scale: Scale) -> torch.dtype:
    """What a worker computes images in, unless its entry says otherwise."""
    return DTYPES["fp32" if scale.device == "cpu" else "bf16"]


def write_stable_diffusion_3(folder: Path, scale: Scale) -> Path:
    """Writes Stable Diffusion 3 without T5."""
    widths = SD3 if scale.is_full_width else TINY_SD3
    with _random_on(scale):
        transformer = diffusers.SD3Transformer2DModel(
            patch_size=2, in_channels=LATENT_CHANNELS, **widths.transformer
        )
        tokenizer = _clip_tokenizer()
        clips = [CLIPTextModelWithProjection(_clip(tokenizer, *one)) for one in widths.clips]
        vae = _vae(widths, shift=0.0609, scaling=1.5305)
    diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=clips[0],
        text_encoder_2=clips[1],
        text_encoder_3=None,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        tokenizer_3=None,
    ).save_pretrained(folder)
    return folder


def write_flux(folder: Path, scale: Scale) -> Path:
    """Writes FLUX.1 with fewer blocks."""
    widths = FLUX if scale.is_full_width else TINY_FLUX
    assert widths.t5 is not None, "FLUX.1 has T5"
    width, inner, layers, heads = widths.t5
    with _random_on(scale):
        transformer = diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * LATENT_CHANNELS,
            guidance_embeds=True,
            **widths.transformer,
        )
        tokenizer = _clip_tokenizer()
        clip = CLIPTextModel(_clip(tokenizer, *widths.clips[0]))
        t5 = T5EncoderModel(
            T5Config(
                vocab_size=30,
                d_model=width,
                d_kv=width // heads,
                d_ff=inner,
                num_layers=layers,
                num_heads=heads,
            )
        )
        vae = _vae(widths, shift=0.1159, scaling=0.3611)
    diffusers.FluxPipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15
        ),
        vae=vae,
        text_encoder=clip,
        text_encoder_2=t5,
        tokenizer=tokenizer,
        tokenizer_2=_letters(),
    ).save_pretrained(folder)
    return folder


WRITERS = {"stable-diffusion-3": write_stable_diffusion_3, "flux.1": write_flux}
"""What writes the pipeline of each family."""


@contextmanager
def _random_on(scale: Scale) -> Iterator[None]:
    """Within it, modules are made with random weights on the device, in its precision."""
    torch.manual_seed(SEED)
    torch.set_default_dtype(_dtype(scale))
    try:
        with torch.device(scale.device):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def _clip_tokenizer() -> CLIPTokenizer:
    tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(PIPELINE / "tokenizer")
    return tokenizer


def _clip(tokenizer: CLIPTokenizer, width: int, layers: int, heads: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        projection_dim=width,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _letters() -> T5Tokenizer:
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    letters = [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return T5Tokenizer(vocab=specials + letters, extra_ids=0, model_max_length=512)


def _vae(widths: PartSizes, *, shift: float, scaling: float) -> diffusers.AutoencoderKL:
    vae = diffusers.AutoencoderKL(
        block_out_channels=widths.vae,
        down_block_types=("DownEncoderBlock2D",) * len(widths.vae),
        up_block_types=("UpDecoderBlock2D",) * len(widths.vae),
        layers_per_block=2,
        norm_num_groups=min(32, widths.vae[0] // 2),
        latent_channels=LATENT_CHANNELS,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=shift,
        scaling_factor=scaling,
    )
    with torch.no_grad():
        vae.decoder.conv_out.weight *= CONTRAST
    return vae
