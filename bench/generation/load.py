"""Mixed prompts with 1, 8, 16, and 32 in flight: the stack, its engines, and other servers.

All of them run SmolLM2-135M-Instruct on this CPU. The stack is measured with our engine in fp32, in
this CPU's fastest precision, and in int4, and also with llama.cpp's server and its 4-bit weights.
That server is measured by itself as well, with the same prompts. The stack is `penstock up`, with
everything on the same cores. Texts are streamed, and their readers record when each piece arrives.
Tokens are counted from the text, the same way for all servers behind HTTP.

The short form measures what decision 139 compares: our engine in the fastest precision, llama.cpp,
two workers of each, and each of them alongside a worker that generates images.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from tokenizers import Tokenizer

from bench.generation.engine_server import ask_server
from bench.generation.prompts import WARM_UP, MixedPrompt, mixed
from bench.generation.served import drive
from bench.generation.servers import SOURCE, gguf_file, peers, running_peer
from bench.generation.timing import TimedGeneration, figures_of, tokens_per_s
from bench.pipeline import read_shipped_models, repeating, serving
from bench.report import Figure, Outcome
from infra.local.stack import Stack
from shared.errors import ConfigurationError, PenstockError
from shared.models.catalog import Model
from workers.models.generation.gguf import open_for_engine
from workers.models.source import resolve

IN_FLIGHT = (1, 8, 16, 32)
PER_CALLER = {1: 4.0, 8: 1.5, 16: 1.5, 32: 1.25}
"""Texts per level, as a multiple of the number in flight."""
SLOTS = 32
MODEL = "smollm2"
CACHE = Path("var/models")
SERVED: Mapping[str, Mapping[str, str]] = {
    "fp32": {"precision": "fp32"},
    "auto": {"precision": "auto"},
    "int4": {"precision": "int4"},
    "llama.cpp Q4_1": {"engine": "llama.cpp", "source": SOURCE},
}
"""Catalog entry fields for each measured variant of the stack."""
SHORT = ("auto", "llama.cpp Q4_1")
"""Variants that the short form measures."""
MIN_RATIO = {1: 0.7, 16: 0.85}
"""Minimum speed by level if an engine is used, as a fraction of its server's own speed. The server
is measured before and after the stack.
"""
SECOND = "smollm2-second"
IN_EACH = 4
"""Number of texts in flight for each of two workers."""
IMAGES_IN_FLIGHT, IMAGES_ALONE_S = 2, 15.0


def run(*, quick: bool = False) -> Outcome:
    """Measures everything that is installed here.

    Args:
        quick: True for the short form.
    """
    try:
        folder = smollm2_folder()
    except ConfigurationError as error:
        return Outcome([], {"not measured": error.message})
    figures: list[Figure] = []
    details: dict[str, Any] = {"model": SOURCE}
    for name in SHORT if quick else SERVED:
        figures += measure_variant(folder, name)
        if quick:
            figures += measure_two_workers(folder, name)
            figures += measure_next_to_images(folder, name)
    for name, command, model in () if quick else peers(folder, gguf_file(SOURCE)):
        try:
            with running_peer(command, model) as peer:
                figures += _level_figures(name, _ask_all(peer.url, peer.model, folder))
        except (PenstockError, RuntimeError, ExceptionGroup, OSError) as error:
            details[name] = f"not measured: {error!r}"[:300]
    return Outcome(figures, details)


def measure_variant(folder: Path, name: str) -> list[Figure]:
    """Measures the stack, and its engine's server by itself if it has one.

    Args:
        folder: SmolLM2's folder.
        name: the variant's key in SERVED.
    """
    before = _ask_alone(name)
    with running_stack(folder, SERVED[name]) as stack:
        reached = _ask_all(stack.api_url, MODEL, folder)
    after = _ask_alone(name)
    figures = [
        *_level_figures(f"{name} alone", before),
        *_level_figures(f"stack {name}", reached),
        *_level_figures(f"{name} alone again", after),
    ]
    for level in MIN_RATIO.keys() & before.keys():
        alone = fmean([tokens_per_s(before[level]), tokens_per_s(after[level])])
        ratio = tokens_per_s(reached[level]) / alone
        figure = f"stack {name} / alone, {level} in flight"
        figures.append(Figure(figure, ratio, "times", ">=", MIN_RATIO[level]))
    return figures


def _ask_alone(name: str) -> dict[int, list[TimedGeneration]]:
    """Returns the texts of a variant's server by itself, by level. Empty without a server."""
    if "engine" not in SERVED[name]:
        return {}
    folder = resolve(SOURCE, "main", CACHE, open_gguf=open_for_engine)
    entry = Model.model_validate(entry_of(folder, SERVED[name]))
    # All levels up to the last one compared are run, because earlier prompts fill the cache.
    rounds = {level: _prompts(level) for level in IN_FLIGHT if level <= max(MIN_RATIO)}
    return ask_server(entry, folder, rounds)


