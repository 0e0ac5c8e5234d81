"""`python -m workers.models.make_tiny_diffusion FOLDER`: makes the small Stable Diffusion that runs on any laptop.

Every part is of the real class (UNet, VAE, CLIP text encoder and tokenizer, scheduler), only narrow, and its weights
are drawn with a fixed seed: the same bytes on each run. It was never trained, so it draws seeded noise.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

SEED = 20240501
TEXT_WIDTH = 64
PROMPT_TOKENS = 77
_START, _END = "<|startoftext|>", "<|endoftext|>"


def main(arguments: list[str] | None = None) -> int:
    """Makes the folder that the command line names."""
    parser = argparse.ArgumentParser(prog="workers.models.make_tiny_diffusion", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to put it; what is there is replaced")
    folder = parser.parse_args(arguments).folder
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    make_tiny_diffusion(folder)
    print(f"made {folder}")
    return 0


def make_tiny_diffusion(folder: Path) -> None:
    """Writes the pipeline to `folder` as a whole: it is there complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            _pipeline().save_pretrained(partial, safe_serialization=True)
        for path in (partial, *partial.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _pipeline() -> Any:
    tokenizer = _tokenizer()
    return StableDiffusionPipeline(
        tokenizer=tokenizer,
        text_encoder=_text_encoder(tokenizer),
        unet=_unet(),
        vae=_vae(),
        # The settings of Stable Diffusion 1.x.
        scheduler=DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _tokenizer() -> Any:
    """CLIP's byte-level tokenizer without merges: a token is a byte, inside a word or at the end of one."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), _START, _END]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=PROMPT_TOKENS)


def _text_encoder(tokenizer: Any) -> Any:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=PROMPT_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config).eval()


def _unet() -> Any:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=4,
        cross_attention_dim=TEXT_WIDTH,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()


def _vae() -> Any:
    """Four blocks, so that 8 pixels are one latent, as everywhere."""
    return AutoencoderKL(
        sample_size=64,
        block_out_channels=(16, 16, 32, 32),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    ).eval()


if __name__ == "__main__":
    sys.exit(main())
