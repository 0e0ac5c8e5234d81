"""`python -m models.shapes.train FOLDER`: trains the model and writes a diffusers folder.

There are three stages, each of which resumes a stopped run: the autoencoder, the text encoder, the
UNet. At intervals the current pipeline draws a sheet of held-out captions and is scored. The
tokenizer is like CLIP's, with one token per word of the captions, and bytes for other words.

The UNet learns to denoise latents, guided by the caption: velocity prediction (Salimans and Ho
2022) weighted by min-SNR (Hang et al. 2023), captions left out now and then for classifier-free
guidance (Ho and Salimans 2022), and a moving average of the weights as the result.

The text encoder learns to read captions: its end token (and the padding after it, which is the same
token) learns to describe the scene. Linear heads, dropped afterwards, predict every attribute from
it. So the UNet starts with meaningful words.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers.models.attention_processor import AttnProcessor
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.nn import functional
from transformers import CLIPTokenizer

from models.shapes.captions import tell
from models.shapes.checkpoint import load_state, save_state
from models.shapes.draw import draw_many
from models.shapes.parts import Widths, join, make_scheduler, make_text_encoder, make_unet
from models.shapes.score import as_text, draw_asked, held_out, score_edits, score_text, sheet
from models.shapes.train_vae import VaePlan, as_input, even_out, train_vae
from models.shapes.world import (
    BACKGROUNDS,
    COLORS,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    Scene,
    sample_scene,
)

IGNORED = -100
"""A target that a scene does not have (cross_entropy's own default)."""
_COLORS, _PLACES, _BACKGROUNDS = tuple(COLORS), tuple(PLACES), tuple(BACKGROUNDS)
_CHOICES = (
    len(_BACKGROUNDS),
    len(_PLACES),
    len(RELATIONS),
    *(len(choices) for _ in range(2) for choices in (SHAPES, _COLORS, SIZES)),
)
"""Number of choices for each target in _order."""
_KINDS = len(SHAPES) * len(_COLORS)
_OUTPUTS = sum(_CHOICES) + _KINDS


@dataclass(frozen=True)
class TextPlan:
    """Length of the text encoder's training."""

    steps: int = 500
    batch: int = 128
    lr: float = 2e-3


def train_text(
    state_dir: Path,
    plan: TextPlan,
    widths: Widths,
    seed: int,
    tokenizer: Any,
    *,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> Any:
    """Trains the text encoder, or continues from `state_dir`. Returns it."""
    torch.manual_seed(seed)
    encoder = make_text_encoder(widths, tokenizer).to(device).train()
    heads = torch.nn.Linear(widths.text, _OUTPUTS).to(device)
    optimizer = torch.optim.AdamW(
        [*encoder.parameters(), *heads.parameters()], lr=plan.lr, betas=(0.9, 0.98)
    )
    path = state_dir / "text.pt"
    first = 0
    if state := load_state(path):
        encoder.load_state_dict(state["encoder"])
        heads.load_state_dict(state["heads"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    saved_s = time.monotonic()
    for step in range(first, plan.steps):
        rng = random.Random(f"text {seed} {step}")
        scenes = [sample_scene(rng) for _ in range(plan.batch)]
        tokens = tokens_of(tokenizer, [tell(scene, rng) for scene in scenes]).to(device)
        for group in optimizer.param_groups:
            group["lr"] = (
                plan.lr
                * min(1.0, (step + 1) / 50)
                * 0.5
                * (1 + math.cos(math.pi * step / plan.steps))
            )
        hidden = encoder(tokens).last_hidden_state
        ends = (tokens == tokenizer.eos_token_id).nonzero(as_tuple=True)
        loss = _loss(heads(hidden[ends]), scenes, ends[0])
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            say(f"text encoder {step}/{plan.steps} loss {float(loss.detach()):.4f}")
        if time.monotonic() - saved_s > SAVE_EVERY_S or step + 1 == plan.steps:
            saved_s = time.monotonic()
            parts = {
                "encoder": encoder.state_dict(),
                "heads": heads.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            save_state(path, parts | {"step": step + 1})
    return encoder.eval()


def tokens_of(tokenizer: Any, captions: Sequence[str]) -> torch.Tensor:
    """Token ids as in the pipeline: padded and truncated to the encoder's maximum."""
    encoded = tokenizer(
        list(captions),
        padding="max_length",
        max_length=tokenizer.model_max_length,
        truncation=True,
        return_tensors="pt",
    )
    ids: torch.Tensor = encoded.input_ids
    return ids


def _loss(outputs: torch.Tensor, scenes: Sequence[Scene], owner: torch.Tensor) -> torch.Tensor:
    """Returns the mean of the attributes' losses.

    `owner` names the scene for each output row.
    """
    ordered = torch.tensor([_order(scene) for scene in scenes], device=outputs.device)[owner]
    pairs = torch.tensor([_shown(scene) for scene in scenes], device=outputs.device)[owner]
    parts = torch.split(outputs, [*_CHOICES, _KINDS], dim=1)
    losses = [
        functional.cross_entropy(part, target, ignore_index=IGNORED)
        for part, target in zip(parts[:-1], ordered.T, strict=True)
        if (target != IGNORED).any()
    ]
    return (
        torch.stack(losses).mean()
        + functional.binary_cross_entropy_with_logits(parts[-1], pairs) * 5
    )


def _order(scene: Scene) -> list[int]:
    """Returns background, place, relation, and shape, color and size of each figure."""
    targets = [
        _BACKGROUNDS.index(scene.background),
        _PLACES.index(scene.place) if scene.place else IGNORED,
        RELATIONS.index(scene.relation) if scene.relation else IGNORED,
    ]
    figures = () if scene.relation == "beside" else scene.figures
    for figure in figures:
        targets += [
            SHAPES.index(figure.shape),
            _COLORS.index(figure.color),
            SIZES.index(figure.size),
        ]
    return targets + [IGNORED] * (len(_CHOICES) - len(targets))


def _shown(scene: Scene) -> list[float]:
    """Returns 1 for each pair of shape and color in the scene, otherwise 0."""
    pairs = [0.0] * _KINDS
    for figure in scene.figures:
        pairs[SHAPES.index(figure.shape) * len(_COLORS) + _COLORS.index(figure.color)] = 1.0
    return pairs


SNR_MAX = 5.0
EMA_DECAY = 0.999
SAVE_EVERY_S = 120.0
ENCODED_AT_ONCE = 64


@dataclass(frozen=True)
class UnetPlan:
    """Length and data of the UNet's training."""

    steps: int = 6800
    batch: int = 64
    images: int = 24_000
    lr: float = 1e-3
    untold: float = 0.1
    """Share of captions that are dropped."""


class Latents:
    """Scenes with their latents in memory.

    Args:
        scenes: the scenes that the images show.
        mean, std: of each image's latents, [scenes, latents, 8, 8].
    """

    def __init__(self, scenes: Sequence[Scene], mean: torch.Tensor, std: torch.Tensor) -> None:
        self.scenes = scenes
        self.mean = mean
        self.std = std
        self.scale = float(1.0 / mean.float().std())
        """AutoencoderKL's scaling_factor: scales the latents to a standard deviation of one."""

    def sample(self, chosen: Sequence[int]) -> torch.Tensor:
        """Returns latents of the chosen scenes as the UNet sees them."""
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
    """Draws and encodes `number` scenes, or loads the ones from an earlier run.

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
        state_dir: folder of `unet.pt`, if an earlier run wrote it. text_encoder, tokenizer:
            trained. They are not changed.
        device: device of the UNet and the text encoder.
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
            # The backward pass of torch's fused attention is slow at these sizes: a third of a step
            # on a CPU.
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

        `look` is called from time to time, and at the end, when the state is saved.
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
        # bf16 halves the time per step on CPUs and GPUs that support it; the weights stay fp32.
        with torch.autocast(self._device.split(":")[0], dtype=torch.bfloat16):
            with torch.no_grad():
                prompt_states = self._text_encoder(
                    tokens_of(self._tokenizer, captions).to(self._device)
                ).last_hidden_state
            loss = self._loss(latents.sample(chosen).to(self._device), prompt_states)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.unet.parameters(), 1.0)
        self._optimizer.step()
        self._follow(min(EMA_DECAY, (step + 1) / (step + 10)))
        return float(loss.detach())

    def _loss(self, clean: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        number = len(clean)
        # Taking one time from each of `number` equal intervals makes the loss less random than free
        # draws.
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
        for averaged, now in zip(self.average.parameters(), self.unet.parameters(), strict=True):
            averaged.lerp_(now, 1 - decay)


def _rate(plan: UnetPlan, step: int) -> float:
    """Returns the learning rate: warm-up, then constant, from 0.6 of the steps down to a 50th."""
    return plan.lr * min(1.0, (step + 1) / 100, (1 - step / plan.steps) / 0.4 + 0.02)


TOKENS_MAX = 28
"""The longest caption has 25 tokens, including start and end."""
START, END = "<|startoftext|>", "<|endoftext|>"
_CAPTIONS = 20_000
_WORD_END = "</w>"


def make_tokenizer() -> Any:
    """Returns a CLIPTokenizer.

    Its merges are learned from captions until every word is one token.
    """
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
    """Trains with the options of the command line."""
    parser = argparse.ArgumentParser(prog="models.shapes.train", description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="output folder of the pipeline; existing files are replaced"
    )
    parser.add_argument(
        "--state",
        type=Path,
        required=True,
        help=("folder for intermediate checkpoints, sheets and scores"),
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
    """Runs all stages.

    At the end `folder` has the pipeline in fp16, and `state_dir` the last sheet and scores.
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
    """Draws the sheet and a short table with the current weights."""
    captioned = held_out(captions)
    images = draw_asked(pipeline, captioned)
    sheet(images, columns=8).save(state_dir / f"sheet-{step:06}.png")
    table = score_text(pipeline, captioned) | score_edits(pipeline, captions // 2)
    (state_dir / f"score-{step:06}.json").write_text(
        json.dumps({name: tally.part for name, tally in table.items()})
    )
    say(as_text(table))


def write_pipeline(pipeline: Any, folder: Path) -> None:
    """Writes the pipeline in fp16 safetensors, atomically."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    halved = {
        name: copy.deepcopy(getattr(pipeline, name)).half()
        for name in ("vae", "text_encoder", "unet")
    }
    join(halved["vae"], halved["text_encoder"], pipeline.tokenizer, halved["unet"]).save_pretrained(
        partial
    )
    # transformers loads the precision that this file names, diffusers loads fp32: the parts must
    # agree.
    config = partial / "text_encoder" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}, indent=2) + "\n"
    )
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


if __name__ == "__main__":
    sys.exit(main())
