"""A tiny Qwen-Image pipeline: real classes with random weights, including its text encoder."""

from pathlib import Path
from typing import Any

import diffusers
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
)

from tests.workers.models.tiny_families import qwen_parts

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
WIDTH = 16
"""Width of the prompts' token embeddings, as expected by the transformer in `qwen_parts`."""


def write_folder(folder: Path) -> Path:
    """Writes a folder in the Hub's format."""
    torch.manual_seed(11)
    tokenizer = _tokenizer()
    parts = qwen_parts() | {"tokenizer": tokenizer, "text_encoder": _encoder(tokenizer)}
    diffusers.QwenImagePipeline(**parts).save_pretrained(folder)
    return folder


def _tokenizer() -> Qwen2Tokenizer:
    """Creates a tokenizer with one token for each byte and one for each word in SPECIAL."""
    names = [*sorted(ByteLevel.alphabet()), *SPECIAL]
    vocab = {name: at for at, name in enumerate(names)}
    return Qwen2Tokenizer(vocab=vocab, merges=[], extra_special_tokens=list(SPECIAL[1:]))


def _encoder(tokenizer: Qwen2Tokenizer) -> Any:
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": WIDTH,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": len(tokenizer),
            "rope_parameters": {
                "mrope_section": [1, 1, 2],
                "rope_type": "default",
                "rope_theta": 1000000.0,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": WIDTH,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()
