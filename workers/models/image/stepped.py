"""Continuous batching of images: they come between two denoise steps, and leave when done.

Each item has a scheduler, a generator of random numbers and timesteps of its own. Only the UNet
computes items together: it takes a timestep for each row. So an item's pixels are those of
diffusers' pipeline for it alone, whichever schedulers, strengths and numbers of steps are alongside
it. The steps before and after the loop are those of the pipelines' own calls, by their own methods.

A family (Stable Diffusion or Stable Diffusion XL) has its own preparation before the loop. It has a
pipeline for text and one for images. Both are of diffusers, and share their parts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import msgspec
import numpy as np
import torch

from shared.errors import BadInput, PenstockError
from shared.tasks import Result
from shared.tasks.text import TokenChunk
from workers.models.base import OutOfMemory, PreparedImage, PreparedItem, RgbImage, StepEnd
from workers.models.device import memory_errors
from workers.models.image.codec import sources_on, to_host
from workers.models.image.control_folders import control_folders
from workers.models.image.controls import Controls, ControlStart, UnetCall
from workers.models.image.masks import (
    MaskedStart,
    pasted,
    start_masked,
)
from workers.models.image.model import ImageModel
from workers.models.image.pipeline import inpainting
from workers.models.image.preview import draw_previews
from workers.models.image.vae import decode, own_type, spare_memory

log = logging.getLogger(__name__)

AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5
"""The defaults of StableDiffusionXLImg2ImgPipeline."""


class StableDiffusion:
    """StableDiffusionPipeline: the UNet gets a prompt and no more."""

    def begin(self, scheduler: Any) -> None:
        """Prepares a scheduler that starts at its first timestep."""

    def conditions(
        self, pipeline: Any, item: PreparedImage, texts: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the UNet's `added_cond_kwargs`.

        Args:
            pipeline: the one that draws the item.
            item: of any size.
            texts: what PromptEncoder has for it.

        Returns:
            Tensors [2, …] each: one row for the negative prompt, and one for the prompt.
        """
        return {}


class StableDiffusionXL(StableDiffusion):
    """StableDiffusionXLPipeline: the UNet also gets sizes and a summary of the prompt."""

    def begin(self, scheduler: Any) -> None:
        """Tells the scheduler to count its steps, instead of looking for their timesteps."""
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(0)

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
        return {
            "text_embeds": torch.cat(pooled),
            "time_ids": torch.cat(times).to(pooled[0].device),
        }


FAMILIES: dict[type, StableDiffusion] = {
    diffusers.StableDiffusionPipeline: StableDiffusion(),
    diffusers.StableDiffusionXLPipeline: StableDiffusionXL(),
}
"""The families by the class of their pipeline for text."""


@dataclass(slots=True, eq=False)
class _Drawing:
    """An item that is being drawn."""

    item: PreparedImage
    scheduler: Any
    generator: torch.Generator
    timesteps: torch.Tensor
    latents: torch.Tensor
    """[1, channels, height, width]."""
    prompt: torch.Tensor
    """[rows, tokens, width]: the negative prompt first if it is guided."""
    conditions: dict[str, torch.Tensor]
    """The other inputs of the UNet for its family, [rows, …] each."""
    scale: torch.Tensor | None
    """The guidance scale as the UNet of a distilled model takes it, [1, width]."""
    for_scheduler: dict[str, Any]
    masked: MaskedStart | None
    control: ControlStart | None = None
    done: int = 0
    """Its steps so far."""

    @property
    def group(self) -> tuple[int, int, int]:
        """Items of one group are computed in one call of the UNet."""
        return self.item.height, self.item.width, len(self.prompt)

    @property
    def rows_pixels(self) -> int:
        """Pixels that the UNet computes of it in a step."""
        return self.item.height * self.item.width * len(self.prompt)

    def unet_input(self, time: torch.Tensor) -> torch.Tensor:
        """What the UNet gets at a timestep, [1, channels, height, width]."""
        scaled: torch.Tensor = self.scheduler.scale_model_input(self.latents, time)
        return scaled if self.masked is None else self.masked.unet_input(scaled)

    def take_step(self, noise: torch.Tensor, time: torch.Tensor) -> None:
        """Takes a step along the noise that the UNet sees, [1, channels, height, width]."""
        self.latents = self.scheduler.step(
            noise, time, self.latents, **self.for_scheduler, return_dict=False
        )[0]
        self.done += 1
        if self.masked is not None:
            is_last = self.done == len(self.timesteps)
            next_time = None if is_last else self.timesteps[self.done]
            self.latents = self.masked.blended(self.latents, self.scheduler, next_time)


