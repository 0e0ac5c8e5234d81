"""Mixed prompts with 1, 8, 16, and 32 in flight: the engine, the stack, and other servers.

All of them run SmolLM2-135M-Instruct in fp32 on this CPU, except llama.cpp, which uses 4-bit
weights. The stack is measured with our engine in fp32, in this CPU's fastest precision, and in
int4, and also with llama.cpp's server, which is measured by itself as well, with the same prompts.
The stack is `penstock up`, with everything on the same cores. Texts are streamed, and their readers
record when each piece arrives. Tokens are counted from the text, the same way for all servers.

The short form measures what decision 139 compares: our engine in the fastest precision, llama.cpp,
two workers of each, and each of them alongside a worker that generates images.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import torch
import yaml
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from bench.generation.engine import SOURCE
from bench.generation.engine_server import ask_server
from bench.generation.prompts import MixedPrompt, mixed
from bench.generation.served import drive
from bench.generation.servers import gguf_file, missing_for_serve, peers, serving
from bench.generation.timing import TimedGeneration, figures_of
from bench.pipeline import Part, say_nothing
from bench.report import Figure, Outcome
from infra.local.ports import Ports
from infra.local.stack import Stack
from infra.local.up import build_stack
from shared.errors import ConfigurationError, PenstockError
from shared.models.catalog import Model
from shared.models.tasks.text import GenerationInput
from workers.models.base import PreparedPrompt
from workers.models.device import Device
from workers.models.generation.model import GenerationModel
from workers.models.generation.prompts import PromptPreparer
from workers.models.source import resolve

IN_FLIGHT = (1, 8, 16, 32)
PER_CALLER = {1: 4.0, 8: 1.5, 16: 1.5, 32: 1.25}
"""Texts per level, as a multiple of the number in flight."""
SLOTS = 32
MODELS_FILE = Path("models.yaml")
MODEL = "smollm2"
CPU_LIMIT_MS = 0.3
"""Maximum CPU time of the API and the worker (not its model process) per token, at 16 in flight.
"""
LLAMA_CPP: Mapping[str, str] = {"engine": "llama.cpp", "source": SOURCE}
SERVED: Mapping[str, Mapping[str, str]] = {
    "fp32": {"precision": "fp32"},
    "auto": {"precision": "auto"},
    "int4": {"precision": "int4"},
    "llama.cpp Q4_1": LLAMA_CPP,
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
SETTLED_S, IDLE_S = 3.0, 5.0


def run(levels: Sequence[int] = IN_FLIGHT, *, quick: bool = False) -> Outcome:
    """Measures everything that is installed here, with these numbers of texts in flight.

    Args:
        quick: True for the short form.
    """
    try:
        folder = smollm2_folder()
    except ConfigurationError as error:
        return Outcome([], {"not measured": error.message})
    figures: list[Figure] = []
    details: dict[str, Any] = {"model": SOURCE}
    if quick:
        for name in SHORT:
            figures += measure_variant(folder, name, levels)
            figures += measure_two_workers(folder, name)
            figures += measure_next_to_images(folder, name)
        return Outcome(figures, details)
    figures += figures_of("generate() fp32, one by one", _plain(folder, _prompts(1)))
    engine = _Engine(folder)
    for level in levels:
        figures += figures_of(f"engine fp32, {level} in flight", engine.write(level))
    for name in SERVED:
        figures += measure_variant(folder, name, levels)
    tokenizer = _tokenizer(folder)
    why_not = missing_for_serve()
    for name, command, model in peers(folder, gguf_file(SOURCE)):
        if isinstance(command, str) or (why_not and "serve" in name):
            details[name] = command if isinstance(command, str) else why_not
            continue
        try:
            with serving(name, command, model) as peer:
                drive(peer.url, peer.model, mixed(1, 99), 1, tokenizer)
                for level in levels:
                    timed = drive(peer.url, peer.model, _prompts(level), level, tokenizer)
                    figures += figures_of(f"{name}, {level} in flight", timed)
        except (PenstockError, RuntimeError, ExceptionGroup, OSError) as error:
            details[name] = f"not measured: {error!r}"[:300]
    return Outcome(figures, details)


def measure_variant(folder: Path, name: str, levels: Sequence[int]) -> Iterator[Figure]:
    """Measures the stack, and its engine's server by itself if it has one.

    Args:
        folder: SmolLM2's folder.
        name: the variant's key in SERVED.
    """
    changes = SERVED[name]
    # All levels up to the last one compared are run, because earlier prompts fill the cache.
    alone = [level for level in levels if "engine" in changes and level <= max(MIN_RATIO)]
    entry = Model.model_validate(entry_of(folder, changes))
    before = yield from _alone(f"{name} alone", entry, alone)
    with running_stack(folder, changes) as stack:
        reached = yield from _measure_stack(stack, name, levels, _tokenizer(folder))
    after = yield from _alone(f"{name} alone again", entry, alone)
    for level in filter(MIN_RATIO.__contains__, alone):
        ratio = reached[level] / fmean([before[level], after[level]])
        figure = f"stack {name} / alone, {level} in flight"
        yield Figure(figure, ratio, "times", ">=", MIN_RATIO[level])


def measure_two_workers(folder: Path, name: str) -> Iterator[Figure]:
    """Measures two models of a variant at once, each with its own worker, on the same cores."""
    changes, tokenizer = SERVED[name], _tokenizer(folder)
    with (
        running_stack(folder, changes, {**changes, "name": SECOND}) as stack,
        ThreadPoolExecutor() as callers,
    ):
        url, models = f"http://127.0.0.1:{stack.ports.api}", (MODEL, SECOND)
        for model in models:
            drive(url, model, mixed(1, 99), 1, tokenizer)
        prompts = mixed(round(2 * IN_EACH * PER_CALLER[2 * IN_EACH]), seed=2 * IN_EACH)
        calls = [
            callers.submit(drive, url, model, prompts[first::2], IN_EACH, tokenizer)
            for first, model in enumerate(models)
        ]
        timed = [text for call in calls for text in call.result()]
    yield from figures_of(f"stack {name}, two workers, {IN_EACH} in flight in each", timed)


def measure_next_to_images(folder: Path, name: str) -> Iterator[Figure]:
    """Measures texts only, images only, and both at once, each with its own worker."""
    changes, tokenizer = SERVED[name], _tokenizer(folder)
    entries = yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))["models"]
    image_model = next(entry for entry in entries if entry["task"] == "image")
    prompts = mixed(round(IN_EACH * PER_CALLER[2 * IN_EACH]), seed=IN_EACH)
    with running_stack(folder, changes, image_model) as stack:
        url = f"http://127.0.0.1:{stack.ports.api}"
        drive(url, MODEL, mixed(1, 99), 1, tokenizer)
        yield from figures_of(
            f"stack {name}, {IN_EACH} in flight, idle image worker",
            drive(url, MODEL, prompts, IN_EACH, tokenizer),
        )
        with _drawing(url, image_model["name"]) as alone:
            time.sleep(IMAGES_ALONE_S)
        yield Figure("images alone", alone.rate, "/s")
        # These prompts use different words, because the engine's cache contains the previous ones.
        others = mixed(len(prompts), seed=IN_EACH + 1)
        with _drawing(url, image_model["name"]) as images:
            timed = drive(url, MODEL, others, IN_EACH, tokenizer)
        yield from figures_of(f"stack {name}, {IN_EACH} in flight, next to images", timed)
        yield Figure(f"images next to {name}", images.rate, "/s")


@dataclass
class _Images:
    """Images per second, set once the block has ended."""

    rate: float = 0.0


@contextmanager
def _drawing(url: str, model: str) -> Iterator[_Images]:
    """Keeps IMAGES_IN_FLIGHT requests, each for one image, in flight while the block runs."""
    images, stop = _Images(), threading.Event()

    def call() -> int:
        count = 0
        with httpx.Client(base_url=url, timeout=120) as client:
            while not stop.is_set():
                body = {"model": model, "prompt": "a large red circle"}  # A random seed.
                client.post("/v1/images/generations", json=body).raise_for_status()
                count += 1
        return count

    began_s = time.monotonic()
    with ThreadPoolExecutor(IMAGES_IN_FLIGHT) as callers:
        calls = [callers.submit(call) for _ in range(IMAGES_IN_FLIGHT)]
        try:
            yield images
        finally:
            stop.set()
            images.rate = sum(called.result() for called in calls) / (time.monotonic() - began_s)


def smollm2_folder() -> Path:
    """Returns SmolLM2-135M's folder.

    Raises:
        ConfigurationError: the `text` extra is not installed.
    """
    return resolve(SOURCE, "main", Path("var/models")).resolve()


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


class _Pieces(BaseStreamer):  # type: ignore[misc]
    """Records when each token arrives. The prompt is in the first call."""

    def __init__(self, timed: TimedGeneration) -> None:
        self._timed = timed
        self._is_prompt = True

    def put(self, value: Any) -> None:
        if not self._is_prompt:
            self._timed.pieces_s.append(time.monotonic())
        self._is_prompt = False

    def end(self) -> None:
        """Does nothing, because all times are already recorded."""


def _plain(folder: Path, prompts: Sequence[MixedPrompt]) -> list[TimedGeneration]:
    """Times each prompt individually with transformers' `generate()` and greedy decoding."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    figures = []
    for prompt in _prepared(folder, prompts):
        ids = torch.frombuffer(bytearray(prompt.ids), dtype=torch.int32).long()[None]
        timed = TimedGeneration(time.monotonic())
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=prompt.max_tokens,
            do_sample=False,
            streamer=_Pieces(timed),
        )
        timed.tokens = len(timed.pieces_s)
        figures.append(timed)
    return figures


