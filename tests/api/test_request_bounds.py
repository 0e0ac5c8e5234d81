"""Limits on a request's other fields, and on the memory it uses until its response is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from api.bodies import MAX_VALUES, Body
from api.predictions.service import DOCUMENT_MAX_BYTES
from api.tasks.custom import validator_of
from shared.models.interface import ModelInterface
from tests.api.harness import (
    IMAGE_MODEL,
    TEXT_MODEL,
    ApiUnderTest,
    api_with_redis,
    settings_for,
)
from tests.deleting import delete_ended
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores

pytestmark = pytest.mark.anyio
MIB = 1024 * 1024
CHAT = ("/v1/chat/completions", {"model": "writer", "messages": [{"role": "user", "content": "a"}]})
COMPLETION = ("/v1/completions", {"model": "writer", "prompt": "a"})
RESPONSE = ("/v1/responses", {"model": "writer", "input": "a"})
EMBEDDING = ("/v1/embeddings", {"model": TEXT_MODEL.name, "input": "a"})
IMAGE = ("/v1/images/generations", {"model": IMAGE_MODEL.name, "prompt": "a"})
TEXTS = (CHAT, COMPLETION, RESPONSE)
NAMES = {"type": "array", "items": {"type": "string"}}
CLASS = ModelInterface(
    inputs={
        "type": "object",
        "properties": {"names": NAMES, "lists": {"type": "array", "items": NAMES}},
    },
    output={"type": "string"},
    cog_version="0",
    sources_sha256="0" * 64,
)
_LONGEST = 256 * 1024
REASONING = [
    ({name: value(_LONGEST)}, {name: value(_LONGEST + 1)})
    for name, value in (
        ("encrypted_content", lambda size: "e" * size),
        ("summary", lambda size: [{"type": "summary_text", "text": "s" * size}]),
    )
]
"""A reasoning item's fields, which are stored but not read: of maximum length, and longer."""


def _thought(fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "reasoning", **fields}, {"role": "user", "content": "say a"}]


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
    *((*RESPONSE, "input", _thought(few), _thought(many)) for few, many in REASONING),
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
    assert f"exceeds the maximum of {DOCUMENT_MAX_BYTES}" in answer.json()["detail"]
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
    async with RecordStores(redis_url) as stores:
        await stores.predictions.create("req_1", "acme", b"{}", deadline_s=2e9, keep_s=60)
        found = await stores.records.read_again("req_1", b"{}")
        assert found == await stores.records.read("req_1")
        await stores.records.cancel("req_1")
        assert await delete_ended(stores, "req_1")
        found = await stores.records.read_again("req_1", b"{}")
        assert found == await stores.records.read("req_1")
        assert found is not None
        assert not found.document
        assert await stores.records.read_again("req_2", b"{}") is None


def _bodies(kind: type[Body] = Body) -> Iterator[type[Body]]:
    for one in kind.__subclasses__():
        yield one
        yield from _bodies(one)


def _lists_in(schema: Any) -> Iterator[dict[str, Any]]:
    """The lists in one of pydantic's core schemas whose elements may be invalid."""
    if isinstance(schema, dict):
        if schema.get("type") == "list" and schema.get("items_schema", {}).get("type") != "any":
            yield schema
        schema = [*schema.values()]
    if isinstance(schema, list | tuple):
        for one in schema:
            yield from _lists_in(one)


def test_a_list_ends_at_its_first_wrong_element_or_has_few() -> None:
    """pydantic reports each invalid element, and 300,000 would fit, blocking the event loop for 3
    s.
    """
    kinds = [*_bodies(), validator_of(CLASS)]
    lists = [
        (kind.__name__, one) for kind in kinds for one in _lists_in(kind.__pydantic_core_schema__)
    ]
    assert len(lists) > 50
    for name, one in lists:
        assert one.get("fail_fast") or one.get("max_length", MAX_VALUES) <= 10_000, (name, one)


async def test_the_first_wrong_element_of_many_is_named(api: ApiUnderTest) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}] + [1] * 1000}
    answer = await api.http.post("/v1/chat/completions", json={"messages": [message]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "messages[0].content[1]: Input should be an object"
    )


def test_bodies_are_within_what_is_received(tmp_path: Path) -> None:
    """These limits are reached before the body size limit."""
    assert settings_for(tmp_path).request_max_bytes > 2 * DOCUMENT_MAX_BYTES
