"""ControlNets: they add to the UNet what a map of edges or depths tells about an image.

A call of the UNet computes images with and without a control, and with several ones. Each
ControlNet computes the rows of its images together. What it adds is multiplied by the scale of each
image, and others get zeros (Zhang et al. 2023, https://arxiv.org/abs/2302.05543).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch

from shared.errors import ConfigurationError
from workers.models.base import PreparedImage
from workers.models.image.plan import ImagePlan

_SHAPES = (
    "cross_attention_dim",
    "block_out_channels",
    "down_block_types",
    "layers_per_block",
    "addition_embed_type",
)
"""Settings that a ControlNet shares with the UNet of its model."""
_ADDED = ("text_embeds", "time_ids")
"""Of the conditions of a UNet, what ControlNets get too (`added_cond_kwargs`)."""


@dataclass(slots=True, eq=False)
class ControlStart:
    """What the steps of an item need of its control."""

    name: str
    image: torch.Tensor
    """The map from 0 to 1, [1, 3, height, width]."""
    scales: Sequence[float]
    """What it multiplies by, for each step. 0: it is left out."""


@dataclass(slots=True, eq=False)
class UnetCall:
    """The inputs of a call of the UNet. Row `row * slots + slot` is a row of the item at a slot."""

    sample: torch.Tensor
    """[rows * slots, channels, height, width]."""
    times: torch.Tensor
    """[rows * slots]."""
    prompt: torch.Tensor
    """[rows * slots, tokens, width]."""
    conditions: dict[str, torch.Tensor]
    """What its family adds, [rows * slots, …] each."""


Added = dict[str, Any]
"""The arguments of the UNet for what ControlNets add. Empty: nothing."""


class Controls:
    """The ControlNets of a pipeline, by their names in the catalog.

    Args:
        folders: of each, as diffusers' ControlNetModel is saved.
        pipeline: the one that they were trained for.
        device: of the pipeline.
        plan: of the pipeline.

    Raises:
        ConfigurationError: a folder is not a ControlNet for this pipeline.
    """

    def __init__(
        self, folders: Mapping[str, Path], pipeline: Any, device: torch.device, plan: ImagePlan
    ) -> None:
        if folders and getattr(pipeline, "unet", None) is None:
            raise ConfigurationError(
                "image.controls: only models of Stable Diffusion and Stable Diffusion XL have some",
                field="image.controls",
            )
        self._nets = {
            name: _load(folder, name, pipeline, device, plan) for name, folder in folders.items()
        }

    def start(self, item: PreparedImage, steps: int) -> ControlStart | None:
        """Prepares the control of an item. None: it has none.

        Args:
            item: with the map of its control.
            steps: how many timesteps it has.
        """
        if not item.control:
            return None
        net = self._nets[item.control]
        pixels = torch.frombuffer(bytearray(item.control_map), dtype=torch.uint8)
        shaped = pixels.view(1, item.height, item.width, 3).permute(0, 3, 1, 2)
        image = (shaped.float() / 255).to(net.device, net.dtype)
        scales = [
            item.control_scale
            # The same divisions and comparisons as in StableDiffusionControlNetPipeline.
            if step / steps >= item.control_start and (step + 1) / steps <= item.control_end
            else 0.0
            for step in range(steps)
        ]
        return ControlStart(item.control, image, scales)

    def added(self, call: UnetCall, starts: Sequence[tuple[ControlStart | None, int]]) -> Added:
        """Computes what the ControlNets add to a call of the UNet.

        Args:
            call: its inputs.
            starts: the control of the item at each slot, and the step that it is at.
        """
        slots_of: dict[str, list[int]] = {}
        for slot, (start, step) in enumerate(starts):
            if start is not None and start.scales[step]:
                slots_of.setdefault(start.name, []).append(slot)
        total: list[torch.Tensor] = []
        for name, slots in slots_of.items():
            rows = [
                first + slot for first in range(0, len(call.sample), len(starts)) for slot in slots
            ]
            residuals = self._residuals(name, call, rows, [starts[slot] for slot in slots])
            if not total:
                total = [one.new_zeros(len(call.sample), *one.shape[1:]) for one in residuals]
            for whole, part in zip(total, residuals, strict=True):
                whole[rows] = part
        if not total:
            return {}
        return {
            "down_block_additional_residuals": tuple(total[:-1]),
            "mid_block_additional_residual": total[-1],
        }

    def _residuals(
        self,
        name: str,
        call: UnetCall,
        rows: Sequence[int],
        starts: Sequence[tuple[ControlStart | None, int]],
    ) -> list[torch.Tensor]:
        """What one of them adds to these rows: for each block down, then for the middle."""
        net, index = self._nets[name], torch.tensor(rows, device=call.sample.device)
        repeats = len(rows) // len(starts)
        guided = [(start, step) for start, step in starts if start is not None]
        images = torch.cat([start.image for start, _ in guided] * repeats)
        scales = torch.tensor([start.scales[step] for start, step in guided] * repeats)
        # A UNet that was trained with masks gets them behind the latents.
        latents = call.sample[index, : net.config.in_channels]
        told = {name: call.conditions[name] for name in _ADDED if name in call.conditions}
        down, middle = net(
            latents,
            call.times[index],
            encoder_hidden_states=call.prompt[index],
            controlnet_cond=images,
            added_cond_kwargs={key: value[index] for key, value in told.items()} or None,
            return_dict=False,
        )
        scale = scales.to(middle.device, middle.dtype).view(-1, 1, 1, 1)
        return [one * scale for one in (*down, middle)]


def _load(
    folder: Path, name: str, pipeline: Any, device: torch.device, plan: ImagePlan
) -> diffusers.ControlNetModel:
    field = f"image.controls.{name}"
    try:
        net: Any = diffusers.ControlNetModel.from_pretrained(
            folder, dtype=plan.dtype, local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ConfigurationError(f"{field}: {folder}: {error}", field=field) from error
    wrong = [
        f"{shape} {net.config.get(shape)!r} instead of {pipeline.unet.config.get(shape)!r}"
        for shape in _SHAPES
        if net.config.get(shape) != pipeline.unet.config.get(shape)
    ]
    if net.config.in_channels != pipeline.vae.config.latent_channels:
        wrong.append(f"latents of {net.config.in_channels} channels")
    if wrong:
        raise ConfigurationError(
            f"{field}: {folder}: it was trained for another model: {', '.join(wrong)}", field=field
        )
    if net.config.global_pool_conditions:
        raise ConfigurationError(
            f"{field}: {folder}: ControlNets that pool their image are not supported", field=field
        )
    if plan.is_tuned:
        net.to(memory_format=torch.channels_last)
    loaded: diffusers.ControlNetModel = net.to(device).eval()
    return loaded
