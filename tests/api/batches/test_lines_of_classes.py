"""Batch lines that are custom model predictions."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.models.catalog import Catalog, Model
from shared.models.interface import ModelInterface
from shared.models.tasks.custom import CustomInput
from tests.api.batches.batching import Running, answers, batching, created, jsonl, until
from tests.api.file_server import FileServer, serving_files
from tests.api.harness import CATALOG, TEXT_MODEL, ApiUnderTest

pytestmark = pytest.mark.anyio
URL = "/v1/predictions"
CLASS = Model.model_validate(
    {
        "name": "mine",
        "task": "custom",
        "source": "local:nowhere",
        "price": {"per_item_usd": 0.5},
        "interface": ModelInterface(
            inputs={
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "size": {"type": "integer", "maximum": 10_000_000},
                    "file": {"type": "string", "format": "uri"},
                },
                "required": ["text"],
            },
            output={"type": "object", "properties": {"made": {"type": "string", "format": "uri"}}},
            streams="items",
            cog_version="0",
            sources_sha256="0" * 64,
        ),
    }
)


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileServer]:
    async with serving_files(tmp_path) as server:
        yield server


@pytest.fixture
async def both(
    tmp_path: Path, redis_url: str, files: FileServer
) -> AsyncIterator[tuple[ApiUnderTest, Running]]:
    catalog = Catalog((*CATALOG.models, CLASS))
    async with batching(
        tmp_path, redis_url, catalog=catalog, secret="s", **files.settings
    ) as running:
        yield running


def line(custom_id: str, version: str = "mine", **given: Any) -> dict[str, Any]:
    body = {"version": version, "input": given}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body}


async def bodies(client: Any, file_id: str | None) -> dict[str, Any]:
    """The response bodies in a file, keyed by custom id."""
    lines = await answers(client, file_id)
    return {one["custom_id"]: one["response"]["body"] for one in lines}


async def test_lines_are_answered_and_their_jobs_are_of_the_batch(
    both: tuple[ApiUnderTest, Running], files: FileServer
) -> None:
    api, _ = both
    client = api.openai()
    upload = {"content": ("a.txt", b"a", "text/plain")}
    mine = (await api.http.post("/v1/files", files=upload)).json()
    given = [
        line("a", text="plain"),
        line("b", text="made", size=70_000),
        line("c", text="by URL", file=files.add("/notes.csv", b"1,2", "text/csv")),
        line("d", text="of mine", file=mine["urls"]["get"]),
        line("e", text="inside", file="data:text/plain;base64,YQ=="),
        line("f", text="gone", file=f"{files.url}/none"),
        line("g", text="too much", size=5_000_000),
    ]
    done = await until(client, await created(client, jsonl(given), endpoint=URL))
    assert (done.status, done.request_counts.completed) == ("completed", 5), done
    found = await bodies(client, done.output_file_id)
    plain = found["a"]
    assert (plain["model"], plain["status"], plain["error"]) == ("penstock/mine", "succeeded", None)
    assert plain["output"] == {"values": {"text": "plain"}, "names": []}
    made = found["b"]["output"]["made"]
    assert made == "data:text/plain;base64," + base64.b64encode(b"x" * 70_000).decode()
    assert [found[one]["output"]["names"] for one in "cde"] == [
        ["notes.csv"],
        ["a.txt"],
        ["file.txt"],
    ]
    failed = await bodies(client, done.error_file_id)
    assert failed["f"]["error"]["message"] == "input.file: 127.0.0.1 returned 404; expected 200"
    assert "exceeds the maximum of 4194304 bytes" in failed["g"]["error"]["message"]
    inputs = [item.input for item in api.worker.items]
    assert all(isinstance(one, CustomInput) and not one.is_streamed for one in inputs)
    assert len(inputs) == 6
    assert {job.envelope.priority for job in api.worker.jobs} == {"batch"}
    assert {job.envelope.batch_id for job in api.worker.jobs} == {done.id}


async def test_values_above_a_message_are_stored(both: tuple[ApiUnderTest, Running]) -> None:
    api, _ = both
    client = api.openai()
    text = "x" * (2 * 1024 * 1024)
    given = jsonl([line("a", text=text), line("b", text="short")])
    done = await until(client, await created(client, given, endpoint=URL))
    assert (done.status, done.request_counts.completed) == ("completed", 2), done
    inputs = [one.input for one in api.worker.items if isinstance(one.input, CustomInput)]
    (large,) = [one for one in inputs if one.files]
    assert (large.values, large.places[0].at) == ({"text": None}, ["text"])
    assert (key := large.files[0].object_key)
    assert await api.dependencies.objects.get(key, 4 * 1024 * 1024) == json.dumps(text).encode()


@pytest.mark.parametrize(
    ("wrong", "param", "reason"),
    [
        (line("a", text=3), "body.input.text", "valid string"),
        (line("a", text="a", word=1), "body.input.word", "unknown parameter"),
        (line("a"), "body.input.text", "Field required"),
        (line("a", text="a", file="cat.png"), "body.input.file", "must be a data: URI"),
        (line("a", TEXT_MODEL.name, text="a"), "body.version", "its own endpoint"),
        (line("a", "gpt-9", text="a"), "body.version", "gpt-9"),
    ],
)
async def test_a_wrong_line_is_named_before_any_runs(
    both: tuple[ApiUnderTest, Running], wrong: dict[str, Any], param: str, reason: str
) -> None:
    api, _ = both
    client = api.openai()
    given = jsonl([line("b", text="right"), wrong])
    done = await until(client, await created(client, given, endpoint=URL))
    assert done.status == "failed"
    (error,) = done.errors.data
    assert (error.line, error.param) == (2, param)
    assert reason in error.message
    assert not api.worker.jobs
