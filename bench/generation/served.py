"""Streamed chats over HTTP from any server that supports OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from bench.generation.prompts import MixedPrompt
from bench.generation.timing import TimedGeneration

LIMIT_S = 600.0


def drive(
    url: str,
    model: str,
    prompts: Sequence[MixedPrompt],
    in_flight: int,
    tokenizer: Tokenizer | None = None,
) -> list[TimedGeneration]:
    """Streams a text for each prompt, with `in_flight` at a time.

    Args:
        url: URL of the server, without a path.
        tokenizer: counts received tokens the same way for all servers. If None, the server's count
            is used.

    Raises:
        RuntimeError: a text did not arrive.
    """
    waiting, finished = iter(prompts), list[TimedGeneration]()

    async def call(http: aiohttp.ClientSession) -> None:
        for prompt in waiting:
            finished.append(await _stream(http, url, model, prompt, tokenizer))

    async def call_all() -> None:
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as callers:
            for _ in range(in_flight):
                callers.create_task(call(http))

    asyncio.run(call_all())
    return finished


async def _stream(
    http: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: MixedPrompt,
    tokenizer: Tokenizer | None,
) -> TimedGeneration:
    body: dict[str, Any] = {
        "model": model,
        "messages": prompt.messages,
        "max_tokens": prompt.tokens,
        "temperature": 0,
        "stream": True,
    }
    if tokenizer is None:
        body["stream_options"] = {"include_usage": True}
    text, timed = "", TimedGeneration(time.monotonic())
    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {(await answer.text())[:200]}")
        async for raw in answer.content:
            event = _event(raw)
            timed.tokens = (event.get("usage") or {}).get("completion_tokens", timed.tokens)
            choices = event.get("choices") or [{}]
            if piece := choices[0].get("delta", {}).get("content"):
                timed.pieces_s.append(time.monotonic())
                text += piece
    if not text:
        raise RuntimeError("a stream had no text")
    if tokenizer is not None:
        timed.tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    return timed


def _event(line: bytes) -> dict[str, Any]:
    return json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: {") else {}
