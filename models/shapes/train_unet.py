"""Last stage of the training: the UNet learns to denoise latents, guided by the caption.

Velocity prediction (Salimans and Ho 2022) weighted by min-SNR (Hang et al. 2023), captions left out
now and then for classifier-free guidance (Ho and Salimans 2022), and a moving average of the
weights as the result.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor

from models.shapes.captions import tell
from models.shapes.checkpoint import load_state, save_state
from models.shapes.draw import draw_many
from models.shapes.parts import Widths, make_scheduler, make_unet
from models.shapes.train_text import tokens_of
from models.shapes.train_vae import as_input, even_out
from models.shapes.world import Scene, sample_scene

SNR_MAX = 5.0
EMA_DECAY = 0.999
SAVE_EVERY_S = 120.0
ENCODED_AT_ONCE = 64


@dataclass(frozen=True)
class UnetPlan:
    """How long and on what the UNet is trained."""

    steps: int = 6800
    batch: int = 64
    images: int = 24_000
    lr: float = 1e-3
    untold: float = 0.1
    """The part of the captions that is left out."""


class Latents:
    """Scenes with their latents in memory.

    Args:
        scenes: what the images show.
        mean, std: of each image's latents, [scenes, latents, 8, 8].
    """

    def __init__(self, scenes: Sequence[Scene], mean: torch.Tensor, std: torch.Tensor) -> None:
        self.scenes = scenes
        self.mean = mean
        self.std = std
        self.scale = float(1.0 / mean.float().std())
        """AutoencoderKL's scaling_factor: brings the latents to a deviation of one."""

    def sample(self, chosen: Sequence[int]) -> torch.Tensor:
        """Latents of the chosen scenes as the UNet sees them."""
        mean, std = self.mean[list(chosen)].float(), self.std[list(chosen)].float()
        return (mean + std * torch.randn(mean.shape)) * self.scale


