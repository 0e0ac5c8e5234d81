"""The stream format that OpenAI's clients expect: data only, one kind of id, and errors found
before the first event reported as request errors.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from api.predictions import generation_stream
from shared.errors import BadInput, ContextLengthExceeded, ModelFailed, PenstockError
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.api.test_generation import TEXT, chat, parsed, said
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHATS: chat(),
    COMPLETIONS: {"model": "writer", "prompt": f"say {TEXT}"},
    RESPONSES: {"model": "writer", "input": f"say {TEXT}"},
}
PREFIXES = {CHATS: "chatcmpl-", COMPLETIONS: "cmpl-", RESPONSES: "resp_"}


@pytest.fixture
async def api(redis_url: str, tmp_path: Path) -> AsyncIterator[ApiUnderTest]:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        yield api


@pytest.mark.parametrize(
    ("headers", "has_ids"),
    [
        ({}, False),
        ({"idempotency-key": "k"}, True),
        ({"x-penstock-event-ids": "true"}, True),
        ({"idempotency-key": "k", "x-penstock-event-ids": "false"}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
async def test_only_readers_who_ask_for_ids_get_them(
    api: ApiUnderTest, path: str, headers: dict[str, str], has_ids: bool
) -> None:
    answer = await api.http.post(path, json={**BODIES[path], "stream": True}, headers=headers)
    lines = [line for line in answer.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    others = [line for line in lines if not line.startswith("data: ")]
    assert bool(others) == has_ids
    assert all(line.startswith("id: ") for line in others)


async def test_events_of_responses_have_only_their_numbers(api: ApiUnderTest) -> None:
    answer = await api.http.post(RESPONSES, json={**BODIES[RESPONSES], "stream": True})
    names = {line.partition(":")[0] for line in answer.text.splitlines() if line}
    assert names == {"event", "data"}


async def test_an_unclear_wish_for_ids_is_refused(api: ApiUnderTest) -> None:
    header = "x-penstock-event-ids"
    answer = await api.http.post(CHATS, json=chat(stream=True), headers={header: "maybe"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == header
    assert "true or false" in answer.json()["error"]["message"]


async def test_a_reader_that_skips_blocks_with_comments_loses_nothing(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads a stream like vLLM's benchmark client, which splits it at empty lines."""
    monkeypatch.setattr(generation_stream, "HEARTBEAT_S", 0.01)
    api.worker.written = asyncio.Semaphore(1)
    later, got = asyncio.get_running_loop(), ""
    async with asyncio.timeout(WAIT_LIMIT_S):
        async with api.http.stream("POST", CHATS, json=chat(stream=True)) as answer:
            async for piece in answer.aiter_text():
                got += piece
                if len(got.split(": keep-alive")) > 2:
                    for _ in TEXT.split():
                        later.call_soon(api.worker.written.release)
    blocks = [block for block in got.split("\n\n") if block and not block.startswith(":")]
    assert ": keep-alive" in got
    assert said(parsed("\n\n".join(blocks))) == TEXT


@pytest.mark.parametrize("path", [*BODIES, MESSAGES])
async def test_a_stream_that_takes_too_long_ends_with_an_error(
    api: ApiUnderTest, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader without ids can't resume, and would mistake the part it got for the whole."""
    monkeypatch.setattr(generation_stream, "MAX_S", 0.0)
    api.worker.written = asyncio.Semaphore(1)
    body = BODIES.get(path, {**BODIES[CHATS], "max_tokens": 60})
    async with asyncio.timeout(WAIT_LIMIT_S):
        answer = await api.http.post(path, json={**body, "stream": True})
        errors = [line for line in answer.text.splitlines() if "request fewer tokens" in line]
        assert len(errors) == 1, answer.text
        assert "[DONE]" not in answer.text


async def test_a_stream_with_ids_ends_early_without_a_word(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_stream, "MAX_S", 0.0)
    api.worker.written = asyncio.Semaphore(1)
    headers = {"idempotency-key": "returns"}
    async with asyncio.timeout(WAIT_LIMIT_S):
        answer = await api.http.post(CHATS, json=chat(stream=True), headers=headers)
    assert "error" not in answer.text
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize("path", BODIES)
async def test_ids_have_one_form_however_an_answer_is_asked_for(
    api: ApiUnderTest, path: str
) -> None:
    form, body = re.compile(PREFIXES[path] + "[0-9a-f]{24}"), BODIES[path]
    answer = await api.http.post(path, json=body)
    assert form.fullmatch(answer.json()["id"])
    keyed = await api.http.post(path, json=body, headers={"idempotency-key": "plain"})
    assert form.fullmatch(keyed.json()["id"])
    for headers in ({}, {"idempotency-key": "streamed"}):
        streamed = await api.http.post(path, json={**body, "stream": True}, headers=headers)
        events = [json.loads(one["data"]) for one in parsed(streamed.text)[:-1]]
        made = {one["response"]["id"] if path == RESPONSES else one["id"] for one in events[:1]}
        assert all(form.fullmatch(one) for one in made)
        if path != COMPLETIONS:
            (shown,) = made
            assert streamed.headers["location"] == f"{path}/{shown}"
            again = await api.http.get(f"{path}/{shown}")
            assert again.json()["id"] == shown
        assert "pred_" not in streamed.text
    if path == RESPONSES:
        late = await api.http.post(path, json={**body, "background": True})
        assert form.fullmatch(late.json()["id"])
        assert "pred_" not in late.text


WRONG: list[PenstockError] = [
    ContextLengthExceeded(
        "This model's maximum context length is 512 tokens. However, you requested 600 tokens.",
        field="messages",
    ),
    BadInput("the JSON schema can't be used: it is not one", field="response_format"),
    ModelFailed("this input breaks the model"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: one.code)
@pytest.mark.parametrize("path", BODIES)
async def test_what_a_worker_finds_wrong_is_an_error_of_the_request(
    api: ApiUnderTest, path: str, wrong: PenstockError
) -> None:
    api.worker.refusal = wrong
    plain = await api.http.post(path, json=BODIES[path])
    streamed = await api.http.post(path, json={**BODIES[path], "stream": True})
    status = 500 if wrong.code == "model_failed" else 400
    assert (streamed.status_code, plain.status_code) == (status, status)
    assert streamed.json() == plain.json()
    error = streamed.json()["error"]
    assert error["code"] == wrong.code
    assert wrong.message in error["message"]
    if path == RESPONSES and wrong.field:
        assert error["param"] == {"messages": "input", "response_format": "text"}[wrong.field]
    else:
        assert error["param"] == wrong.field


@pytest.mark.parametrize("path", BODIES)
async def test_what_goes_wrong_later_is_an_event_of_the_right_type(
    api: ApiUnderTest, path: str
) -> None:
    api.worker.written = asyncio.Semaphore(2)
    got = ""
    async with asyncio.timeout(WAIT_LIMIT_S):
        async with api.http.stream("POST", path, json={**BODIES[path], "stream": True}) as answer:
            async for piece in answer.aiter_text():
                got += piece
                if "mill" in got and api.worker.refusal is None:
                    api.worker.refusal = ContextLengthExceeded("it is too long", field="prompt")
                    for _ in TEXT.split():
                        api.worker.written.release()
    last = json.loads(parsed(got)[-1]["data"])
    if path == RESPONSES:
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["code"] == "context_length_exceeded"
    else:
        error = last["error"]
        assert (error["type"], error["code"]) == (
            "invalid_request_error",
            "context_length_exceeded",
        )
        assert error["param"] == "prompt"