def _ask_all(url: str, model: str, folder: Path) -> dict[int, list[TimedGeneration]]:
    """Returns a server's texts by level, after a warm-up."""
    tokenizer = _tokenizer(folder)
    drive(url, model, WARM_UP, 1, tokenizer)
    return {level: drive(url, model, _prompts(level), level, tokenizer) for level in IN_FLIGHT}


def _level_figures(name: str, texts: Mapping[int, list[TimedGeneration]]) -> list[Figure]:
    return [
        figure
        for level, timed in texts.items()
        for figure in figures_of(f"{name}, {level} in flight", timed)
    ]


def measure_two_workers(folder: Path, name: str) -> Iterator[Figure]:
    """Measures two models of a variant at once, each with its own worker, on the same cores."""
    changes, tokenizer = SERVED[name], _tokenizer(folder)
    with (
        running_stack(folder, changes, {**changes, "name": SECOND}) as stack,
        ThreadPoolExecutor() as callers,
    ):
        models = MODEL, SECOND
        for model in models:
            drive(stack.api_url, model, WARM_UP, 1, tokenizer)
        prompts = mixed(round(2 * IN_EACH * PER_CALLER[2 * IN_EACH]), seed=2 * IN_EACH)
        calls = [
            callers.submit(drive, stack.api_url, model, prompts[first::2], IN_EACH, tokenizer)
            for first, model in enumerate(models)
        ]
        timed = [text for call in calls for text in call.result()]
    yield from figures_of(f"stack {name}, two workers, {IN_EACH} in flight in each", timed)


def measure_next_to_images(folder: Path, name: str) -> Iterator[Figure]:
    """Measures texts only, images only, and both at once, each with its own worker."""
    changes, tokenizer = SERVED[name], _tokenizer(folder)
    image_model = next(entry for entry in read_shipped_models() if entry["task"] == "image")
    prompts = mixed(round(IN_EACH * PER_CALLER[2 * IN_EACH]), seed=IN_EACH)
    with (
        running_stack(folder, changes, image_model) as stack,
        httpx.Client(base_url=stack.api_url, timeout=120) as client,
    ):
        url, draw = stack.api_url, partial(_draw, client, image_model["name"])
        drive(url, MODEL, WARM_UP, 1, tokenizer)
        yield from figures_of(
            f"stack {name}, {IN_EACH} in flight, idle image worker",
            drive(url, MODEL, prompts, IN_EACH, tokenizer),
        )
        began_s = time.monotonic()
        with repeating(IMAGES_IN_FLIGHT, draw) as images:
            time.sleep(IMAGES_ALONE_S)
        yield Figure("images alone", len(images) / (time.monotonic() - began_s), "/s")
        # These prompts use different words, because the engine's cache contains the previous ones.
        others, began_s = mixed(len(prompts), seed=IN_EACH + 1), time.monotonic()
        with repeating(IMAGES_IN_FLIGHT, draw) as images:
            timed = drive(url, MODEL, others, IN_EACH, tokenizer)
        rate = len(images) / (time.monotonic() - began_s)
        yield from figures_of(f"stack {name}, {IN_EACH} in flight, next to images", timed)
        yield Figure(f"images next to {name}", rate, "/s")


def _draw(client: httpx.Client, model: str) -> None:
    """Requests one image with a random seed."""
    body = {"model": model, "prompt": "a large red circle"}
    client.post("/v1/images/generations", json=body).raise_for_status()


def smollm2_folder() -> Path:
    """Returns SmolLM2-135M's folder.

    Raises:
        ConfigurationError: the `text` extra is not installed.
    """
    return resolve(SOURCE, "main", CACHE).resolve()


def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _prompts(level: int) -> list[MixedPrompt]:
    return mixed(round(level * PER_CALLER[level]), seed=level)


def entry_of(folder: Path, changes: Mapping[str, str] = SERVED["fp32"]) -> dict[str, Any]:
    """Returns the catalog entry for the model in `folder`, named MODEL."""
    entry: dict[str, Any] = {
        "name": MODEL,
        "task": "text",
        "source": f"local:{folder}",
        "batch": {"max_tokens": SLOTS * 640, "max_items": SLOTS},
        "generation": {
            "context_tokens": 640,
            "default_tokens": 64,
            "longest_tokens": 256,
            "chunk_tokens": 256,
        },
        "deadline": {"default_s": 280, "longest_s": 300},
    }
    return {**entry, **changes}


def running_stack(
    folder: Path, changes: Mapping[str, str] = SERVED["fp32"], *others: Mapping[str, Any]
) -> AbstractContextManager[Stack]:
    """Returns the stack of `penstock up`, serving the model in `folder` as MODEL.

    Args:
        changes: catalog entry fields that override those from `entry_of`.
        others: the same for additional entries, each of which needs a name. If it contains `task`,
            it is a whole entry.
    """
    return serving(
        [fields if "task" in fields else entry_of(folder, fields) for fields in (changes, *others)]
    )
