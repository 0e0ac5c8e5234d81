"""Images as customers request them: with masks, adapters (LoRA), and ControlNets.

First, it measures the cost of each feature: four images of Stable Diffusion 1.5's size are
generated alternately with and without it. Then the shipped model draws all kinds in one running
batch, which images join and leave, and their pixels are compared with each image's pixels when
drawn alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import torch

from bench.gpu.card import in_turns, medians
from bench.gpu.company import distances, drawn, gradient, masked, outline, text_image
from bench.gpu.images import GUIDANCE, image_entry, load_model
from bench.gpu.scale import Scale
from bench.report import Figure
from models.shapes import PIPELINE
from shared.models.catalog import Model
from shared.models.entry import Batch
from shared.models.image_entry import Adapter, Control, ImageDefaults
from tests.workers.models import lora_files
from workers.models.base import PreparedControl, PreparedImage

TOGETHER, RANK = 4, 8
SHIPPED_SIDE, SHIPPED_GUIDANCE = 64, 2.0
CONTROL_STD = 0.01


def measure(scale: Scale, pipeline: Path, folder: Path) -> Iterator[Figure]:
    """Yields each feature's cost, and the distances by precision and kind of image.

    For distances, see bench.gpu.company. In both, images are not compiled: an entry with adapters
    never is.
    """
    folder.mkdir(parents=True)
    yield from _costs(scale, pipeline, folder / "full")
    precisions = ("fp32",) if scale.device == "cpu" else ("fp32", "fp16", "bf16")
    extras = write_extras(PIPELINE, folder / "shipped", trained=PIPELINE.parent / "canny")
    kinds = _kinds(SHIPPED_SIDE, scale.joined_steps, SHIPPED_GUIDANCE)
    for precision in precisions:
        model = load_model(_make_shipped_entry(extras, precision, scale), PIPELINE, scale)
        for kind, levels in distances(model, kinds).items():
            label = f"joined, {precision}, {kind}"
            yield Figure(f"{label}, max", float(levels.max()), "levels")
            yield Figure(f"{label}, mean", float(levels.mean()), "levels")


def _costs(scale: Scale, pipeline: Path, folder: Path) -> Iterator[Figure]:
    extras = write_extras(pipeline, folder)
    model = load_model(image_entry(pipeline, scale, **extras), pipeline, scale)
    kinds = _kinds(scale.side, scale.text_steps, GUIDANCE)
    adapters = {
        "four adapters": [f"a{n}" for n in range(TOGETHER)],
        "one adapter": ["a0"] * TOGETHER,
    }
    same = {"no extras": kinds["text"], "masks": kinds["mask"], "a ControlNet": kinds["control"]}
    change = msgspec.structs.replace
    batches = {
        name: [change(kinds["text"], seed=n, adapter=adapter) for n, adapter in enumerate(names)]
        for name, names in adapters.items()
    } | {name: [change(item, seed=n) for n in range(TOGETHER)] for name, item in same.items()}
    taken = medians(
        in_turns(scale, {name: partial(drawn, model, batch) for name, batch in batches.items()})
    )
    for name, call_s in taken.items():
        yield Figure(f"four images, {name}", TOGETHER / call_s, "images/s")
        yield Figure(f"four images, {name}, over none", taken["no extras"] / call_s, "times")


def _kinds(side: int, steps: int, guidance: float) -> dict[str, PreparedImage]:
    text = text_image(side, steps, guidance)
    change = msgspec.structs.replace
    edges = [PreparedControl("edges", outline(side, side), scale=1.0, start=0.0, end=1.0)]
    return {
        "text": text,
        "adapter": change(text, seed=2, adapter="a0"),
        "image, adapter": change(
            text, seed=3, adapter="a1", source=gradient(side, side), strength=0.6
        ),
        "mask": change(masked(text), seed=4),
        "mask, adapter": change(masked(text), seed=5, adapter="a2", adapter_scale=0.5),
        "control": change(text, seed=6, controls=edges),
        "control, adapter": change(text, seed=7, controls=edges, adapter="a3"),
    }


def write_extras(pipeline: Path, folder: Path, *, trained: Path | None = None) -> dict[str, Any]:
    """Writes adapters and a ControlNet for a pipeline. Returns the entry fields that refer to them.

    Args:
        folder: a new folder for the files.
        trained: a ControlNet for the pipeline. If None, one with random weights is written.
    """
    folder.mkdir(parents=True)
    unet: Any = diffusers.UNet2DConditionModel.from_pretrained(pipeline / "unet")
    files = write_adapters(unet, folder)
    control = folder / "control"
    if trained is None:
        net = diffusers.ControlNetModel.from_unet(unet)
        for layer in [*net.controlnet_down_blocks, net.controlnet_mid_block]:
            torch.nn.init.normal_(layer.weight, std=CONTROL_STD)
        net.to(torch.float16).save_pretrained(control)
    else:
        shutil.copytree(trained, control)
    return {
        "adapters": {name: Adapter(source=f"local:{file}") for name, file in files.items()},
        "controls": {"edges": Control(source=f"local:{control}")},
    }


def write_adapters(unet: torch.nn.Module, folder: Path) -> dict[str, Path]:
    """Writes adapters with random weights for each attention layer of a UNet.

    Returns their files by name (a0, a1, and so on).
    """
    layers: dict[str, torch.nn.Module] = {
        name: layer
        for name, layer in unet.named_modules()
        if isinstance(layer, torch.nn.Linear) and ".attn" in name
    }
    return {
        f"a{number}": lora_files.write(
            folder / f"{number}.safetensors",
            lora_files.as_peft(lora_files.random_weights({"unet": layers}, number, RANK)),
        )
        for number in range(TOGETHER)
    }


def _make_shipped_entry(extras: Mapping[str, Any], precision: str, scale: Scale) -> Model:
    return Model(
        name="stable-diffusion-tiny",
        task="image",
        source=f"local:{PIPELINE}",
        backend="torch",
        precision=precision,
        batch=Batch(max_items=8, max_pixel_steps=8 * SHIPPED_SIDE**2 * scale.joined_steps),
        image=ImageDefaults(
            width=SHIPPED_SIDE, height=SHIPPED_SIDE, steps=scale.joined_steps, **extras
        ),
    )
