"""Shared by trainings that start from the shipped pipeline: noised scenes, loss, learning rate.

The loss is the same as in the UNet's training: velocity prediction weighted by min-SNR
(https://arxiv.org/abs/2303.09556).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from models.shapes.train import SNR_MAX, tokens_of
from models.shapes.train_vae import as_input

WARM_UP_STEPS = 30


@dataclass(frozen=True)
class NoisedScenes:
    """Latents of images, each noised to a separate timestep, as the UNet sees them in training."""

    latents: torch.Tensor
    """Noised latents, [images, channels, 8, 8]."""
    times: torch.Tensor
    """Timesteps, [images]."""
    told: torch.Tensor
    """The text encoder's output for the captions, [images, tokens, width]."""
    velocity: torch.Tensor
    """The UNet's target, same shape as `latents`."""
    weight: torch.Tensor
    """Weight of each image in the loss, [images, 1, 1, 1]."""

    def loss(self, predicted: torch.Tensor) -> torch.Tensor:
        """Returns the weighted mean squared error of a prediction with the shape of `latents`."""
        squared: torch.Tensor = self.weight * (predicted - self.velocity) ** 2
        return squared.mean() / self.weight.mean()


@torch.no_grad()
def noised(pipeline: Any, images: torch.Tensor, captions: Sequence[str]) -> NoisedScenes:
    """Noises images to timesteps spread over the whole range.

    Args:
        images: uint8 [images, 64, 64, 3].
        captions: one per image. Empty: no description.
    """
    alphas = pipeline.scheduler.alphas_cumprod
    prompt_states = encoded(pipeline, captions)
    clean = pipeline.vae.encode(as_input(images.permute(0, 3, 1, 2))).latent_dist.sample()
    clean = clean * pipeline.vae.config.scaling_factor
    number = len(clean)
    times = ((torch.randperm(number) + torch.rand(number)) / number * len(alphas)).long()
    alpha = alphas[times].view(-1, 1, 1, 1)
    noise = torch.randn(clean.shape)
    snr = alpha / (1 - alpha)
    return NoisedScenes(
        latents=alpha.sqrt() * clean + (1 - alpha).sqrt() * noise,
        times=times,
        told=prompt_states,
        velocity=alpha.sqrt() * noise - (1 - alpha).sqrt() * clean,
        weight=snr.clamp(max=SNR_MAX) / (snr + 1),
    )


@torch.no_grad()
def encoded(pipeline: Any, captions: Sequence[str]) -> torch.Tensor:
    """Returns the text encoder's output for captions, [captions, tokens, width]."""
    states: torch.Tensor = pipeline.text_encoder(
        tokens_of(pipeline.tokenizer, captions)
    ).last_hidden_state
    return states


def rate(step: int, steps: int) -> float:
    """Returns the learning rate factor at a step: a short warm-up, then half a cosine."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm * 0.5 * (1 + math.cos(math.pi * step / steps))
