"""Streams of texts that go on behind any event: each piece once."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.api.test_text import TEXT, chat, events_of, said

pytestmark = pytest.mark.anyio


@pytest.fixture
async def api(redis_url: str, tmp_path: Path) -> AsyncIterator[ApiUnderTest]:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        yield api


async def test_the_end_of_a_text_comes_behind_its_last_token_and_once(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker holds back what may become a stop sequence, and has no token to send it with."""
    assert api.worker.records is not None
    append = api.worker.records.tokens.append

    async def short(written: Any) -> Any:
        chunk = written[0].chunk
        if chunk.end == 5:
            written = [written[0]._replace(chunk=structs.replace(chunk, text="ni"))]
        return await append(written)

    monkeypatch.setattr(api.worker.records.tokens, "append", short)
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
    """Each choice begins, is written and ends once, whatever the order that they came in."""
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
