"""Tiny FLUX.1 pipelines: real classes with random weights."""

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel, CLIPTokenizer

from tests.workers.models.tiny_stable_diffusion_3 import (
    CLIP_WIDTH,
    LATENT_CHANNELS,
    T5_WIDTH,
    clip_config,
    t5_tokenizer,
    tiny_t5,
    tiny_vae,
)

SHIFTING = {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
"""FLUX.1's scheduler."""


def write_folder(
    folder: Path, shipped: Path, *, is_told_guidance: bool = True, **scheduler: Any
) -> Path:
    """Writes a folder in the Hub's format.

    Args:
        shipped: folder of the pipeline whose tokenizer is copied.
        is_told_guidance: True if the transformer takes the guidance scale. False for FLUX.1
            "schnell".
        scheduler: the scheduler's settings. Default: FLUX.1's.
    """
    torch.manual_seed(5)
    tokenizer = CLIPTokenizer.from_pretrained(shipped / "tokenizer")
    FluxPipeline(
        vae=tiny_vae(),
        text_encoder=CLIPTextModel(clip_config(tokenizer)),
        text_encoder_2=tiny_t5(),
        tokenizer=tokenizer,
        tokenizer_2=t5_tokenizer(),
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * LATENT_CHANNELS,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=T5_WIDTH,
            pooled_projection_dim=CLIP_WIDTH,
            guidance_embeds=is_told_guidance,
            axes_dims_rope=(4, 4, 8),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(**(scheduler or SHIFTING)),
    ).save_pretrained(folder)
    return folder
