"""`python -m examples.lora.train FOLDER`: trains a style (LoRA) and writes one safetensors file.

The style is ink: black figures on white paper, whatever colors the caption names. Its low-rank
layers (Hu et al. 2021, https://arxiv.org/abs/2106.09685) are created by PEFT, alongside the UNet's
linear layers. They are trained like the UNet, on pairs of an inked scene and its caption. The UNet
does not change.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from diffusers.models.attention_processor import AttnProcessor
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from models.shapes.captions import tell
from models.shapes.draw import draw_many
from models.shapes.fine_tuning import noised, rate
from models.shapes.judge import is_ink, read
from models.shapes.score import draw_asked, held_out, load, matched
from models.shapes.world import Scene, sample_scene

PIPELINE = Path(__file__).parents[2] / "models" / "shapes" / "pipeline"
LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
"""UNet layers that get low-rank layers: attention and feed-forward."""
UNTOLD = 0.1
"""Share of captions that are dropped, for guidance."""
AT_ONCE = 16
FILE = "ink.safetensors"


@dataclass(frozen=True)
class LoraPlan:
    """Training duration and layer size."""

    steps: int = 300
    batch: int = 16
    lr: float = 2e-3
    rank: int = 8


def inked(scene: Scene) -> Scene:
    """Returns the scene in ink: all figures black, on white."""
    figures = tuple(replace(figure, color="black") for figure in scene.figures)
    return replace(scene, background="white", figures=figures)


def train(pipeline: Any, plan: LoraPlan, seed: int) -> None:
    """Adds low-rank layers to the pipeline's UNet and trains them on inked scenes."""

    def loss(rng: random.Random) -> torch.Tensor:
        scenes = [sample_scene(rng) for _ in range(plan.batch)]
        captions = ["" if rng.random() < UNTOLD else tell(scene, rng) for scene in scenes]
        images = torch.from_numpy(draw_many(inked(scene) for scene in scenes))
        noisy = noised(pipeline, images, captions)
        predicted = pipeline.unet(noisy.latents, noisy.times, encoder_hidden_states=noisy.told)
        return noisy.loss(predicted.sample)

    fit(pipeline.unet, plan, seed, loss)


def fit(unet: Any, plan: LoraPlan, seed: int, loss_of: Callable[[random.Random], Any]) -> None:
    """Adds low-rank layers to a UNet and trains them.

    Args:
        unet: UNet from diffusers. The UNet's own weights do not change.
        seed: seed for all random choices.
        loss_of: returns the scalar loss of one step, for scenes sampled from this generator.
    """
    torch.manual_seed(seed)
    unet.requires_grad_(False)
    # The backward pass of fused attention is slow at these sizes.
    unet.set_attn_processor(AttnProcessor())
    unet.add_adapter(LoraConfig(r=plan.rank, lora_alpha=plan.rank, target_modules=list(LAYERS)))
    layers = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(layers, lr=plan.lr, betas=(0.9, 0.99))
    began_s, smooth = time.monotonic(), 0.0
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * rate(step, plan.steps)
        loss = loss_of(random.Random(f"style {seed} {step}"))
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(layers, 1.0)
        optimizer.step()
        smooth = float(loss.detach()) if step == 0 else 0.95 * smooth + 0.05 * float(loss.detach())
        if step % 20 == 0:
            spent_s = time.monotonic() - began_s
            print(f"step {step}/{plan.steps} loss {smooth:.4f} after {spent_s:.0f} s", flush=True)


def save(pipeline: Any, folder: Path, name: str) -> None:
    """Writes the layers in fp16, with PEFT's settings in the metadata, as diffusers does."""
    layers = get_peft_model_state_dict(pipeline.unet)
    StableDiffusionPipeline.save_lora_weights(
        folder,
        unet_lora_layers={layer: tensor.half() for layer, tensor in layers.items()},
        weight_name=name,
        unet_lora_adapter_metadata=pipeline.unet.peft_config["default"].to_dict(),
    )


def score(folder: Path, file: Path | None, number: int) -> dict[str, float]:
    """Has the judge score held-out captions drawn by plain diffusers, with or without a style.

    Returns:
        The share of images classified as ink, and the share of figures with the right shape.
    """
    pipeline = load(folder)
    if file is not None:
        pipeline.load_lora_weights(file.parent, weight_name=file.name)
    captioned = held_out(number)
    images = [
        image
        for at in range(0, number, AT_ONCE)
        for image in draw_asked(pipeline, captioned[at : at + AT_ONCE])
    ]
    right = [
        seen is not None and seen.shape == figure.shape
        for request, image in zip(captioned, images, strict=True)
        for figure, seen in matched(inked(request.scene).figures, read(image).figures)
    ]
    inks = [is_ink(image) for image in images]
    return {"ink": sum(inks) / number, "shape right": sum(right) / len(right)}


def main(arguments: list[str] | None = None) -> int:
    """Trains with the options of the command line."""
    parser = argparse.ArgumentParser(prog="examples.lora.train", description=__doc__)
    parser.add_argument("folder", type=Path, help="output folder of the file")
    parser.add_argument("--pipeline", type=Path, default=PIPELINE)
    parser.add_argument("--steps", type=int, default=LoraPlan.steps)
    parser.add_argument("--batch", type=int, default=LoraPlan.batch)
    parser.add_argument("--lr", type=float, default=LoraPlan.lr)
    parser.add_argument("--rank", type=int, default=LoraPlan.rank)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scored", type=int, default=96, help="held-out scenes")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    pipeline = load(options.pipeline)
    plan = LoraPlan(options.steps, options.batch, options.lr, options.rank)
    began_s = time.process_time()
    train(pipeline, plan, options.seed)
    print(f"trained for {time.process_time() - began_s:.0f} CPU seconds", flush=True)
    save(pipeline, options.folder, FILE)
    scores = {
        name: score(options.pipeline, file, options.scored)
        for name, file in (("with", options.folder / FILE), ("without", None))
    }
    print(json.dumps(scores, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
