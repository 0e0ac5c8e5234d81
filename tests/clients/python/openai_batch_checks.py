"""OpenAI's own client: files, batches and an organization's usage."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import openai

from tests.clients.python.checks import (
    EMBEDDER,
    KEY,
    LIMIT_S,
    URL,
    Skip,
    assert_same,
    check,
    fresh,
    raises,
    vectors,
)

POLL_S = 0.25
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=LIMIT_S)

Found = TypeVar("Found")


@check
def batch_of_a_file() -> None:
    texts = fresh(5)
    file = uploaded([line_of(number, text) for number, text in enumerate(texts)])
    assert client.files.retrieve(file.id).purpose == "batch"
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    created = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/embeddings",
        completion_window="24h",
        metadata={"night": "1"},
    )
    assert created.id in [one.id for one in client.batches.list()]
    done = polled(lambda: ended(created.id))
    counts = done.request_counts
    assert counts is not None
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 5, 5, 0)
    assert (done.metadata, done.error_file_id) == ({"night": "1"}, None)
    answers = answers_of(done.output_file_id)
    assert [one["custom_id"] for one in answers] == [f"line-{number}" for number in range(5)]
    got = [one["response"]["body"]["data"][0]["embedding"] for one in answers]
    assert_same(got, vectors(texts))
    assert client.files.delete(file.id).deleted
    with raises(openai.NotFoundError):
        client.files.retrieve(file.id)


@check
def batch_with_a_wrong_line_fails_and_names_it() -> None:
    file = uploaded([line_of(0, "a"), line_of(1, "b", dimensions=100_000)])
    created = client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    failed = polled(lambda: ended(created.id))
    assert failed.status == "failed"
    assert failed.errors is not None
    (error,) = failed.errors.data or []
    assert (error.line, error.param) == (2, "body.dimensions")


@check
def batch_is_canceled() -> None:
    file = uploaded([line_of(number, text) for number, text in enumerate(fresh(500))])
    created = client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    client.batches.cancel(created.id)
    over = polled(lambda: ended(created.id))
    assert over.status in {"cancelled", "completed"}, over.status
    answers = answers_of(over.output_file_id) + answers_of(over.error_file_id)
    assert len({one["custom_id"] for one in answers}) == len(answers)


@check
def usage_of_the_organization() -> None:
    if not hasattr(client, "admin"):
        raise Skip("this version has no usage API")
    began_s = int(time.time())
    embeddings = client.embeddings.create(model=EMBEDDER, input=fresh(2))
    accountant = openai.OpenAI(base_url=f"{URL}/v1", admin_api_key=KEY, timeout=LIMIT_S)

    def counted() -> Any:
        page = accountant.admin.organization.usage.embeddings(
            start_time=began_s, bucket_width="1m", group_by=["model"]
        )
        results: list[Any] = [result for bucket in page.data for result in bucket.results]
        ours = [result for result in results if result.model == EMBEDDER]
        # Each text's row arrives separately, and rows of the canceled batch may arrive first.
        tokens = sum(result.input_tokens for result in ours)
        return ours if tokens >= embeddings.usage.total_tokens else None

    assert all(usage.num_model_requests >= 1 for usage in polled(counted))
    costs = accountant.admin.organization.usage.costs(start_time=began_s - began_s % 86_400)
    lines: list[Any] = [line for bucket in costs.data for line in bucket.results]
    assert sum(line.amount.value for line in lines) > 0


def line_of(number: int, text: str, **fields: Any) -> dict[str, Any]:
    body = {"model": EMBEDDER, "input": text, **fields}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/embeddings", "body": body}


def uploaded(lines: list[dict[str, Any]]) -> openai.types.FileObject:
    data = "\n".join(map(json.dumps, lines)).encode()
    return client.files.create(file=("lines.jsonl", data), purpose="batch")


def answers_of(file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def ended(batch_id: str) -> openai.types.Batch | None:
    batch = client.batches.retrieve(batch_id)
    is_open = batch.status in {"validating", "in_progress", "finalizing", "cancelling"}
    return None if is_open else batch


def polled(found: Callable[[], Found | None]) -> Found:
    """The first result of `found` that is not None."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        value = found()
        if value is not None:
            return value
        time.sleep(POLL_S)
    raise AssertionError(f"nothing after {LIMIT_S:.0f} s")
