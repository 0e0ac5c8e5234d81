"""Tiny Stable Diffusion 3 pipelines: real classes with random weights."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

CLIP_WIDTH, T5_WIDTH = 16, 32
"""The two CLIP encoders' outputs sit side by side; together they are as wide as T5's."""
LATENT_CHANNELS = 16


def write_folder(
    folder: Path, shipped: Path, *, has_t5: bool = True, trained: bool = False, **scheduler: Any
) -> Path:
    """Writes a folder in the Hub's format.

    Args:
        shipped: folder of the pipeline whose tokenizer is copied.
        has_t5: True to include the third text encoder.
        trained: True if the transformer was trained with masks.
        scheduler: the scheduler's settings. Default: Stable Diffusion 3's.
    """
    torch.manual_seed(5)
    tokenizer = CLIPTokenizer.from_pretrained(shipped / "tokenizer")
    StableDiffusion3Pipeline(
        vae=tiny_vae(),
        text_encoder=CLIPTextModelWithProjection(clip_config(tokenizer)),
        text_encoder_2=CLIPTextModelWithProjection(clip_config(tokenizer)),
        text_encoder_3=tiny_t5() if has_t5 else None,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        tokenizer_3=t5_tokenizer() if has_t5 else None,
        transformer=_transformer(trained=trained),
        scheduler=FlowMatchEulerDiscreteScheduler(**(scheduler or {"shift": 3.0})),
    ).save_pretrained(folder)
    return folder


def clip_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=CLIP_WIDTH,
        intermediate_size=2 * CLIP_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        projection_dim=CLIP_WIDTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def t5_tokenizer() -> T5Tokenizer:
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    letters = [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return T5Tokenizer(vocab=specials + letters, extra_ids=0, model_max_length=512)


def tiny_t5() -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(vocab_size=30, d_model=T5_WIDTH, d_kv=8, d_ff=T5_WIDTH, num_layers=2, num_heads=2)
    )


def tiny_vae() -> AutoencoderKL:
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=LATENT_CHANNELS,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5305,
    )
    # Otherwise, all pixels would be nearly the same shade of gray.
    vae.decoder.conv_out.weight.data *= 20
    return vae


def _transformer(*, trained: bool) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=2 * LATENT_CHANNELS + 1 if trained else LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=T5_WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=8,
        # As in version 3.5.
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
