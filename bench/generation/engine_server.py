"""The server of an engine alone: prompts go straight to its socket, without API, queue and worker.

It reads each prompt as a whole, in the order of arrival, as nobody shares it out.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.generation.timing import TimedGeneration
from shared.models.catalog import Model
from workers.models.base import PreparedPrompt
from workers.models.engines.generation import read_events
from workers.models.engines.llama_cpp import PATH, Asked, decode_reply, request_of, settings_of
from workers.models.engines.process import EngineProcess
from workers.models.generation.writing import IDS

START_LIMIT_S = 180.0


def ask_server(
    entry: Model, folder: Path, prompts: Sequence[PreparedPrompt], in_flight: int
) -> list[TimedGeneration]:
    """Starts a server, and streams a text for each prompt, `in_flight` at a time.

    Args:
        entry: the catalog entry of the model.
        folder: the folder of its GGUF file.
    """
    return asyncio.run(_ask(entry, folder, prompts, in_flight))


async def _ask(
    entry: Model, folder: Path, prompts: Sequence[PreparedPrompt], in_flight: int
) -> list[TimedGeneration]:
    threads = len(os.sched_getaffinity(0))
    key = secrets.token_urlsafe()
    settings = settings_of(entry, folder, threads)
    server = await EngineProcess.start(settings, key, threads, START_LIMIT_S)
    try:
        await _call(server, 0, iter(prompts[:1]))
        waiting = iter(prompts)
        async with asyncio.TaskGroup() as callers:
            calls = [callers.create_task(_call(server, slot, waiting)) for slot in range(in_flight)]
    finally:
        await server.end()
    return [timed for call in calls for timed in call.result()]


async def _call(
    server: EngineProcess, slot: int, waiting: Iterator[PreparedPrompt]
) -> list[TimedGeneration]:
    """Asks for one text after the other, all of one slot."""
    texts = []
    for prompt in waiting:
        timed = TimedGeneration(time.monotonic())
        ids = np.frombuffer(prompt.ids, IDS).tolist()
        order = Asked(ids, slot, keeps=False, tokens=prompt.max_tokens, is_streamed=True)
        async with server.post(PATH, request_of(prompt, order)) as response:
            async for data in read_events(response):
                reply = decode_reply(data)
                if reply.tokens and reply.prompt_progress is None:
                    timed.pieces_s.append(time.monotonic())
                timed.tokens = max(timed.tokens, reply.tokens_predicted)
        texts.append(timed)
    return texts
