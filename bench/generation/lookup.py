"""Gain and cost of prompt-lookup decoding (`generation.lookup_tokens`): one text at a time.

SmolLM2-135M-Instruct on this CPU, greedy and sampled, for questions that let it quote, and others.
The engine without guesses writes the same texts in turn with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.generation.load import smollm2_folder
from bench.report import Figure, Outcome
from shared.errors import ConfigurationError
from shared.models.catalog import Model
from shared.models.tasks.text import GenerationInput, GenerationResult
from workers.models.base import PreparedPrompt
from workers.models.device import Device
from workers.models.generation.model import GenerationModel
from workers.models.generation.prompts import PromptPreparer

LOOKUP_TOKENS = 8
TOKENS = 64
_STORY = (
    "Mara kept bees on the roof of the old post office. In June a swarm left the third hive and "
    "settled on the sign of the bakery. The baker closed his shop, and called her. She came with a "
    "box, a sheet and a brush. It took her an hour, and nobody was stung. He gave her a cake."
)
_QUOTING = (
    f"Repeat this story word by word, but call the woman Anna.\n\n{_STORY}",
    f"Correct the spelling of this text, and change nothing else.\n\n{_STORY}",
    f"Write this story as a JSON list of its sentences.\n\n{_STORY}",
    f"Which sentences tell what the baker did? Quote them.\n\n{_STORY}",
)
_OTHERS = (
    "Why is the sky blue in the day and red in the evening?",
    "Write a short letter to a friend who has moved to another town.",
    "What should I look at when I buy a used bicycle?",
    "Explain how bread rises, to a child.",
)


def run() -> Outcome:
    """Measures each precision of a CPU."""
    try:
        folder = smollm2_folder()
    except ConfigurationError as error:
        return Outcome([], {"not measured": error.message})
    figures: list[Figure] = []
    for precision in ("fp32", "bf16", "int4"):
        engines = {most: _open(folder, precision, most) for most in (0, LOOKUP_TOKENS)}
        for kind, questions in (("quoting", _QUOTING), ("other", _OTHERS)):
            for temperature in (0.0, 0.8):
                prompts = _prepared(folder, questions, temperature)
                name = f"{precision}, {kind}, temperature {temperature}"
                figures += _compared(name, engines, prompts)
    return Outcome(figures, {"tokens of a guess": str(LOOKUP_TOKENS), "texts": str(TOKENS)})


def _entry(precision: str, lookup_tokens: int) -> Model:
    return Model.model_validate(
        {
            "name": "bench-lookup",
            "task": "text",
            "source": "local:unused",
            "precision": precision,
            "batch": {"max_tokens": 640, "max_items": 1},
            "generation": {
                "context_tokens": 640,
                "default_tokens": TOKENS,
                "longest_tokens": TOKENS,
                "lookup_tokens": lookup_tokens,
            },
        }
    )


def _open(folder: Path, precision: str, lookup_tokens: int) -> GenerationModel:
    threads = len(os.sched_getaffinity(0))
    model = GenerationModel(_entry(precision, lookup_tokens), folder, Device("cpu", threads, 1.0))
    model.setup()
    model.warmup()
    return model


def _prepared(folder: Path, questions: Sequence[str], temperature: float) -> list[PreparedPrompt]:
    inputs = [
        GenerationInput(
            TOKENS,
            number,
            messages=[{"role": "user", "content": question}],
            temperature=temperature,
        )
        for number, question in enumerate(questions)
    ]
    prepared: list[Any] = PromptPreparer(_entry("fp32", 0), folder).prepare(inputs)
    return [one for one in prepared if isinstance(one, PreparedPrompt)]


def _compared(
    name: str, engines: dict[int, GenerationModel], prompts: Sequence[PreparedPrompt]
) -> list[Figure]:
    spent_s, steps, written = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0), 0
    texts: dict[int, list[str]] = {most: [] for most in engines}
    for prompt in prompts:
        for most, engine in engines.items():
            result, took, took_s = _write(engine, prompt)
            spent_s[most] += took_s
            steps[most] += took
            texts[most].append(result.text)
        written += result.output_tokens
    without, guessing = engines
    equal = sum(one == other for one, other in zip(texts[without], texts[guessing], strict=True))
    return [
        Figure(f"{name}, speed", written / spent_s[without], "tokens/s"),
        Figure(f"{name}, speed with guesses", written / spent_s[guessing], "tokens/s"),
        Figure(f"{name}, times as fast", spent_s[without] / spent_s[guessing], "x"),
        Figure(f"{name}, tokens of a step", written / steps[guessing], ""),
        Figure(f"{name}, equal texts", equal, f"/{len(texts[without])}"),
    ]


def _write(engine: GenerationModel, prompt: PreparedPrompt) -> tuple[GenerationResult, int, float]:
    """The text, the steps and the seconds of its tokens behind the first."""
    engine.admit(0, prompt)
    end = engine.step()
    began_s, steps = time.perf_counter(), 0
    while not end.results:
        end = engine.step()
        steps += 1
    result = end.results[0]
    assert isinstance(result, GenerationResult), result
    return result, steps, time.perf_counter() - began_s
