"""Adapters (LoRA) of images: what a mixed batch costs, and what it costs to have more than fit.

Adapters with random weights, of rank 8 in each attention layer of the shipped model's UNet. First a
batch of four images, each with an adapter of its own, in turn with the same four images without.
Then a stack with fifty adapters in its catalog, eight of which fit into memory, gets Poisson
arrivals: of one adapter, and of all of them, in turn.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import httpx
import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bench.pipeline import only_model, say_nothing
from bench.report import Figure, Outcome
from infra.local.ports import Ports
from infra.local.stack import Stack
from shared.catalog import Model
from shared.catalog_file import read_catalog
from shared.image_entry import Adapter
from shared.tasks.image import ImageInput, choose_adapter
from workers.models.base import PreparedImage
from workers.models.image.stepped import SteppedImageModel
from workers.models.source import resolve
from workers.tasks import model_for, preparer_for

RANK = 8
MIXED, STEPS, PAIRS = 4, 20, 12
ADAPTERS, RESIDENT = 50, 8
ARRIVALS, ROUNDS, LOAD = 100, 3, 0.5
SHORT_STEPS = 8
FULL_S, FULL_IN_FLIGHT = 15.0, 16
CALL_LIMIT_S = 120.0


def run() -> Outcome:
    """Measures both. Files of adapters are written first."""
    with tempfile.TemporaryDirectory() as folder:
        entry = read_catalog(Path("models.yaml")).default("image")
        adapters, each_bytes = _entries_of_adapters(entry, Path(folder))
        memory = {"adapter_memory_bytes": RESIDENT * each_bytes}
        image = entry.image.model_copy(update={"adapters": adapters} | memory)
        pairs = _mixed_batches(entry.model_copy(update={"image": image}))
        ratio = float(np.median([without_s / with_s for with_s, without_s in pairs]))
        figures = [
            Figure("four images with an adapter each, median", _median(pairs, 0), "s"),
            Figure("the same four without, median", _median(pairs, 1), "s"),
            Figure("throughput with over without, median of pairs", ratio, "", ">=", 0.8),
        ]
        with _stack(Path(folder), entry, adapters, memory) as stack:
            rate = LOAD * asyncio.run(_keep_full(stack))
            timed = _in_turn(stack, rate)
    p95_s = {kind: float(np.percentile(took_s, 95)) for kind, took_s in timed.items()}
    for kind, took_s in timed.items():
        figures.append(Figure(f"{kind}: p50", float(np.percentile(took_s, 50)), "s"))
        figures.append(Figure(f"{kind}: p95", p95_s[kind], "s"))
    many = p95_s["fifty adapters"] / p95_s["one adapter"]
    figures.append(Figure("fifty adapters over one: p95", many, "", "<=", 2.0))
    return Outcome(figures, {"pairs_s": pairs, "arrivals_per_s": rate, "adapter_bytes": each_bytes})


def _median(pairs: list[tuple[float, float]], which: int) -> float:
    return float(np.median([pair[which] for pair in pairs]))


def _entries_of_adapters(entry: Model, folder: Path) -> tuple[dict[str, Adapter], int]:
    """Writes the files. Returns their entries, and the bytes of each in fp32."""
    source = resolve(entry.source, entry.revision, folder)
    unet: Any = diffusers.UNet2DConditionModel.from_pretrained(source / "unet")
    files = write_adapters(unet, folder, ADAPTERS, RANK)
    weights = load_file(next(iter(files.values())))
    each_bytes = sum(weight.nbytes for weight in weights.values())
    return {name: Adapter(source=f"local:{file}") for name, file in files.items()}, each_bytes


def write_adapters(unet: torch.nn.Module, folder: Path, count: int, rank: int) -> dict[str, Path]:
    """Writes adapters with random weights in each attention layer of a UNet.

    Returns their files by name: a0, a1 and so on.
    """
    layers = {
        name: layer
        for name, layer in unet.named_modules()
        if isinstance(layer, torch.nn.Linear) and ".attn" in name
    }
    files = {}
    for number in range(count):
        drawn = torch.Generator().manual_seed(number)
        tensors = {}
        for name, layer in layers.items():
            for side, shape in (
                ("A", (rank, layer.in_features)),
                ("B", (layer.out_features, rank)),
            ):
                weight = torch.randn(shape, generator=drawn) * 0.05
                tensors[f"unet.{name}.lora_{side}.weight"] = weight
        files[f"a{number}"] = folder / f"{number}.safetensors"
        save_file(tensors, files[f"a{number}"])
    return files


def _mixed_batches(entry: Model) -> list[tuple[float, float]]:
    """Seconds of a batch of four adapters, and of the same images without, in turn."""
    folder = resolve(entry.source, entry.revision, Path("unused"))
    torch.set_num_threads(1)
    model = model_for(entry, folder, "cpu")
    assert isinstance(model, SteppedImageModel)
    model.setup()
    preparer = preparer_for(entry, folder)
    mixed: list[PreparedImage] = []
    plain: list[PreparedImage] = []
    for seed in range(MIXED):
        image = entry.image
        without = ImageInput(
            prompt="a large red circle",
            width=image.width,
            height=image.height,
            steps=STEPS,
            guidance_scale=image.guidance_scale,
            seed=seed,
            scheduler=image.scheduler,
        )
        chosen = choose_adapter(entry, f"a{seed}", None)
        prepared = preparer.prepare([msgspec.structs.replace(without, adapter=chosen), without])
        for items, item in zip((mixed, plain), prepared, strict=True):
            assert isinstance(item, PreparedImage)
            items.append(item)
    for items in (mixed, plain):
        _drawn_s(model, items)  # reads adapters, and encodes prompts
    return [(_drawn_s(model, mixed), _drawn_s(model, plain)) for _ in range(PAIRS)]


def _drawn_s(model: SteppedImageModel, items: list[PreparedImage]) -> float:
    began_s = time.perf_counter()
    for slot, item in enumerate(items):
        model.admit(slot, item)
    done = 0
    while done < len(items):
        done += len(model.step().results)
    return time.perf_counter() - began_s


@contextmanager
def _stack(
    folder: Path, entry: Model, adapters: dict[str, Adapter], memory: dict[str, int]
) -> Iterator[Stack]:
    named = {name: adapter.model_dump() for name, adapter in adapters.items()}
    image = entry.image.model_dump() | {"adapters": named} | memory
    settings = {
        "PENSTOCK_MODELS_FILE": str(only_model(folder, entry.name, {"image": image})),
        "PENSTOCK_PROCESSES": "1",
        "PENSTOCK_THREADS": "1",
    }
    with Stack(folder, ports=Ports.free(1), settings=settings, say=say_nothing) as stack:
        yield stack


async def _keep_full(stack: Stack) -> float:
    """Images per second of one adapter, with enough callers to fill a batch twice."""
    until_s, done = time.monotonic() + FULL_S, 0

    async def one_after_another(client: httpx.AsyncClient, drawn: random.Random) -> None:
        nonlocal done
        while time.monotonic() < until_s:
            await _draw(client, "a0", drawn.getrandbits(40))
            done += 1

    began_s = time.monotonic()
    async with _client(stack) as client, asyncio.TaskGroup() as group:
        for number in range(FULL_IN_FLIGHT):
            group.create_task(one_after_another(client, random.Random(number)))
    return done / (time.monotonic() - began_s)


def _in_turn(stack: Stack, rate_per_s: float) -> dict[str, list[float]]:
    timed: dict[str, list[float]] = {"one adapter": [], "fifty adapters": []}
    for number in range(ROUNDS):
        for kind, count in (("one adapter", 1), ("fifty adapters", ADAPTERS)):
            timed[kind] += asyncio.run(_arrive(stack, rate_per_s, count, seed=number))
    return timed


async def _arrive(stack: Stack, rate_per_s: float, adapters: int, seed: int) -> list[float]:
    """Seconds of each image of an open loop. The arrivals of a seed are at the same moments."""
    moments, chosen, took_s = random.Random(seed), random.Random(seed + 1), list[float]()

    async def draw(client: httpx.AsyncClient, name: str, number: int) -> None:
        began_s = time.perf_counter()
        await _draw(client, name, number)
        took_s.append(time.perf_counter() - began_s)

    async with _client(stack) as client, asyncio.TaskGroup() as group:
        for _ in range(ARRIVALS):
            name = f"a{chosen.randrange(adapters)}"
            group.create_task(draw(client, name, chosen.getrandbits(40)))
            await asyncio.sleep(moments.expovariate(rate_per_s))
    return took_s


def _client(stack: Stack) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=ARRIVALS)
    return httpx.AsyncClient(base_url=stack.api_url, timeout=CALL_LIMIT_S, limits=limits)


async def _draw(client: httpx.AsyncClient, adapter: str, seed: int) -> None:
    asked = {
        "prompt": "a green star",
        "num_inference_steps": SHORT_STEPS,
        "seed": seed,
        "size": "64x64",
        "lora_weights": adapter,
    }
    answer = await client.post(
        "/v1/images/generations",
        json=asked,
        headers={"x-penstock-deadline-ms": str(int(CALL_LIMIT_S * 1000))},
    )
    answer.raise_for_status()
