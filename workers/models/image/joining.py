"""Images that join a running batch between two denoise steps, and leave it when they are done.

Each item has a scheduler, a generator of random numbers and timesteps of its own. Only the UNet
computes items together: it takes a timestep for each row. So an item's pixels are those of
diffusers' pipeline for it alone, whichever schedulers, strengths and numbers of steps are beside
it. The steps before and after the loop are those of StableDiffusionPipeline.__call__ and
StableDiffusionImg2ImgPipeline.__call__, by their own methods.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shared.errors import PenstockError
from shared.tasks import Result
from shared.tasks.text import TokenChunk
from workers.models.base import OutOfMemory, Picture, PreparedImage, PreparedItem, StepEnd
from workers.models.device import memory_errors
from workers.models.image.codec import sources_on, to_host
from workers.models.image.model import ImageModel, spare_memory
from workers.models.image.preview import draw_previews

log = logging.getLogger(__name__)


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
    """[rows, tokens, width]: the negative prompt first where it is guided."""
    condition: torch.Tensor | None
    """The guidance scale as the UNet of a distilled model takes it, [1, width]."""
    for_scheduler: dict[str, Any]
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


class JoiningImageModel(ImageModel):
    """An ImageModel of Stable Diffusion that also computes step by step. See SteppedModel."""

    _drawings: dict[int, _Drawing]

    def setup(self) -> None:
        """Loads the pipeline."""
        super().setup()
        self._drawings = {}

    def admit(self, place: int, item: PreparedItem) -> None:
        """Encodes the prompts and the source, and draws the noise."""
        assert isinstance(item, PreparedImage), "the preparer of images makes them; this is a bug"
        if (refusal := self.refusal(item)) is not None:
            raise refusal
        with torch.inference_mode(), self.settled(), memory_errors():
            self._drawings[place] = self._begin(item)

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
            for place, drawing in list(self._drawings.items()):
                if drawing.done == len(drawing.timesteps):
                    del self._drawings[place]
                    end.results[place] = self._end(drawing)
        return end

    def take_chunks(self) -> dict[int, TokenChunk]:
        """None: only texts have them."""
        return {}

    def drop(self, place: int) -> None:
        """Forgets an item."""
        self._drawings.pop(place, None)

    def progress(self) -> dict[int, tuple[int, int]]:
        """How many steps of how many each item has."""
        return {
            place: (drawing.done, len(drawing.timesteps))
            for place, drawing in self._drawings.items()
        }

    def picture(self, place: int) -> Picture | None:
        """A small picture of an item between two steps. None where it can't be drawn."""
        drawing = self._drawings.get(place)
        if drawing is None or not drawing.done:
            return None
        with torch.inference_mode(), self.settled():
            return draw_previews(self._text_to_image, drawing.latents, [0])[0]

    def _begin(self, item: PreparedImage) -> _Drawing:
        pipeline: Any = self._text_to_image if item.source is None else self._image_to_image
        scheduler = pipeline.scheduler = self._scheduler(item.scheduler)
        generator = torch.Generator("cpu").manual_seed(item.seed)
        texts = self._prompts.arguments([item])
        prompt, negative = texts["prompt_embeds"], texts["negative_prompt_embeds"]
        width = pipeline.unet.config.time_cond_proj_dim
        if item.guidance_scale > 1 and width is None:
            prompt = torch.cat([negative, prompt])
        scheduler.set_timesteps(item.steps, device=self._device)
        timesteps = scheduler.timesteps
        if item.source is None:
            channels = pipeline.unet.config.in_channels
            size = (item.height, item.width)
            latents = pipeline.prepare_latents(
                1, channels, *size, prompt.dtype, self._device, generator
            )
        else:
            source = pipeline.image_processor.preprocess(sources_on(self._device, [item]))
            timesteps, _ = pipeline.get_timesteps(item.steps, item.strength, self._device)
            latents = pipeline.prepare_latents(
                source, timesteps[:1], 1, 1, prompt.dtype, self._device, generator
            )
        condition = None
        if width is not None:
            scale = torch.tensor(item.guidance_scale - 1).repeat(1)
            condition = pipeline.get_guidance_scale_embedding(scale, embedding_dim=width)
            condition = condition.to(self._device, latents.dtype)
        for_scheduler = pipeline.prepare_extra_step_kwargs(generator, 0.0)
        return _Drawing(
            item, scheduler, generator, timesteps, latents, prompt, condition, for_scheduler
        )

    def _step_all(self) -> None:
        """One step of each item. If memory runs out, some have had theirs."""
        groups: dict[tuple[int, int, int], list[_Drawing]] = {}
        for drawing in self._drawings.values():
            groups.setdefault(drawing.group, []).append(drawing)
        for group in groups.values():
            for places in self.groups([drawing.item for drawing in group]):
                self._step_together([group[place] for place in places])

    def _step_together(self, drawings: Sequence[_Drawing]) -> None:
        """One call of the UNet, then the scheduler of each item."""
        rows = len(drawings[0].prompt)
        times = [drawing.timesteps[drawing.done] for drawing in drawings]
        scaled = [
            drawing.scheduler.scale_model_input(drawing.latents, time)
            for drawing, time in zip(drawings, times, strict=True)
        ]
        # A compiled size is filled up with the last item again.
        fill = len(self._padded([drawing.item for drawing in drawings])) - len(drawings)
        places = [*range(len(drawings)), *[len(drawings) - 1] * fill]
        conditions = [drawings[place].condition for place in places]
        known = [one for one in conditions if one is not None]
        noise = self._text_to_image.unet(
            torch.cat([scaled[place] for place in places] * rows),
            torch.stack([times[place].float() for place in places] * rows).to(self._device),
            encoder_hidden_states=torch.cat(
                [drawings[place].prompt[row : row + 1] for row in range(rows) for place in places]
            ),
            timestep_cond=torch.cat(known) if known else None,
            cross_attention_kwargs=None,
            added_cond_kwargs=None,
            return_dict=False,
        )[0]
        for place, (drawing, time) in enumerate(zip(drawings, times, strict=True)):
            own = noise[place :: len(places)]
            if rows == 2:
                without, with_prompt = own.chunk(2)
                own = without + drawing.item.guidance_scale * (with_prompt - without)
            drawing.latents = drawing.scheduler.step(
                own, time, drawing.latents, **drawing.for_scheduler, return_dict=False
            )[0]
            drawing.done += 1

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
        vae = pipeline.vae
        decoded = vae.decode(
            drawing.latents / vae.config.scaling_factor,
            return_dict=False,
            generator=drawing.generator,
        )[0]
        drawn = pipeline.image_processor.postprocess(
            decoded, output_type="pt", do_denormalize=[True]
        )
        return to_host(drawn)[0]
