"""FLUX.1: a transformer over packed latents, which is told the guidance scale.

Squares of 2 x 2 latents are one token. They are packed for each call of the transformer, and
unpacked after it. There is no negative prompt: the guidance was distilled into the weights. That of
"schnell" has none at all, and ignores the scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from workers.models.base import PreparedImage
from workers.models.image.family import Encoded, FlowFamily

T5_TOKENS = 512
"""The default `max_sequence_length` of FluxPipeline."""


class Flux(FlowFamily):
    """FluxPipeline."""

    options = frozenset()
    max_shift = 1.15

    def token_pixels(self, pipeline: Any) -> int:
        """A square of 2 x 2 latents."""
        across: int = 2 * pipeline.vae_scale_factor
        return across

    def encode(self, pipeline: Any, texts: Sequence[str], clip_skip: int | None) -> Encoded:
        """States of T5, and the pooled ones of CLIP."""
        states, pooled, _ = pipeline.encode_prompt(
            prompt=list(texts),
            prompt_2=None,
            device=pipeline.device,
            max_sequence_length=T5_TOKENS,
        )
        return states, pooled

    def widest_reader(self, pipeline: Any) -> tuple[Any, int]:
        """T5."""
        return pipeline.tokenizer_2, T5_TOKENS

    def set_timesteps(self, pipeline: Any, item: PreparedImage) -> None:
        """Evenly from all noise, and shifted by size."""
        sigmas = np.linspace(1.0, 1 / item.steps, item.steps)
        shift = self.shift(pipeline, item)
        pipeline.scheduler.set_timesteps(sigmas=sigmas, mu=shift, device=pipeline.device)

    def rows(self, pipeline: Any, item: PreparedImage) -> int:
        """One."""
        return 1

    def conditions(
        self, pipeline: Any, item: PreparedImage, texts: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The pooled prompt, and the guidance scale if the transformer is told it."""
        told = {"pooled_projections": texts["pooled_prompt_embeds"]}
        if pipeline.transformer.config.guidance_embeds:
            told["guidance"] = torch.full([1], item.guidance_scale, device=pipeline.device)
        return told

    def from_text(
        self, pipeline: Any, item: PreparedImage, dtype: torch.dtype, generator: torch.Generator
    ) -> torch.Tensor:
        """Plain noise."""
        size = item.height, item.width
        packed, _ = pipeline.prepare_latents(
            1, _channels(pipeline), *size, dtype, pipeline.device, generator
        )
        pipeline.scheduler.set_begin_index(0)
        return _unpacked(pipeline, packed, size)

    def from_image(
        self,
        pipeline: Any,
        source: torch.Tensor,
        time: torch.Tensor,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """See Family."""
        size = source.shape[-2], source.shape[-1]
        packed, _ = pipeline.prepare_latents(
            source, time, 1, _channels(pipeline), *size, dtype, pipeline.device, generator
        )
        return _unpacked(pipeline, packed, size)

    def from_mask(
        self,
        pipeline: Any,
        source: torch.Tensor,
        time: torch.Tensor,
        dtype: torch.dtype,
        generator: torch.Generator,
        *,
        only_noise: bool,
        keeps_source: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See Family. At strength 1 nothing of the source is left at the first timestep."""
        size = source.shape[-2], source.shape[-1]
        *packed, _ = pipeline.prepare_latents(
            source, time, 1, _channels(pipeline), *size, dtype, pipeline.device, generator
        )
        latents, noise, own = (_unpacked(pipeline, part, size) for part in packed)
        return latents, noise, own

    def predict(
        self,
        pipeline: Any,
        latents: torch.Tensor,
        times: torch.Tensor,
        prompts: torch.Tensor,
        conditions: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """The velocity along the flow."""
        rows, channels, height, width = latents.shape
        places = pipeline._prepare_latent_image_ids(
            rows, height // 2, width // 2, latents.device, latents.dtype
        )
        packed = pipeline.transformer(
            hidden_states=pipeline._pack_latents(latents, rows, channels, height, width),
            timestep=times.to(latents.dtype) / 1000,
            guidance=conditions.get("guidance"),
            pooled_projections=conditions["pooled_projections"],
            encoder_hidden_states=prompts,
            txt_ids=torch.zeros(prompts.shape[1], 3, device=prompts.device, dtype=prompts.dtype),
            img_ids=places,
            joint_attention_kwargs=None,
            return_dict=False,
        )[0]
        scale = pipeline.vae_scale_factor
        return _unpacked(pipeline, packed, (height * scale, width * scale))


def _channels(pipeline: Any) -> int:
    channels: int = pipeline.transformer.config.in_channels // 4
    return channels


def _unpacked(pipeline: Any, packed: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Latents [rows, channels, height, width] of an image of (height, width) pixels."""
    latents: torch.Tensor = pipeline._unpack_latents(packed, *size, pipeline.vae_scale_factor)
    return latents
