"""First stage of the training: the autoencoder learns to encode images into 8 x 8 latents.

It uses only convolutions, so its first steps can use crops around a figure, a quarter of an image
in size. They cost a quarter and contain little of the flat background.
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
import numpy.typing as npt
import torch
from scipy import ndimage

from models.shapes.checkpoint import load_state, save_state
from models.shapes.draw import draw_many
from models.shapes.parts import Widths, make_vae
from models.shapes.world import SIDE, sample_scene

KL_WEIGHT = 1e-4
FIGURE_WEIGHT = 9.0
"""Weight of pixels in and next to a figure of FIGURE_PIXELS, relative to the background.

Smaller figures weigh more, so that they don't become blots, and larger ones less.
"""
FIGURE_PIXELS = 300
EDGE_PIXELS = 2
NOISE = 0.07
"""Standard deviation of the noise added to latents, relative to theirs.

The UNet does not predict latents exactly, so images must not depend on finer detail.
"""
SAVE_EVERY_S = 60.0


@dataclass(frozen=True)
class VaePlan:
    """Length and data of the autoencoder's training.

    `batch` counts crops; for whole images it is a quarter of that.
    """

    steps: int = 11_000
    full_from: float = 0.4
    """Share of the steps after which whole images are used instead of crops."""
    batch: int = 64
    crop: int = 32
    images: int = 10_000
    lr: float = 1e-3


def train_vae(
    state_dir: Path,
    plan: VaePlan,
    widths: Widths,
    seed: int,
    *,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> Any:
    """Trains the autoencoder, or continues from `state_dir`. Returns it.

    The loss is the mean absolute and squared difference of pixels and hues, plus KL_WEIGHT times
    the latents' mean divergence from the normal distribution (Kingma and Welling 2014).
    """
    torch.manual_seed(seed)
    vae = make_vae(widths).to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(
        vae.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=1e-4
    )
    path = state_dir / "vae.pt"
    first = 0
    if state := load_state(path):
        vae.load_state_dict(state["vae"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    if first < plan.steps:
        images, weights = make_images(plan.images, seed)
        saved_s = began_s = time.monotonic()
        for step in range(first, plan.steps):
            torch.manual_seed(seed * 1_000_003 + step)
            loss = _step(
                vae,
                optimizer,
                *_batch(images, weights, plan, step, seed, device),
                _rate(plan, step),
            )
            if step % 50 == 0:
                each_s = (time.monotonic() - began_s) / (step - first + 1)
                say(f"autoencoder {step}/{plan.steps} difference {loss:.4f} {each_s:.2f} s a step")
            if time.monotonic() - saved_s > SAVE_EVERY_S or step + 1 == plan.steps:
                saved_s = time.monotonic()
                save_state(
                    path,
                    {
                        "vae": vae.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step + 1,
                    },
                )
    return vae.eval()


def make_images(number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images, uint8 [number, 3, 64, 64], and pixel weights, float16 [number, 1, 64, 64]."""
    rng = random.Random(seed)
    pixels = draw_many(sample_scene(rng) for _ in range(number))
    weights = np.stack([_weights(image) for image in pixels])[:, None]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))), torch.from_numpy(
        weights
    )


def _weights(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.float16]:
    weights = np.ones(image.shape[:2], np.float16)
    # The corner is always background.
    parts, number = ndimage.label((image != image[0, 0]).any(axis=2))
    for part in range(1, number + 1):
        figure = parts == part
        smallness = min(2.5, math.sqrt(FIGURE_PIXELS / figure.sum()))
        weights[ndimage.binary_dilation(figure, iterations=EDGE_PIXELS)] = (
            1.0 + (FIGURE_WEIGHT - 1.0) * smallness
        )
    return weights


def as_input(pixels: torch.Tensor) -> torch.Tensor:
    """Converts uint8 pixels to the autoencoder's input, from -1 to 1."""
    return (pixels.float() / 127.5 - 1.0).contiguous(memory_format=torch.channels_last)


def _batch(
    images: torch.Tensor, weights: torch.Tensor, plan: VaePlan, step: int, seed: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input of this step and the pixel weights. They depend only on the step."""
    rng = random.Random(f"{seed} {step}")
    whole = step >= plan.full_from * plan.steps
    size = SIDE if whole else plan.crop
    number = plan.batch // 4 if whole else plan.batch
    crops, counts = [], []
    for _ in range(number):
        index = rng.randrange(len(images))
        top, left = (0, 0) if whole else _corner(weights[index, 0] > 1.0, size, rng)
        crops.append(images[index, :, top : top + size, left : left + size])
        counts.append(weights[index, :, top : top + size, left : left + size])
    return as_input(torch.stack(crops)).to(device), torch.stack(counts).float().to(device)


def _corner(figure: torch.Tensor, size: int, rng: random.Random) -> tuple[int, int]:
    """Returns the corner of a crop with a figure near its center, on the latents' 8-pixel grid."""
    inside = figure.nonzero()
    row, column = inside[rng.randrange(len(inside))].tolist()
    top, left = (round((at - size / 2 + rng.uniform(-8, 8)) / 8) * 8 for at in (row, column))
    return min(max(top, 0), SIDE - size), min(max(left, 0), SIDE - size)


def _rate(plan: VaePlan, step: int) -> float:
    """Returns the learning rate: warm-up, then constant, from 0.6 of the steps down to zero."""
    return plan.lr * min(1.0, (step + 1) / 100, (1 - step / plan.steps) / 0.4 + 0.01)


def _step(
    vae: Any,
    optimizer: torch.optim.Optimizer,
    pixels: torch.Tensor,
    weights: torch.Tensor,
    lr: float,
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = lr
    posterior = vae.encode(pixels).latent_dist
    spread = posterior.mean.detach().std(dim=(0, 2, 3), keepdim=True)
    drawn = vae.decode(
        posterior.sample() + NOISE * spread * torch.randn_like(posterior.mean)
    ).sample
    error = drawn - pixels
    off = error.abs()
    # Brightness alone is most of the error, so hues, the differences of channels, count once more.
    hue = (error - error.roll(1, dims=1)).abs()
    difference = (weights * (off + off**2 + hue)).mean()
    divergence = 0.5 * (posterior.mean**2 + posterior.var - 1.0 - posterior.logvar).mean()
    optimizer.zero_grad(set_to_none=True)
    (difference + KL_WEIGHT * divergence).backward()
    torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
    optimizer.step()
    return float(off.detach().mean())


@torch.no_grad()
def even_out(vae: Any, mean: torch.Tensor, std: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalizes each channel of the latents to mean 0 and deviation 1.

    The autoencoder's own 1 x 1 convolutions absorb the change, so it draws the same images.

    Args:
        mean: means of many images' latents, [images, latents, 8, 8].
        std: standard deviations of the same latents, [images, latents, 8, 8].

    Returns:
        mean and std of the changed autoencoder.
    """
    middle, scale = mean.float().mean(dim=(0, 2, 3)), mean.float().std(dim=(0, 2, 3))
    number = len(scale)
    encoding, decoding = vae.quant_conv, vae.post_quant_conv
    encoding.bias[:number] -= middle
    encoding.bias[:number] /= scale
    encoding.weight[:number] /= scale.view(-1, 1, 1, 1)
    encoding.bias[number:] -= 2 * scale.log()
    decoding.bias += decoding.weight[:, :, 0, 0] @ middle
    decoding.weight *= scale.view(1, -1, 1, 1)
    middle, scale = middle.view(1, -1, 1, 1), scale.view(1, -1, 1, 1)
    return (mean.float() - middle) / scale, std.float() / scale
