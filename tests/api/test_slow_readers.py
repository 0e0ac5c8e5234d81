"""Readers of streamed texts that stop reading or leave: they hold up no other reader and leave
nothing behind.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from prometheus_client import REGISTRY

from shared.models.catalog import Catalog
from shared.models.entry import Generation
from shared.stores.token_streams import TokenStreams
from tests.api.harness import (
    WRITER,
    ApiUnderTest,
    PromptServer,
    api_with_redis,
    running_api,
    settings_for,
)
from tests.api.test_generation import chat, events_of, parsed, said
from tests.limits import WAIT_LIMIT_S

pytestmark = [pytest.mark.slow(about_s=5), pytest.mark.anyio]
TOKENS = 64
COUNT = [{"role": "user", "content": "count"}]
COUNTED = "".join(f"3-{number} " for number in range(TOKENS))
ROOM_BYTES = 64 * 1024
"""The size of a segment on the loopback interface. With less buffer space, the kernel sends in
bursts 0.2 s apart.
"""
LONG_TOKENS, STEP_TOKENS = 1000, 50
"""Several times the buffer space between the API and a reader, including log probabilities."""
LEAVING, PATIENT = 200, 20
"""Number of readers that disconnect at once, and how many of them wait for a token first."""
KEY_S = 600
"""Longer than the test takes, so that no key expires before it is checked."""


api = api_with_redis()


class RoomlessServer(PromptServer):
    """Makes the kernel buffer only a few bytes for a caller that does not read; by default it
    buffers a few megabytes.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listening in server.sockets:  # connections inherit it
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM_BYTES)


