"""The untrained parts of the pipeline, from classes of diffusers and transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from models.shapes.world import SIDE

LATENT_SCALE = 8
"""Pixels per side of a latent, as everywhere."""


@dataclass(frozen=True)
class Widths:
    """Widths and depths of the parts. By default the result fits into 12 MB in fp16."""

    vae: tuple[int, int, int, int] = (16, 24, 48, 64)
    latents: int = 8
    text: int = 128
    text_layers: int = 2
    unet: tuple[int, int] = (64, 128)


def make_vae(widths: Widths) -> Any:
    """Maps images [n, 3, 64, 64] from -1 to 1 to latents [n, latents, 8, 8] and back.

    Uses only convolutions.
    """
    return AutoencoderKL(
        sample_size=SIDE,
        block_out_channels=widths.vae,
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=widths.latents,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        mid_block_add_attention=False,
    )


def make_text_encoder(widths: Widths, tokenizer: Any) -> Any:
    """Maps token ids [n, tokens] to [n, tokens, text]."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=widths.text,
            intermediate_size=4 * widths.text,
            num_hidden_layers=widths.text_layers,
            num_attention_heads=4,
            projection_dim=widths.text,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_unet(widths: Widths) -> Any:
    """Maps latents, a time and an encoded caption to the velocity.

    Attends to the caption at 8 x 8 and at 4 x 4.
    """
    return UNet2DConditionModel(
        sample_size=SIDE // LATENT_SCALE,
        in_channels=widths.latents,
        out_channels=widths.latents,
        block_out_channels=widths.unet,
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=4,
        cross_attention_dim=widths.text,
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
    )


def make_scheduler() -> Any:
    """Uses Stable Diffusion's betas, so that other schedulers accept them too.

    Steps are counted from the noisiest time.
    """
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,
    )


def join(vae: Any, text_encoder: Any, tokenizer: Any, unet: Any) -> Any:
    """Returns the parts as the pipeline that from_pretrained loads."""
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