def _prepared(folder: Path, prompts: Sequence[MixedPrompt]) -> list[PreparedPrompt]:
    inputs = [
        GenerationInput(
            prompt.tokens, 1, messages=prompt.messages, temperature=0.0, is_streamed=True
        )
        for prompt in prompts
    ]
    prepared = PromptPreparer(Model.model_validate(entry_of(folder)), folder).prepare(inputs)
    return [prompt for prompt in prepared if isinstance(prompt, PreparedPrompt)]


class _Engine:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        threads = len(os.sched_getaffinity(0))
        entry = Model.model_validate(entry_of(folder))
        self._model = GenerationModel(entry, folder, Device("cpu", threads, 1.0))
        self._model.setup()
        self._model.warmup()

    def write(self, level: int) -> list[TimedGeneration]:
        """Generates texts, with `level` of them in the model at a time."""
        waiting = list(enumerate(_prepared(self._folder, _prompts(level))))
        inside: dict[int, TimedGeneration] = {}
        done: list[TimedGeneration] = []
        while waiting or inside:
            while waiting and len(inside) < level:
                slot, prompt = waiting.pop(0)
                inside[slot] = TimedGeneration(time.monotonic())
                self._model.admit(slot, prompt)
            end, now_s = self._model.step(), time.monotonic()
            for slot, chunk in self._model.take_chunks().items():
                inside[slot].pieces_s += [now_s] * len(chunk.ids)
            for slot, result in end.results.items():
                timed = inside.pop(slot)
                timed.tokens = getattr(result, "output_tokens", 0)
                timed.pieces_s += [now_s] * (timed.tokens - len(timed.pieces_s))
                done.append(timed)
        return done


