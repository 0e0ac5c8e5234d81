"""Stable Diffusion and Stable Diffusion XL: UNets, guided by a negative prompt.

A UNet of a distilled model is told the guidance scale instead, and computes one row.

Deep features of a UNet can be kept over some steps: DeepCache (https://arxiv.org/abs/2312.00858).
Features in the middle of a UNet change little from step to step. At one step of `cache_interval` it
is computed as a whole, and what comes up to its last layers is kept for each image. At the steps
between, only its first and last layers are computed, around these features. Each image counts its
own steps, so images that joined at different ones have other features, and none depends on what is
beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import UNet2DConditionModel

from shared.errors import ConfigurationError
from shared.image_entry import DeepCacheSettings
from workers.models.base import PreparedImage
from workers.models.image.family import Encoded, Family
from workers.models.image.guides import UnetCall

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


FIELD = "image.deep_cache"


class DeepCache:
    """Computes the outer layers of a UNet around features that it had at an earlier step.

    Args:
        settings: of the catalog's entry.
        pipeline: of Stable Diffusion or Stable Diffusion XL.

    Raises:
        ConfigurationError: the pipeline has no such UNet, or its last block has fewer layers.
    """

    def __init__(self, settings: DeepCacheSettings, pipeline: Any) -> None:
        unet = getattr(pipeline, "unet", None)
        if not isinstance(unet, UNet2DConditionModel) or len(unet.up_blocks) < 2:
            raise ConfigurationError(
                f"{FIELD}: it needs a UNet of Stable Diffusion or Stable Diffusion XL", field=FIELD
            )
        parts: Any = unet
        self._first, self._last = parts.down_blocks[0], parts.up_blocks[-1]
        most = len(self._first.resnets)
        if settings.cache_branch_id > most:
            field = f"{FIELD}.cache_branch_id"
            raise ConfigurationError(
                f"{field}: {settings.cache_branch_id} is above {most}, which this UNet has",
                field=field,
            )
        self._unet = parts
        self._interval = settings.cache_interval
        self._branch = settings.cache_branch_id
        self._last.resnets[-1 - self._branch].register_forward_pre_hook(self._keep)
        self._features: torch.Tensor | None = None
        self._is_within = False

    def is_whole(self, step: int) -> bool:
        """Returns whether an image computes the whole UNet at a step, counted from its first."""
        return step % self._interval == 0

    def take_features(self) -> torch.Tensor:
        """Returns the features of the last whole call, [rows, channels, height, width]."""
        features, self._features = self._features, None
        assert features is not None, "the UNet was called before; this is a bug"
        return features

    def predict(
        self, call: UnetCall, features: torch.Tensor, added: Mapping[str, Any]
    ) -> torch.Tensor:
        """Computes the outer layers, as UNet2DConditionModel does.

        Args:
            call: the inputs of the UNet.
            features: those of an earlier step, of all rows.
            added: what ControlNets add to the whole UNet. Its outer part gets that of its layers.

        Returns:
            As the UNet, [rows, channels, height, width].
        """
        time, prompt = self._embedded(call)
        skips = self._first_layers(call.sample, time, prompt)
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
        """Keeps what comes from below: all channels but those of a first layer, which are last."""
        if not self._is_within:
            self._features = inputs[0][:, : -self._unet.config.block_out_channels[0]]

    def _embedded(self, call: UnetCall) -> tuple[torch.Tensor, torch.Tensor]:
        """The embeddings of times and prompts, as the UNet makes them."""
        unet, told = self._unet, unet_conditions(call.conditions)
        conditions = told["added_cond_kwargs"]
        time = unet.time_embedding(
            unet.get_time_embed(sample=call.sample, timestep=call.times), told["timestep_cond"]
        )
        more = unet.get_aug_embed(
            emb=time, encoder_hidden_states=call.prompt, added_cond_kwargs=conditions
        )
        time = time if more is None else time + more
        if unet.time_embed_act is not None:
            time = unet.time_embed_act(time)
        prompt = unet.process_encoder_hidden_states(
            encoder_hidden_states=call.prompt, added_cond_kwargs=conditions
        )
        return time, prompt

    def _first_layers(
        self, sample: torch.Tensor, time: torch.Tensor, prompt: torch.Tensor
    ) -> list[torch.Tensor]:
        """What goes beside to the last layers, the first of it last."""
        hidden = self._unet.conv_in(
            2 * sample - 1.0 if self._unet.config.center_input_sample else sample
        )
        skips = [hidden]
        for layer in range(self._branch):
            hidden = _computed(self._first, layer, hidden, time, prompt)
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
            hidden = _computed(self._last, layer, torch.cat([hidden, skip], dim=1), time, prompt)
        return hidden


def _computed(
    block: Any, layer: int, hidden: torch.Tensor, time: torch.Tensor, prompt: torch.Tensor
) -> torch.Tensor:
    """The output of a layer of a block: its resnet, and its attention if it has some."""
    hidden = block.resnets[layer](hidden, time)
    if getattr(block, "has_cross_attention", False):
        hidden = block.attentions[layer](hidden, encoder_hidden_states=prompt, return_dict=False)[0]
    return hidden