def encode_scenes(
    state_dir: Path,
    vae: Any,
    number: int,
    seed: int,
    *,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> Latents:
    """Draws and encodes `number` scenes, or reads those of an earlier run.

    Normalizes the autoencoder's latents.
    """
    rng = random.Random(f"scenes {seed}")
    scenes = [sample_scene(rng) for _ in range(number)]
    path = state_dir / "latents.pt"
    state = load_state(path)
    if state is None or len(state["mean"]) != number:
        means, stds = [], []
        for at in range(0, number, ENCODED_AT_ONCE):
            pixels = torch.from_numpy(draw_many(scenes[at : at + ENCODED_AT_ONCE])).permute(
                0, 3, 1, 2
            )
            with torch.no_grad():
                posterior = vae.encode(as_input(pixels).to(device)).latent_dist
            means.append(posterior.mean.half().cpu())
            stds.append(posterior.std.half().cpu())
            if at % (ENCODED_AT_ONCE * 20) == 0:
                say(f"encoded {at}/{number}")
        state = {"mean": torch.cat(means), "std": torch.cat(stds)}
        save_state(path, state)
    return Latents(scenes, *even_out(vae, state["mean"], state["std"]))


class UnetTraining:
    """The UNet, its moving average and the progress of the training. `run` trains.

    Args:
        state_dir: has `unet.pt`, which an earlier run left.
        text_encoder, tokenizer: trained. They are not changed.
        device: where the UNet and the text encoder are.
    """

    def __init__(
        self,
        state_dir: Path,
        plan: UnetPlan,
        widths: Widths,
        seed: int,
        text_encoder: Any,
        tokenizer: Any,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(seed)
        self.unet = make_unet(widths).to(device, memory_format=torch.channels_last)
        if device == "cpu":
            # torch's fused attention is slow backwards at these sizes: a third of a step on a
            # processor.
            self.unet.set_attn_processor(AttnProcessor())
        self.average = make_unet(widths).to(device).eval().requires_grad_(False)
        self.average.load_state_dict(self.unet.state_dict())
        self.step = 0
        self.spent_s = 0.0
        self._path = state_dir / "unet.pt"
        self._plan = plan
        self._seed = seed
        self._text_encoder = text_encoder
        self._tokenizer = tokenizer
        self._device = device
        self._optimizer = torch.optim.AdamW(
            self.unet.parameters(), lr=plan.lr, betas=(0.9, 0.99), weight_decay=0.01
        )
        self._alphas = make_scheduler().alphas_cumprod.to(device)
        if state := load_state(self._path):
            self.unet.load_state_dict(state["unet"])
            self.average.load_state_dict(state["average"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step, self.spent_s = state["step"], state["spent_s"]

    def run(
        self,
        latents: Latents,
        *,
        look_every_s: float,
        look: Callable[[], None],
        say: Callable[[str], None] = print,
    ) -> None:
        """Trains to the plan's last step.

        `look` is called now and then, and at the end, when the state is saved.
        """
        self.unet.train()
        began_s = saved_s = looked_s = time.monotonic()
        spent_s, smooth = self.spent_s, 0.0
        while self.step < self._plan.steps:
            loss = self._train_step(latents)
            self.step += 1
            now_s = time.monotonic()
            self.spent_s = spent_s + now_s - began_s
            smooth = loss if smooth == 0.0 else 0.98 * smooth + 0.02 * loss
            if self.step % 20 == 0:
                say(
                    f"UNet {self.step}/{self._plan.steps} loss {smooth:.4f} after "
                    f"{self.spent_s:.0f} s"
                )
            is_last = self.step == self._plan.steps
            if now_s - saved_s > SAVE_EVERY_S or is_last:
                saved_s = now_s
                self._save()
            if now_s - looked_s > look_every_s or is_last:
                looked_s = now_s
                look()

    def _save(self) -> None:
        parts = {"unet": self.unet, "average": self.average, "optimizer": self._optimizer}
        state = {name: part.state_dict() for name, part in parts.items()}
        save_state(self._path, state | {"step": self.step, "spent_s": self.spent_s})

    def _train_step(self, latents: Latents) -> float:
        plan, step = self._plan, self.step
        rng = random.Random(f"unet {self._seed} {step}")
        torch.manual_seed(self._seed * 1_000_003 + step)
        chosen = [rng.randrange(len(latents.scenes)) for _ in range(plan.batch)]
        captions = [
            "" if rng.random() < plan.untold else tell(latents.scenes[index], rng)
            for index in chosen
        ]
        for group in self._optimizer.param_groups:
            group["lr"] = _rate(plan, step)
        # bf16 halves a step on processors and GPUs that have it; the weights stay fp32.
        with torch.autocast(self._device.split(":")[0], dtype=torch.bfloat16):
            with torch.no_grad():
                told = self._text_encoder(
                    tokens_of(self._tokenizer, captions).to(self._device)
                ).last_hidden_state
            loss = self._loss(latents.sample(chosen).to(self._device), told)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.unet.parameters(), 1.0)
        self._optimizer.step()
        self._follow(min(EMA_DECAY, (step + 1) / (step + 10)))
        return float(loss.detach())

    def _loss(self, clean: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        number = len(clean)
        # One time from each of `number` equal parts of the schedule: less chance in the loss than
        # free draws.
        spread = (torch.randperm(number) + torch.rand(number)) / number
        times = (spread * len(self._alphas)).long().to(clean.device)
        alpha = self._alphas[times].view(-1, 1, 1, 1)
        noise = torch.randn(clean.shape).to(clean.device)
        noisy = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise
        velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * clean
        noise_ = self.unet(noisy, times, encoder_hidden_states=told).sample.float()
        snr = alpha / (1 - alpha)
        weight = snr.clamp(max=SNR_MAX) / (snr + 1)
        loss: torch.Tensor = (weight * (noise_ - velocity) ** 2).mean() / weight.mean()
        return loss

    @torch.no_grad()
    def _follow(self, decay: float) -> None:
        for kept, now in zip(self.average.parameters(), self.unet.parameters(), strict=True):
            kept.lerp_(now, 1 - decay)


def _rate(plan: UnetPlan, step: int) -> float:
    """A short warm-up, then level, and from 0.6 of the steps on down to a fiftieth."""
    return plan.lr * min(1.0, (step + 1) / 100, (1 - step / plan.steps) / 0.4 + 0.02)
