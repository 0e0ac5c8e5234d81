"""Computes several images' calls together: chooses the batches and makes per-row additions.

Adapters (LoRA), ControlNets, IP-Adapters, shortcuts, and guidance are applied here, because only
this code knows which image each row belongs to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel, UNet2DConditionModel
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg

from workers.models.image.calls import Batch, Call, Part, join, split
from workers.models.image.compilation import EagerCalls, cheapest_cover
from workers.models.image.controls import add_up
from workers.models.image.deep_cache import DeepCache
from workers.models.image.drawing import Drawing
from workers.models.image.hub import Batching
from workers.models.image.ip_adapters import IpAdapters
from workers.models.image.pipeline import parameters_of
from workers.models.image.resident_adapters import ResidentAdapters

DECODED_PIXELS = 512 * 512
"""Maximum number of pixels that the VAE computes at a time, but always at least one image. More
pixels would delay other images' steps.
"""
GUIDED_KINDS = (UNet2DConditionModel, SD3Transformer2DModel)
"""Denoisers whose calls have a row for the negative prompt followed by one for the prompt."""


@dataclass(slots=True)
class CompiledSizes:
    """The compiled batch sizes, in images, and how many seconds a batch of each size takes."""

    width: int
    height: int
    seconds: Mapping[int, float] = field(default_factory=dict)
    """Empty if nothing is compiled."""

    def have(self, drawing: Drawing) -> bool:
        """Returns whether any sizes are compiled for an image."""
        size = drawing.item.width, drawing.item.height
        return bool(self.seconds) and size == (self.width, self.height)


class RowBatching(Batching):
    """Batches images. The owner of a call is a Drawing.

    Args:
        deep_cache: None means that every step computes the whole UNet.
        guidance_stop: fraction of the steps after which the negative prompt no longer applies.
        eager_calls: counts the calls of compiled parts that run eagerly.
    """

    def __init__(
        self,
        denoiser: Any,
        adapters: ResidentAdapters,
        ip_adapters: IpAdapters,
        deep_cache: DeepCache | None,
        guidance_stop: float,
        sizes: CompiledSizes,
        eager_calls: EagerCalls,
    ) -> None:
        self._denoiser = denoiser
        self._adapters = adapters
        self._ip_adapters = ip_adapters
        self._deep_cache = deep_cache
        self._guidance_stop = guidance_stop
        self._sizes = sizes
        self._eager_calls = eager_calls
        self._unexpected_calls = 0
        self._is_guided_by_row = isinstance(denoiser, GUIDED_KINDS)

    def prepare(self, call: Call) -> None:
        """Drops the negative prompt's row once it no longer applies. Calls ControlNets."""
        drawing: Drawing = call.owner
        if call.part.module is not self._denoiser:
            return
        is_guided = self._is_guided_by_row and call.rows == 2
        if is_guided and self._guidance_stop < 1:
            call.is_halved = drawing.calls >= int(self._guidance_stop * drawing.steps)
        if call.is_halved:
            call.last_rows(1)
        call.added = add_up(drawing.controls, call.values, drawing.calls, drawing.steps)

    def key(self, call: Call) -> Hashable:
        """Returns the call's key. Calls with the same key share a batch."""
        drawing: Drawing = call.owner
        if not call.part.is_denoiser:
            return call.key
        is_whole = self._deep_cache is None or self._deep_cache.is_whole(drawing.calls)
        # A compiled graph supports only one row count.
        return call.key, is_whole, call.rows if self._sizes.have(drawing) else 0

    def cover(self, calls: Sequence[Call]) -> Sequence[int]:
        """Picks the compiled sizes with the lowest cost.

        The VAE computes only a few pixels at a time.
        """
        drawing: Drawing = calls[0].owner
        if calls[0].part.is_denoiser and self._sizes.have(drawing):
            return cheapest_cover(len(calls), self._sizes.seconds)
        if calls[0].part.name.startswith("vae"):
            max_calls = max(1, DECODED_PIXELS // drawing.pixels)
            return [min(max_calls, len(calls) - at) for at in range(0, len(calls), max_calls)]
        return [len(calls)]

    def spare_memory(self, part: Part) -> bool:
        """Makes the VAE compute images in tiles from now on."""
        vae = part.module
        if not isinstance(vae, AutoencoderKL) or vae.use_tiling:
            return False
        vae.enable_tiling()
        return True

    def compute(self, calls: Sequence[Call]) -> Sequence[Any]:
        """Computes calls that have the same key. Returns each call's results."""
        eager_calls = self._eager_calls.count
        results = self._compute(calls)
        if self._eager_calls.count > eager_calls and self._sizes.have(calls[0].owner):
            self._unexpected_calls += 1
        return results

    def take_eager_calls(self) -> int:
        """Returns how many calls at the compiled size ran eagerly since the last time."""
        count, self._unexpected_calls = self._unexpected_calls, 0
        return count

    def _compute(self, calls: Sequence[Call]) -> Sequence[Any]:
        part = calls[0].part
        batch = join(calls, self._fill(calls) if part.is_denoiser else 0)
        rows = [call.owner.adapter for call in batch.row_calls]
        with self._adapters.apply(part.name, rows):
            if not part.is_denoiser:
                return split(part.compute(**batch.values), batch)
            results = split(self._denoise(part, batch), batch)
        for call in calls:
            call.owner.calls += 1
        if not self._is_guided_by_row:
            return results
        return [self._guide(call, result) for call, result in zip(calls, results, strict=True)]

    def _fill(self, calls: Sequence[Call]) -> int:
        """Returns how many calls to add to reach a compiled size."""
        if not self._sizes.have(calls[0].owner):
            return 0
        larger = [size for size in self._sizes.seconds if size >= len(calls)]
        return min(larger, default=len(calls)) - len(calls)

    def _denoise(self, part: Part, batch: Batch) -> Any:
        if part.module is not self._denoiser or not isinstance(part.module, UNet2DConditionModel):
            return part.compute(**batch.values)
        added = _join_added(batch)
        images: Any = contextlib.nullcontext()
        if any(call.owner.ip_adapter for call in batch.calls):
            images = self._ip_adapters.apply(list(_reference_rows(batch)))
        with images:
            if self._deep_cache is None:
                return part.compute(**batch.values, **added)
            return self._compute_cached(self._deep_cache, part, batch, added)

    def _compute_cached(
        self, cache: DeepCache, part: Part, batch: Batch, added: Mapping[str, Any]
    ) -> Any:
        """Computes the whole UNet, or only its outer layers around features from earlier steps."""
        first: Drawing = batch.calls[0].owner
        if not cache.is_whole(first.calls):
            inner_features = [
                call.owner.features[-call.rows :] for call in batch.calls if call.owner is not None
            ]
            return (cache.predict(batch.values, torch.cat(inner_features), added),)
        output = part.compute(**batch.values, **added)
        features, at = cache.take_features(), 0
        for call in batch.calls:
            call.owner.features = features[at : at + call.rows].clone()
            at += call.rows
        return output

    def _guide(self, call: Call, output: Any) -> Any:
        """Returns two rows from which the pipeline will compute the requested noise.

        Pipelines compute `without + scale * (with - without)`, which is the row itself if the two
        rows are identical.
        """
        drawing: Drawing = call.owner
        if call.is_halved:
            return (torch.cat([output[0]] * 2), *output[1:])
        item = drawing.item
        if call.rows != 2 or not item.guidance_rescale:
            return output
        if "guidance_rescale" in parameters_of(drawing.pipeline):
            return output
        without, with_prompt = output[0].chunk(2)
        noise = without + item.guidance_scale * (with_prompt - without)
        noise = rescale_noise_cfg(noise, with_prompt, item.guidance_rescale)
        return (torch.cat([noise] * 2), *output[1:])


def _join_added(batch: Batch) -> dict[str, Any]:
    """Returns the UNet's arguments with the ControlNets' additions for each row.

    Empty if there are none.
    """
    some = next((call.added for call in batch.every if call.added), None)
    if some is None:
        return {}
    joined = [
        torch.cat(
            [
                call.added[at] if call.added else some[at].new_zeros(call.rows, *some[at].shape[1:])
                for call in batch.every
            ]
        )
        for at in range(len(some))
    ]
    return {
        "down_block_additional_residuals": tuple(joined[:-1]),
        "mid_block_additional_residual": joined[-1],
    }


def _reference_rows(batch: Batch) -> Any:
    """Yields each row's reference image and token set, starting with the tokens for no image."""
    for call in batch.every:
        start = call.owner.ip_adapter
        for row in range(-call.rows, 0):
            yield None if start is None else (start, row)
