"""Inputs that a step's model rejects: errors name the field that the caller sent.

These classes' inputs have different names than the fields of the endpoints that their flows serve.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadInput, InputTooLarge
from shared.models.blob import Blob
from shared.settings import ApiSettings, read_settings
from tests.api.batches.batching import answers, created, jsonl, until
from tests.flows.models import Compute, catalog_of, class_entry
from tests.flows.test_lines_of_flows import client_of, running_runner
from tests.flows.world import World, world

pytestmark = pytest.mark.anyio

FILE, STRING = {"type": "string", "format": "uri"}, {"type": "string"}
PAGES = {"type": "array", "items": FILE}
NUMBERS = {"type": "array", "items": {"type": "integer"}}
CUT = class_entry(
    "cut",
    {"source": FILE, "which": STRING},
    {"type": "object", "properties": {"pages": PAGES, "numbers": NUMBERS}},
)
READ = class_entry("read", {"image": FILE}, {"type": "array", "items": {"type": "object"}})
HEAR = class_entry("hear", {"recording": FILE}, STRING)
SCORE = class_entry("score", {"words": STRING, "of": STRING}, STRING)
MODELS = (CUT, READ, HEAR, SCORE)
EYES: dict[str, Any] = {
    "name": "eyes",
    "api": "ocr",
    "input": {"document": "file", "pages": {"type": "string", "default": ""}},
    "steps": [
        {
            "id": "cut",
            "model": CUT.name,
            "input": {"source": "$input.document", "which": "$input.pages"},
        },
        {"id": "read", "model": READ.name, "for_each": "$cut.pages", "input": {"image": "$item"}},
    ],
    "output": {"pages": "$read", "numbers": "$cut.numbers"},
}
EARS: dict[str, Any] = {
    "name": "ears",
    "api": "transcription",
    "input": {"file": "file"},
    "steps": [{"id": "heard", "model": HEAR.name, "input": {"recording": "$input.file"}}],
    "output": [{"id": 0, "text": "$heard", "start": 0.0, "end": 1.0, "duration": 1.5}],
}
SCORES: dict[str, Any] = {
    "name": "scores",
    "input": {
        "texts": ["string"],
        "pairs": {"type": "array", "items": {"type": "object"}, "default": []},
        "about": {"type": "object", "default": {"topic": "mills"}},
    },
    "steps": [
        {"id": "each", "model": SCORE.name, "for_each": "$input.texts", "max_items": 4}
        | {"input": {"words": "$item", "of": "$input.about.topic"}},
        {"id": "pair", "model": SCORE.name, "for_each": {"pair": "$input.pairs"}}
        | {"input": {"words": "$item.pair.words", "of": "$item.pair.of"}},
    ],
    "output": {"each": "$each", "pair": "$pair"},
}
FLOWS = (EYES, EARS, SCORES)
TRANSCRIPTIONS, OCR = "/v1/audio/transcriptions", "/v1/ocr"


class Strict(Compute):
    """Here, a document is a text with one page per line."""

    def output(self, name: str, values: Mapping[str, Any]) -> Any:
        if name == HEAR.name:
            raise BadInput("recording: it is no sound", field="recording")
        if name == SCORE.name:
            return self._score(values)
        if name == READ.name:
            if values["image"] == b"broken":
                raise BadInput("image: page 0: it is broken", field="image")
            markdown = values["image"].decode()
            return [{"index": 0, "markdown": markdown, "images": [], "dimensions": None}]
        if values["source"] == b"locked":
            raise BadInput("source: it is encrypted", field="source")
        if values["source"] == b"long":
            raise InputTooLarge("it weighs 12, and at most 9 is allowed", field="input")
        if values["which"] == "9":
            raise BadInput("which: there is no page 9", field="which")
        lines = values["source"].split(b"\n")
        numbers = list(range(int(values["which"][:1] or 0), len(lines)))
        return {
            "pages": [Blob("text/plain", data=lines[number]) for number in numbers],
            "numbers": numbers,
        }

    def _score(self, values: Mapping[str, Any]) -> str:
        for name in ("words", "of"):
            if values[name] == "?":
                raise BadInput(f"{name}: it has no word", field=name)
        if values["words"] == values["of"]:
            raise InputTooLarge("it weighs 12, and at most 9 is allowed", field="input")
        return f"{values['words']} of {values['of']}"


@pytest.fixture
def settings(tmp_path: Path, redis_url: str) -> ApiSettings:
    return read_settings(
        ApiSettings, redis_url=redis_url, objects_url=f"file://{tmp_path}/objects", secret="s"
    )


@pytest.fixture
async def flows(settings: ApiSettings) -> AsyncIterator[World]:
    given: Any = {"objects_url": settings.objects_url, "secret": "s"}  # mypy tries each keyword
    async with world(
        settings.redis_url, *FLOWS, models=MODELS, computes=Strict, **given
    ) as running:
        yield running


def document(text: str) -> dict[str, str]:
    data = base64.b64encode(text.encode()).decode()
    return {"type": "document_url", "document_url": f"data:application/pdf;base64,{data}"}


WRONG_DOCUMENTS: list[tuple[dict[str, Any], str, str]] = [
    ({"document": document("locked")}, "document", "document: it is encrypted"),
    ({"document": document("a"), "pages": "9"}, "pages", "pages: there is no page 9"),
    (
        {"document": document("a\nb\nbroken"), "pages": "1-2"},
        "document",
        "document: page 2: it is broken",
    ),
    (
        {"document": document("long")},
        "document",
        "document: it weighs 12, and at most 9 is allowed",
    ),
]


@pytest.mark.parametrize(("body", "field", "message"), WRONG_DOCUMENTS)
async def test_a_document(flows: World, body: dict[str, Any], field: str, message: str) -> None:
    answer = await flows.http.post(OCR, json={"model": "eyes"} | body)
    assert answer.status_code == 422, answer.text
    error = answer.json()
    assert (error["message"], error["detail"][0]["loc"]) == (message, ["body", field])


async def test_the_documents_of_a_batch(flows: World, settings: ApiSettings) -> None:
    client = client_of(flows)
    lines = [
        {"custom_id": str(number), "method": "POST", "url": OCR, "body": {"model": "eyes"} | body}
        for number, (body, _, _) in enumerate(WRONG_DOCUMENTS)
    ]
    async with running_runner(flows, settings, catalog_of(*FLOWS, models=MODELS)):
        done = await until(client, await created(client, jsonl(lines), endpoint=OCR))
        failed = await answers(client, done.error_file_id)
    errors = {one["custom_id"]: one["response"]["body"] for one in failed}
    assert [
        (errors[str(number)]["error"]["param"], errors[str(number)]["error"]["message"])
        for number in range(len(lines))
    ] == [(field, message) for _, field, message in WRONG_DOCUMENTS]


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_error_of_an_uploaded_recording_names_file(flows: World, stream: str) -> None:
    form = {"model": "ears", "stream": stream}
    answer = await flows.http.post(TRANSCRIPTIONS, data=form, files={"file": ("a.wav", b"RIFF")})
    assert answer.status_code == (200 if stream == "true" else 400), answer.text
    assert '"param":"file"' in answer.text
    assert '"message":"file: it is no sound"' in answer.text


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_error_of_a_recording_by_url_names_url(flows: World, stream: str) -> None:
    upload = await client_of(flows).files.create(file=("a.wav", b"RIFF"), purpose="user_data")
    form = {"model": "ears", "stream": stream, "url": upload.id}
    answer = await flows.http.post(
        TRANSCRIPTIONS, files={name: (None, value) for name, value in form.items()}
    )
    assert answer.status_code == (200 if stream == "true" else 400), answer.text
    assert '"param":"url"' in answer.text
    assert '"message":"url: it is no sound"' in answer.text


async def test_the_recordings_of_a_batch(flows: World, settings: ApiSettings) -> None:
    client = client_of(flows)
    upload = await client.files.create(file=("a.wav", b"RIFF"), purpose="user_data")
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": TRANSCRIPTIONS,
            "body": {"model": "ears", name: upload.id},
        }
        for name in ("file", "url")
    ]
    async with running_runner(flows, settings, catalog_of(*FLOWS, models=MODELS)):
        done = await until(client, await created(client, jsonl(lines), endpoint=TRANSCRIPTIONS))
        failed = await answers(client, done.error_file_id)
    errors = {one["custom_id"]: one["response"]["body"]["error"] for one in failed}
    for name in ("file", "url"):
        assert errors[name]["param"] == name
        assert errors[name]["message"] == f"{name}: it is no sound"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"texts": ["a", "?"]}, "texts.1: it has no word"),
        ({"texts": ["a"], "about": {"topic": "?"}}, "about.topic: it has no word"),
        (
            {"texts": [], "pairs": [{"words": "a", "of": "b"}, {"words": "a", "of": "?"}]},
            "pairs.1.of: it has no word",
        ),
        ({"texts": [], "pairs": [{"words": "a", "of": "b"}, {}]}, "pairs.1.words: is missing"),
        ({"texts": ["a"], "about": {}}, "about.topic: is missing"),
        # The model's error about all of its inputs together.
        ({"texts": ["mills"]}, "input: it weighs 12, and at most 9 is allowed"),
        ({"texts": list("abcde")}, "texts: 5 elements, which exceeds the maximum of 4"),
    ],
)
async def test_a_part_of_an_input(flows: World, given: dict[str, Any], error: str) -> None:
    run = await flows.run("scores", given)
    assert (run["status"], run["error"]) == ("failed", error)
