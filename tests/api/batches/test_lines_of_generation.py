"""Batch lines for chats and completions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.batches.batching import answers, created, jsonl, until
from tests.api.harness import WRITER, ApiUnderTest

pytestmark = pytest.mark.anyio
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def line(url: str, **body: Any) -> dict[str, Any]:
    given = {"model": WRITER.name, **body}
    return {"custom_id": "a", "method": "POST", "url": url, "body": given}


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"say {text}"}]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (line(CHAT, messages=say("good night")), "good night"),
        (line(COMPLETION, prompt="say good night"), "good night"),
    ],
)
async def test_a_line_is_answered_as_its_endpoint_does(
    api: ApiUnderTest, given: dict[str, Any], text: str
) -> None:
    client = api.openai()
    done = await until(client, await created(client, jsonl([given]), endpoint=given["url"]))
    assert done.status == "completed", done
    (answer,) = await answers(client, done.output_file_id)
    body = answer["response"]["body"]
    choice = body["choices"][0]
    assert (choice["message"]["content"] if "message" in choice else choice["text"]) == text
    assert body["usage"]["completion_tokens"] == 2
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == tuple(
        body["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")
    )


async def test_a_line_is_not_streamed(api: ApiUnderTest) -> None:
    client = api.openai()
    given = line(CHAT, messages=say("a"), stream=True)
    done = await until(client, await created(client, jsonl([given]), endpoint=CHAT))
    assert done.status == "failed"
    assert "stream" in done.errors.data[0].message
