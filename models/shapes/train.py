"""`python -m models.shapes.train FOLDER`: trains the model and writes a diffusers folder.

Three stages, each of which goes on where a stopped run was: the autoencoder, the text encoder, the
UNet. Now and then the pipeline as it is draws a sheet of held-out captions and is scored.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from models.shapes.parts import Widths, join
from models.shapes.score import as_text, draw_asked, held_out, score_edits, score_text, sheet
from models.shapes.tokenizer import make_tokenizer
from models.shapes.train_text import TextPlan, train_text
from models.shapes.train_unet import UnetPlan, UnetTraining, encode_scenes
from models.shapes.train_vae import VaePlan, train_vae

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
    parser.add_argument("--pictures", type=int, default=UnetPlan.pictures)
    parser.add_argument("--look-every-s", type=float, default=600.0)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    transformers.utils.logging.set_verbosity_error()
    train(
        given.folder,
        given.state,
        widths=Widths(),
        vae_plan=VaePlan(steps=given.vae_steps),
        text_plan=TextPlan(steps=given.text_steps),
        unet_plan=UnetPlan(steps=given.unet_steps, pictures=given.pictures),
        seed=given.seed,
        device=given.device,
        look_every_s=given.look_every_s,
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
    latents = encode_scenes(state_dir, vae, unet_plan.pictures, seed, device=device, say=say)
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
    pictures = draw_asked(pipeline, asked)
    sheet(pictures, columns=8).save(state_dir / f"sheet-{step:06}.png")
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
