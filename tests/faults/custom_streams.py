"""Readers of a custom model's streams, while API instances and workers are killed in turn.

A class whose process is killed starts over. If it yields the same pieces again, each reader gets
only the pieces it lacks; otherwise its stream ends with `stream_lost`. Readers also hang up midway
and resume after their last event at the other instance.

To run it in full: `python -m tests.faults.custom_streams`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp

from tests.faults.streams import PAUSE_S, SILENCE_LIMIT_S, STREAM_LIMIT_S, Kill, kill_in_turn
from tests.faults.world import APIS, WORKERS, World
from workers.models.custom.checking import inspect_folder, write_interface

MODEL = "counts"
AT_A_TIME = 16
"""Number of predictions that a worker runs at once."""
HANG_UP_SHARE = 0.05
"""Fraction of events after which the reader hangs up."""
OTHER_SHARE = 0.2
"""Fraction of streams whose class yields different pieces when it starts over."""
BURST = 3
"""Number of elements yielded at once, so that one event carries several."""
FLAWS_SHOWN = 20
TURNS = (
    APIS[0],
    WORKERS[0],
    f"class of {WORKERS[1]}",
    APIS[1],
    WORKERS[1],
    f"model of {WORKERS[0]}",
)
"""The processes to kill, in this order."""
CLASS = f"""
import asyncio, os, time
from typing import AsyncIterator
from cog import BasePredictor, Input


class Predictor(BasePredictor):
    async def predict(
        self, stream: int, items: int, pause_s: float, kind: str = Input(choices=["same", "other"])
    ) -> AsyncIterator[dict]:
        mark = 0 if kind == "same" else f"{{os.getpid()}} {{time.time_ns()}}"
        for number in range(items):
            if number % {BURST} == 0:
                await asyncio.sleep({BURST} * pause_s)
            text = "line\\n" * (number % 3)
            yield {{"stream": stream, "item": number, "mark": mark, "text": text}}
"""


def write_model(folder: Path) -> str:
    """Writes the class. Returns a catalog that serves it."""
    folder.mkdir()
    (folder / "predict.py").write_text(CLASS)
    (folder / "cog.yaml").write_text(f"concurrency: {{max: {AT_A_TIME}}}\n")
    write_interface(folder, inspect_folder(folder).interface)
    entry = {
        "name": MODEL,
        "task": "custom",
        "source": f"local:{folder}",
        "batch": {"max_items": AT_A_TIME},
        "deadline": {"default_s": 240, "longest_s": 300},
    }
    return json.dumps({"models": [entry]})


@dataclass
class CustomStream:
    """A stream as its reader received it."""

    number: int
    kind: str
    items: list[Any] = field(default_factory=list)
    event_ids: list[str] = field(default_factory=list)
    prediction: str = ""
    connections: int = 0
    ended: str = ""
    """`complete`, or the reason it failed."""
    output: list[Any] | None = None
    """The prediction's output, once it has finished."""
    status: str = ""

    def flaw(self, items: int) -> str:
        """The stream's flaw. Empty if there is none."""
        numbers = [one["item"] for one in self.items]
        if numbers != list(range(len(numbers))):
            return f"items {numbers}: twice, out of order or missing"
        if not self.ended:
            return f"no end after {STREAM_LIMIT_S:g} s and {len(numbers)} items"
        if self.ended != "complete":
            return "" if self._may_fail() else f"failed: {self.ended}"
        if len(numbers) != items or self.items != self.output:
            return f"complete with {len(numbers)} items, not those of the output"
        return ""

    def _may_fail(self) -> bool:
        """True if this failure is expected. A stream whose class yields different pieces may be
        lost, but its prediction must succeed.
        """
        if self.kind == "other" and self.ended == CHANGED:
            return self.status == "succeeded"
        return self.status == "failed" and CRASHED in self.ended


CHANGED = "the completion has changed since it was streamed; fetch it again"
CRASHED = "died"


@dataclass
class CustomFindings:
    """The results of all streams."""

    streams: list[CustomStream]
    kills: list[Kill]
    items: int
    took_s: float

    def flaws(self) -> list[str]:
        return [
            f"stream {one.number} ({one.kind}, {one.prediction}): {flaw}"
            for one in self.streams
            if (flaw := one.flaw(self.items))
        ]

    def table(self) -> Counter[str]:
        return Counter(f"{one.kind}: {one.ended or 'no end'}" for one in self.streams)


