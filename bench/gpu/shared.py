"""Two models that time-share a GPU, each in its own process: their rates alone and together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from bench.gpu.company import text_image
from bench.gpu.images import GUIDANCE, image_entry
from bench.gpu.scale import Scale
from bench.gpu.texts import SHAPES, TINY_SHAPES, draw_batches, prepare, text_entry, write_bert
from bench.report import Figure
from workers.models.base import Prepared, PreparedImage
from workers.runtime.pool import HostedModel, ModelPool
from workers.runtime.pooled_process import PooledProcess

MEMORY_FRACTION = 0.45
START_TIMEOUT_S = 900.0
BATCH_TIMEOUT_S = 120.0
TEXT_TOKENS = 2_048
"""Number of tokens in a batch for MiniLM."""


def measure(scale: Scale, images: Path, folder: Path) -> Iterator[Figure]:
    """Yields batches/s of the image model and of MiniLM: alone, together, and the share kept."""
    yield from asyncio.run(_measure(scale, images, folder))


async def _measure(scale: Scale, images: Path, folder: Path) -> list[Figure]:
    shape = (SHAPES if scale.is_full_width else TINY_SHAPES)[0]
    entry = text_entry(shape, write_bert(folder, shape), scale, TEXT_TOKENS)
    [texts, *_] = draw_batches(TEXT_TOKENS, TEXT_TOKENS)
    work: dict[str, tuple[HostedModel, list[Prepared]]] = {
        "images": (HostedModel(image_entry(images, scale), images), [*_images(scale)]),
        "MiniLM": (HostedModel(entry, folder), [prepare(text) for text in texts]),
    }
    async with AsyncExitStack() as stack:
        loads: dict[str, tuple[PooledProcess, Sequence[Prepared]]] = {}
        for name, (hosted, batch) in work.items():
            pool = ModelPool(
                [hosted],
                device=scale.device,
                processes=1,
                memory_fraction=MEMORY_FRACTION,
                start_timeout_s=START_TIMEOUT_S,
            )
            loads[name] = ((await stack.enter_async_context(pool)).processes[0], batch)
        alone = {name: await _rate(load, scale) for name, load in loads.items()}
        rates = await asyncio.gather(*(_rate(load, scale) for load in loads.values()))
        together = dict(zip(loads, rates, strict=True))
    return [
        figure
        for name in work
        for figure in (
            Figure(f"{name} alone", alone[name], "batches/s"),
            Figure(f"{name} together", together[name], "batches/s"),
            Figure(f"{name} kept while sharing", together[name] / alone[name], "of alone"),
        )
    ]


async def _rate(load: tuple[PooledProcess, Sequence[Prepared]], scale: Scale) -> float:
    """Returns the number of batches per second when they run one after another.

    The first batch is not counted.
    """
    process, batch = load
    await process.run(batch, timeout_s=BATCH_TIMEOUT_S)
    began_s, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - began_s < scale.shared_s:
        await process.run(batch, timeout_s=BATCH_TIMEOUT_S)
        count += 1
    return count / (time.perf_counter() - began_s)


def _images(scale: Scale) -> list[PreparedImage]:
    one = text_image(scale.side, scale.text_steps, GUIDANCE)
    return [one, msgspec.structs.replace(one, seed=2)]
