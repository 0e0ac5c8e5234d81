"""Batch lines that are flow runs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from api.batch_runner.runner import open_runner
from api.batches.documents import LineUsage
from api.replicate.prediction_lines import PredictionsEndpoint
from shared.messages import ItemOutcome, Receipt
from shared.models.catalog import Catalog
from shared.settings import ApiSettings, read_settings
from shared.usage.row_list import RowList
from tests.api.batches.batching import answers, created, jsonl, until
from tests.api.harness import already_open
from tests.flows.models import CHECK, JOIN, SPLIT, catalog_of
from tests.flows.world import World, world
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
URL = "/v1/predictions"
SPELL = {
    "name": "spell",
    "input": {"text": "string"},
    "steps": [
        {"id": "words", "model": SPLIT.name, "input": {"text": "$input.text"}},
        {"id": "check", "model": CHECK.name, "for_each": "$words", "input": {"word": "$item"}},
        {"id": "joined", "model": JOIN.name, "input": {"words": "$check.word"}},
    ],
    "output": {"text": "$joined", "words": "$words"},
}
SAID: dict[str, Any] = {
    "name": "listen",
    "api": "transcription",
    "input": {"file": "file"},
    "steps": [{"id": "said", "model": JOIN.name, "input": {"words": ["so", "said"]}}],
    "output": [{"id": 0, "text": "$said", "start": 0.0, "end": 1.0, "duration": 1.5}],
}
"""A flow that transcribes any recording to the same text."""
SKIPPED = {
    **SAID,
    "name": "skip",
    "input": {"file": "file", "language": {"type": "string", "default": ""}},
    "steps": [{**SAID["steps"][0], "when": '$input.language == "en"'}],
    "output": [{"id": 0, "text": "", "start": 0.0, "end": 1.0, "duration": 1.5}],
}
"""A flow that runs no step for most recordings."""
TRANSCRIPTIONS = "/v1/audio/transcriptions"
LEASE_S = 1.0


def line(custom_id: str, text: str) -> dict[str, Any]:
    body = {"version": "spell", "input": {"text": text}}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body}


@asynccontextmanager
async def running_runner(
    flows: World, settings: ApiSettings, catalog: Catalog | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """A batch runner alongside the API.

    `catalog`: the runner's catalog; by default, this module's flows.
    """
    catalog = catalog or catalog_of(SPELL, SAID)
    broker, rows = flows.broker, RowList()
    parts = (already_open(broker), already_open(broker), rows)
    async with open_runner(settings, catalog, *parts, lease_s=LEASE_S) as runner:
        flows.written.append(rows.rows)
        task = asyncio.create_task(runner.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def settings(tmp_path: Path, redis_url: str) -> ApiSettings:
    return read_settings(
        ApiSettings, redis_url=redis_url, objects_url=f"file://{tmp_path}/objects", secret="s"
    )


@pytest.fixture
async def flows(settings: ApiSettings) -> AsyncIterator[World]:
    objects: Any = {"objects_url": settings.objects_url, "secret": "s"}  # mypy tries each keyword
    async with world(settings.redis_url, SPELL, SAID, SKIPPED, **objects) as running:
        yield running


def client_of(flows: World) -> Any:
    http: Any = flows.http  # its types refer to a different httpx
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="any", max_retries=0, http_client=http
    )


async def runs_of(flows: World) -> list[dict[str, Any]]:
    """All predictions in the list, newest first."""
    listed: list[dict[str, Any]] = (await flows.http.get(URL)).json()["results"]
    return listed


async def until_canceled(flows: World) -> dict[str, Any]:
    """Returns the only run once it has been canceled."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            (run,) = await runs_of(flows)
            if run["status"] == "canceled":
                return run
            await asyncio.sleep(0.02)


