"""Readers of streamed texts, each of which resumes after the last event it received.

Meanwhile, API instances and workers are killed in turn. Afterward, each text is compared with the
same text generated without faults.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

import aiohttp

from tests.faults.world import APIS, WORKERS, World
from workers.models.custom.runner.confinement import NAME as CLASS_NAME
from workers.models.engines import program
from workers.runtime.template import MODEL_PROCESS_NAME

PROMPTS = 32
STREAM_LIMIT_S = 240.0
"""A stream that hasn't finished by then is considered lost."""
SILENCE_LIMIT_S = 25.0
"""Comments keep a stream open, so a stream without any is dead."""
PAUSE_S = 0.1
"""Pause between two attempts to reach an instance."""
TURNS = (APIS[0], WORKERS[0], APIS[1], WORKERS[1])
"""The processes to kill, in this order."""
PROCESS_NAMES = {
    "model": MODEL_PROCESS_NAME,
    "class": CLASS_NAME.decode(),
    "engine": program.NAME,
}


@dataclass
class Stream:
    """A text as a reader received it."""

    number: int
    text: str = ""
    events: list[tuple[float, str]] = field(default_factory=list)
    """When each event arrived (monotonic seconds), and which instance it came from."""
    places: list[tuple[int, ...]] = field(default_factory=list)
    """Each event's position in the text; positions must increase."""
    resumes: int = 0
    flaw: str = ""

    def gap_s(self, kill: Kill) -> float | None:
        """How long the reader waited for the next event after a kill. None: the reader was not
        affected.
        """
        before = [one for one in self.events if one[0] <= kill.at_s]
        after = [at_s for at_s, _ in self.events if at_s > kill.at_s]
        if not before or not after or (kill.target in APIS and before[-1][1] != kill.target):
            return None
        return after[0] - kill.at_s


@dataclass(frozen=True)
class Kill:
    """The process that was killed, and the time of the kill (monotonic seconds)."""

    target: str
    at_s: float


@dataclass
class StreamFindings:
    """The results of all streams."""

    streams: list[Stream]
    kills: list[Kill]
    differing: list[str]

    def flaws(self) -> list[str]:
        found = [f"stream {one.number}: {one.flaw}" for one in self.streams if one.flaw]
        for one in self.streams:
            if any(place >= later for place, later in itertools.pairwise(one.places)):
                found.append(f"stream {one.number}: an event came again or out of order")
        return found + self.differing

    def resumes_s(self, targets: Sequence[str]) -> list[float]:
        """The longest wait after each kill of `targets` that affected a reader."""
        found = []
        for kill in self.kills:
            gaps = [gap for one in self.streams if (gap := one.gap_s(kill)) is not None]
            if kill.target in targets and gaps:
                found.append(max(gaps))
        return found


