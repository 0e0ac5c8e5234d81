"""ControlNets, which condition a UNet on a map, such as edges or depth.

See Zhang et al. 2023, https://arxiv.org/abs/2302.05543. Before each UNet call, an image calls its
ControlNets through the hub, which joins the calls of all images. Their results are multiplied by
their scales and added up. In a UNet call, images without a ControlNet get zeros if any other images
have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch

from shared.errors import ConfigurationError
from workers.models.base import PreparedControl, PreparedImage
from workers.models.image.own_pipeline import Interception
from workers.models.image.pipeline import load_part
from workers.models.image.plan import ImagePlan
from workers.models.loading import folder_errors

_SHAPES = (
    "cross_attention_dim",
    "block_out_channels",
    "down_block_types",
    "layers_per_block",
    "addition_embed_type",
)
"""Settings that a ControlNet must share with its model's UNet."""


class Controls:
    """A pipeline's ControlNets, by their names in the catalog.

    Args:
        folders: one folder per ControlNet, saved by diffusers' ControlNetModel.
        pipeline: the pipeline they were trained for.
        interception: creates stand-ins, whose calls go to the hub.

    Raises:
        ConfigurationError: a folder doesn't contain a ControlNet for this pipeline.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        pipeline: Any,
        plan: ImagePlan,
        interception: Interception,
    ) -> None:
        if folders and getattr(pipeline, "unet", None) is None:
            raise ConfigurationError(
                "image.controls: only supported by Stable Diffusion and Stable Diffusion XL models",
                field="image.controls",
            )
        self._nets = {
            name: interception.stand_in("controlnet", _load(folder, name, pipeline, plan))
            for name, folder in folders.items()
        }

    def start(self, item: PreparedImage) -> list[ControlStart]:
        """Prepares an item's ControlNets, including their maps."""
        starts = []
        for control in item.controls:
            net = self._nets[control.name]
            pixels = torch.frombuffer(bytearray(control.map), dtype=torch.uint8)
            shaped = pixels.view(1, item.height, item.width, 3).permute(0, 3, 1, 2)
            image = (shaped.float() / 255).to(net.device, net.dtype)
            starts.append(ControlStart(net, image, control))
        return starts


@dataclass(slots=True, eq=False)
class ControlStart:
    """A ControlNet used by an item."""

    net: Any
    """The ControlNet, whose calls go to the hub."""
    image: torch.Tensor
    """The map from 0 to 1, [1, 3, height, width]."""
    control: PreparedControl

    def compute(
        self, values: Mapping[str, Any], step: int, steps: int
    ) -> Sequence[torch.Tensor] | None:
        """Computes residuals for a UNet call: one per down block, then one for the middle block.

        Args:
            values: the call's arguments, by parameter name.
            step: the item's step number, from 0.
            steps: the item's total number of steps.

        Returns:
            None if the ControlNet adds nothing at this step.
        """
        own = self.control
        # The same divisions and comparisons as in StableDiffusionControlNetPipeline.
        if not own.scale or step / steps < own.start or (step + 1) / steps > own.end:
            return None
        # For a UNet trained with masks, the masks follow the latents.
        sample = values["sample"][:, : self.net.config.in_channels]
        down, middle = self.net(
            sample,
            values["timestep"],
            encoder_hidden_states=values["encoder_hidden_states"],
            controlnet_cond=self.image.expand(len(sample), -1, -1, -1),
            added_cond_kwargs=values.get("added_cond_kwargs"),
            return_dict=False,
        )
        return [residual * own.scale for residual in (*down, middle)]


def add_up(
    controls: Sequence[ControlStart], values: Mapping[str, Any], step: int, steps: int
) -> Sequence[torch.Tensor]:
    """Adds up all ControlNets' residuals for a UNet call, in ControlStart.compute's format.

    Returns:
        An empty sequence if none of them adds anything.
    """
    total: Sequence[torch.Tensor] = ()
    for control in controls:
        if own := control.compute(values, step, steps):
            total = [a + b for a, b in zip(total, own, strict=True)] if total else own
    return total


def _load(folder: Path, name: str, pipeline: Any, plan: ImagePlan) -> diffusers.ControlNetModel:
    field = f"image.controls.{name}"
    with folder_errors(f"{field}: {folder}", field):
        net: Any = load_part(diffusers.ControlNetModel, folder, pipeline.device, plan.dtype)
    wrong = [
        f"{shape} {net.config.get(shape)!r} instead of {pipeline.unet.config.get(shape)!r}"
        for shape in _SHAPES
        if net.config.get(shape) != pipeline.unet.config.get(shape)
    ]
    if net.config.in_channels != pipeline.vae.config.latent_channels:
        wrong.append(f"latents of {net.config.in_channels} channels")
    if wrong:
        raise ConfigurationError(
            f"{field}: {folder} was trained for a different model: {', '.join(wrong)}",
            field=field,
        )
    if net.config.global_pool_conditions:
        raise ConfigurationError(
            f"{field}: {folder}: ControlNets that pool their input image are not supported",
            field=field,
        )
    if plan.is_tuned:
        net.to(memory_format=torch.channels_last)
    loaded: diffusers.ControlNetModel = net.eval()
    return loaded
