"""Stable Diffusion and Stable Diffusion XL: UNets, guided by a negative prompt.

A UNet of a distilled model is told the guidance scale instead, and computes one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workers.models.base import PreparedImage
from workers.models.image.family import Encoded, Family

AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5
"""The defaults of StableDiffusionXLImg2ImgPipeline."""

_TOLD_SCALE = "timestep_cond"


def unet_conditions(conditions: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The arguments of a UNet for what it gets besides latents, time and prompt."""
    told = {name: value for name, value in conditions.items() if name != _TOLD_SCALE}
    return {_TOLD_SCALE: conditions.get(_TOLD_SCALE), "added_cond_kwargs": told or None}


class StableDiffusion(Family):
    """StableDiffusionPipeline: the UNet gets a prompt and no more."""

    options = frozenset({"negative_prompt", "clip_skip", "guidance_rescale"})

    def encode(self, pipeline: Any, texts: Sequence[str], clip_skip: int | None) -> Encoded:
        """Hidden states of CLIP, and with two encoders also pooled ones."""
        if clip_skip is not None and not hasattr(pipeline, "text_encoder_2"):
            return (_states_before(pipeline, texts, clip_skip),)
        # SD returns (states, None), and SDXL (states, None, pooled, None).
        encoded: Encoded = pipeline.encode_prompt(
            prompt=list(texts),
            device=pipeline.device,
            num_images_per_prompt=1,
            do_classifier_free_guidance=False,
            clip_skip=clip_skip,
        )[::2]
        return encoded

    def widest_reader(self, pipeline: Any) -> tuple[Any, int]:
        """SDXL's two tokenizers are the same. Its refiner has only the second."""
        tokenizer = pipeline.tokenizer or pipeline.tokenizer_2
        return tokenizer, tokenizer.model_max_length

    def set_timesteps(self, pipeline: Any, item: PreparedImage) -> None:
        """They depend on the number of steps only."""
        pipeline.scheduler.set_timesteps(item.steps, device=pipeline.device)

    def rows(self, pipeline: Any, item: PreparedImage) -> int:
        """A distilled UNet is told the scale."""
        is_told = pipeline.unet.config.time_cond_proj_dim is not None
        return 2 if item.guidance_scale > 1 and not is_told else 1

    def conditions(
        self, pipeline: Any, item: PreparedImage, texts: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The guidance scale, if the UNet is told it."""
        width = pipeline.unet.config.time_cond_proj_dim
        if width is None:
            return {}
        scale = torch.tensor(item.guidance_scale - 1).repeat(1)
        embedding = pipeline.get_guidance_scale_embedding(scale, embedding_dim=width)
        return {_TOLD_SCALE: embedding.to(pipeline.device, texts["prompt_embeds"].dtype)}

    def from_text(
        self, pipeline: Any, item: PreparedImage, dtype: torch.dtype, generator: torch.Generator
    ) -> torch.Tensor:
        """As large as the scheduler starts."""
        channels, size = pipeline.unet.config.in_channels, (item.height, item.width)
        latents: torch.Tensor = pipeline.prepare_latents(
            1, channels, *size, dtype, pipeline.device, generator
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
        """The UNet."""
        return self.predict_controlled({}, pipeline, latents, times, prompts, conditions)

    def predict_controlled(
        self,
        added: Mapping[str, Any],
        pipeline: Any,
        latents: torch.Tensor,
        times: torch.Tensor,
        prompts: torch.Tensor,
        conditions: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """The UNet, with what ControlNets add."""
        noise: torch.Tensor = pipeline.unet(
            latents,
            times,
            encoder_hidden_states=prompts,
            cross_attention_kwargs=None,
            return_dict=False,
            **unet_conditions(conditions),
            **added,
        )[0]
        return noise

    def noised(
        self, scheduler: Any, latents: torch.Tensor, noise: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        """As the scheduler adds noise."""
        noised: torch.Tensor = scheduler.add_noise(latents, noise, time)
        return noised

    def step_arguments(self, pipeline: Any, generator: torch.Generator) -> dict[str, Any]:
        """The generator for schedulers that draw noise, and no `eta`."""
        arguments: dict[str, Any] = pipeline.prepare_extra_step_kwargs(generator, 0.0)
        return arguments


def _states_before(pipeline: Any, texts: Sequence[str], clip_skip: int) -> torch.Tensor:
    """The states of CLIP before its last layers, in the scale of the last one.

    `encode_prompt` of diffusers 0.42 looks for the final norm where transformers 5 no longer has
    it.
    """
    tokenizer, encoder = pipeline.tokenizer, pipeline.text_encoder
    read = tokenizer(
        list(texts),
        padding="max_length",
        max_length=tokenizer.model_max_length,
        truncation=True,
        return_tensors="pt",
    ).to(pipeline.device)
    is_masked = getattr(encoder.config, "use_attention_mask", False)
    states = encoder(
        read.input_ids,
        attention_mask=read.attention_mask if is_masked else None,
        output_hidden_states=True,
    ).hidden_states[-(clip_skip + 1)]
    normed: torch.Tensor = encoder.final_layer_norm(states)
    return normed


class StableDiffusionXL(StableDiffusion):
    """StableDiffusionXLPipeline: the UNet also gets sizes and a summary of the prompt."""

    def max_clip_skip(self, pipeline: Any) -> int:
        """One less: the layer before the last is where it is trained."""
        return super().max_clip_skip(pipeline) - 1

    def from_text(
        self, pipeline: Any, item: PreparedImage, dtype: torch.dtype, generator: torch.Generator
    ) -> torch.Tensor:
        """Also tells the scheduler to count its steps, instead of looking for their timesteps."""
        if hasattr(pipeline.scheduler, "set_begin_index"):
            pipeline.scheduler.set_begin_index(0)
        return super().from_text(pipeline, item, dtype, generator)

    def conditions(
        self, pipeline: Any, item: PreparedImage, texts: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The pooled prompts, and what an image of the training of this size had."""
        pooled = [texts["negative_pooled_prompt_embeds"], texts["pooled_prompt_embeds"]]
        size, corner = (item.height, item.width), (0, 0)
        width = pipeline.text_encoder_2.config.projection_dim
        # The two pipelines have methods of one name and different arguments.
        if item.source is None:
            same = pipeline._get_add_time_ids(size, corner, size, pooled[0].dtype, width)
            times = [same, same]
        else:
            scores = (AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE)
            conditions = (size, corner, size, *scores, size, corner, size, pooled[0].dtype, width)
            times = list(reversed(pipeline._get_add_time_ids(*conditions)))
        return super().conditions(pipeline, item, texts) | {
            "text_embeds": torch.cat(pooled),
            "time_ids": torch.cat(times).to(pooled[0].device),
        }