async def test_lines_are_runs_with_the_price_of_batches(
    flows: World, settings: ApiSettings
) -> None:
    client = client_of(flows)
    flows.compute.fails = {"bad": 9}
    texts = {"a": "one cat", "b": "on a mat", "c": "a bad"}
    async with running_runner(flows, settings):
        given = [line(name, text) for name, text in texts.items()]
        done = await until(client, await created(client, jsonl(given), endpoint=URL))
        answered = {one["custom_id"]: one for one in await answers(client, done.output_file_id)}
        (failed,) = await answers(client, done.error_file_id)
        # Equal items in other runs are either hits or computed, and each has a row.
        rows = await flows.until_rows(4 + 5 + 3)
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
    for name, one in answered.items():
        body, run_rows = (
            one["response"]["body"],
            [row for row in rows if row.request_id == one["response"]["request_id"]],
        )
        words = texts[name].split()
        assert body["output"] == {"text": " ".join(words).upper(), "words": words}
        assert body["metrics"]["cost_usd"] == sum(row.cost_usd or 0 for row in run_rows)
        assert [step["items"] for step in body["metrics"]["steps"]] == [1, len(words), 1]
        assert "total_time" not in body["metrics"]
    assert failed["custom_id"] == "c"
    assert "step 'check', item 1" in failed["response"]["body"]["error"]["message"]
    assert {(row.batch_id, row.flow, row.priority) for row in rows} == {(done.id, "spell", "batch")}
    computed = {row.cost_usd for row in rows if row.cache not in ("memory", "redis", "joined")}
    assert computed <= {0.125, 0.0}, "half the price of 0.25, or failed"
    assert 0.125 in computed
    shown = await flows.http.get(f"{URL}/{failed['response']['request_id']}")
    assert shown.json()["status"] == "failed"
    assert shown.json()["input"] == {"batch_id": done.id, "custom_id": "c"}
    assert "output" not in shown.json() or shown.json()["output"] is None


def test_usage_of_a_run_has_the_tokens_of_all_steps() -> None:
    body = {"version": SPELL["name"], "input": {"text": "a"}}
    endpoint = PredictionsEndpoint()
    request = endpoint.read(json.dumps(body).encode(), catalog_of(SPELL), 0)
    receipts = [Receipt(tokens=50, output_tokens=20, cached_tokens=10), Receipt(tokens=5)]
    outcomes = [ItemOutcome(0, "succeeded", receipt) for receipt in receipts]
    assert endpoint.usage(request, outcomes, outcomes[:1]) == LineUsage(35, 20, 10)


async def test_a_canceled_batch_begins_no_further_step(flows: World, settings: ApiSettings) -> None:
    client, gate = client_of(flows), threading.Event()
    flows.compute.gates["held"] = gate
    async with running_runner(flows, settings):
        batch = await created(client, jsonl([line("a", "held")]), endpoint=URL)
        await flows.until_began("held")
        await client.batches.cancel(batch.id)
        done = await until(client, batch)
        run = await until_canceled(flows)
        gate.set()
        (undone,) = await answers(client, done.error_file_id)
        rows = await flows.until_rows(2)
    assert (done.status, undone["error"]["code"]) == ("cancelled", "batch_cancelled")
    assert flows.compute.count(JOIN.name) == 0
    assert {(row.step, row.cost_usd) for row in rows} == {("words", 0.125), ("check", 0.0)}
    assert run["metrics"]["cost_usd"] == 0.125


async def test_a_batch_canceled_while_a_run_begins_leaves_no_run(
    flows: World, settings: ApiSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has the first job, but the runner does not know it yet."""
    client, gate, publish = client_of(flows), threading.Event(), flows.broker.publish
    flows.compute.gates["held"] = gate
    unconfirmed = asyncio.Event()

    async def publish_unconfirmed(topic_id: str, *message: Any, **options: Any) -> str:
        message_id = await publish(topic_id, *message, **options)
        if not unconfirmed.is_set():
            unconfirmed.set()
            await asyncio.Event().wait()
        return message_id

    monkeypatch.setattr(flows.broker, "publish", publish_unconfirmed)
    async with running_runner(flows, settings):
        batch = await created(client, jsonl([line("a", "held")]), endpoint=URL)
        await flows.until_began("held")
        await client.batches.cancel(batch.id)
        done = await until(client, batch)
        await until_canceled(flows)
        gate.set()
    assert done.status == "cancelled"
    assert flows.compute.count(JOIN.name) == 0


async def left_by_its_runner(
    flows: World, settings: ApiSettings, text: str, gate: threading.Event
) -> Any:
    """A one-line batch whose `held` step waits for the gate, after the batch's runner has died."""
    flows.compute.gates["held"] = gate
    async with running_runner(flows, settings) as runner:
        batch = await created(client_of(flows), jsonl([line("a", text)]), endpoint=URL)
        await flows.until_began("held")
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)
    return batch