class CustomReaders:
    """Callers that read streams.

    Args:
        pause_s: average seconds between two items.
        seed: determines when readers hang up, and which kind each stream is.
    """

    def __init__(
        self, world: World, *, items: int, pause_s: float, in_flight: int, seed: int = 1
    ) -> None:
        self._urls = [world.url(api) for api in APIS]
        self._items = items
        self._pause_s = pause_s
        self._in_flight = in_flight
        self._random = random.Random(seed)
        self._next = itertools.count()
        self.read: list[CustomStream] = []

    async def run(self, streams: int, goes_on: Callable[[], bool]) -> None:
        """Reads until `streams` streams are read, and for as long as `goes_on` returns true."""
        timeout = aiohttp.ClientTimeout(sock_connect=5.0, sock_read=SILENCE_LIMIT_S)
        connector = aiohttp.TCPConnector(limit=2 * self._in_flight)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as self._http,
            asyncio.TaskGroup() as callers,
        ):
            for _ in range(self._in_flight):
                callers.create_task(self._call(streams, goes_on))

    async def _call(self, streams: int, goes_on: Callable[[], bool]) -> None:
        while len(self.read) < streams or goes_on():
            kind = "other" if self._random.random() < OTHER_SHARE else "same"
            stream = CustomStream(len(self.read), kind)
            self.read.append(stream)
            try:
                async with asyncio.timeout(STREAM_LIMIT_S):
                    await self._create(stream)
                    while not stream.ended:
                        await self._read(stream)
                    await self._look(stream)
            except TimeoutError:
                continue  # it never finished, which is a flaw

    def _url(self) -> str:
        return self._urls[next(self._next) % len(self._urls)]

    async def _create(self, stream: CustomStream) -> None:
        given = {
            "stream": stream.number,
            "items": self._items,
            "pause_s": self._pause_s,
            "kind": stream.kind,
        }
        body = {"version": MODEL, "input": given}
        headers = {"idempotency-key": str(uuid4())}
        found = await self._insist("POST", "/v1/predictions", json=body, headers=headers)
        stream.prediction = found["id"]

    async def _look(self, stream: CustomStream) -> None:
        """Reads the prediction once it has finished. An error in the stream may come before
        that.
        """
        while True:
            found = await self._insist("GET", f"/v1/predictions/{stream.prediction}")
            if found["status"] in ("succeeded", "failed", "canceled"):
                stream.status, stream.output = found["status"], found["output"]
                return
            await asyncio.sleep(PAUSE_S)

    async def _insist(self, method: str, path: str, **given: Any) -> Any:
        while True:
            try:
                async with self._http.request(method, self._url() + path, **given) as answer:
                    if answer.status < 300:
                        return await answer.json()
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(PAUSE_S)

    async def _read(self, stream: CustomStream) -> None:
        """Resumes after the last event and reads until the stream or the connection ends."""
        stream.connections += 1
        headers = {"last-event-id": stream.event_ids[-1]} if stream.event_ids else {}
        url = f"{self._url()}/v1/predictions/{stream.prediction}/stream"
        async with aclosing(self._events(url, headers)) as events:
            async for name, event_id, data in events:
                if event_id:
                    stream.event_ids.append(event_id)
                if name == "output":
                    stream.items.append(json.loads(data))
                elif name == "error":
                    stream.ended = json.loads(data)["detail"]
                elif name == "done":
                    stream.ended = stream.ended or "complete"
                if stream.ended and name == "done":
                    return
                if not stream.ended and self._random.random() < HANG_UP_SHARE:
                    return

    async def _events(
        self, url: str, headers: dict[str, str]
    ) -> AsyncGenerator[tuple[str, str, str]]:
        """Yields each event's name, id and data until the connection ends."""
        try:
            async with self._http.get(url, headers=headers) as answer:
                if answer.status != 200:
                    await asyncio.sleep(PAUSE_S)
                    return
                event: dict[str, str] = {}
                async for raw in answer.content:
                    name, _, value = raw.decode().rstrip("\n").partition(": ")
                    if name:
                        event[name] = f"{event[name]}\n{value}" if name in event else value
                    elif "event" in event:
                        yield event["event"], event.get("id", ""), event["data"]
                        event = {}
        except (aiohttp.ClientError, TimeoutError):
            await asyncio.sleep(0)


def run(
    folder: Path,
    *,
    streams: int,
    kills: int,
    every_s: float,
    items: int,
    pause_s: float,
    in_flight: int,
    say: Callable[[str], None],
) -> CustomFindings:
    """Reads streams while parts of the pipeline are killed.

    Args:
        folder: receives the state and logs of all parts.
        streams: minimum number of streams; readers continue until all kills are done.
        kills: number of kills, in the order of TURNS; 0 means killing until all streams end.
        pause_s: average seconds between two items.
        say: called with a line for each kill.
    """
    began_s = time.monotonic()
    with World(folder, served=(MODEL, write_model(folder / "model"))) as world:
        say(f"all parts ready after {time.monotonic() - began_s:.1f} s")
        began_s = time.monotonic()
        readers = CustomReaders(world, items=items, pause_s=pause_s, in_flight=in_flight)
        done = asyncio.run(_read_while_killing(readers, world, streams, kills, every_s, say))
    return CustomFindings(readers.read, done, items, time.monotonic() - began_s)


async def _read_while_killing(
    readers: CustomReaders,
    world: World,
    streams: int,
    kills: int,
    every_s: float,
    say: Callable[[str], None],
) -> list[Kill]:
    is_read = asyncio.Event()
    killing = asyncio.create_task(
        kill_in_turn(world, kills or sys.maxsize, every_s, say, TURNS, lambda: not is_read.is_set())
    )
    await readers.run(streams, lambda: bool(kills) and not killing.done())
    is_read.set()
    return await killing


def main() -> int:
    """Does the full run. Returns 0 if nothing was lost, duplicated or unexplained."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.custom_streams")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--every-s", type=float, default=10.0)
    parser.add_argument("--items", type=int, default=60)
    parser.add_argument("--pause-s", type=float, default=0.1)
    parser.add_argument("--in-flight", type=int, default=24)
    parser.add_argument("--folder", type=Path, help="keeps state and logs here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-streams-") as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = run(
            folder,
            streams=given.streams,
            kills=0,
            every_s=given.every_s,
            items=given.items,
            pause_s=given.pause_s,
            in_flight=given.in_flight,
            say=lambda line: print(line, flush=True),
        )
    print(f"\n  kills: {dict(Counter(one.target for one in found.kills))}")
    print(f"  connections: {sum(one.connections for one in found.streams)}")
    for name, count in sorted(found.table().items()):
        print(f"  {count:5} {name}")
    print(f"  {found.took_s:.0f} s")
    for flaw in found.flaws()[:FLAWS_SHOWN]:
        print(f"  {flaw}")
    return 1 if found.flaws() else 0


if __name__ == "__main__":
    sys.exit(main())
