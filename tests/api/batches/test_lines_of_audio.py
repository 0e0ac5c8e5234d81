"""Batch lines that transcribe recordings, with file names as Groq and OpenAI users write them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import InputTooLarge
from shared.models.catalog import Catalog
from tests.api.batches.batching import Running, answers, batching, created, jsonl, until
from tests.api.file_server import FileServer, serving_files
from tests.api.harness import CATALOG, ApiUnderTest
from tests.api.test_audio import EARS, SAID, TEXT, TRANSCRIPTIONS, TRANSLATIONS

pytestmark = pytest.mark.anyio


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileServer]:
    async with serving_files(tmp_path) as server:
        yield server


@pytest.fixture
async def both(
    tmp_path: Path, redis_url: str, files: FileServer
) -> AsyncIterator[tuple[ApiUnderTest, Running]]:
    catalog = Catalog((*CATALOG.models, EARS))
    async with batching(
        tmp_path, redis_url, catalog=catalog, secret="s", **files.settings
    ) as running:
        yield running


def line(custom_id: str, path: str = TRANSCRIPTIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": path, "body": {"model": "ears"} | body}


async def bodies(client: Any, file_id: str | None) -> dict[str, Any]:
    """The response bodies in a file, keyed by custom id."""
    lines = await answers(client, file_id)
    return {one["custom_id"]: one["response"]["body"] for one in lines}


async def test_lines_have_the_answers_of_the_route(
    both: tuple[ApiUnderTest, Running], files: FileServer
) -> None:
    api, _ = both
    client = api.openai()
    upload = await client.files.create(file=("day.wav", SAID), purpose="user_data")
    url = files.add("/day.wav", SAID, "audio/wav")
    verbose: dict[str, Any] = {"response_format": "verbose_json"}
    verbose["timestamp_granularities"] = ["segment", "word"]
    given = [
        line("id", file=upload.id),
        line("url", url=url, language="en", **verbose),
        line("srt", url=upload.id, response_format="srt"),
        line("gone", url=f"{files.url}/none"),
    ]
    done = await until(client, await created(client, jsonl(given), endpoint=TRANSCRIPTIONS))
    assert (done.status, done.request_counts.completed) == ("completed", 3), done
    found = await bodies(client, done.output_file_id)
    assert done.usage.audio_seconds == 9, "of three recordings, whatever the format of an answer"
    assert found["id"] == {"text": TEXT, "usage": {"seconds": 3, "type": "duration"}}
    assert [one["text"] for one in found["url"]["segments"]] == [" good day", " how are <you>"]
    assert len(found["url"]["words"]) == 5
    assert found["srt"].startswith("1\n00:00:00,000 --> 00:00:01,250\ngood day\n")
    failed = await bodies(client, done.error_file_id)
    assert failed["gone"]["error"]["message"] == "url: 127.0.0.1 returned 404; expected 200"
    assert {job.envelope.priority for job in api.worker.jobs} == {"batch"}
    assert {job.envelope.batch_id for job in api.worker.jobs} == {done.id}


async def test_translations_and_words_of_errors(both: tuple[ApiUnderTest, Running]) -> None:
    api, _ = both
    client = api.openai()
    upload = await client.files.create(file=("day.wav", SAID), purpose="user_data")
    given = jsonl([line("a", TRANSLATIONS, file=upload.id)])
    done = await until(client, await created(client, given, endpoint=TRANSLATIONS))
    assert (await bodies(client, done.output_file_id))["a"]["text"] == TEXT.upper()
    api.worker.refusal = InputTooLarge("it weighs 61, and at most 60 is allowed", field="input")
    given = jsonl([line("a", file=upload.id)])
    done = await until(client, await created(client, given, endpoint=TRANSCRIPTIONS))
    error = (await bodies(client, done.error_file_id))["a"]["error"]
    assert error["param"] == "file"
    assert error["message"] == "file: exceeds the maximum of 60 seconds for ears"


@pytest.mark.parametrize(
    ("wrong", "param", "reason"),
    [
        (line("a"), "body.url", "one of url and file"),
        (line("a", url="file-1", file="file-1"), "body.url", "one of url and file"),
        (line("a", url="file-1", stream=True), "body.stream", "not supported in batches"),
        (line("a", url="file-1", mood="gay"), "body.mood", "unknown parameter"),
        (line("a", url="file-1", model="none"), "body.model", "none"),
        (line("a", url="file-1", include=["logprobs"]), "body.include", "not supported"),
    ],
)
async def test_a_wrong_line_is_named_before_any_runs(
    both: tuple[ApiUnderTest, Running], wrong: dict[str, Any], param: str, reason: str
) -> None:
    api, _ = both
    client = api.openai()
    given = jsonl([line("b", url="https://example.com/a.wav"), wrong])
    done = await until(client, await created(client, given, endpoint=TRANSCRIPTIONS))
    assert done.status == "failed"
    (error,) = done.errors.data
    assert (error.line, error.param) == (2, param)
    assert reason in error.message
    assert not api.worker.jobs
