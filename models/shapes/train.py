"""`python -m models.shapes.train FOLDER`: trains the model and writes a diffusers folder.

Three stages, each of which continues a stopped run: the autoencoder, the text encoder, the UNet. At
intervals the current pipeline draws a sheet of held-out captions and is scored. The tokenizer is
like CLIP's, with one token per word of the captions, and bytes for other words.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import CLIPTokenizer

from models.shapes.captions import tell
from models.shapes.parts import Widths, join
from models.shapes.score import as_text, draw_asked, held_out, score_edits, score_text, sheet
from models.shapes.train_text import TextPlan, train_text
from models.shapes.train_unet import UnetPlan, UnetTraining, encode_scenes
from models.shapes.train_vae import VaePlan, train_vae
from models.shapes.world import sample_scene

TOKENS_MAX = 28
"""The longest caption has 25, with its start and end."""
START, END = "<|startoftext|>", "<|endoftext|>"
_CAPTIONS = 20_000
_WORD_END = "</w>"


def make_tokenizer() -> Any:
    """A CLIPTokenizer. Its merges are learned from captions until every word is one token."""
    rng = random.Random(0)
    words = sorted(
        {
            word
            for _ in range(_CAPTIONS)
            for word in tell(sample_scene(rng), rng).replace(",", " ,").split()
        }
    )
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=_WORD_END))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, end_of_word_suffix=_WORD_END, show_progress=False
    )
    tokenizer.train_from_iterator(words, trainer)
    merges = [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [
        *letters,
        *(f"{letter}{_WORD_END}" for letter in letters),
        *("".join(merge) for merge in merges),
    ]
    vocabulary = {
        token: number for number, token in enumerate(dict.fromkeys([*tokens, START, END]))
    }
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=TOKENS_MAX)


LOOK_CAPTIONS = 48


def main(arguments: list[str] | None = None) -> int:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(prog="models.shapes.train", description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="where to put the pipeline; what is there is replaced"
    )
    parser.add_argument(
        "--state", type=Path, required=True, help="checkpoints, sheets and scores on the way"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vae-steps", type=int, default=VaePlan.steps)
    parser.add_argument("--text-steps", type=int, default=TextPlan.steps)
    parser.add_argument("--unet-steps", type=int, default=UnetPlan.steps)
    parser.add_argument("--images", type=int, default=UnetPlan.images)
    parser.add_argument("--look-every-s", type=float, default=600.0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    train(
        options.folder,
        options.state,
        widths=Widths(),
        vae_plan=VaePlan(steps=options.vae_steps),
        text_plan=TextPlan(steps=options.text_steps),
        unet_plan=UnetPlan(steps=options.unet_steps, images=options.images),
        seed=options.seed,
        device=options.device,
        look_every_s=options.look_every_s,
    )
    return 0


def train(
    folder: Path,
    state_dir: Path,
    *,
    widths: Widths,
    vae_plan: VaePlan,
    text_plan: TextPlan,
    unet_plan: UnetPlan,
    seed: int,
    device: str = "cpu",
    look_every_s: float = 600.0,
    look_captions: int = LOOK_CAPTIONS,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> None:
    """All stages.

    At the end `folder` has the pipeline in fp16 and `state_dir` the last sheet and scores.
    """
    began_s = time.monotonic()
    tokenizer = make_tokenizer()
    vae = train_vae(state_dir, vae_plan, widths, seed, device=device, say=say)
    text_encoder = train_text(state_dir, text_plan, widths, seed, tokenizer, device=device, say=say)
    latents = encode_scenes(state_dir, vae, unet_plan.images, seed, device=device, say=say)
    vae.register_to_config(scaling_factor=latents.scale)
    training = UnetTraining(state_dir, unet_plan, widths, seed, text_encoder, tokenizer, device)
    pipeline = join(vae, text_encoder, tokenizer, training.average)
    pipeline.set_progress_bar_config(disable=True)

    def look() -> None:
        _look(pipeline, state_dir, training.step, look_captions, say)

    training.run(latents, look_every_s=look_every_s, look=look, say=say)
    write_pipeline(pipeline, folder)
    say(f"wrote {folder} after {time.monotonic() - began_s:.0f} s of this run on {device}")


def _look(
    pipeline: Any, state_dir: Path, step: int, captions: int, say: Callable[[str], None]
) -> None:
    """Draws the sheet and a short table of the weights as they are."""
    asked = held_out(captions)
    images = draw_asked(pipeline, asked)
    sheet(images, columns=8).save(state_dir / f"sheet-{step:06}.png")
    table = score_text(pipeline, asked) | score_edits(pipeline, captions // 2)
    (state_dir / f"score-{step:06}.json").write_text(
        json.dumps({name: tally.part for name, tally in table.items()})
    )
    say(as_text(table))


def write_pipeline(pipeline: Any, folder: Path) -> None:
    """Writes the pipeline in fp16 safetensors, completely or not at all."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    halved = {
        name: copy.deepcopy(getattr(pipeline, name)).half()
        for name in ("vae", "text_encoder", "unet")
    }
    join(halved["vae"], halved["text_encoder"], pipeline.tokenizer, halved["unet"]).save_pretrained(
        partial
    )
    # transformers loads in the precision that this file names, diffusers in fp32: the parts must
    # agree.
    config = partial / "text_encoder" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}, indent=2) + "\n"
    )
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


if __name__ == "__main__":
    sys.exit(main())
