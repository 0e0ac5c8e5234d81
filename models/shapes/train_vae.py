"""First stage of the training: the autoencoder learns to keep a picture in 8 x 8 latents and to draw it sharply again.

It has convolutions only, so its first steps see crops of a quarter of a picture around a figure, which cost a quarter
and show little of the flat background.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.shapes.checkpoint import load_state, save_state
from models.shapes.draw import draw_many
from models.shapes.parts import Widths, make_vae
from models.shapes.world import SIDE, sample_scene

KL_WEIGHT = 1e-4
FIGURE_WEIGHT = 4.0
"""A figure's pixel counts so much against one of the background: figures are a tenth of a picture."""
SAVE_EVERY_S = 60.0


@dataclass(frozen=True)
class VaePlan:
    """How long and on what the autoencoder is trained; `batch` is of crops, a quarter as many of whole pictures."""

    steps: int = 8000
    full_from: float = 0.55
    """From this part of the steps on, whole pictures instead of crops."""
    batch: int = 24
    crop: int = 32
    pictures: int = 8000
    lr: float = 1.5e-3


def train_vae(
    state_dir: Path,
    plan: VaePlan,
    widths: Widths,
    seed: int,
    *,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> Any:
    """Trains the autoencoder, or goes on from what `state_dir` has; returns it.

    The loss is the pixels' mean absolute and squared difference and that of their hues, plus KL_WEIGHT times the
    latents' mean divergence from the normal distribution (Kingma and Welling 2014).
    """
    torch.manual_seed(seed)
    vae = make_vae(widths).to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=1e-4)
    path = state_dir / "vae.pt"
    first = 0
    if state := load_state(path):
        vae.load_state_dict(state["vae"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    if first < plan.steps:
        pictures = make_pictures(plan.pictures, seed)
        saved_s = began_s = time.monotonic()
        for step in range(first, plan.steps):
            torch.manual_seed(seed * 1_000_003 + step)
            loss = _step(vae, optimizer, *_batch(pictures, plan, step, seed, device), _rate(plan, step))
            if step % 50 == 0:
                each_s = (time.monotonic() - began_s) / (step - first + 1)
                say(f"autoencoder {step}/{plan.steps} difference {loss:.4f} {each_s:.2f} s a step")
            if time.monotonic() - saved_s > SAVE_EVERY_S or step + 1 == plan.steps:
                saved_s = time.monotonic()
                save_state(path, {"vae": vae.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
    return vae.eval()


def make_pictures(number: int, seed: int) -> torch.Tensor:
    """Pictures to train on, uint8 [number, 3, 64, 64]."""
    rng = random.Random(seed)
    pixels = draw_many(sample_scene(rng) for _ in range(number))
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))


def as_input(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 pixels as the autoencoder takes them, from -1 to 1."""
    return (pixels.float() / 127.5 - 1.0).contiguous(memory_format=torch.channels_last)


def _batch(
    pictures: torch.Tensor, plan: VaePlan, step: int, seed: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The input of this step and the weight of its pixels, whichever run it is in."""
    rng = random.Random(f"{seed} {step}")
    whole = step >= plan.full_from * plan.steps
    size = SIDE if whole else plan.crop
    number = plan.batch // 4 if whole else plan.batch
    chosen, weights = [], []
    for _ in range(number):
        picture = pictures[rng.randrange(len(pictures))]
        # The corner is always background.
        figure = (picture != picture[:, :1, :1]).any(dim=0)
        top, left = (0, 0) if whole else _corner(figure, size, rng)
        chosen.append(picture[:, top : top + size, left : left + size])
        weights.append(1.0 + (FIGURE_WEIGHT - 1.0) * figure[None, top : top + size, left : left + size])
    return as_input(torch.stack(chosen)).to(device), torch.stack(weights).to(device)


def _corner(figure: torch.Tensor, size: int, rng: random.Random) -> tuple[int, int]:
    """Where a crop begins that has some pixel of a figure near its middle, on the latents' grid of 8 pixels."""
    inside = figure.nonzero()
    row, column = inside[rng.randrange(len(inside))].tolist()
    top, left = (round((at - size / 2 + rng.uniform(-8, 8)) / 8) * 8 for at in (row, column))
    return min(max(top, 0), SIDE - size), min(max(left, 0), SIDE - size)


def _rate(plan: VaePlan, step: int) -> float:
    """A short warm-up, then a cosine to nothing."""
    return plan.lr * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / plan.steps)))


def _step(vae: Any, optimizer: torch.optim.Optimizer, pixels: torch.Tensor, weights: torch.Tensor, lr: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = lr
    posterior = vae.encode(pixels).latent_dist
    drawn = vae.decode(posterior.sample()).sample
    error = drawn - pixels
    off = error.abs()
    # Light alone is most of the error, so hues, the channels' differences, count once more.
    hue = (error - error.roll(1, dims=1)).abs()
    difference = (weights * (off + off**2 + hue)).mean()
    divergence = 0.5 * (posterior.mean**2 + posterior.var - 1.0 - posterior.logvar).mean()
    optimizer.zero_grad(set_to_none=True)
    (difference + KL_WEIGHT * divergence).backward()
    torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
    optimizer.step()
    return float(off.detach().mean())
