"""What a request may carry beside its input, and what is kept of it while it is answered."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import redis

from api.predictions.service import DOCUMENT_MAX_BYTES
from shared.stores.records import Records
from tests.api.harness import (
    IMAGE_MODEL,
    TEXT_MODEL,
    ApiUnderTest,
    api_with_redis,
    settings_for,
)
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
MIB = 1024 * 1024
CHAT = ("/v1/chat/completions", {"model": "writer", "messages": [{"role": "user", "content": "a"}]})
COMPLETION = ("/v1/completions", {"model": "writer", "prompt": "a"})
RESPONSE = ("/v1/responses", {"model": "writer", "input": "a"})
EMBEDDING = ("/v1/embeddings", {"model": TEXT_MODEL.name, "input": "a"})
IMAGE = ("/v1/images/generations", {"model": IMAGE_MODEL.name, "prompt": "a"})
TEXTS = (CHAT, COMPLETION, RESPONSE)
BOUNDED = [
    *((*one, "metadata", {"k" * 64: "v" * 512}, {"k" * 65: "v"}) for one in TEXTS),
    *((*one, "metadata", {"k": "v" * 512}, {"k": "v" * 513}) for one in TEXTS),
    *(
        (*one, "metadata", {str(n): "" for n in range(16)}, {str(n): "" for n in range(17)})
        for one in TEXTS
    ),
    *((*one, "user", "u" * 128, "u" * 129) for one in (*TEXTS, EMBEDDING, IMAGE)),
    *((*one, "safety_identifier", "u" * 128, "u" * 129) for one in (*TEXTS, IMAGE)),
    *((*one, "prompt_cache_key", "k" * 64, "k" * 65) for one in TEXTS),
    *((*one, "prompt_cache_retention", "24h", "k" * 65) for one in TEXTS),
    *((*one, "prompt_cache_options", {"ttl": "30m"}, {"ttl": "k" * MIB}) for one in TEXTS),
    *((*one, "service_tier", "auto", "k" * 65) for one in TEXTS),
    (*CHAT, "reasoning_effort", "low", "k" * 65),
    (*CHAT, "verbosity", "low", "k" * 65),
    (*RESPONSE, "text", {"verbosity": "low"}, {"verbosity": "k" * 65}),
    (*RESPONSE, "reasoning", {"effort": "low"}, {"summary": "k" * MIB}),
    (*RESPONSE, "previous_response_id", None, "r" * 257),
    *((*IMAGE, name, "auto", "k" * 65) for name in ("quality", "style", "background")),
]


api = api_with_redis()


@pytest.mark.parametrize(("path", "body", "field", "most", "too_much"), BOUNDED)
async def test_fields_without_effect_are_bounded_by_name(
    api: ApiUnderTest, path: str, body: dict[str, Any], field: str, most: Any, too_much: Any
) -> None:
    accepted = await api.http.post(path, json=body | {field: most})
    assert accepted.status_code == 200, accepted.text
    refused = await api.http.post(path, json=body | {field: too_much})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(field)
    assert len(error["message"]) < 500


def _part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "output_text", "text": text, **more}


MUCH = [{"type": "url_citation", "url": "x" * MIB}]
KEPT = {
    "chat": (
        CHAT[0],
        {"messages": [{"role": "assistant", "content": "a", "annotations": MUCH}], "stream": True},
    ),
    "response": (
        RESPONSE[0],
        {
            "input": [
                {
                    "role": "assistant",
                    "content": [_part("say a", annotations=MUCH, logprobs=MUCH)],
                }
            ],
            "background": True,
        },
    ),
    "prediction": (
        "/v1/models/any/writer/predictions",
        {
            "input": {
                "messages": [{"role": "user", "content": "say a", "annotations": MUCH}],
                "seed": 1,
            }
        },
    ),
}


@pytest.mark.parametrize(("path", "body"), KEPT.values(), ids=KEPT)
async def test_what_is_not_read_is_not_kept(
    api: ApiUnderTest, redis_url: str, path: str, body: dict[str, Any]
) -> None:
    given = body if "predictions" in path else {"model": "writer"} | body
    answer = await api.http.post(path, json=given)
    assert answer.status_code in (200, 201), answer.text
    with redis.Redis.from_url(redis_url) as client:
        (record,) = [
            key for key in client.keys("penstock:record:*") if client.hexists(key, "document")
        ]
        assert client.hstrlen(record, "document") < 4096


async def test_a_request_that_is_too_large_to_keep_is_refused(
    api: ApiUnderTest, redis_url: str
) -> None:
    texts = ["\x01" * 8000] * 128  # six bytes each as JSON
    body = {"version": TEXT_MODEL.name, "input": {"texts": texts, "truncate": "end"}}
    answer = await api.http.post("/v1/predictions", json=body)
    assert answer.status_code == 422, answer.text[:500]
    assert f"at most {DOCUMENT_MAX_BYTES} bytes are allowed" in answer.json()["detail"]
    with redis.Redis.from_url(redis_url) as client:
        assert not client.keys("penstock:record:*")


async def test_following_a_prediction_does_not_read_its_request_again(
    api: ApiUnderTest, redis_url: str
) -> None:
    api.worker.go.clear()
    given = {"texts": ["a " * 4096] * 128, "truncate": "end"}
    body = {"version": TEXT_MODEL.name, "input": given}
    made = (await api.http.post("/v1/predictions", json=body)).json()["id"]
    predictions = api.dependencies.predictions
    snapshot = await predictions.read("default", made)
    with redis.Redis.from_url(redis_url) as client:
        before = client.info("stats")["total_net_output_bytes"]
        for _ in range(20):
            snapshot = await predictions.refresh(snapshot)
        read_bytes = client.info("stats")["total_net_output_bytes"] - before
    assert read_bytes < MIB / 4
    assert json.loads(snapshot.record.document)["id"] == made
    api.worker.go.set()
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not snapshot.record.is_over:
            snapshot = await predictions.refresh(snapshot)
    assert snapshot.record == (await predictions.read("default", made)).record


async def test_a_deleted_record_has_no_document(redis_url: str) -> None:
    async with Records(redis_url) as records:
        await records.create("req_1", "acme", b"{}", deadline_s=2e9, keep_s=60)
        found = await records.read_again("req_1", b"{}")
        assert found == await records.read("req_1")
        await records.cancel("req_1")
        assert await records.delete("req_1", 2e9)
        found = await records.read_again("req_1", b"{}")
        assert found == await records.read("req_1")
        assert found is not None
        assert not found.document
        assert await records.read_again("req_2", b"{}") is None


def test_bodies_are_within_what_is_received(tmp_path: Path) -> None:
    """The bounds here are reached before that of a body."""
    assert settings_for(tmp_path).request_max_bytes > 2 * DOCUMENT_MAX_BYTES
