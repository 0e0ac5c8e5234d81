"""When callers hang up as their jobs are being sent to the broker, workers are still notified."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import jobs_topic_id
from shared.errors import PenstockError, Unavailable
from tests.api.dispatcher_harness import ends, running_dispatcher
from tests.api.harness import TEXT_MODEL, ApiUnderTest, api_with_redis
from tests.api.test_generation import chat
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores

pytestmark = pytest.mark.anyio
api = api_with_redis()
LONG_DEADLINE_S = 3600.0
CHAT = ("/v1/chat/completions", chat(stream=True))
COMPLETION = ("/v1/completions", {"prompt": "say it", "stream": True})
MESSAGE = (
    "/v1/messages",
    {
        "model": "writer",
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "say it"}],
        "stream": True,
    },
)
RESPONSE = ("/v1/responses", {"input": "say it", "stream": True})


class UnconfirmingBroker(InMemoryBroker):
    """Delivers jobs but confirms none of them to their publisher.

    If `error` is set, publishing raises it.
    """

    def __init__(self, error: PenstockError | None = None) -> None:
        super().__init__()
        self._error = error

    async def publish(
        self, topic_id: str, data: bytes, attributes: Mapping[str, str], **options: Any
    ) -> str:
        message_id = await super().publish(topic_id, data, attributes, **options)
        if topic_id.startswith("jobs."):
            if self._error is not None:
                raise self._error
            await asyncio.Event().wait()
        return message_id


async def until_canceled(stores: RecordStores, record: str) -> None:
    with anyio.fail_after(WAIT_LIMIT_S):
        while (found := await stores.records.read(record)) is None or found.state != "canceled":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_job_is_canceled_if_its_caller_leaves_while_it_is_published(
    tmp_path: Path, redis_url: str
) -> None:
    broker = UnconfirmingBroker()
    async with running_dispatcher(tmp_path, redis_url=redis_url, transport=broker) as harness:
        harness.worker.go.clear()
        ask = harness.ask("a", deadline_in_s=LONG_DEADLINE_S)
        await harness.worker.until_taken(1)
        ask.cancel()
        await asyncio.wait([ask])
        await until_canceled(harness.stores, ask.get_name())
        assert harness.is_idle()


async def test_job_that_may_be_with_the_broker_is_canceled_if_its_caller_gets_an_error(
    tmp_path: Path, redis_url: str
) -> None:
    broker = UnconfirmingBroker(Unavailable("no answer in time"))
    async with running_dispatcher(tmp_path, redis_url=redis_url, transport=broker) as harness:
        harness.worker.go.clear()
        ask = harness.ask("a", deadline_in_s=LONG_DEADLINE_S)
        assert ends(await ask) == ["unavailable"]
        await until_canceled(harness.stores, ask.get_name())


async def test_job_that_the_broker_refused_needs_no_cancel(tmp_path: Path, redis_url: str) -> None:
    async with running_dispatcher(tmp_path, redis_url=redis_url) as harness:
        await harness.transport.delete_topic(jobs_topic_id(TEXT_MODEL.name))
        ask = harness.ask("a")
        assert ends(await ask) == ["unavailable"]
        assert await harness.stores.records.read(ask.get_name()) is None


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (*CHAT, {}),
        (*COMPLETION, {}),
        (*MESSAGE, {}),
        (*RESPONSE, {}),
        (*CHAT, {"x-penstock-event-ids": "true"}),
    ],
    ids=["chat", "completion", "message", "response", "chat with ids"],
)
async def test_stream_that_nobody_can_resume_is_canceled_at_once(
    api: ApiUnderTest,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
) -> None:
    """The reader has received no events yet, so it has no id to resume from."""
    monkeypatch.setattr("api.predictions.generation_stream.LEFT_S", 10 * WAIT_LIMIT_S)
    api.worker.go.clear()
    asking = asyncio.create_task(api.http.post(path, json=body, headers=headers))
    await api.worker.until_taken(1)
    asking.cancel()
    await asyncio.wait([asking])
    await until_states(api, {"canceled": 1})


async def test_stream_that_was_cut_off_goes_on_for_its_reader(api: ApiUnderTest) -> None:
    """With an Idempotency-Key, repeating the request resumes the stream."""
    api.worker.go.clear()
    path, body = CHAT
    given: dict[str, Any] = {"json": body, "headers": {"idempotency-key": "again"}}
    asking = asyncio.create_task(api.http.post(path, **given))
    await api.worker.until_taken(1)
    asking.cancel()
    await asyncio.wait([asking])
    again = asyncio.create_task(api.http.post(path, **given))
    api.worker.go.set()
    assert "[DONE]" in (await again).text
    assert await states_of(api) == {"succeeded": 1}


async def states_of(api: ApiUnderTest) -> Counter[str]:
    page = (await api.http.get("/v1/predictions")).json()
    return Counter(one["status"] for one in page["results"])


async def until_states(api: ApiUnderTest, states: dict[str, int]) -> None:
    with anyio.fail_after(WAIT_LIMIT_S):
        while await states_of(api) != states:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
