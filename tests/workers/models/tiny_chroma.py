"""Tiny Chroma pipelines: real classes with random weights. None of our code mentions Chroma."""

from pathlib import Path
from typing import Any

import torch
from diffusers import ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler

from tests.workers.models.tiny_stable_diffusion_3 import (
    LATENT_CHANNELS,
    T5_WIDTH,
    t5_tokenizer,
    tiny_t5,
    tiny_vae,
)


def write_folder(folder: Path, shipped: Path, **scheduler: Any) -> Path:
    """Writes a folder in the Hub's format.

    Args:
        shipped: a pipeline's folder. It is not used.
    """
    torch.manual_seed(5)
    ChromaPipeline(
        vae=tiny_vae(),
        text_encoder=tiny_t5(),
        tokenizer=t5_tokenizer(),
        transformer=ChromaTransformer2DModel(
            patch_size=1,
            in_channels=4 * LATENT_CHANNELS,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=T5_WIDTH,
            axes_dims_rope=(4, 4, 8),
            approximator_hidden_dim=32,
            approximator_layers=1,
            approximator_num_channels=16,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(**scheduler),
    ).save_pretrained(folder)
    return folder
