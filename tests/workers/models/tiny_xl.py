"""Tiny Stable Diffusion XL pipelines, with the shipped tokenizer and VAE, and random weights."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

WIDTH = 32
"""Each text encoder's width. The UNet attends to both encoders' outputs, side by side."""
TIME_WIDTH = 8
MEANS = {"latents_mean": [0.5, -1.0, 2.0, 0.0], "latents_std": [3.0, 2.0, 4.0, 1.0]}


def write_folder(
    folder: Path, shipped: Path, *, distilled: bool = False, refines: bool = False, **options: Any
) -> Path:
    """Writes a folder in the Hub's format.

    Args:
        shipped: folder of the pipeline whose VAE and tokenizer are copied.
        distilled: the UNet takes the guidance scale as an input, like LCM's UNets.
        refines: like the refiner, the pipeline draws only from an image and has one text encoder.
        options: `overflows` and `means` for the VAE, and options for the pipeline.
    """
    torch.manual_seed(5)
    tokenizer = CLIPTokenizer.from_pretrained(shipped / "tokenizer")
    text = _text_config(tokenizer)
    vae = _vae(shipped, **{name: options.pop(name, False) for name in ("overflows", "means")})
    kind = StableDiffusionXLImg2ImgPipeline if refines else StableDiffusionXLPipeline
    if refines:
        options |= {"requires_aesthetics_score": True}
    kind(
        vae=vae,
        text_encoder=None if refines else CLIPTextModel(text),
        text_encoder_2=CLIPTextModelWithProjection(text),
        tokenizer=None if refines else tokenizer,
        tokenizer_2=tokenizer,
        unet=_unet(vae.config.latent_channels, distilled=distilled, refines=refines),
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
            steps_offset=1,
        ),
        **{"force_zeros_for_empty_prompt": True, "add_watermarker": False} | options,
    ).save_pretrained(folder)
    return folder


def _text_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=WIDTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _vae(shipped: Path, *, overflows: bool, means: bool) -> Any:
    """The shipped VAE.

    Args:
        shipped: the pipeline folder that contains the VAE.
        overflows: values between two of its layers are too large for fp16.
        means: the VAE has statistics for its four-channel latents, and random weights.
    """
    if means:
        config = AutoencoderKL.load_config(shipped / "vae")
        vae = AutoencoderKL.from_config(config | MEANS | {"latent_channels": 4})
        vae.decoder.conv_out.weight.data *= 20
        return vae
    vae = AutoencoderKL.from_pretrained(shipped / "vae")
    if overflows:
        vae.post_quant_conv.weight.data *= 2**14
        vae.post_quant_conv.bias.data *= 2**14
        vae.decoder.conv_in.weight.data /= 2**14
    return vae


def _unet(channels: int, *, distilled: bool, refines: bool) -> Any:
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=channels,
        out_channels=channels,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=(2, 4),
        cross_attention_dim=WIDTH if refines else 2 * WIDTH,
        use_linear_projection=True,
        transformer_layers_per_block=(1, 1),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        addition_embed_type="text_time",
        addition_time_embed_dim=TIME_WIDTH,
        # Two sizes and a crop corner, or one size and a score.
        projection_class_embeddings_input_dim=WIDTH + (5 if refines else 6) * TIME_WIDTH,
        time_cond_proj_dim=16 if distilled else None,
    )