class SteppedImageModel(ImageModel):
    """An ImageModel of a known family that also computes step by step. See SteppedModel."""

    draws_masks = True
    takes_controls = True
    _drawings: dict[int, _Drawing]

    def setup(self) -> None:
        """Loads the pipeline."""
        super().setup()
        self._drawings = {}
        self._family = FAMILIES[type(self._text_to_image)]
        self._inpainting = inpainting(self._text_to_image, self._image_to_image)
        folders = control_folders(self._entry)
        self._controls = Controls(folders, self._text_to_image, self._device, self._plan)

    def refusal(self, item: PreparedImage) -> BadInput | None:
        """Returns why this model can't draw an item. None if it can."""
        if self._needs_mask and item.mask is None:
            return BadInput("this model draws only within the mask of an image", field="mask")
        return super().refusal(item)

    def _usual_item(self, *, from_image: bool) -> PreparedImage:
        usual = super()._usual_item(from_image=from_image or self._needs_mask)
        if not self._needs_mask:
            return usual
        return msgspec.structs.replace(usual, mask=b"\xff" * (usual.width * usual.height))

    def _warm(self, items: Sequence[PreparedImage]) -> None:
        if not self._needs_mask:
            super()._warm(items)
            return
        # Not within `settled`: compilation is allowed only here.
        with torch.inference_mode(), memory_errors():
            drawings = [self._begin(item) for item in items]
            for _ in drawings[0].timesteps:
                self._step_together(drawings)
            for drawing in drawings:
                self._decode(drawing)

    def admit(self, slot: int, item: PreparedItem) -> None:
        """Encodes the prompts and the source, and draws the noise."""
        assert isinstance(item, PreparedImage), "the preparer of images makes them; this is a bug"
        if (refusal := self.refusal(item)) is not None:
            raise refusal
        with torch.inference_mode(), self.settled(), memory_errors():
            self._drawings[slot] = self._begin(item)

    def step(self) -> StepEnd:
        """One denoise step of each item. Decodes those that are done."""
        end = StepEnd(work=sum(drawing.rows_pixels for drawing in self._drawings.values()))
        with torch.inference_mode(), self.settled():
            try:
                with memory_errors():
                    self._step_all()
            except OutOfMemory:
                if len(self._drawings) == 1:
                    raise
                youngest = list(self._drawings)[-1]
                del self._drawings[youngest]
                end.preempted.append(youngest)
            for slot, drawing in list(self._drawings.items()):
                if drawing.done == len(drawing.timesteps):
                    del self._drawings[slot]
                    end.results[slot] = self._end(drawing)
        return end

    def take_chunks(self) -> dict[int, TokenChunk]:
        """None: only texts have them."""
        return {}

    def drop(self, slot: int) -> None:
        """Forgets an item."""
        self._drawings.pop(slot, None)

    def progress(self) -> dict[int, tuple[int, int]]:
        """Returns the completed and total steps of each item."""
        return {
            slot: (drawing.done, len(drawing.timesteps)) for slot, drawing in self._drawings.items()
        }

    def image(self, slot: int) -> RgbImage | None:
        """A small image of an item between two steps. None if it can't be drawn."""
        drawing = self._drawings.get(slot)
        if drawing is None or not drawing.done:
            return None
        with torch.inference_mode(), self.settled():
            return draw_previews(self._text_to_image, drawing.latents, [0])[0]

    def _begin(self, item: PreparedImage) -> _Drawing:
        pipeline: Any = self._text_to_image if item.source is None else self._image_to_image
        if item.mask is not None:
            pipeline = self._inpainting
        scheduler = pipeline.scheduler = self._scheduler(item.scheduler)
        generator = torch.Generator("cpu").manual_seed(item.seed)
        texts = self._prompts.arguments([item])
        scheduler.set_timesteps(item.steps, device=self._device)
        prompt = torch.cat([texts["negative_prompt_embeds"], texts["prompt_embeds"]])
        masked = None
        if item.mask is None:
            timesteps, latents = self._start(pipeline, item, generator, prompt.dtype)
        else:
            timesteps, latents, masked = start_masked(pipeline, item, generator, prompt.dtype)
        conditions = self._family.conditions(pipeline, item, texts)
        scale = self._scale(pipeline, item, latents)
        rows = 2 if item.guidance_scale > 1 and scale is None else 1
        return _Drawing(
            item=item,
            scheduler=scheduler,
            generator=generator,
            timesteps=timesteps,
            latents=latents,
            prompt=prompt[-rows:],
            conditions={name: both[-rows:] for name, both in conditions.items()},
            scale=scale,
            for_scheduler=pipeline.prepare_extra_step_kwargs(generator, 0.0),
            masked=masked,
            control=self._controls.start(item, len(timesteps)),
        )

    def _start(
        self, pipeline: Any, item: PreparedImage, generator: torch.Generator, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The timesteps that an item has before it, and its latents at the first of them."""
        if item.source is None:
            self._family.begin(pipeline.scheduler)
            channels = pipeline.unet.config.in_channels
            size = (item.height, item.width)
            latents = pipeline.prepare_latents(1, channels, *size, dtype, self._device, generator)
            return pipeline.scheduler.timesteps, latents
        source = pipeline.image_processor.preprocess(sources_on(self._device, [item]))
        timesteps, _ = pipeline.get_timesteps(item.steps, item.strength, self._device)
        with own_type(pipeline.vae):
            latents = pipeline.prepare_latents(
                source, timesteps[:1], 1, 1, dtype, self._device, generator
            )
        return timesteps, latents

    def _scale(
        self, pipeline: Any, item: PreparedImage, latents: torch.Tensor
    ) -> torch.Tensor | None:
        width = pipeline.unet.config.time_cond_proj_dim
        if width is None:
            return None
        scale = torch.tensor(item.guidance_scale - 1).repeat(1)
        embedding: torch.Tensor = pipeline.get_guidance_scale_embedding(scale, embedding_dim=width)
        return embedding.to(self._device, latents.dtype)

    def _step_all(self) -> None:
        """One step of each item. If memory runs out, some have had theirs."""
        groups: dict[tuple[int, int, int], list[_Drawing]] = {}
        for drawing in self._drawings.values():
            groups.setdefault(drawing.group, []).append(drawing)
        for group in groups.values():
            for slots in self.groups([drawing.item for drawing in group]):
                self._step_together([group[slot] for slot in slots])

    def _step_together(self, drawings: Sequence[_Drawing]) -> None:
        """One call of the UNet, then the scheduler of each item."""
        rows = len(drawings[0].prompt)
        times = [drawing.timesteps[drawing.done] for drawing in drawings]
        scaled = [drawing.unet_input(time) for drawing, time in zip(drawings, times, strict=True)]
        # A compiled size is filled up with the last item again.
        fill = len(self._padded([drawing.item for drawing in drawings])) - len(drawings)
        slots = [*range(len(drawings)), *[len(drawings) - 1] * fill]
        scales = [drawing.scale for drawing in drawings if drawing.scale is not None]
        added = {
            name: _together([drawing.conditions[name] for drawing in drawings], slots)
            for name in drawings[0].conditions
        }
        call = UnetCall(
            torch.cat([scaled[slot] for slot in slots] * rows),
            torch.stack([times[slot].float() for slot in slots] * rows).to(self._device),
            _together([drawing.prompt for drawing in drawings], slots),
            added,
        )
        noise = self._text_to_image.unet(
            call.sample,
            call.times,
            encoder_hidden_states=call.prompt,
            timestep_cond=_together(scales, slots) if scales else None,
            cross_attention_kwargs=None,
            added_cond_kwargs=added or None,
            return_dict=False,
            **self._controls.added(
                call, [(drawings[slot].control, drawings[slot].done) for slot in slots]
            ),
        )[0]
        for slot, (drawing, time) in enumerate(zip(drawings, times, strict=True)):
            own = noise[slot :: len(slots)]
            if rows == 2:
                without, with_prompt = own.chunk(2)
                own = without + drawing.item.guidance_scale * (with_prompt - without)
            drawing.take_step(own, time)

    def _end(self, drawing: _Drawing) -> Result | PenstockError:
        try:
            return self._results([drawing.item], [self._decoded(drawing)])[0]
        except OutOfMemory as error:
            return error

    def _decoded(self, drawing: _Drawing) -> np.ndarray | None:
        """As to_host. If memory runs out, the VAE decodes in tiles from then on."""
        try:
            with memory_errors():
                return self._decode(drawing)
        except OutOfMemory:
            if not spare_memory(self._text_to_image.vae, 1):
                raise
            log.warning("memory is short: the VAE decodes in parts from now on")
        with memory_errors():
            return self._decode(drawing)

    def _decode(self, drawing: _Drawing) -> np.ndarray | None:
        pipeline: Any = self._text_to_image
        drawn = pipeline.image_processor.postprocess(
            decode(pipeline, drawing.latents), output_type="pt", do_denormalize=[True]
        )
        (image,) = to_host(drawn)
        return image if image is None or drawing.masked is None else pasted(image, drawing.item)


def _together(parts: Sequence[torch.Tensor], slots: Sequence[int]) -> torch.Tensor:
    """The first row of the part at each slot, then the second of each."""
    rows = range(len(parts[0]))
    return torch.cat([parts[slot][row : row + 1] for row in rows for slot in slots])
