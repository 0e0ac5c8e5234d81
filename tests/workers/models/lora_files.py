"""Adapter files with random weights, in the formats found on the Hub."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

UNET = ("attn1.to_q", "attn2.to_k", "attn2.to_v", "attn1.to_out.0", "ff.net.0.proj")
TEXTS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1")
STRENGTH = 0.3
"""Weight strength that makes an image look quite different but still like an image."""

Chosen = dict[str, dict[str, torch.nn.Module]]
"""Layers, keyed by pipeline part and name."""


def chosen_layers(pipeline: Any, *, texts: bool, convolutions: bool = False) -> Chosen:
    """The layers that adapters usually change."""
    parts = ("unet", "text_encoder", "text_encoder_2") if texts else ("unet",)
    ends = UNET + (("conv1", "conv2", "proj_in") if convolutions else ()) + TEXTS
    return {
        part: {
            name: layer
            for name, layer in module.named_modules()
            if name.endswith(ends) and isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)
        }
        for part in parts
        if (module := getattr(pipeline, part, None)) is not None
    }


Weights = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Both projections by PART.LAYER."""


def random_weights(layers: Chosen, seed: int, rank: int = 4) -> Weights:
    random = torch.Generator().manual_seed(seed)
    drawn: Weights = {}
    for part, of_part in layers.items():
        for name, layer in of_part.items():
            if isinstance(layer, torch.nn.Conv2d):
                down: tuple[int, ...] = (rank, layer.in_channels, *layer.kernel_size)
                up: tuple[int, ...] = (layer.out_channels, rank, 1, 1)
            else:
                assert isinstance(layer, torch.nn.Linear)
                down, up = (rank, layer.in_features), (layer.out_features, rank)
            drawn[f"{part}.{name}"] = (
                torch.randn(down, generator=random) * (STRENGTH / down[1] ** 0.5),
                torch.randn(up, generator=random) * STRENGTH,
            )
    return drawn


def as_peft(weights: Weights) -> dict[str, torch.Tensor]:
    """The names that diffusers uses today."""
    named: dict[str, torch.Tensor] = {}
    for name, (down, up) in weights.items():
        named |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    return named


def as_diffusers(weights: Weights) -> dict[str, torch.Tensor]:
    """The names that diffusers wrote before it used PEFT."""
    named: dict[str, torch.Tensor] = {}
    for name, (down, up) in weights.items():
        middle = "lora" if name.startswith("unet.") else "lora_linear_layer"
        named |= {f"{name}.{middle}.down.weight": down, f"{name}.{middle}.up.weight": up}
    return named


def as_kohya(weights: Weights, alphas: Sequence[float] = (2.0,)) -> dict[str, torch.Tensor]:
    """The names in kohya's scripts, with alphas that differ from the rank in each layer."""
    parts = {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}
    has_two = any(name.startswith("text_encoder_2.") for name in weights)
    named: dict[str, torch.Tensor] = {}
    for number, (name, (down, up)) in enumerate(weights.items()):
        part, _, layer = name.partition(".")
        prefix = parts[part] if has_two or part == "unet" else "lora_te"
        if part != "unet" and not layer.startswith("text_model."):
            layer = f"text_model.{layer}"
        key = f"{prefix}_{layer.replace('.', '_')}"
        alpha = torch.tensor(alphas[number % len(alphas)])
        named |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
        named[f"{key}.alpha"] = alpha
    return named


FORMATS: dict[str, Callable[[Weights], dict[str, torch.Tensor]]] = {
    "peft": as_peft,
    "diffusers": as_diffusers,
    "kohya": as_kohya,
}


def write(file: Path, tensors: dict[str, torch.Tensor], settings: object = None) -> Path:
    """Writes a file, with PEFT settings if there are any."""
    metadata = {"lora_adapter_metadata": json.dumps(settings)} if settings else None
    save_file({name: one.contiguous() for name, one in tensors.items()}, file, metadata)
    return file


def digest_of(file: Path) -> str:
    """The digest, in the format used in the catalog."""
    return f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