@contextmanager
def running_stack(
    folder: Path,
    changes: Mapping[str, str] = SERVED["fp32"],
    *others: Mapping[str, Any],
) -> Iterator[Stack]:
    """Yields the stack of `penstock up`, serving the model in `folder` as MODEL.

    Args:
        changes: catalog entry fields that override those from `entry_of`.
        others: the same for additional entries, each of which needs a name. If it contains `task`,
            it is a whole entry.
    """
    with tempfile.TemporaryDirectory() as temporary:
        state_dir = Path(temporary)
        models_file = state_dir / "models.yaml"
        entries = [
            fields if "task" in fields else entry_of(folder, fields)
            for fields in (changes, *others)
        ]
        models_file.write_text(yaml.safe_dump({"models": entries}), encoding="utf-8")
        variables = {"PENSTOCK_MODELS_FILE": str(models_file)}
        with build_stack(state_dir, Ports.free(), variables, say_nothing) as stack:
            yield stack


def _alone(
    name: str, entry: Model, levels: Sequence[int]
) -> Generator[Figure, None, dict[int, float]]:
    """Measures an engine's server by itself. Returns its speed by level."""
    if not levels:
        return {}
    folder, speeds = smollm2_folder(), {}
    rounds = {level: _prepared(folder, _prompts(level)) for level in levels}
    first = _prepared(folder, mixed(1, 99))
    texts = ask_server(entry, gguf_file(SOURCE).parent, first, rounds)
    for level, timed in texts.items():
        speed, *others = figures_of(f"{name}, {level} in flight", timed)
        yield from (speed, *others)
        speeds[level] = speed.value
    return speeds


def _measure_stack(
    stack: Stack, name: str, levels: Sequence[int], tokenizer: Tokenizer
) -> Generator[Figure, None, dict[int, float]]:
    """Returns the speed by level, tokens/s."""
    speeds = {}
    url = f"http://127.0.0.1:{stack.ports.api}"
    drive(url, MODEL, mixed(1, 99), 1, tokenizer)
    parts = {"API": Part(stack.ports.api), "worker": Part(stack.ports.health[0])}
    time.sleep(SETTLED_S)
    idle = _cpu_s(parts)
    time.sleep(IDLE_S)
    idle = {part: (now_s - idle[part]) / IDLE_S for part, now_s in _cpu_s(parts).items()}
    for level in levels:
        before, began_s = _cpu_s(parts), time.monotonic()
        timed = drive(url, MODEL, _prompts(level), level, tokenizer)
        speed, *others = figures_of(f"stack {name}, {level} in flight", timed)
        yield from (speed, *others)
        speeds[level] = speed.value
        tokens, wall_s = sum(text.tokens for text in timed), time.monotonic() - began_s
        spent = {part: now_s - before[part] for part, now_s in _cpu_s(parts).items()}
        for part, cpu_s in spent.items():
            figure = f"stack {name}, CPU of the {part} for a token, {level} in flight"
            yield Figure(figure, 1000 * cpu_s / tokens, "ms")
        own_ms = 1000 * sum(spent.values()) / tokens
        limit = ("<=", CPU_LIMIT_MS) if level == 16 and name == "fp32" else ()
        yield Figure(f"stack {name}, CPU of both, {level} in flight", own_ms, "ms", *limit)
        above_ms = own_ms - 1000 * sum(idle.values()) * wall_s / tokens
        yield Figure(f"stack {name}, the same above idle, {level} in flight", above_ms, "ms")
    return speeds


def _cpu_s(parts: Mapping[str, Part]) -> dict[str, float]:
    return {name: part.cpu_s() for name, part in parts.items()}
