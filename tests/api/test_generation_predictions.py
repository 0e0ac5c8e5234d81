"""Predictions from text models, as Replicate's client streams them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from replicate.client import Client

from tests.api.harness import ApiUnderTest, api_with_redis, running_api, settings_for
from tests.api.test_generation import parsed
from tests.keys import bearer, keys_url
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
TEXT = "the mill\nturns  all\n\nnight"


api = api_with_redis(secret="s")


@pytest.fixture
async def client(api: ApiUnderTest) -> AsyncIterator[Any]:
    """Untyped, so that tests can inspect raw output."""
    made = Client(api_token="any", base_url=api.url)
    yield made
    await made._async_client.aclose()
    made._client.close()


async def create(client: Any, **given: Any) -> Any:
    given = given or {"prompt": f"say {TEXT}"}
    return await client.models.predictions.async_create("any/writer", input=given)


async def test_tokens_come_as_they_are_written(api: ApiUnderTest, client: Any) -> None:
    api.worker.written = asyncio.Semaphore(0)
    created = await create(client)
    got = ""
    async with asyncio.timeout(WAIT_LIMIT_S):
        api.worker.written.release()
        async for event in created.async_stream():
            assert event.event.value == ("output" if got != TEXT else "done")
            got += str(event)
            api.worker.written.release()
    assert got == TEXT
    await created.async_wait()
    assert created.output == TEXT


async def test_run_gives_the_text(client: Any) -> None:
    messages = [{"role": "user", "content": "say good night"}]
    assert await client.async_run("any/writer", input={"messages": messages}) == "good night"


async def test_a_stream_goes_on_behind_any_event(
    api: ApiUnderTest, client: Any, redis_url: str, tmp_path: Path
) -> None:
    created = await create(client)
    path = f"/v1/predictions/{created.id}/stream"
    events = parsed((await api.http.get(path)).text)
    assert [one["event"] for one in events] == ["output"] * 5 + ["done"]
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s")
    others: dict[str, Any] = {"transport": api.broker, "admin": api.broker, "worker": api.worker}
    async with running_api(settings, **others) as other:
        for at, event in enumerate(events[:-1]):
            rest = await other.http.get(path, headers={"last-event-id": event["id"]})
            assert parsed(rest.text) == events[at + 1 :]


async def test_a_text_has_no_line_end_that_a_reader_would_lose(client: Any) -> None:
    created = await create(client, prompt="say a\u2028b\x0bc\x85d\x1ce\r\nf\n")
    got = "".join([str(event) async for event in created.async_stream()])
    assert got.split("\n") == ["a", "b", "c", "d", "e", "f", ""]


async def test_a_failure_ends_the_stream_with_its_error(client: Any) -> None:
    created = await create(client, prompt="broken")
    with pytest.raises(RuntimeError, match="breaks the model"):
        async for _ in created.async_stream():
            pass


async def test_a_canceled_text_ends_its_stream(api: ApiUnderTest, client: Any) -> None:
    api.worker.written = asyncio.Semaphore(2)
    created = await create(client)
    events = []
    async with asyncio.timeout(WAIT_LIMIT_S):
        async for event in created.async_stream():
            events.append(event)
            if len(events) == 2:
                await created.async_cancel()
    assert [event.event.value for event in events] == ["output", "output", "done"]
    assert events[-1].data == '{"reason":"canceled"}'


async def test_an_id_of_no_event_is_refused(api: ApiUnderTest, client: Any) -> None:
    created = await create(client)
    headers = {"last-event-id": "nonsense"}
    answer = await api.http.get(f"/v1/predictions/{created.id}/stream", headers=headers)
    assert answer.status_code == 422
    assert "Last-Event-ID" in answer.json()["detail"]


async def test_another_tenant_neither_reads_nor_cancels(redis_url: str, tmp_path: Path) -> None:
    keys = keys_url(tmp_path, ours="a", theirs="b")
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s", keys_url=keys)
    async with running_api(settings) as api:
        body = {"version": "writer", "input": {"prompt": "say a"}}
        made = await api.http.post("/v1/predictions", json=body, headers=bearer("ours"))
        path = f"/v1/predictions/{made.json()['id']}"
        stream = await api.http.get(f"{path}/stream", headers=bearer("theirs"))
        cancel = await api.http.post(f"{path}/cancel", headers=bearer("theirs"))
        assert [stream.status_code, cancel.status_code] == [404, 404]
