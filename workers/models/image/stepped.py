"""Continuous batching of images: they come between two denoise steps, and leave when done.

Each item has a scheduler, a generator of random numbers and timesteps of its own. Only the denoiser
(a UNet or a transformer) computes items together: it takes a timestep for each row. So an item's
pixels are those of diffusers' pipeline for it alone, whichever schedulers, strengths and numbers of
steps are alongside it. What comes before and after the loop is done by the pipelines' own methods.

What is particular to a class of pipelines is in its family (workers.models.image.family).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg

from shared.errors import BadInput, PenstockError
from shared.tasks import Result
from shared.tasks.text import TokenChunk
from workers.models.base import OutOfMemory, PreparedImage, PreparedItem, RgbImage, StepEnd
from workers.models.device import memory_errors
from workers.models.image.families import load_family
from workers.models.image.family import Family
from workers.models.image.folders_beside import control_folders, ip_adapter_files
from workers.models.image.guides import (
    Added,
    Controls,
    ControlStart,
    IpAdapters,
    IpAdapterStart,
    UnetCall,
)
from workers.models.image.masks import MaskedStart, pasted, start_masked
from workers.models.image.model import ImageModel
from workers.models.image.pipeline import inpainting
from workers.models.image.resident_adapters import Applied, ResidentAdapters
from workers.models.image.stable_diffusion import DeepCache
from workers.models.image.vae import (
    decode,
    draw_previews,
    own_type,
    sources_on,
    spare_memory,
    to_host,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Drawing:
    """An item that is being drawn."""

    item: PreparedImage
    family: Family
    scheduler: Any
    generator: torch.Generator
    timesteps: torch.Tensor
    latents: torch.Tensor
    """[1, channels, height, width]."""
    prompt: torch.Tensor
    """[rows, tokens, width]: the negative prompt first if it is guided."""
    conditions: dict[str, torch.Tensor]
    """The other inputs of the denoiser for its family, [rows, …] each."""
    for_scheduler: dict[str, Any]
    masked: MaskedStart | None
    adapter: Applied = None
    control: ControlStart | None = None
    ip_adapter: IpAdapterStart | None = None
    guided_steps: int = sys.maxsize
    """How many of its steps are guided by the negative prompt, if it has one."""
    features: torch.Tensor | None = None
    """The deep features of its last step with a whole UNet, [rows, channels, height, width]."""
    done: int = 0
    """Its steps so far."""

    @property
    def rows(self) -> int:
        """How many the denoiser computes of it at the next step."""
        return len(self.prompt) if self.done < self.guided_steps else 1

    @property
    def rows_pixels(self) -> int:
        """Pixels that the denoiser computes of it in a step."""
        return self.item.height * self.item.width * self.rows

    def denoiser_input(self, time: torch.Tensor) -> torch.Tensor:
        """What the denoiser gets at a timestep, [1, channels, height, width]."""
        scaled = self.latents
        # Those that match flows do not scale.
        if hasattr(self.scheduler, "scale_model_input"):
            scaled = self.scheduler.scale_model_input(scaled, time)
        return scaled if self.masked is None else self.masked.unet_input(scaled)

    def guided(self, noise: torch.Tensor) -> torch.Tensor:
        """The noise that the prompts make of that of each row, [1, channels, height, width]."""
        if len(noise) == 1:
            return noise
        without, with_prompt = noise.chunk(2)
        noise = without + self.item.guidance_scale * (with_prompt - without)
        if self.item.guidance_rescale:
            noise = rescale_noise_cfg(noise, with_prompt, self.item.guidance_rescale)
        return noise

    def take_step(self, noise: torch.Tensor, time: torch.Tensor) -> None:
        """Takes a step along the noise that the denoiser sees in each row."""
        noise = self.guided(noise)
        self.latents = self.scheduler.step(
            noise, time, self.latents, **self.for_scheduler, return_dict=False
        )[0]
        self.done += 1
        if self.masked is not None:
            is_last = self.done == len(self.timesteps)
            next_time = None if is_last else self.timesteps[self.done]
            self.latents = self.masked.blended(self.latents, self.family, self.scheduler, next_time)


class SteppedImageModel(ImageModel):
    """An ImageModel of a known family that also computes step by step. See SteppedModel."""

    draws_masks = True
    takes_adapters = True
    takes_guides = True
    _drawings: dict[int, _Drawing]

    def setup(self) -> None:
        """Loads the pipeline."""
        super().setup()
        self._drawings = {}
        self.adapters = ResidentAdapters(self._entry.image, self._text_to_image, self._device)
        family = load_family(self._text_to_image)
        assert family is not None, "only folders of a family are loaded so; this is a bug"
        self._family = family
        self._inpainting = inpainting(self._text_to_image, self._image_to_image)
        folders = control_folders(self._entry)
        self._controls = Controls(folders, self._text_to_image, self._device, self._plan)
        files = ip_adapter_files(self._entry)
        self._ip_adapters = IpAdapters(files, self._text_to_image, self._device, self._plan)
        settings = self._entry.image.deep_cache
        self._deep_cache = None if settings is None else DeepCache(settings, self._text_to_image)

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
        """Encodes the prompts and the source, and draws the noise.

        Later, if the adapter of the item has to be read first.
        """
        assert isinstance(item, PreparedImage), "the preparer of images makes them; this is a bug"
        if (refusal := self.refusal(item)) is not None:
            raise refusal
        if not self.adapters.holds_back(slot, item):
            self._draw_from_now_on(slot, item)

    def _draw_from_now_on(self, slot: int, item: PreparedImage) -> None:
        with torch.inference_mode(), self.settled(), memory_errors():
            self._drawings[slot] = self._begin(item)

    def _end_waits(self, end: StepEnd) -> None:
        """Begins the items whose adapters are there by now. Ends those whose adapters failed."""
        in_use = {drawing.item.adapter for drawing in self._drawings.values()}
        for slot, item in self.adapters.take_ready(in_use):
            if isinstance(item, PenstockError):
                end.results[slot] = item
                end.waiting.append(slot)
                continue
            try:
                self._draw_from_now_on(slot, item)
            except PenstockError as error:
                end.waiting.append(slot)
                if isinstance(error, OutOfMemory) and self._drawings:
                    end.preempted.append(slot)
                else:
                    end.results[slot] = error
        end.waiting += self.adapters.waiting

    def step(self) -> StepEnd:
        """One denoise step of each item. Decodes those that are done."""
        end = StepEnd()
        self._end_waits(end)
        end.work = sum(drawing.rows_pixels for drawing in self._drawings.values())
        if not self._drawings:
            self.adapters.pause()
            return end
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
        self.adapters.drop(slot)

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
        adapter = self.adapters.of(item)
        is_varied = self.adapters.changes_prompts(adapter)
        with self.adapters.applied([adapter]):
            variant = f"{item.adapter}@{item.adapter_scale}" if is_varied else ""
            texts = self._prompts.arguments([item], variant)
        self._family.set_timesteps(pipeline, item)
        names = ("negative_prompt_embeds", "prompt_embeds")
        prompt = torch.cat([texts[name] for name in names if name in texts])
        masked = None
        if item.mask is None:
            timesteps, latents = self._start(pipeline, item, generator, prompt.dtype)
        else:
            timesteps, latents, masked = start_masked(
                pipeline, self._family, item, generator, prompt.dtype
            )
        conditions = self._family.conditions(pipeline, item, texts)
        rows = self._family.rows(pipeline, item)
        return _Drawing(
            item=item,
            family=self._family,
            scheduler=scheduler,
            generator=generator,
            timesteps=timesteps,
            latents=latents,
            prompt=prompt[-rows:],
            conditions={name: both[-rows:] for name, both in conditions.items()},
            for_scheduler=self._family.step_arguments(pipeline, generator),
            masked=masked,
            adapter=adapter,
            control=self._controls.start(item, len(timesteps)),
            ip_adapter=self._ip_adapters.start(item),
            guided_steps=int(self._entry.image.guidance_stop * len(timesteps)),
        )

    def _start(
        self, pipeline: Any, item: PreparedImage, generator: torch.Generator, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The timesteps that an item has before it, and its latents at the first of them."""
        if item.source is None:
            latents = self._family.from_text(pipeline, item, dtype, generator)
            return pipeline.scheduler.timesteps, latents
        source = pipeline.image_processor.preprocess(sources_on(self._device, [item]))
        timesteps, _ = pipeline.get_timesteps(item.steps, item.strength, self._device)
        with own_type(pipeline.vae):
            latents = self._family.from_image(pipeline, source, timesteps[:1], dtype, generator)
        return timesteps, latents

    def _step_all(self) -> None:
        """One step of each item. If memory runs out, some have had theirs."""
        groups: dict[tuple[int, int, int, bool], list[_Drawing]] = {}
        for drawing in self._drawings.values():
            groups.setdefault(self._group(drawing), []).append(drawing)
        for group in groups.values():
            for slots in self.groups([drawing.item for drawing in group]):
                self._step_together([group[slot] for slot in slots])

    def _group(self, drawing: _Drawing) -> tuple[int, int, int, bool]:
        """Items of one group are computed in one call of the denoiser, whole or not."""
        is_whole = self._deep_cache is None or self._deep_cache.is_whole(drawing.done)
        return drawing.item.height, drawing.item.width, drawing.rows, is_whole

    def _step_together(self, drawings: Sequence[_Drawing]) -> None:
        """One call of the denoiser, then the scheduler of each item."""
        rows = drawings[0].rows
        times = [drawing.timesteps[drawing.done] for drawing in drawings]
        scaled = [
            drawing.denoiser_input(time) for drawing, time in zip(drawings, times, strict=True)
        ]
        # A compiled size is filled up with the last item again.
        fill = len(self._padded([drawing.item for drawing in drawings])) - len(drawings)
        slots = [*range(len(drawings)), *[len(drawings) - 1] * fill]
        conditions = {
            name: _together([drawing.conditions[name] for drawing in drawings], slots, rows)
            for name in drawings[0].conditions
        }
        call = UnetCall(
            torch.cat([scaled[slot] for slot in slots] * rows),
            torch.stack([times[slot].float() for slot in slots] * rows).to(self._device),
            _together([drawing.prompt for drawing in drawings], slots, rows),
            conditions,
        )
        controls = [(drawings[slot].control, drawings[slot].done) for slot in slots]
        added = self._controls.added(call, controls)
        starts = [drawings[slot].ip_adapter for slot in slots]
        with (
            self.adapters.applied([drawings[slot].adapter for slot in slots] * rows),
            self._ip_adapters.applied(starts, rows),
        ):
            noise = self._predicted(call, added, drawings)
        for slot, (drawing, time) in enumerate(zip(drawings, times, strict=True)):
            drawing.take_step(noise[slot :: len(slots)], time)

    def _predicted(
        self, call: UnetCall, added: Added, drawings: Sequence[_Drawing]
    ) -> torch.Tensor:
        """The noise of each row: by the whole denoiser, or around features of earlier steps."""
        cache, slots = self._deep_cache, range(len(drawings))
        if cache is not None and not cache.is_whole(drawings[0].done):
            kept = [drawing.features for drawing in drawings if drawing.features is not None]
            return cache.predict(call, _together(kept, slots, drawings[0].rows), added)
        predict = self._family.predict
        if added:
            predict = partial(self._family.predict_controlled, added)
        noise = predict(self._text_to_image, call.sample, call.times, call.prompt, call.conditions)
        if cache is not None:
            features = cache.take_features()
            for slot, drawing in enumerate(drawings):
                drawing.features = features[slot :: len(slots)].clone()
        return noise

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


def _together(parts: Sequence[torch.Tensor], slots: Sequence[int], rows: int) -> torch.Tensor:
    """The last `rows` rows of the parts at the slots: the first of each, then the second."""
    lasts = [part[-rows:] for part in parts]
    return torch.cat([lasts[slot][row : row + 1] for row in range(rows) for slot in slots])
