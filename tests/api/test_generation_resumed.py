"""Text streams resumed after any event: each piece arrives exactly once."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from shared.errors import Unavailable
from shared.stores.token_streams import TokenStreams
from tests.api.harness import ApiUnderTest, api_with_redis, running_api, settings_for
from tests.api.test_generation import TEXT, chat, events_of, parsed, said
from tests.keys import bearer, keys_url
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio


api = api_with_redis()


async def test_the_end_of_a_text_comes_behind_its_last_token_and_once(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker holds back text that may become a stop sequence, and has no token to send it
    with.
    """
    assert api.worker.stores is not None
    append = api.worker.stores.tokens.append

    async def short(written: Any) -> Any:
        chunk = written[0].chunk
        if chunk.end == 5:
            written = [written[0]._replace(chunk=structs.replace(chunk, text="ni"))]
        return await append(written)

    monkeypatch.setattr(api.worker.stores.tokens, "append", short)
    keyed = {"idempotency-key": "held"}
    body = chat(stream=True, stream_options={"include_usage": True})
    events = await events_of(api, "POST", "/v1/chat/completions", json=body, headers=keyed)
    assert said(events) == TEXT
    assert len({one["id"] for one in events}) == len(events) - 2, "usage and [DONE] come again"
    for at, event in enumerate(events[:-2]):
        headers = keyed | {"last-event-id": event["id"]}
        rest = await events_of(api, "POST", "/v1/chat/completions", json=body, headers=headers)
        assert rest == events[at + 1 :]


async def test_several_texts_go_on_behind_any_event(api: ApiUnderTest) -> None:
    """Each choice begins, is generated, and ends exactly once; choices can come in any order."""
    tool = {"type": "function", "function": {"name": "f"}}
    calls = '<tool_call>[{"name": "f"}, {"name": "f", "arguments": {}}]</tool_call> so'
    body = chat(
        messages=[{"role": "user", "content": f"say {calls}"}], tools=[tool], n=2, stream=True
    )
    keyed = {"idempotency-key": "two"}
    events = await events_of(api, "POST", "/v1/chat/completions", json=body, headers=keyed)

    def told(events: list[dict[str, str]]) -> list[list[Any]]:
        read = [json.loads(one["data"]) for one in events if one["data"] != "[DONE]"]
        return [
            [one["choices"][0] for one in read if one["choices"][0]["index"] == index]
            for index in range(2)
        ]

    assert [len(choice) for choice in told(events)] == [5, 5], "opening, rest, two calls, end"
    for at, event in enumerate(events[:-1]):
        headers = keyed | {"last-event-id": event["id"]}
        rest = await events_of(api, "POST", "/v1/chat/completions", json=body, headers=headers)
        both = zip(told(events[: at + 1]), told(rest), strict=True)
        assert [before + after for before, after in both] == told(events)


async def test_a_stream_waits_for_redis_and_ends_whole(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis stops responding after two tokens have been read. The rest is in the record."""
    read, asked = TokenStreams.read, asyncio.Event()

    async def away(self: TokenStreams, wanted: Any) -> Any:
        asked.set()
        raise Unavailable("Redis is away")

    api.worker.written = asyncio.Semaphore(2)
    given: dict[str, Any] = {"json": chat(stream=True)}
    async with api.http.stream("POST", "/v1/chat/completions", **given) as answer:
        got = ""
        async for piece in answer.aiter_text():
            got += piece
            if said(parsed(got)).split() == TEXT.split()[:2]:
                monkeypatch.setattr(TokenStreams, "read", away)
                async with asyncio.timeout(WAIT_LIMIT_S):
                    await asked.wait()
                for _ in TEXT.split():
                    api.worker.written.release()
                await ended(api)
                monkeypatch.setattr(TokenStreams, "read", read)
    events = parsed(got)
    assert said(events) == TEXT
    assert events[-1]["data"] == "[DONE]"


async def ended(api: ApiUnderTest) -> None:
    """Waits for the only prediction to finish."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            found = (await api.http.get("/v1/predictions")).json()["results"]
            if found[0]["status"] == "succeeded":
                return


async def test_streams_of_one_tenant_leave_room_for_another(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.predictions.generation_stream.MAX_STREAMS", 4)
    # Their responses begin without tokens.
    monkeypatch.setattr("api.predictions.generation_stream.FIRST_EVENT_S", 0.0)
    monkeypatch.setattr("api.predictions.generation_stream.HEARTBEAT_S", 0.05)
    keys = keys_url(tmp_path, ours="a", theirs="b")
    async with (
        running_api(settings_for(tmp_path, redis_url=redis_url, keys_url=keys)) as api,
        AsyncExitStack() as open_streams,
    ):
        api.worker.written = asyncio.Semaphore(0)
        statuses = []
        for name in ("ours",) * 6 + ("theirs",):
            answer = await open_streams.enter_async_context(
                api.http.stream(
                    "POST", "/v1/chat/completions", json=chat(stream=True), headers=bearer(name)
                )
            )
            statuses.append(answer.status_code)
        assert statuses.count(429) >= 2
        assert 429 in statuses[:-1]
        assert statuses[-1] == 200
