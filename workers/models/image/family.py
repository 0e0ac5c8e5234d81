"""What differs between families of Stable Diffusion before the loop of their pipelines' own calls.

A family has a pipeline for text and one for images. Both are of diffusers, and share their parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import torch

from workers.models.base import PreparedImage

AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5
"""What StableDiffusionXLImg2ImgPipeline takes where its caller does not say."""


class StableDiffusion:
    """StableDiffusionPipeline: the UNet gets a prompt and no more."""

    def begin(self, scheduler: Any) -> None:
        """Prepares a scheduler that starts at its first timestep."""

    def conditions(
        self, pipeline: Any, item: PreparedImage, texts: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What the UNet gets as `added_cond_kwargs`.

        Args:
            pipeline: the one that draws the item.
            item: of any size.
            texts: what PromptEncoder has for it.

        Returns:
            Tensors [2, …] each: one row for the negative prompt, and one for the prompt.
        """
        return {}


class StableDiffusionXL(StableDiffusion):
    """StableDiffusionXLPipeline: the UNet is also told sizes and a summary of the prompt."""

    def begin(self, scheduler: Any) -> None:
        """Tells the scheduler to count its steps, instead of looking for their timesteps."""
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(0)

    def conditions(
        self, pipeline: Any, item: PreparedImage, texts: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The pooled prompts, and what a picture of the training of this size had."""
        pooled = [texts["negative_pooled_prompt_embeds"], texts["pooled_prompt_embeds"]]
        size, corner = (item.height, item.width), (0, 0)
        width = pipeline.text_encoder_2.config.projection_dim
        # The two pipelines have methods of one name and different arguments.
        if item.source is None:
            same = pipeline._get_add_time_ids(size, corner, size, pooled[0].dtype, width)
            times = [same, same]
        else:
            scores = (AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE)
            given = (size, corner, size, *scores, size, corner, size, pooled[0].dtype, width)
            times = list(reversed(pipeline._get_add_time_ids(*given)))
        return {
            "text_embeds": torch.cat(pooled),
            "time_ids": torch.cat(times).to(pooled[0].device),
        }


FAMILIES: dict[type, StableDiffusion] = {
    diffusers.StableDiffusionPipeline: StableDiffusion(),
    diffusers.StableDiffusionXLPipeline: StableDiffusionXL(),
}
"""By the class of the pipeline for text."""
