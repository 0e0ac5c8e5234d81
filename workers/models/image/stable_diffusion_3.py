"""Stable Diffusion 3 and 3.5: a transformer over image and text, guided by a negative prompt.

Two encoders of CLIP and one of T5 read the prompt. A folder without T5 draws with zeros for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shared.errors import BadInput
from workers.models.base import PreparedImage
from workers.models.image.family import Encoded, FlowFamily

T5_TOKENS = 256
"""The default `max_sequence_length` of StableDiffusion3Pipeline."""


class StableDiffusion3(FlowFamily):
    """StableDiffusion3Pipeline."""

    options = frozenset({"negative_prompt", "clip_skip"})
    max_shift = 1.16

    def refusal(self, pipeline: Any, item: PreparedImage) -> BadInput | None:
        """The transformer also knows places up to a largest side only."""
        across = self.token_pixels(pipeline)
        largest = pipeline.transformer.config.pos_embed_max_size * across
        for name in ("width", "height"):
            if getattr(item, name) > largest:
                reason = f"{name} {getattr(item, name)} is above {largest}, the most of this model"
                return BadInput(reason, field=name)
        return super().refusal(pipeline, item)

    def token_pixels(self, pipeline: Any) -> int:
        """A patch of latents."""
        across: int = pipeline.vae_scale_factor * pipeline.transformer.config.patch_size
        return across

    def encode(self, pipeline: Any, texts: Sequence[str], clip_skip: int | None) -> Encoded:
        """States of CLIP and then of T5, and the pooled ones of CLIP."""
        states, _, pooled, _ = pipeline.encode_prompt(
            prompt=list(texts),
            prompt_2=None,
            prompt_3=None,
            device=pipeline.device,
            do_classifier_free_guidance=False,
            clip_skip=clip_skip,
            max_sequence_length=T5_TOKENS,
        )
        return states, pooled

    def widest_reader(self, pipeline: Any) -> tuple[Any, int]:
        """T5, if it is there."""
        if pipeline.text_encoder_3 is None:
            return pipeline.tokenizer, pipeline.tokenizer_max_length
        return pipeline.tokenizer_3, T5_TOKENS

    def max_clip_skip(self, pipeline: Any) -> int:
        """Of the smaller encoder. The layer before the last is where it is trained."""
        encoders = (pipeline.text_encoder, pipeline.text_encoder_2)
        layers: int = min(encoder.config.num_hidden_layers for encoder in encoders)
        return layers - 1

    def set_timesteps(self, pipeline: Any, item: PreparedImage) -> None:
        """Shifted by size if the scheduler asks for it."""
        shifts = pipeline.scheduler.config.get("use_dynamic_shifting")
        shift = {"mu": self.shift(pipeline, item)} if shifts else {}
        pipeline.scheduler.set_timesteps(item.steps, device=pipeline.device, **shift)

    def rows(self, pipeline: Any, item: PreparedImage) -> int:
        """As the pipelines decide it."""
        return 2 if item.guidance_scale > 1 else 1

    def conditions(
        self, pipeline: Any, item: PreparedImage, texts: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The pooled prompts."""
        pooled = [texts["negative_pooled_prompt_embeds"], texts["pooled_prompt_embeds"]]
        return {"pooled_projections": torch.cat(pooled)}

    def from_text(
        self, pipeline: Any, item: PreparedImage, dtype: torch.dtype, generator: torch.Generator
    ) -> torch.Tensor:
        """Plain noise."""
        channels, size = pipeline.transformer.config.in_channels, (item.height, item.width)
        latents: torch.Tensor = pipeline.prepare_latents(
            1, channels, *size, dtype, pipeline.device, generator
        )
        return latents

    def mask_inputs(
        self,
        pipeline: Any,
        mask: torch.Tensor,
        masked: torch.Tensor,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Family. The pipeline's method also takes a number of images for each prompt."""
        size, device = mask.shape[-2:], pipeline.device
        latents: tuple[torch.Tensor, torch.Tensor] = pipeline.prepare_mask_latents(
            mask, masked, 1, 1, *size, dtype, device, generator, False
        )
        return latents

    def predict(
        self,
        pipeline: Any,
        latents: torch.Tensor,
        times: torch.Tensor,
        prompts: torch.Tensor,
        conditions: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """The velocity along the flow."""
        velocity: torch.Tensor = pipeline.transformer(
            hidden_states=latents,
            timestep=times,
            encoder_hidden_states=prompts,
            pooled_projections=conditions["pooled_projections"],
            joint_attention_kwargs=None,
            return_dict=False,
        )[0]
        return velocity