class StreamReaders:
    """Callers that read one model's texts."""

    def __init__(self, world: World, model: str, *, tokens: int, in_flight: int) -> None:
        self._urls = {api: world.url(api) for api in APIS}
        self._model = model
        self._tokens = tokens
        self._in_flight = in_flight
        self._next = itertools.count()
        self._numbers = itertools.count()
        self._expected: list[str] = []
        self.read: list[Stream] = []

    async def run(self, streams: int, goes_on: Callable[[], bool]) -> list[str]:
        """Reads at least `streams` texts, and more for as long as `goes_on` returns true.

        Returns a message for each text that differs from the expected one.
        """
        timeout = aiohttp.ClientTimeout(sock_connect=5.0, sock_read=SILENCE_LIMIT_S)
        connector = aiohttp.TCPConnector(limit=2 * self._in_flight)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._http:
            if not self._expected:
                self._expected = await asyncio.gather(*map(self._undisturbed, range(PROMPTS)))
            async with asyncio.TaskGroup() as callers:
                for _ in range(self._in_flight):
                    callers.create_task(self._call(streams, goes_on))
        return [
            f"stream {one.number}: {one.text!r} is not {expected!r}"
            for one in self.read
            if not one.flaw and one.text != (expected := self._expected[one.number % PROMPTS])
        ]

    async def _undisturbed(self, number: int) -> str:
        url = f"{self._urls[APIS[0]]}/v1/chat/completions"
        # Unlike a stream, it returns nothing until it is finished.
        limit = aiohttp.ClientTimeout(STREAM_LIMIT_S)
        body = self._chat(number, stream=False)
        async with self._http.post(url, json=body, timeout=limit) as answer:
            found: str = (await answer.json())["choices"][0]["message"]["content"]
            return found

    def _chat(self, number: int, *, stream: bool) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": _question(number)}],
            "temperature": 0,
            "max_tokens": self._tokens,
            "stream": stream,
        }

    async def _call(self, streams: int, goes_on: Callable[[], bool]) -> None:
        while len(self.read) < streams or goes_on():
            stream = Stream(next(self._numbers))
            self.read.append(stream)
            read = self._read_chat if stream.number % 2 else self._read_response
            try:
                async with asyncio.timeout(STREAM_LIMIT_S):
                    await read(stream)
            except TimeoutError:
                stream.flaw = f"no end after {STREAM_LIMIT_S:g} s and {len(stream.events)} events"

    async def _read_chat(self, stream: Stream) -> None:
        """Repeats the request, with the same key and the last event's id."""
        key, last_id, body = str(uuid4()), "", self._chat(stream.number, stream=True)
        while True:
            headers = {"idempotency-key": key, "cache-control": "no-store"}
            if last_id:
                headers["last-event-id"] = last_id
            request = partial(self._http.post, json=body, headers=headers)
            async with aclosing(self._events(stream, request, "/v1/chat/completions")) as events:
                async for event_id, data in events:
                    if data == "[DONE]":
                        return
                    told = json.loads(data)
                    if "error" in told:
                        stream.flaw = str(told["error"])
                        return
                    last_id = event_id
                    stream.places.append(_place(event_id))
                    stream.text += told["choices"][0]["delta"].get("content") or ""

    async def _read_response(self, stream: Stream) -> None:
        """Reads the stored response, starting after the last event's sequence number."""
        body = {
            "model": self._model,
            "input": _question(stream.number),
            "temperature": 0,
            "max_output_tokens": self._tokens,
            "stream": True,
        }
        headers = {"idempotency-key": str(uuid4()), "cache-control": "no-store"}
        request, path = partial(self._http.post, json=body, headers=headers), "/v1/responses"
        while True:
            async with aclosing(self._events(stream, request, path)) as events:
                async for _, data in events:
                    told = json.loads(data)
                    if told["type"] in ("error", "response.failed"):
                        stream.flaw = data
                        return
                    stream.places.append((told["sequence_number"],))
                    if told["type"] == "response.created":
                        path = f"/v1/responses/{told['response']['id']}"
                    if told["type"] == "response.output_text.delta":
                        stream.text += told["delta"]
                    if told["type"] in ("response.completed", "response.incomplete"):
                        return
            if stream.places:
                after = {"stream": "true", "starting_after": str(stream.places[-1][0])}
                request = partial(self._http.get, params=after)

    async def _events(
        self, stream: Stream, request: Callable[[str], Any], path: str
    ) -> AsyncGenerator[tuple[str, str]]:
        """Yields each event's id and data until the connection ends."""
        api = APIS[next(self._next) % len(APIS)]
        try:
            async with request(self._urls[api] + path) as answer:
                if answer.status != 200:
                    await asyncio.sleep(PAUSE_S)
                    return
                event_id = ""
                async for raw in answer.content:
                    line = raw.decode().rstrip("\n")
                    if line.startswith("id: "):
                        event_id = line.removeprefix("id: ")
                    elif line.startswith("data: "):
                        stream.events.append((time.monotonic(), api))
                        yield event_id, line.removeprefix("data: ")
        except (aiohttp.ClientError, TimeoutError):
            await asyncio.sleep(0)
        finally:
            stream.resumes += 1


async def kill_in_turn(
    world: World,
    kills: int,
    every_s: float,
    say: Callable[[str], None],
    turns: Sequence[str] = TURNS,
    goes_on: Callable[[], bool] = lambda: True,
) -> list[Kill]:
    """Kills API instances and workers in turn and restarts each, for as long as `goes_on` returns
    true.

    A worker's `model of`, `class of`, and `engine of` are child processes that the worker restarts
    itself.
    """
    done: list[Kill] = []
    next_s = time.monotonic()
    for target in itertools.islice(itertools.cycle(turns), kills):
        next_s = max(time.monotonic(), next_s + every_s)
        await asyncio.sleep(next_s - time.monotonic())
        if not goes_on():
            break
        done.append(Kill(target, time.monotonic()))
        if (below := target.partition(" of "))[1]:
            world.kill_below(below[2], PROCESS_NAMES[below[0]])
            say(f"killed {target}")
            continue
        world.processes[target].kill()
        await asyncio.get_running_loop().run_in_executor(world.healer, _start, world, target)
        say(f"killed {target}, which serves again after {time.monotonic() - done[-1].at_s:.1f} s")
    return done


def _start(world: World, target: str) -> None:
    world.restart(target)
    world.wait_ready(target)


def _question(number: int) -> str:
    return f"Tell me about the number {number % PROMPTS}."


def _place(event_id: str) -> tuple[int, ...]:
    """Tokens, and parts of the end: `-`, `7`, `7f2`."""
    tokens, _, ended = event_id.partition("f")
    return (-1, 0) if tokens == "-" else (int(tokens), int(ended or 0))


async def read_while_killing(
    readers: StreamReaders,
    world: World,
    *,
    streams: int,
    kills: int,
    every_s: float,
    say: Callable[[str], None],
    turns: Sequence[str] = TURNS,
) -> StreamFindings:
    """Reads at least `streams` texts, and more until all kills are done.

    Args:
        world: the pipeline under test, whose parts are killed.
        streams: minimum number of texts to read.
        kills: number of kills, in the order of `turns`.
        say: called with a line for each kill.
    """
    await readers.run(0, lambda: False)  # the expected texts
    killing = asyncio.create_task(kill_in_turn(world, kills, every_s, say, turns))
    differing = await readers.run(streams, lambda: not killing.done())
    return StreamFindings(readers.read, await killing, differing)
