"""Readers of streamed texts that stop reading, or leave: they hold nobody up, and leave nothing."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis

from shared.stores.token_streams import TokenStreams
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.api.test_text import chat, events_of, parsed, said
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
TOKENS = 64
COUNT = [{"role": "user", "content": "count"}]
COUNTED = "".join(f"3-{number} " for number in range(TOKENS))
LEAVING = 100


@pytest.fixture
async def api(redis_url: str, tmp_path: Path) -> AsyncIterator[ApiUnderTest]:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        yield api


class SlowReader:
    """A client by ASGI that takes the start of an answer, and nothing more until `reads`."""

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


async def test_a_reader_that_stops_holds_up_nobody_and_gets_all_later(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_to: dict[str, int] = {}
    read = TokenStreams.read

    async def noted(self: TokenStreams, wanted: Any) -> Any:
        found = await read(self, wanted)
        for (record, _, end), tokens in zip(wanted, found, strict=True):
            news = tokens.chunks[-1].end if tokens.chunks else end
            read_to[record] = max(read_to.get(record, 0), news)
        return found

    monkeypatch.setattr(TokenStreams, "read", noted)
    api.worker.written = asyncio.Semaphore(1)
    slow = SlowReader(api, chat(messages=COUNT, seed=3, max_tokens=TOKENS, stream=True))
    async with asyncio.timeout(WAIT_LIMIT_S):
        await slow.stopped.wait()
    api.worker.written.release()
    async with asyncio.timeout(WAIT_LIMIT_S):
        while [*read_to.values()] != [2]:  # noqa: ASYNC110 - there is no event of it
            await asyncio.sleep(0.01)
    (record,) = read_to
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
    assert read_to[record] == 2, "what it does not take is left in Redis"
    slow.reads.set()
    async with asyncio.timeout(WAIT_LIMIT_S):
        await slow.call
    assert said(parsed(slow.got.decode())) == COUNTED
    assert parsed(slow.got.decode())[-1]["data"] == "[DONE]"


async def test_readers_that_leave_leave_nothing_behind(
    api: ApiUnderTest, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text is canceled, as nobody comes back to read it, and every key runs out."""

    async def nobody(self: TokenStreams, record: str) -> bool:
        return False

    monkeypatch.setattr("api.predictions.text_stream.LEFT_S", 0.0)
    monkeypatch.setattr(TokenStreams, "is_read", nobody)
    api.worker.written = asyncio.Semaphore(0)
    before = len(asyncio.all_tasks())

    async def leave() -> None:
        given: dict[str, Any] = {"json": chat(messages=COUNT, max_tokens=TOKENS, stream=True)}
        async with api.http.stream("POST", "/v1/chat/completions", **given) as answer:
            api.worker.written.release()
            async for _ in answer.aiter_text():
                return

    await asyncio.gather(*(leave() for _ in range(LEAVING)))
    async with asyncio.timeout(WAIT_LIMIT_S):
        while await statuses(api) != {"canceled": LEAVING}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for _ in range(TOKENS * LEAVING):
        api.worker.written.release()
    async with asyncio.timeout(WAIT_LIMIT_S):
        while len(asyncio.all_tasks()) > before + 4:  # noqa: ASYNC110 - there is no event of it
            await asyncio.sleep(0.01)
    with redis.Redis.from_url(redis_url) as client:
        keys = [*client.scan_iter(match="*tokens:*"), *client.scan_iter(match="*reader:*")]
        assert [key for key in keys if client.ttl(key) == -1] == []


async def statuses(api: ApiUnderTest) -> Counter[str]:
    """How many predictions there are in each state."""
    url, found = "/v1/predictions", Counter[str]()
    while url:
        page = (await api.http.get(url)).json()
        found.update(one["status"] for one in page["results"])
        url = page["next"]
    return found
