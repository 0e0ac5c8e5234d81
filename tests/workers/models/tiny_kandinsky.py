"""A tiny Kandinsky 2.2: a prior and a decoder combined in one pipeline, with random weights."""

from typing import Any

import diffusers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

WIDTH = 32
"""Width of the text and image embeddings."""
TOKENS = 16
"""Maximum number of tokens in a prompt."""
SPECIAL = ("<|startoftext|>", "<|endoftext|>")


def kandinsky_parts(*, of_masks: bool = False) -> dict[str, Any]:
    """The parts of a combined pipeline.

    Args:
        of_masks: the UNet also takes a mask and the image outside the mask.
    """
    tokenizer = _tokenizer()
    return {
        "unet": _unet(in_channels=9 if of_masks else 4),
        "scheduler": diffusers.DDPMScheduler(
            beta_start=0.00085,
            beta_end=0.002,
            beta_schedule="linear",
            clip_sample=False,
            variance_type="learned_range",
        ),
        "movq": _vq_model(),
        "prior_prior": _prior(),
        "prior_image_encoder": _image_encoder(),
        "prior_text_encoder": _text_encoder(tokenizer),
        "prior_tokenizer": tokenizer,
        "prior_scheduler": diffusers.UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=10.0
        ),
        "prior_image_processor": CLIPImageProcessor(size=32, crop_size=32),
    }


def _tokenizer() -> CLIPTokenizer:
    """Creates a tokenizer with two tokens for each byte: inside and at the end of a word."""
    letters = sorted(ByteLevel.alphabet())
    names = [*letters, *(f"{letter}</w>" for letter in letters), *SPECIAL]
    vocab = {name: at for at, name in enumerate(names)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=TOKENS)


def _unet(in_channels: int) -> Any:
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=in_channels,
        # The noise and its variance.
        out_channels=8,
        addition_embed_type="image",
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        block_out_channels=(32, 64),
        layers_per_block=1,
        encoder_hid_dim=WIDTH,
        encoder_hid_dim_type="image_proj",
        cross_attention_dim=16,
        attention_head_dim=4,
        resnet_time_scale_shift="scale_shift",
    )
    # Random variances would amplify rounding errors with each step, as would large betas.
    unet.conv_out.weight.data /= 10
    return unet


def _vq_model() -> Any:
    return diffusers.VQModel(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        norm_type="spatial",
        num_vq_embeddings=12,
        vq_embed_dim=4,
    )


def _prior() -> Any:
    prior = diffusers.PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=12,
        embedding_dim=WIDTH,
        num_embeddings=TOKENS,
        num_layers=1,
    )
    # With a deviation of zero, all prompts have the same image embedding.
    prior.clip_std.data.fill_(1)
    return prior


def _image_encoder() -> Any:
    return CLIPVisionModelWithProjection(
        CLIPVisionConfig(
            hidden_size=WIDTH,
            image_size=32,
            projection_dim=WIDTH,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=1,
            patch_size=16,
        )
    )


def _text_encoder(tokenizer: CLIPTokenizer) -> Any:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            projection_dim=WIDTH,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=1,
            max_position_embeddings=TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
