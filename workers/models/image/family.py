"""What a family of diffusers pipelines has of its own, so that its images join a running batch.

A family has a pipeline for text, one for images and one for masks. They are of diffusers, and share
their parts. The loop over the steps is the same for all (workers.models.image.stepped). What comes
before it is what the pipelines' own calls do, by their own methods.

Latents are [1, channels, height, width] everywhere. A family whose transformer takes them in
another form brings them there and back in `predict`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

from shared.errors import BadInput
from workers.models.base import PreparedImage

Encoded = tuple[torch.Tensor, ...]
"""Encoded prompts: hidden states [texts, tokens, width], and maybe pooled states [texts, width]."""


def denoiser_of(pipeline: Any) -> Any | None:
    """Returns the UNet or the transformer of a pipeline. None if it has neither."""
    unet = getattr(pipeline, "unet", None)
    return getattr(pipeline, "transformer", None) if unet is None else unet


class Family(ABC):
    """A family. It has no state: each call gets the pipeline that draws the item."""

    options: frozenset[str]
    """Which of `negative_prompt`, `clip_skip` and `guidance_rescale` it takes."""

    def refusal(self, pipeline: Any, item: PreparedImage) -> BadInput | None:
        """Returns why no pipeline of the family can draw an item of this size. None if it can."""
        return None

    @abstractmethod
    def encode(self, pipeline: Any, texts: Sequence[str], clip_skip: int | None) -> Encoded:
        """Encodes prompts.

        Args:
            pipeline: with text encoders.
            texts: at least one.
            clip_skip: how many of the last layers of CLIP are left out. None: as trained.
        """

    @abstractmethod
    def widest_reader(self, pipeline: Any) -> tuple[Any, int]:
        """The tokenizer of the text encoder that reads the most tokens, and how many those are."""

    def max_clip_skip(self, pipeline: Any) -> int:
        """The most layers of CLIP that can be left out."""
        layers: int = (pipeline.text_encoder or pipeline.text_encoder_2).config.num_hidden_layers
        return layers

    @abstractmethod
    def set_timesteps(self, pipeline: Any, item: PreparedImage) -> None:
        """Gives the scheduler of a pipeline all timesteps of an item."""

    @abstractmethod
    def rows(self, pipeline: Any, item: PreparedImage) -> int:
        """How many rows the denoiser computes of an item: 2 if a negative prompt guides it."""

    @abstractmethod
    def conditions(
        self, pipeline: Any, item: PreparedImage, texts: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns what the denoiser of an item gets besides latents, time and prompt.

        Args:
            pipeline: the one that draws the item.
            item: of any size.
            texts: what PromptEncoder has for it.

        Returns:
            Tensors [rows, …] each. With two rows, the first is for the negative prompt.
        """

    @abstractmethod
    def from_text(
        self, pipeline: Any, item: PreparedImage, dtype: torch.dtype, generator: torch.Generator
    ) -> torch.Tensor:
        """The noise that an item without a source starts from."""

    def from_image(
        self,
        pipeline: Any,
        source: torch.Tensor,
        time: torch.Tensor,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """The latents of a source with the noise of its first timestep.

        Args:
            pipeline: the one for images.
            source: [1, 3, height, width] from -1 to 1.
            time: of the first step, [1].
            dtype: of the result.
            generator: of the item.
        """
        latents: torch.Tensor = pipeline.prepare_latents(
            source, time, 1, 1, dtype, pipeline.device, generator
        )
        return latents

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
        """As from_image, for an item with a mask.

        Args:
            pipeline: the one for masks.
            source: see from_image.
            time: see from_image.
            dtype: see from_image.
            generator: see from_image.
            only_noise: it starts from noise, at strength 1.
            keeps_source: whether the latents of the source are needed.

        Returns:
            Its latents, its noise, and maybe the latents of the source.
        """
        latents, noise, *own = pipeline.prepare_latents(
            1,
            pipeline.vae.config.latent_channels,
            *source.shape[-2:],
            dtype,
            pipeline.device,
            generator,
            image=source,
            timestep=time,
            is_strength_max=only_noise,
            return_noise=True,
            return_image_latents=keeps_source,
        )
        return latents, noise, own[0] if own else None

    def mask_inputs(
        self,
        pipeline: Any,
        mask: torch.Tensor,
        masked: torch.Tensor,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a denoiser that was trained with masks gets beside the latents.

        Args:
            pipeline: the one for masks.
            mask: [1, 1, height, width]. 1 where it is drawn anew, and 0 elsewhere.
            masked: the source without what is masked, [1, 3, height, width].
            dtype: of the results.
            generator: of the item.

        Returns:
            The mask [1, 1, …] and the masked source [1, channels, …], as latents.
        """
        size, device = mask.shape[-2:], pipeline.device
        latents: tuple[torch.Tensor, torch.Tensor] = pipeline.prepare_mask_latents(
            mask, masked, 1, *size, dtype, device, generator, False
        )
        return latents

    @abstractmethod
    def predict(
        self,
        pipeline: Any,
        latents: torch.Tensor,
        times: torch.Tensor,
        prompts: torch.Tensor,
        conditions: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """One call of the denoiser.

        Args:
            pipeline: the one for text.
            latents: [rows, channels, height, width].
            times: a timestep of each row, fp32.
            prompts: [rows, tokens, width].
            conditions: as `conditions` returns them, of all rows.

        Returns:
            [rows, channels, height, width], as the scheduler takes them.
        """

    def predict_controlled(
        self,
        added: Mapping[str, Any],
        pipeline: Any,
        latents: torch.Tensor,
        times: torch.Tensor,
        prompts: torch.Tensor,
        conditions: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """As predict, of a family with a UNet.

        `added`: what ControlNets add, as arguments of the UNet. Entries with controls and another
        family are refused when their model starts.
        """
        raise AssertionError(f"{type(self).__name__} takes no controls; this is a bug")

    @abstractmethod
    def noised(
        self, scheduler: Any, latents: torch.Tensor, noise: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        """Latents with the noise of a timestep, [1]."""

    def step_arguments(self, pipeline: Any, generator: torch.Generator) -> dict[str, Any]:
        """What a step of the scheduler takes besides noise, time and latents."""
        return {}


class FlowFamily(Family):
    """A family of transformers that learned to match flows (https://arxiv.org/abs/2403.03206).

    The scheduler is FlowMatchEulerDiscreteScheduler. It may shift its timesteps by the size of the
    image, so each item has its own.
    """

    max_shift: float
    """The pipelines' own default, for schedulers that shift and do not say how far."""

    def refusal(self, pipeline: Any, item: PreparedImage) -> BadInput | None:
        """A side must be a multiple of what a token of the transformer stands for."""
        multiple = self.token_pixels(pipeline)
        for name in ("width", "height"):
            side = getattr(item, name)
            if side % multiple:
                reason = f"{name} {side} is not a multiple of {multiple}, as this model needs"
                return BadInput(reason, field=name)
        return None

    @abstractmethod
    def token_pixels(self, pipeline: Any) -> int:
        """The pixels across that a token stands for."""

    def tokens(self, pipeline: Any, item: PreparedImage) -> int:
        """How many tokens the transformer makes of the latents of an item."""
        across = self.token_pixels(pipeline)
        return (item.height // across) * (item.width // across)

    def shift(self, pipeline: Any, item: PreparedImage) -> float:
        """`mu` of the scheduler for the size of an item."""
        config = pipeline.scheduler.config
        shift: float = calculate_shift(
            self.tokens(pipeline, item),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", self.max_shift),
        )
        return shift

    def noised(
        self, scheduler: Any, latents: torch.Tensor, noise: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        """On the straight line between them."""
        noised: torch.Tensor = scheduler.scale_noise(latents, time, noise)
        return noised


Key = TypeVar("Key", bound=Hashable)
_Encoded = tuple[torch.Tensor, ...]


class KeptEncodings(Generic[Key]):
    """An LRU cache of tensors on the device.

    Args:
        kept_bytes: what they take at most.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[Key, _Encoded] = OrderedDict()
        self._bytes = 0

    def get(self, key: Key) -> _Encoded | None:
        """Returns what is kept. None: nothing."""
        return self._kept.get(key)

    def keep(self, used: Mapping[Key, _Encoded]) -> None:
        """Keeps what was used now, and lets go of what was used least recently."""
        for key, encoded in used.items():
            if key not in self._kept:
                self._bytes += _size_bytes(encoded)
            self._kept[key] = encoded
            self._kept.move_to_end(key)
        while self._bytes > self._kept_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= _size_bytes(dropped)


def _size_bytes(encoded: _Encoded) -> int:
    return sum(part.nbytes for part in encoded)
