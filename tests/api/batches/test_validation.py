"""Files that are accepted, and files that are rejected as a whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.batch_runner import run
from api.batches.documents import BatchCreated
from tests.api.batches.batching import (
    Running,
    answers,
    created,
    jsonl,
    line,
    until,
)
from tests.api.harness import IMAGE_MODEL, TEXT_MODEL, ApiUnderTest

pytestmark = pytest.mark.anyio


BAD_LINES: list[tuple[Any, str, str | None]] = [
    (b"{no json", "invalid_json_line", None),
    (b'{"custom_id": "\xff"}', "invalid_json_line", None),
    (b'{"custom_id": "a\0"}', "invalid_json_line", None),
    (b'{"custom_id": "\\ud800"}', "invalid_json_line", None),
    (b'{"body": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json_line", None),
    (b'["a"]', "invalid_request", None),
    ({"custom_id": "a"}, "invalid_request", None),
    (line("a") | {"custom_id": 5}, "invalid_request", None),
    (line("a") | {"custom_id": ""}, "invalid_custom_id", "custom_id"),
    (line("a") | {"custom_id": "x" * 513}, "invalid_custom_id", "custom_id"),
    (line("a") | {"method": "GET"}, "invalid_method", "method"),
    (line("a") | {"url": "/v1/images/generations"}, "mismatched_endpoint", "url"),
    (line("first"), "duplicate_custom_id", "custom_id"),
    (line("a", model="unknown"), "model_not_found", "body.model"),
    (line("a", model=IMAGE_MODEL.name), "model_not_found", "body.model"),
    (line("a", surprise=1), "invalid_input", "body.surprise"),
    (line("a") | {"body": 5}, "invalid_input", "body"),
    (line("a") | {"body": {"model": TEXT_MODEL.name, "input": ""}}, "invalid_input", "body.input"),
    (line("a", dimensions=4000), "invalid_input", "body.dimensions"),
    (line("a", "x" * 9_000_000), "line_too_long", None),
]


@pytest.mark.parametrize(("wrong", "code", "param"), BAD_LINES)
async def test_file_with_a_wrong_line_fails_whole(
    api: ApiUnderTest, wrong: Any, code: str, param: str | None
) -> None:
    client = api.openai()
    bad = wrong if isinstance(wrong, bytes) else json.dumps(wrong).encode()
    data = jsonl([line("first")]) + b"\n" + bad + b"\n" + jsonl([line("last")])
    done = await until(client, await created(client, data))
    assert (done.status, done.output_file_id) == ("failed", None)
    assert done.failed_at
    assert done.errors.object == "list"
    (error,) = done.errors.data
    assert (error.code, error.line, error.param) == (code, 3, param), error
    assert error.message
    assert api.worker.jobs == []


@pytest.mark.parametrize(("field", "value"), [("response_format", "url"), ("stream", True)])
async def test_links_that_end_too_soon_and_streams_are_refused(
    api: ApiUnderTest, field: str, value: object
) -> None:
    endpoint = "/v1/images/generations"
    body = {"prompt": "a circle", field: value}
    data = jsonl([{"custom_id": "1", "method": "POST", "url": endpoint, "body": body}])
    client = api.openai()
    done = await until(client, await created(client, data, endpoint))
    assert [(one.code, one.param) for one in done.errors.data] == [
        ("invalid_input", f"body.{field}")
    ]


async def test_errors_that_are_told_are_bounded(api: ApiUnderTest) -> None:
    client = api.openai()
    done = await until(client, await created(client, b"{\n" * 3000))
    assert len(done.errors.data) == 100


async def test_bounds_of_a_file(api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    client = api.openai()
    monkeypatch.setattr(run, "MAX_LINES", 3)
    done = await until(client, await created(client, jsonl(line(str(n)) for n in range(4))))
    assert [one.code for one in done.errors.data] == ["too_many_tasks"]
    monkeypatch.setattr(run, "MAX_INPUTS", 3)
    both = jsonl(line(str(n), input=["a", "b"]) for n in range(2))
    done = await until(client, await created(client, both))
    assert [one.code for one in done.errors.data] == ["too_many_inputs"]


@pytest.mark.usefixtures("small_segments")
async def test_strange_but_valid_files(api: ApiUnderTest) -> None:
    client = api.openai()
    data = b"\xef\xbb\xbf\r\n" + jsonl(line(f"ü{n}") for n in range(20)).replace(b"\n", b"\r\n\n")
    done = await until(client, await created(client, data.rstrip()))
    assert done.status == "completed", done.errors
    found = await answers(client, done.output_file_id)
    assert [one["custom_id"] for one in found] == [f"ü{n}" for n in range(20)]


async def test_key_may_use_its_models_only(both: tuple[ApiUnderTest, Running]) -> None:
    api, _ = both
    client = api.openai()
    file = await client.files.create(file=("a", jsonl([line("1")])), purpose="batch")
    batch = BatchCreated(
        id="batch_" + "0" * 32,
        tenant="default",
        endpoint="/v1/embeddings",
        input_file_id=file.id,
        created_at_s=1.0,
        expires_at_s=4e9,
        output_keep_s=3600,
        models=[IMAGE_MODEL.name],
    )
    found = await api.dependencies.batch_files.find("default", file.id)
    with pytest.raises(run.FileRefused) as caught:
        await run.validate(batch, found, api.dependencies.batch_files, api.dependencies.catalog)
    assert [one.code for one in caught.value.errors] == ["model_not_found"]
