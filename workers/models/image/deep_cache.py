"""DeepCache (https://arxiv.org/abs/2312.00858): reuses a UNet's deep features for several steps.

Features in the middle of a UNet change little from step to step. On one of every `cache_interval`
steps, the whole UNet runs, and the input to its last layers is kept for each image. On the steps in
between, only the first and last layers run, around those features. Each image counts its own steps,
so images that joined at different steps have separate features, and no image depends on any other
in its batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import UNet2DConditionModel

from shared.errors import ConfigurationError
from shared.models.image_entry import DeepCacheSettings

FIELD = "image.deep_cache"


class DeepCache:
    """Computes a UNet's outer layers, using features from an earlier step.

    Args:
        pipeline: a Stable Diffusion or Stable Diffusion XL pipeline.

    Raises:
        ConfigurationError: the pipeline has no such UNet, or the UNet's first block has fewer
            layers than the settings' branch.
    """

    def __init__(self, settings: DeepCacheSettings, pipeline: Any) -> None:
        unet = getattr(pipeline, "unet", None)
        if not isinstance(unet, UNet2DConditionModel) or len(unet.up_blocks) < 2:
            raise ConfigurationError(
                f"{FIELD}: requires a Stable Diffusion or Stable Diffusion XL UNet", field=FIELD
            )
        parts: Any = unet
        self._first, self._last = parts.down_blocks[0], parts.up_blocks[-1]
        maximum = len(self._first.resnets)
        if settings.cache_branch_id > maximum:
            field = f"{FIELD}.cache_branch_id"
            raise ConfigurationError(
                f"{field}: must be at most {maximum} for this UNet, got {settings.cache_branch_id}",
                field=field,
            )
        self._unet = parts
        self._interval = settings.cache_interval
        self._branch = settings.cache_branch_id
        self._last.resnets[-1 - self._branch].register_forward_pre_hook(self._keep)
        self._features: torch.Tensor | None = None
        self._is_within = False

    def is_whole(self, step: int) -> bool:
        """Returns whether an image runs the whole UNet at a step, counting from its first step."""
        return step % self._interval == 0

    def take_features(self) -> torch.Tensor:
        """Returns the features from the last full call, [rows, channels, height, width]."""
        features, self._features = self._features, None
        assert features is not None, "the UNet was not called before; this is a bug"
        return features

    def predict(
        self, values: Mapping[str, Any], features: torch.Tensor, added: Mapping[str, Any]
    ) -> torch.Tensor:
        """Computes the outer layers the way UNet2DConditionModel does.

        Args:
            values: the UNet's arguments, by parameter name.
            features: features from an earlier step, for all rows.
            added: the summed ControlNet residuals for the whole UNet. The outer layers use the
                residuals for those layers.

        Returns:
            The UNet's output, [rows, channels, height, width].
        """
        time, prompt = self._embed(values)
        skips = self._first_layers(values["sample"], time, prompt)
        for skip, residual in enumerate(added.get("down_block_additional_residuals", ())):
            if skip < len(skips):
                skips[skip] = skips[skip] + residual
        self._is_within = True
        try:
            hidden = self._last_layers(features, skips, time, prompt)
        finally:
            self._is_within = False
        if self._unet.conv_norm_out:
            hidden = self._unet.conv_act(self._unet.conv_norm_out(hidden))
        noise: torch.Tensor = self._unet.conv_out(hidden)
        return noise

    def _keep(self, resnet: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        """Saves the input from below: all channels but the last, which come from a first layer."""
        if not self._is_within:
            self._features = inputs[0][:, : -self._unet.config.block_out_channels[0]]

    def _embed(self, values: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the time and prompt embeddings the way the UNet does."""
        unet, prompt_states = self._unet, values["encoder_hidden_states"]
        conditions = values.get("added_cond_kwargs")
        time = unet.time_embedding(
            unet.get_time_embed(sample=values["sample"], timestep=values["timestep"]),
            values.get("timestep_cond"),
        )
        more = unet.get_aug_embed(
            emb=time, encoder_hidden_states=prompt_states, added_cond_kwargs=conditions
        )
        time = time if more is None else time + more
        if unet.time_embed_act is not None:
            time = unet.time_embed_act(time)
        prompt = unet.process_encoder_hidden_states(
            encoder_hidden_states=prompt_states, added_cond_kwargs=conditions
        )
        return time, prompt

    def _first_layers(
        self, sample: torch.Tensor, time: torch.Tensor, prompt: torch.Tensor
    ) -> list[torch.Tensor]:
        """Returns the skip connections to the last layers, with the first layer's last."""
        hidden = self._unet.conv_in(
            2 * sample - 1.0 if self._unet.config.center_input_sample else sample
        )
        skips = [hidden]
        for layer in range(self._branch):
            hidden = _compute_layer(self._first, layer, hidden, time, prompt)
            skips.append(hidden)
        return skips

    def _last_layers(
        self,
        hidden: torch.Tensor,
        skips: list[torch.Tensor],
        time: torch.Tensor,
        prompt: torch.Tensor,
    ) -> torch.Tensor:
        for layer, skip in zip(range(-1 - self._branch, 0), reversed(skips), strict=True):
            hidden = _compute_layer(
                self._last, layer, torch.cat([hidden, skip], dim=1), time, prompt
            )
        return hidden


def _compute_layer(
    block: Any, layer: int, hidden: torch.Tensor, time: torch.Tensor, prompt: torch.Tensor
) -> torch.Tensor:
    """Returns the output of one layer in a block: its resnet, then its attention if it has one."""
    hidden = block.resnets[layer](hidden, time)
    if getattr(block, "has_cross_attention", False):
        hidden = block.attentions[layer](hidden, encoder_hidden_states=prompt, return_dict=False)[0]
    return hidden