@pytest.fixture
async def roomy(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ApiUnderTest]:
    """An API with room for all the readers that disconnect at once, and for long texts.

    Its responses start before there are any tokens.
    """
    monkeypatch.setattr("api.predictions.generation_stream.FIRST_EVENT_S", 0.0)
    monkeypatch.setattr("api.predictions.generation_stream.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("tests.api.harness.PromptServer", RoomlessServer)
    room = {"max_in_flight": 2 * LEAVING}
    settings = settings_for(tmp_path, redis_url=redis_url, **room)
    size = {"generation": Generation(context_tokens=10_000, longest_tokens=LONG_TOKENS)}
    catalog = Catalog((WRITER.model_copy(update=room | size),))
    async with running_api(settings, catalog=catalog) as api:
        yield api


class SlowReader:
    """An ASGI client that receives the start of a response, and nothing more until `reads`."""

    def __init__(self, api: ApiUnderTest, body: dict[str, Any]) -> None:
        self._body = json.dumps(body).encode()
        self.reads = asyncio.Event()
        self.stopped = asyncio.Event()
        self.got = b""
        self._has_sent = False
        self.call = asyncio.create_task(api.app(_scope(), self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._has_sent:
            await asyncio.Event().wait()  # it stays connected
        self._has_sent = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: Any) -> None:
        self.got += message.get("body", b"")
        if self.got:
            self.stopped.set()
            await self.reads.wait()


def _scope() -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
        "extensions": {},
    }


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The position after each read that returned tokens, keyed by record."""
    found: dict[str, list[int]] = defaultdict(list)
    read = TokenStreams.read

    async def noted(self: TokenStreams, wanted: Any) -> Any:
        answers = await read(self, wanted)
        for (record, _, _), tokens in zip(wanted, answers, strict=True):
            if tokens.chunks:
                found[record].append(tokens.chunks[-1].end)
        return answers

    monkeypatch.setattr(TokenStreams, "read", noted)
    return found


async def test_a_reader_that_stops_holds_up_nobody_and_gets_all_later(
    api: ApiUnderTest, reads: dict[str, list[int]]
) -> None:
    api.worker.written = asyncio.Semaphore(1)
    slow = SlowReader(api, chat(messages=COUNT, seed=3, max_tokens=TOKENS, stream=True))
    async with asyncio.timeout(WAIT_LIMIT_S):
        await slow.stopped.wait()
    api.worker.written.release()
    async with asyncio.timeout(WAIT_LIMIT_S):
        while [ends[-1] for ends in reads.values()] != [2]:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
    (record,) = reads
    for _ in range(10 * TOKENS):
        api.worker.written.release()
    others = await asyncio.gather(
        *(
            events_of(
                api,
                "POST",
                "/v1/chat/completions",
                json=chat(messages=COUNT, seed=3, max_tokens=TOKENS, stream=True),
            )
            for _ in range(4)
        )
    )
    assert [said(events) for events in others] == [COUNTED] * 4
    assert reads[record][-1] == 2, "what it does not take is left in Redis"
    slow.reads.set()
    async with asyncio.timeout(WAIT_LIMIT_S):
        await slow.call
    assert said(parsed(slow.got.decode())) == COUNTED
    assert parsed(slow.got.decode())[-1]["data"] == "[DONE]"


async def test_what_a_socket_does_not_take_is_not_read_for_it(
    roomy: ApiUnderTest, reads: dict[str, list[int]]
) -> None:
    """The kernel has some buffer space. The API buffers one read and no more."""
    roomy.worker.written = asyncio.Semaphore(0)
    asked = chat(
        messages=COUNT, max_tokens=LONG_TOKENS, stream=True, logprobs=True, top_logprobs=20
    )
    little_room = (socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM_BYTES)
    small = httpx.AsyncHTTPTransport(socket_options=[little_room])
    async with (
        asyncio.timeout(WAIT_LIMIT_S),
        httpx.AsyncClient(base_url=roomy.url, timeout=WAIT_LIMIT_S, transport=small) as http,
        http.stream("POST", "/v1/chat/completions", json=asked) as answer,
    ):
        await write_until_unread(roomy, reads)
        (record,) = reads
        before = len(reads[record])
        for _ in range(LONG_TOKENS + TOKENS):
            roomy.worker.written.release()
        while await statuses(roomy) != {"succeeded": 1}:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        other = chat(messages=COUNT, seed=3, max_tokens=TOKENS, stream=True)
        events = await events_of(roomy, "POST", "/v1/chat/completions", json=other)
        assert said(events) == COUNTED
        assert unread() == 1
        assert len(reads[record]) <= before + 1, "one more may wait until there is room"
        text = (await answer.aread()).decode()
    assert len(said(parsed(text)).split()) == LONG_TOKENS


async def write_until_unread(api: ApiUnderTest, reads: dict[str, list[int]]) -> None:
    """Lets the worker generate, each part once the previous one was read, until a response is
    stuck.
    """
    for written in range(STEP_TOKENS, LONG_TOKENS, STEP_TOKENS):
        for _ in range(STEP_TOKENS):
            api.worker.written.release()
        while [ends[-1] for ends in reads.values()] != [written]:
            if unread():
                return
            await asyncio.sleep(0.01)


async def test_readers_that_leave_leave_nothing_behind(
    roomy: ApiUnderTest, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text is canceled, because its reader will not return, and every key expires."""

    async def nobody(self: TokenStreams, record: str) -> bool:
        return False

    monkeypatch.setattr("api.predictions.generation_stream.LEFT_S", 0.0)
    # Tokens are generated only after the response has started.
    monkeypatch.setattr("api.predictions.generation_stream.FIRST_EVENT_S", 0.05)
    monkeypatch.setattr(TokenStreams, "is_read", nobody)
    monkeypatch.setattr("shared.stores.token_streams.READER_S", KEY_S)
    api = roomy
    api.worker.written = asyncio.Semaphore(0)
    before = len(asyncio.all_tasks())

    async def leave(http: httpx.AsyncClient, *, is_patient: bool) -> None:
        # Too long to finish before its reader disconnects.
        body = chat(messages=COUNT, max_tokens=LONG_TOKENS, stream=True)
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            async for text in answer.aiter_text():
                if not is_patient or "data:" in text:
                    return
                # The token goes to the text that has waited longest. With each heartbeat, another
                # text gets one, until it is this text's turn.
                api.worker.written.release()

    all_at_once = httpx.Limits(max_connections=LEAVING)
    async with httpx.AsyncClient(
        base_url=api.url, timeout=WAIT_LIMIT_S, limits=all_at_once
    ) as http:
        await asyncio.gather(
            *(leave(http, is_patient=number < PATIENT) for number in range(LEAVING))
        )
    async with asyncio.timeout(WAIT_LIMIT_S):
        while await statuses(api) != {"canceled": LEAVING}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for _ in range(LEAVING):
        api.worker.written.release()
    async with asyncio.timeout(WAIT_LIMIT_S):
        while len(asyncio.all_tasks()) > before + 4:  # noqa: ASYNC110 - there is no event of it
            await asyncio.sleep(0.01)
    with redis.Redis.from_url(redis_url) as client:
        keys = {kind: [*client.scan_iter(match=f"*{kind}:*")] for kind in ("tokens", "reader")}
        # Of the clients that disconnected at a heartbeat, some had tokens and were marked as
        # readers, and some weren't.
        assert all(PATIENT <= len(found) <= LEAVING for found in keys.values()), keys
        assert [key for found in keys.values() for key in found if client.ttl(key) == -1] == []


def unread() -> float:
    """How many of this process's connections have a response that the caller does not read."""
    return REGISTRY.get_sample_value("penstock_api_connections_unread") or 0.0


async def statuses(api: ApiUnderTest) -> Counter[str]:
    """The number of predictions in each state."""
    url, found = "/v1/predictions", Counter[str]()
    while url:
        page = (await api.http.get(url)).json()
        found.update(one["status"] for one in page["results"])
        url = page["next"]
    return found
