"""Second stage of the training: the text encoder learns to read captions.

Its end token (and the padding after it, which is the same token) learns to tell what the scene is:
linear heads, dropped afterwards, read every attribute off it. So the UNet starts with words that
already mean something.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from models.shapes.captions import tell
from models.shapes.checkpoint import load_state, save_state
from models.shapes.parts import Widths, make_text_encoder
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

SAVE_EVERY_S = 60.0
IGNORED = -100
"""A target that a scene does not have (cross_entropy's own default)."""
_COLORS, _PLACES, _BACKGROUNDS = tuple(COLORS), tuple(PLACES), tuple(BACKGROUNDS)
_CHOICES = (
    len(_BACKGROUNDS),
    len(_PLACES),
    len(RELATIONS),
    *(len(choices) for _ in range(2) for choices in (SHAPES, _COLORS, SIZES)),
)
"""What there is to choose from in each target of _ordered."""
_KINDS = len(SHAPES) * len(_COLORS)
_OUTPUTS = sum(_CHOICES) + _KINDS


@dataclass(frozen=True)
class TextPlan:
    """How long the text encoder is trained."""

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
        said = (tokens == tokenizer.eos_token_id).nonzero(as_tuple=True)
        loss = _loss(heads(hidden[said]), scenes, said[0])
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
    """Mean of the attributes' losses. `owner` says which scene each row of outputs is about."""
    ordered = torch.tensor([_ordered(scene) for scene in scenes], device=outputs.device)[owner]
    shown = torch.tensor([_shown(scene) for scene in scenes], device=outputs.device)[owner]
    parts = torch.split(outputs, [*_CHOICES, _KINDS], dim=1)
    losses = [
        functional.cross_entropy(part, target, ignore_index=IGNORED)
        for part, target in zip(parts[:-1], ordered.T, strict=True)
        if (target != IGNORED).any()
    ]
    return (
        torch.stack(losses).mean()
        + functional.binary_cross_entropy_with_logits(parts[-1], shown) * 5
    )


def _ordered(scene: Scene) -> list[int]:
    """Background, place, relation, then shape, color and size of each figure in the caption."""
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
    """1 for each pair of shape and color that the scene shows."""
    shown = [0.0] * _KINDS
    for figure in scene.figures:
        shown[SHAPES.index(figure.shape) * len(_COLORS) + _COLORS.index(figure.color)] = 1.0
    return shown
