"""`python -m examples.controlnet.train FOLDER`: trains a ControlNet and writes a diffusers folder.

The ControlNet draws the shapes from models/shapes along the given edges. It starts as a copy of the
UNet's first half with its outputs zeroed (Zhang et al. 2023, https://arxiv.org/abs/2302.05543), and
is trained like the UNet, with velocity prediction weighted by min-SNR. The UNet does not change.
Half of the captions are dropped so that it learns to read the edges.

Workers make the same kind of edges from `control_image` with `preprocessor: canny`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import ControlNetModel, StableDiffusionControlNetPipeline, StableDiffusionPipeline
from diffusers.models.attention_processor import AttnProcessor

from models.shapes.captions import tell
from models.shapes.draw import draw, draw_many
from models.shapes.fine_tuning import noised, rate
from models.shapes.judge import overlap, silhouette
from models.shapes.score import GUIDANCE, STEPS, Asked, held_out
from models.shapes.world import Scene, sample_scene
from workers.models.image.preprocessing import edges

PIPELINE = Path(__file__).parents[2] / "models" / "shapes" / "pipeline"
LOW, HIGH = 100, 200
"""Canny thresholds, as in the catalog."""
EMBEDDING_WIDTHS = (16, 32, 64, 128)
"""Channels of the convolutions that downsample an image to the latents' size."""
UNTOLD = 0.5


@dataclass(frozen=True)
class ControlPlan:
    """Training length and size."""

    steps: int = 800
    batch: int = 16
    lr: float = 1e-3


def outlines(scenes: Sequence[Scene]) -> torch.Tensor:
    """Returns the edges of scenes as ControlNet input, [scenes, 3, 64, 64] from 0 to 1."""
    outlined = np.stack([edges(pixels, LOW, HIGH) for pixels in draw_many(scenes)])
    return torch.from_numpy(outlined)[:, None].expand(-1, 3, -1, -1).float() / 255


def train(pipeline: Any, plan: ControlPlan, seed: int, folder: Path) -> Any:
    """Trains a ControlNet for the pipeline's UNet. Saves its state to `folder` periodically."""
    torch.manual_seed(seed)
    pipeline.unet.requires_grad_(False)
    # The backward pass of fused attention is slow at these sizes.
    pipeline.unet.set_attn_processor(AttnProcessor())
    control = ControlNetModel.from_unet(
        pipeline.unet, conditioning_embedding_out_channels=EMBEDDING_WIDTHS
    ).train()
    _open(control)
    control.set_attn_processor(AttnProcessor())
    optimizer = torch.optim.AdamW(control.parameters(), lr=plan.lr, betas=(0.9, 0.99))
    began_s, smooth = time.monotonic(), 0.0
    for step in range(plan.steps):
        rng = random.Random(f"control {seed} {step}")
        scenes = [sample_scene(rng) for _ in range(plan.batch)]
        captions = ["" if rng.random() < UNTOLD else tell(scene, rng) for scene in scenes]
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * rate(step, plan.steps)
        loss = _loss(pipeline, control, scenes, captions)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(control.parameters(), 1.0)
        optimizer.step()
        smooth = float(loss.detach()) if step == 0 else 0.95 * smooth + 0.05 * float(loss.detach())
        if step % 20 == 0:
            spent_s = time.monotonic() - began_s
            print(f"step {step}/{plan.steps} loss {smooth:.4f} after {spent_s:.0f} s", flush=True)
        if step % 100 == 99:
            control.save_pretrained(folder)
    return control.eval()


@torch.no_grad()
def _open(control: Any) -> None:
    """Scales edges to the latents' magnitude from the start. Only the outputs start at zero.

    When these also started at zero, as in diffusers, the ControlNet still didn't react to edges
    after 140 steps.
    """
    embedding = control.controlnet_cond_embedding
    embedding.conv_out.reset_parameters()
    images = outlines([sample_scene(random.Random(seed)) for seed in range(32)])
    embedded = embedding(images)
    embedding.conv_out.weight /= embedded.std()
    embedding.conv_out.bias.copy_(
        (embedding.conv_out.bias - embedded.mean(dim=(0, 2, 3))) / embedded.std()
    )


def _loss(
    pipeline: Any, control: Any, scenes: Sequence[Scene], captions: Sequence[str]
) -> torch.Tensor:
    noisy = noised(pipeline, torch.from_numpy(draw_many(scenes)), captions)
    down, middle = control(
        noisy.latents,
        noisy.times,
        encoder_hidden_states=noisy.told,
        controlnet_cond=outlines(scenes),
        return_dict=False,
    )
    predicted = pipeline.unet(
        noisy.latents,
        noisy.times,
        encoder_hidden_states=noisy.told,
        down_block_additional_residuals=down,
        mid_block_additional_residual=middle,
    ).sample
    return noisy.loss(predicted)


AT_ONCE = 16


def score(folder: Path, control: Any, number: int) -> dict[str, float]:
    """Returns how well silhouettes of held-out scenes match drawn ones (intersection over union).

    Measured with edges and captions, with captions only, and with edges only.
    """
    plain = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    controlled = StableDiffusionControlNetPipeline(
        **plain.components, controlnet=control, requires_safety_checker=False
    )
    scenes = held_out(number)
    scores_of = {}
    for name, pipeline, is_told in (
        ("edges and caption", controlled, True),
        ("caption", plain, True),
        ("edges", controlled, False),
    ):
        pipeline.set_progress_bar_config(disable=True)
        overlaps = []
        for at in range(0, number, AT_ONCE):
            some = scenes[at : at + AT_ONCE]
            overlaps += _overlaps(pipeline, some, is_told=is_told)
        scores_of[f"mean IoU from {name}"] = float(np.mean(overlaps))
        scores_of[f"share with IoU above 0.7 from {name}"] = float(
            np.mean(np.array(overlaps) >= 0.7)
        )
    return scores_of


def _overlaps(pipeline: Any, asked: Sequence[Asked], *, is_told: bool) -> list[float]:
    is_controlled = isinstance(pipeline, StableDiffusionControlNetPipeline)
    drawn = pipeline(
        [request.caption if is_told else "" for request in asked],
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE if is_told else 1.0,
        generator=[torch.Generator().manual_seed(request.seed) for request in asked],
        **({"image": outlines([request.scene for request in asked])} if is_controlled else {}),
    ).images
    return [
        overlap(silhouette(np.asarray(draw(request.scene))), silhouette(np.asarray(image)))
        for request, image in zip(asked, drawn, strict=True)
    ]


def main(arguments: list[str] | None = None) -> int:
    """Trains with the options of the command line."""
    parser = argparse.ArgumentParser(prog="examples.controlnet.train", description=__doc__)
    parser.add_argument("folder", type=Path, help="output folder of the ControlNet")
    parser.add_argument("--pipeline", type=Path, default=PIPELINE)
    parser.add_argument("--steps", type=int, default=ControlPlan.steps)
    parser.add_argument("--batch", type=int, default=ControlPlan.batch)
    parser.add_argument("--lr", type=float, default=ControlPlan.lr)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scored", type=int, default=96, help="held-out scenes")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    pipeline = StableDiffusionPipeline.from_pretrained(options.pipeline, local_files_only=True)
    plan = ControlPlan(options.steps, options.batch, options.lr)
    began_s = time.process_time()
    control = train(pipeline, plan, options.seed, options.folder)
    print(f"trained for {time.process_time() - began_s:.0f} CPU seconds", flush=True)
    control.half().save_pretrained(options.folder)
    scores = score(options.pipeline, control.float(), options.scored)
    print(json.dumps(scores, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
