"""FLUX.1 with random weights: diffusers, eager and compiled, compared with our compiled model.

`regional` compiles each kind of block once, without CUDA graphs (diffusers'
`compile_repeated_blocks`). Ours compiles the whole transformer, which takes longer, and records a
CUDA graph. The seconds until the first image show what that costs at startup.

It has the published shapes, but only 5 of the 19 blocks, 10 of the 38 blocks, and 4 of T5's 24
layers, because more would only take longer to write. Ours ends with PNG files, and `plain` with PIL
images.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from msgspec.structs import replace
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from bench.gpu.card import DTYPES, in_turns, medians
from bench.gpu.company import text_image
from bench.gpu.images import PROMPT_TOKENS, SEED, draw, draw_plain, image_entry, load_model
from bench.gpu.scale import Scale
from bench.report import Figure
from models.shapes import PIPELINE

GUIDANCE = 4.5
FULL: dict[str, dict[str, Any]] = {
    "transformer": {"num_layers": 5, "num_single_layers": 10, "guidance_embeds": True},
    "clip": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    "t5": {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 4, "num_heads": 64},
    "vae": {"block_out_channels": (128, 256, 512, 512)},
}
"""Arguments of each part's class. The transformer's defaults are FLUX.1's shapes."""
TINY: dict[str, dict[str, Any]] = {
    "transformer": {
        "num_layers": 1,
        "num_single_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 4, 8),
        "guidance_embeds": True,
    },
    "clip": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    "vae": {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4},
}


def measure(scale: Scale, folder: Path) -> Iterator[Figure]:
    """Yields each contender's images/s. `folder` is a new folder for the pipeline."""
    dtype = DTYPES["fp32" if scale.device == "cpu" else "bf16"]  # as in a worker
    write_pipeline(folder, dtype, FULL if scale.is_full_width else TINY)
    plain: Any = diffusers.FluxPipeline.from_pretrained(folder, dtype=dtype, local_files_only=True)
    plain.to(scale.device).set_progress_bar_config(disable=True)
    alone = dataclasses.replace(
        scale, batches=(1,), side=scale.flux_side, text_steps=scale.flux_steps
    )
    item = text_image(scale.flux_side, scale.flux_steps, GUIDANCE)
    batch = [replace(item, scheduler="default")]
    regional = diffusers.FluxPipeline(**plain.components | {"transformer": _compile_blocks(plain)})
    regional.set_progress_bar_config(disable=True)
    began_s = time.perf_counter()
    draw_plain(regional, batch)
    yield Figure("FLUX.1, regional, first image", time.perf_counter() - began_s, "s")
    entry = image_entry(folder, alone, compile="auto", scheduler="default")
    ours = load_model(entry, folder, scale)
    began_s = time.perf_counter()
    ours.warmup()
    yield Figure("FLUX.1, ours, warm-up", time.perf_counter() - began_s, "s")
    contenders: dict[str, Callable[[], Any]] = {
        "plain": partial(draw_plain, plain, batch),
        "regional": partial(draw_plain, regional, batch),
        "ours": partial(draw, ours, batch),
    }
    taken_s = medians(in_turns(scale, contenders))
    for name, call_s in taken_s.items():
        yield Figure(f"FLUX.1, {name}", 1 / call_s, "images/s")
    yield Figure("FLUX.1, ours over plain", taken_s["plain"] / taken_s["ours"], "times")
    yield Figure("FLUX.1, ours over regional", taken_s["regional"] / taken_s["ours"], "times")


def _compile_blocks(plain: Any) -> Any:
    """Returns a copy of the transformer whose blocks are compiled when they are first called.

    On a CPU, they are only traced, as compiling them there would take minutes.
    """
    transformer = copy.deepcopy(plain.transformer)
    backend = "eager" if transformer.device.type == "cpu" else "inductor"
    transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
    return transformer


def write_pipeline(folder: Path, dtype: torch.dtype, sizes: dict[str, dict[str, Any]]) -> None:
    """Writes a pipeline with random weights. At full width, it is several GB."""
    torch.manual_seed(SEED)
    tokenizer = CLIPTokenizer.from_pretrained(
        PIPELINE / "tokenizer", model_max_length=PROMPT_TOKENS
    )
    clip = CLIPTextConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **sizes["clip"],
    )
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1159,
        scaling_factor=0.3611,
        **sizes["vae"],
    )
    letters = [(letter, -3.0) for letter in "\u2581abcdefghijklmnopqrstuvwxyz"]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *letters]
    diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        transformer=diffusers.FluxTransformer2DModel(**sizes["transformer"]),
        text_encoder=CLIPTextModel(clip),
        text_encoder_2=T5EncoderModel(T5Config(vocab_size=len(vocabulary), **sizes["t5"])),
        tokenizer=tokenizer,
        tokenizer_2=T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512),
        vae=vae,
    ).to(dtype).save_pretrained(folder)
