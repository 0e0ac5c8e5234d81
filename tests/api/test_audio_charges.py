"""The costs of recordings and spoken text agree in all three books."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.dispatch.request import COST_HEADER
from tests.api.ledger import LedgerWorld
from tests.api.test_custom_charges import charged
from tests.keys import bearer
from tests.limits import WAIT_LIMIT_S

pytestmark = [pytest.mark.anyio, pytest.mark.slow(about_s=30)]

HEARS = """
class Predictor(BasePredictor):
    def predict(self, file: Path, language: str = "") -> Iterator[dict[str, Any]]:
        for number, line in enumerate(file.read_text().splitlines()):
            if line == "fail":
                raise ValueError("no")
            if line == "noise":
                error = ValueError("nobody speaks in it")
                error.field = "file"
                raise error
            about = {"language": "en", "duration": 2.0, "id": number}
            yield about | {"start": number, "end": number + 1, "text": f" {line}"}
            while line == "forever":
                time.sleep(0.01)

    def work(self, input) -> int:
        return len(input.file.read_text().splitlines())
"""
SPEAKS = """
class Predictor(BasePredictor):
    def predict(self, input: str, voice: str = "usual") -> Path:
        if input == "fail":
            raise ValueError("no")
        path = Path("out.wav")
        path.write_bytes(b"x" * len(input) * 100)
        return path

    def work(self, input) -> int:
        return len(input.input)
"""
USD_PER_SECOND = 0.25
FIELDS: dict[str, Any] = {
    "api": "transcription",
    "price": {"per_work_usd": USD_PER_SECOND},
    "work": {"max": 10},
}


async def transcribe(world: LedgerWorld, said: str, **form: str) -> httpx.Response:
    """The response for a recording. Records the cost that the response reports."""
    answer = await world.api.http.post(
        "/v1/audio/transcriptions",
        data={"model": "mine"} | form,
        files={"file": ("a.wav", said.encode())},
        headers=bearer("one"),
    )
    told_usd = float(answer.headers.get(COST_HEADER, 0))
    if location := answer.headers.get("location"):
        told_usd = await told_by_the_prediction(world, location)
    world.ledger.tell("one", told_usd)
    return answer


async def told_by_the_prediction(world: LedgerWorld, location: str) -> float:
    """Returns a stream's cost once the stream has ended."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            prediction = (await world.api.http.get(location, headers=bearer("one"))).json()
            if prediction["status"] in ("succeeded", "failed", "canceled"):
                return float((prediction["metrics"] or {}).get("cost_usd", 0.0))
            await asyncio.sleep(0.02)


async def test_seconds_are_charged_alike_whole_and_streamed(redis_url: str, tmp_path: Path) -> None:
    async with charged(redis_url, tmp_path, HEARS, **FIELDS) as world:
        whole = await transcribe(world, "a\nb\nc")
        assert whole.json() == {"text": "a b c", "usage": {"seconds": 3, "type": "duration"}}
        assert float(whole.headers[COST_HEADER]) == 3 * USD_PER_SECOND
        verbose = await transcribe(world, "a\nb", response_format="verbose_json")
        assert [one["text"] for one in verbose.json()["segments"]] == [" a", " b"]
        streamed = await transcribe(world, "a\nb\nc\nd", stream="true")
        assert streamed.text.count("transcript.text.delta") == 4
        assert (await world.ledger.check())["one"] == (3 + 2 + 4) * USD_PER_SECOND
        assert sorted(row.work or 0 for row in world.ledger.rows()) == [2, 3, 4]
        for row in world.ledger.rows():
            assert row.work_unit == "seconds"
            assert row.cost_usd == (row.work or 0) * USD_PER_SECOND * (row.charged_share or 0)


async def test_what_fails_is_named_and_costs_nothing(redis_url: str, tmp_path: Path) -> None:
    async with charged(redis_url, tmp_path, HEARS, **FIELDS) as world:
        for form in ({}, {"stream": "true"}):
            failed = await transcribe(world, "fail", **form)
            assert failed.status_code == 500
            noise = (await transcribe(world, "noise", **form)).json()["error"]
            assert (noise["param"], noise["message"]) == ("file", "file: nobody speaks in it")
            long = (await transcribe(world, "\n" * 11, **form)).json()["error"]
            assert long["message"] == "file: exceeds the maximum of 10 seconds for mine"
        assert (await world.ledger.check())["one"] == 0.0


async def test_an_equal_recording_costs_its_share(redis_url: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = FIELDS | {"deterministic": True}
    fields["price"] = {"per_work_usd": USD_PER_SECOND, "cached_share": 0.5}
    async with charged(redis_url, tmp_path, HEARS, **fields) as world:
        first = await transcribe(world, "a\nb")
        again = await transcribe(world, "a\nb", response_format="text")
        assert again.text == "a b\n"
        assert first.headers["x-penstock-cache"] == "miss"
        assert again.headers["x-penstock-cache"] == "hit"
        assert (await world.ledger.check())["one"] == 1.5 * 2 * USD_PER_SECOND


async def test_a_stream_that_was_read_in_part_costs_its_seconds(
    redis_url: str, tmp_path: Path
) -> None:
    async with charged(redis_url, tmp_path, HEARS, **FIELDS) as world:
        http = world.api.http
        request: dict[str, Any] = {
            "data": {"model": "mine", "stream": "true"},
            "files": {"file": ("a.wav", b"a\nforever\nb")},
            "headers": bearer("one"),
        }
        async with http.stream("POST", "/v1/audio/transcriptions", **request) as answer:
            async for line in answer.aiter_lines():
                if "forever" in line:
                    break
            location = answer.headers["location"]
        await http.post(f"{location}/cancel", headers=bearer("one"))
        async with asyncio.timeout(WAIT_LIMIT_S):
            while not world.ledger.rows():  # noqa: ASYNC110  written once the class has stopped
                await asyncio.sleep(0.01)
        world.ledger.tell("one", await told_by_the_prediction(world, location))
        assert (await world.ledger.check())["one"] == 3 * USD_PER_SECOND


async def test_characters_of_speech_are_charged(redis_url: str, tmp_path: Path) -> None:
    fields = FIELDS | {"api": "speech"}
    async with charged(redis_url, tmp_path, SPEAKS, **fields) as world:
        body = {"model": "mine", "input": "good day"}
        said = await world.ledger.post("one", "/v1/audio/speech", body)
        assert len(said.content) == 800
        failed = await world.ledger.post("one", "/v1/audio/speech", body | {"input": "fail"})
        assert failed.status_code == 500
        long = await world.ledger.post("one", "/v1/audio/speech", body | {"input": "a" * 11})
        message = "input: exceeds the maximum of 10 characters for mine"
        assert long.json()["error"]["message"] == message
        assert (await world.ledger.check())["one"] == 8 * USD_PER_SECOND
        assert {row.work_unit for row in world.ledger.rows()} == {"characters"}
