"""An engine's server by itself: prompts go directly to its socket, without API, queue, or worker.

It reads each prompt as a whole, in order of arrival, because nothing here splits prompts up. Like
the stack, it caches prompt prefixes: 24 mixed prompts have up to 58% of their tokens in common with
earlier prompts.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.generation.prompts import WARM_UP, MixedPrompt
from bench.generation.timing import TimedGeneration
from shared.models.catalog import Model
from shared.models.tasks.text import GenerationInput
from shared.process.cores import usable_cores
from workers.models.base import PreparedPrompt
from workers.models.engines.dialect import EngineDialect, EngineRequest, Hardware, Reply
from workers.models.engines.llama_cpp import LlamaCpp
from workers.models.engines.process import EngineProcess
from workers.models.generation.prompts import PromptPreparer
from workers.models.generation.vocabulary import Vocabulary
from workers.models.generation.writing import IDS

START_LIMIT_S = 180.0
ANY_SLOT = -1
"""The server chooses the free slot that already has the longest part of the prompt."""


def ask_server(
    entry: Model, folder: Path, rounds: Mapping[int, Sequence[MixedPrompt]]
) -> dict[int, list[TimedGeneration]]:
    """Starts a server, warms it up, and streams a text for each prompt.

    Args:
        entry: the catalog entry of the model.
        folder: the folder with the model's GGUF file and its tokenizer.
        rounds: prompts, keyed by the number in flight.
    """
    return asyncio.run(_ask(entry, folder, rounds))


async def _ask(
    entry: Model, folder: Path, rounds: Mapping[int, Sequence[MixedPrompt]]
) -> dict[int, list[TimedGeneration]]:
    threads = usable_cores()
    dialect, preparer = LlamaCpp(entry, Vocabulary(folder)), PromptPreparer(entry, folder)
    launch = dialect.launch(Hardware("cpu", threads))
    server = await EngineProcess.start(launch, secrets.token_urlsafe(), threads, START_LIMIT_S)
    texts = {}
    try:
        await _call(dialect, server, iter(_prepare(preparer, WARM_UP)))
        for in_flight, prompts in rounds.items():
            waiting = iter(_prepare(preparer, prompts))
            async with asyncio.TaskGroup() as callers:
                calls = [
                    callers.create_task(_call(dialect, server, waiting)) for _ in range(in_flight)
                ]
            texts[in_flight] = [timed for call in calls for timed in call.result()]
    finally:
        await server.end()
    return texts


def _prepare(preparer: PromptPreparer, prompts: Sequence[MixedPrompt]) -> list[PreparedPrompt]:
    inputs = [
        GenerationInput(
            prompt.tokens, 1, messages=prompt.messages, temperature=0.0, is_streamed=True
        )
        for prompt in prompts
    ]
    prepared = preparer.prepare(inputs)
    return [prompt for prompt in prepared if isinstance(prompt, PreparedPrompt)]


async def _call(
    dialect: EngineDialect, server: EngineProcess, waiting: Iterator[PreparedPrompt]
) -> list[TimedGeneration]:
    """Requests texts one after another until none are left."""
    texts = []
    for prompt in waiting:
        timed = TimedGeneration(time.monotonic())
        ids = np.frombuffer(prompt.ids, IDS).tolist()
        order = EngineRequest(ids, ANY_SLOT, "everyone", keeps=True, tokens=prompt.max_tokens)
        await dialect.stream(server.post, prompt, order, partial(_note, timed))
        texts.append(timed)
    return texts


def _note(timed: TimedGeneration, replies: Sequence[Reply]) -> bool:
    """Records tokens that arrived together. Returns False, because all tokens are needed."""
    tokens = sum(len(reply.tokens) for reply in replies)
    if tokens:
        timed.pieces_s.append(time.monotonic())
    timed.tokens += tokens
    return False