@pytest.mark.slow(about_s=7)  # the first lease ends
async def test_another_runner_finds_the_run_of_one_that_died(
    flows: World, settings: ApiSettings
) -> None:
    client, gate = client_of(flows), threading.Event()
    batch = await left_by_its_runner(flows, settings, "a held b", gate)
    async with running_runner(flows, settings):
        gate.set()
        done = await until(client, batch)
        (one,) = await answers(client, done.output_file_id)
        rows = await flows.until_rows(5)
    assert one["response"]["body"]["output"]["text"] == "A HELD B"
    assert [run["id"] for run in await runs_of(flows)] == [one["response"]["request_id"]]
    assert (flows.compute.count(SPLIT.name), flows.compute.count(CHECK.name)) == (1, 3)
    assert len({row.row_id for row in rows}) == 5


async def test_a_batch_canceled_while_no_runner_lives_leaves_no_run(
    flows: World, settings: ApiSettings
) -> None:
    client, gate = client_of(flows), threading.Event()
    batch = await left_by_its_runner(flows, settings, "held", gate)
    await client.batches.cancel(batch.id)
    async with running_runner(flows, settings):
        done = await until(client, batch)
        await until_canceled(flows)
        gate.set()
    assert done.status == "cancelled"
    assert flows.compute.count(JOIN.name) == 0


@pytest.mark.parametrize("is_deleted", [False, True], ids=["canceled", "canceled and deleted"])
async def test_a_run_that_its_caller_ended_is_not_begun_again(
    flows: World, settings: ApiSettings, *, is_deleted: bool
) -> None:
    client, gate = client_of(flows), threading.Event()
    flows.compute.gates["held"] = gate
    async with running_runner(flows, settings):
        batch = await created(client, jsonl([line("a", "held"), line("b", "b")]), endpoint=URL)
        await flows.until_began("held")
        (held,) = [run for run in await runs_of(flows) if run["input"]["custom_id"] == "a"]
        await flows.http.post(f"{URL}/{held['id']}/cancel")
        if is_deleted:
            await flows.http.delete(f"{URL}/{held['id']}")
        gate.set()
        done = await until(client, batch)
        (failed,) = await answers(client, done.error_file_id)
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    assert failed["response"]["body"]["error"]["code"] == "canceled"
    assert flows.compute.count(SPLIT.name) == 2
    assert len(await runs_of(flows)) == 2 - is_deleted


async def test_an_endpoint_that_a_flow_serves_has_lines_too(
    flows: World, settings: ApiSettings
) -> None:
    client = client_of(flows)
    recording = await client.files.create(file=("day.wav", b"RIFF"), purpose="user_data")
    body = {"model": "listen", "file": recording.id, "response_format": "srt"}
    given = {"custom_id": "a", "method": "POST", "url": TRANSCRIPTIONS, "body": body}
    async with running_runner(flows, settings):
        batch = await created(client, jsonl([given]), endpoint=TRANSCRIPTIONS)
        done = await until(client, batch)
        (one,) = await answers(client, done.output_file_id)
        (row,) = await flows.until_rows(1)
    assert one["response"]["body"] == "1\n00:00:00,000 --> 00:00:01,000\nso said\n"
    assert (row.flow, row.step, row.batch_id, row.cost_usd) == ("listen", "said", done.id, 0.125)
    run = (await flows.http.get(f"{URL}/{one['response']['request_id']}")).json()
    assert (run["status"], run["input"]["custom_id"]) == ("succeeded", "a")


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_a_recording_for_which_all_steps_are_skipped(flows: World, stream: str) -> None:
    form = {"model": "skip", "stream": stream}
    answer = await flows.http.post(TRANSCRIPTIONS, data=form, files={"file": ("a.wav", b"RIFF")})
    assert answer.status_code == 200, answer.text
    assert '"seconds":2' in answer.text
