"""/v1/batches through OpenAI's client, with a runner in the same process and a fake worker."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest

from api.batches import runner as runner_module
from api.batches import service, validation
from api.batches.documents import BatchCreated
from api.batches.execution import LineAnswer, LineExecutor
from api.batches.lease import BatchLeases
from api.batches.lines import BatchLine
from api.batches.names import owner_of
from api.dispatch.dispatcher import Dispatcher
from api.dispatch.request import InferenceRequest, InferenceResponse
from api.endpoints import ENDPOINTS
from api.schemas.openai_batches import BatchBody
from shared.errors import Canceled, DeadlineExceeded, Overloaded, PenstockError, Unavailable
from shared.tasks.embedding import TextInput
from shared.tenants.plan import Caller, Plan
from tests.api.batching import (
    Running,
    answers,
    batching,
    created,
    jsonl,
    line,
    running_runner,
    until,
)
from tests.api.fake_worker import vector_of
from tests.api.harness import IMAGE_MODEL, TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.keys import key_for, keys_url
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio


@pytest.fixture
async def both(tmp_path: Path, redis_url: str) -> AsyncIterator[tuple[ApiUnderTest, Running]]:
    async with batching(tmp_path, redis_url) as running:
        yield running


@pytest.fixture
def api(both: tuple[ApiUnderTest, Running]) -> ApiUnderTest:
    return both[0]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.05)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "SEGMENT_LINES", 7)


@pytest.mark.usefixtures("small_segments")
async def test_every_line_is_answered_once_and_in_order(api: ApiUnderTest) -> None:
    client = api.openai()
    batch = await created(
        client, jsonl(line(str(n)) for n in range(50)), metadata={"night": "monday"}
    )
    assert (batch.status, batch.metadata) == ("validating", {"night": "monday"})
    assert batch.expires_at - batch.created_at == 24 * 3600
    done = await until(client, batch)
    assert done.status == "completed", done
    assert done.request_counts.model_dump() == {"completed": 50, "failed": 0, "total": 50}
    assert (done.model, done.error_file_id, done.errors) == (TEXT_MODEL.name, None, None)
    assert done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.usage.total_tokens == done.usage.input_tokens == 50 * 4
    found = await answers(client, done.output_file_id)
    assert [one["custom_id"] for one in found] == [str(n) for n in range(50)]
    for one in found:
        response = one["response"]
        assert (one["error"], response["status_code"]) == (None, 200)
        vector = response["body"]["data"][0]["embedding"]
        assert np.allclose(vector, vector_of(TextInput(f"text {one['custom_id']}")), atol=1e-6)
    output = await client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert len({one["id"] for one in found}) == 50


async def test_errors_of_lines_are_in_the_error_file(api: ApiUnderTest) -> None:
    client = api.openai()
    texts = ["fine", "broken", "fine too", "broken"]
    batch = await created(client, jsonl(line(f"c{n}", text) for n, text in enumerate(texts)))
    done = await until(client, batch)
    assert done.status == "completed"
    assert done.request_counts.model_dump() == {"completed": 2, "failed": 2, "total": 4}
    assert [one["custom_id"] for one in await answers(client, done.output_file_id)] == ["c0", "c2"]
    errors = await answers(client, done.error_file_id)
    assert [one["custom_id"] for one in errors] == ["c1", "c3"]
    assert errors[0]["response"]["status_code"] == 500
    assert errors[0]["response"]["body"]["error"]["code"] == "model_failed"


async def test_batch_whose_lines_all_fail_has_no_output_file(api: ApiUnderTest) -> None:
    client = api.openai()
    done = await until(client, await created(client, jsonl([line("1", "broken")])))
    assert (done.status, done.output_file_id) == ("completed", None)
    assert len(await answers(client, done.error_file_id)) == 1


async def test_rows_are_of_the_lane_and_cost_the_plans_share(
    both: tuple[ApiUnderTest, Running],
) -> None:
    api, _ = both
    client = api.openai()
    await until(client, await created(client, jsonl(line(str(n)) for n in range(3))))
    envelopes = [job.envelope for job in api.worker.jobs]
    assert {(one.lane, one.price_share) for one in envelopes} == {("batch", 0.5)}
    assert len({one.request_id for one in envelopes}) == 3
    assert {one.request_id.rpartition("-")[2] for one in envelopes} == {"1", "2", "3"}


async def test_images_come_as_base64(api: ApiUnderTest) -> None:
    client, endpoint = api.openai(), "/v1/images/generations"
    bodies = [
        {"prompt": "a circle", "size": "64x64", "seed": 7, "n": 2},
        {"prompt": "a star", "size": "64x64", "output_format": "webp", "model": IMAGE_MODEL.name},
    ]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": endpoint, "body": body}
        for n, body in enumerate(bodies)
    ]
    done = await until(client, await created(client, jsonl(lines), endpoint))
    assert done.status == "completed", done
    found = await answers(client, done.output_file_id)
    assert [len(one["response"]["body"]["data"]) for one in found] == [2, 1]
    first, second = (one["response"]["body"]["data"][0] for one in found)
    assert first["seed"] == 7
    assert base64.b64decode(first["b64_json"]).startswith(b"\x89PNG")
    assert base64.b64decode(second["b64_json"])[8:12] == b"WEBP"


BAD_LINES: list[tuple[Any, str, str | None]] = [
    (b"{no json", "invalid_json_line", None),
    (b'{"custom_id": "\xff"}', "invalid_json_line", None),
    (b'{"custom_id": "a\0"}', "invalid_json_line", None),
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


async def test_links_are_refused_as_they_end_too_soon(api: ApiUnderTest) -> None:
    endpoint = "/v1/images/generations"
    body = {"prompt": "a circle", "response_format": "url"}
    data = jsonl([{"custom_id": "1", "method": "POST", "url": endpoint, "body": body}])
    client = api.openai()
    done = await until(client, await created(client, data, endpoint))
    assert [(one.code, one.param) for one in done.errors.data] == [
        ("invalid_input", "body.response_format")
    ]


async def test_errors_that_are_told_are_bounded(api: ApiUnderTest) -> None:
    client = api.openai()
    done = await until(client, await created(client, b"{\n" * 3000))
    assert len(done.errors.data) == 100


async def test_bounds_of_a_file(api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    client = api.openai()
    monkeypatch.setattr(validation, "MOST_LINES", 3)
    done = await until(client, await created(client, jsonl(line(str(n)) for n in range(4))))
    assert [one.code for one in done.errors.data] == ["too_many_tasks"]
    monkeypatch.setattr(validation, "MOST_INPUTS", 3)
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


@pytest.fixture
def held_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], asyncio.Event]:
    """Lets lines above a number wait for the event."""

    def hold(number: int) -> asyncio.Event:
        go, run_line = asyncio.Event(), LineExecutor.run

        async def run(
            self: LineExecutor, batch: BatchCreated, caller: Caller, line: BatchLine
        ) -> LineAnswer:
            if line.number > number:
                await go.wait()
            return await run_line(self, batch, caller, line)

        monkeypatch.setattr(LineExecutor, "run", run)
        return go

    return hold


@pytest.mark.usefixtures("small_segments")
async def test_canceled_batch_keeps_what_is_done(
    api: ApiUnderTest, held_after: Callable[[int], asyncio.Event]
) -> None:
    client = api.openai()
    held_after(9)
    batch = await created(client, jsonl(line(str(n)) for n in range(20)))
    await _until_completed(client, batch, 7)
    cancelling = await client.batches.cancel(batch.id)
    assert cancelling.status in ("cancelling", "cancelled")
    assert cancelling.cancelling_at
    done = await until(client, batch, "cancelled")
    assert done.cancelled_at >= done.cancelling_at
    outputs = await answers(client, done.output_file_id)
    errors = await answers(client, done.error_file_id)
    assert done.request_counts.completed == len(outputs)
    assert len(outputs) in (7, 8, 9), "the lines of the next segment may be done or not"
    assert done.request_counts.failed == len(errors) == 20 - len(outputs)
    assert [one["custom_id"] for one in outputs + errors] == [str(n) for n in range(20)]
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert {one["response"] for one in errors} == {None}
    assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def _until_completed(client: Any, batch: Any, lines: int) -> None:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            counts = (await client.batches.retrieve(batch.id)).request_counts
            if counts.completed >= lines:
                return
            await asyncio.sleep(0.02)


async def test_batch_that_is_over_cannot_be_canceled(api: ApiUnderTest) -> None:
    client = api.openai()
    batch = await created(client, jsonl([line("1")]))
    await until(client, batch)
    with pytest.raises(openai.BadRequestError, match="completed"):
        await client.batches.cancel(batch.id)


@pytest.mark.usefixtures("small_segments")
async def test_expired_batch_says_which_lines_were_not_run(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "WINDOW_S", 2)
    client = api.openai()
    api.worker.is_silent = True
    batch = await created(client, jsonl(line(str(n)) for n in range(10)))
    done = await until(client, batch, "expired")
    assert done.expired_at
    assert done.request_counts.model_dump() == {"completed": 0, "failed": 10, "total": 10}
    errors = await answers(client, done.error_file_id)
    assert [one["custom_id"] for one in errors] == [str(n) for n in range(10)]
    assert {one["error"]["code"] for one in errors} == {"batch_expired"}


async def test_lists_are_in_pages(api: ApiUnderTest) -> None:
    client, made = api.openai(), []
    for _ in range(5):
        made.append((await created(client, jsonl([line("1")]))).id)
        await asyncio.sleep(0.002)  # ids are in the order of their milliseconds
    assert [one.id async for one in client.batches.list(limit=2)] == made[::-1]
    page = await client.batches.list(limit=2)
    assert ([one.id for one in page.data], page.has_more) == (made[:2:-1], True)
    for wrong in (0, 101):
        with pytest.raises(openai.BadRequestError):
            await client.batches.list(limit=wrong)


async def test_another_tenants_batch_does_not_exist(tmp_path: Path, redis_url: str) -> None:
    async with batching(tmp_path, redis_url, keys_url=keys_url(tmp_path, a="alice", b="bob")) as (
        api,
        _,
    ):
        alice, bob = api.openai(api_key=key_for("a")), api.openai(api_key=key_for("b"))
        batch = await created(alice, jsonl([line("1")]))
        for call in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        assert [one async for one in bob.batches.list()] == []
        with pytest.raises(openai.NotFoundError):
            await bob.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/embeddings",
                completion_window="24h",
            )
        done = await until(alice, batch)
        with pytest.raises(openai.NotFoundError):
            await bob.files.content(done.output_file_id)


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "/v1/chat/completions"},
        {"completion_window": "1h"},
        {"metadata": {str(n): "x" for n in range(17)}},
        {"metadata": {"x" * 65: "x"}},
        {"metadata": {"x": "x" * 513}},
        {"output_expires_after": {"anchor": "created_at", "seconds": 60}},
        {"webhook": "ftp://example.com/"},
        {"webhook": "https://127.0.0.1/"},
        {"surprise": 1},
    ],
)
async def test_wrong_creations_name_the_field(api: ApiUnderTest, wrong: dict[str, Any]) -> None:
    client = api.openai()
    file = await client.files.create(file=("a", jsonl([line("1")])), purpose="batch")
    body = {
        "input_file_id": file.id,
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    } | wrong
    answer = await api.http.post("/v1/batches", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == next(iter(wrong))


async def test_output_of_a_batch_is_no_input(api: ApiUnderTest) -> None:
    client = api.openai()
    done = await until(client, await created(client, jsonl([line("1")])))
    with pytest.raises(openai.BadRequestError, match="purpose batch_output"):
        await client.batches.create(
            input_file_id=done.output_file_id,
            endpoint="/v1/embeddings",
            completion_window="24h",
        )


async def test_input_of_an_open_batch_is_not_deleted(api: ApiUnderTest) -> None:
    client = api.openai()
    api.worker.go.clear()
    batch = await created(client, jsonl([line("1")]))
    with pytest.raises(openai.BadRequestError, match=batch.id):
        await client.files.delete(batch.input_file_id)
    api.worker.go.set()
    await until(client, batch)
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            try:
                await client.files.delete(batch.input_file_id)
                break
            except openai.BadRequestError:
                await asyncio.sleep(0.02)


async def test_tenant_has_a_bound_of_open_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_OPEN", 2)
    settings = settings_for(tmp_path, keys_url=keys_url(tmp_path, a="alice", b="bob"))
    async with running_api(settings) as api:
        alice, bob = api.openai(api_key=key_for("a")), api.openai(api_key=key_for("b"))
        for _ in range(2):
            await created(alice, jsonl([line("1")]))
        with pytest.raises(openai.RateLimitError, match="2 of your batches"):
            await created(alice, jsonl([line("1")]))
        await created(bob, jsonl([line("1")]))


@pytest.mark.usefixtures("small_segments")
async def test_tenants_take_turns(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MOST_AT_ONCE", 1)
    async with batching(tmp_path, redis_url, keys_url=keys_url(tmp_path, a="alice", b="bob")) as (
        api,
        _,
    ):
        alice, bob = api.openai(api_key=key_for("a")), api.openai(api_key=key_for("b"))
        api.worker.go.clear()
        large = await created(alice, jsonl(line(str(n)) for n in range(140)))
        await api.worker.until_taken(7)
        small = await created(bob, jsonl([line("1", "of bob")]))
        await asyncio.sleep(0.1)  # the runner sees it
        api.worker.go.set()
        assert (await until(bob, small)).status == "completed"
        assert (await until(alice, large)).request_counts.completed == 140
    order = [job.envelope.tenant for job in api.worker.jobs]
    assert order.index("bob") < 140 - 7, "before the end of the large one"


@pytest.mark.usefixtures("small_segments")
async def test_next_runner_goes_on_after_the_last_whole_segment(
    tmp_path: Path, redis_url: str, held_after: Callable[[int], asyncio.Event]
) -> None:
    settings = settings_for(tmp_path, redis_url=redis_url)
    async with running_api(settings) as api:
        client = api.openai()
        async with running_runner(api, settings):
            go = held_after(16)
            batch = await created(client, jsonl(line(str(n)) for n in range(40)))
            await _until_completed(client, batch, 14)
            await api.worker.until_taken(16)
        taken = [job.envelope.request_id for job in api.worker.jobs]
        go.set()
        async with running_runner(api, settings):
            done = await until(client, batch)
        again = [job.envelope.request_id for job in api.worker.jobs[len(taken) :]]
        assert done.request_counts.model_dump() == {"completed": 40, "failed": 0, "total": 40}
        found = await answers(client, done.output_file_id)
        assert [one["custom_id"] for one in found] == [str(n) for n in range(40)]
        assert not set(again) & {f"{batch.id}-{n}" for n in range(1, 15)}


@pytest.mark.usefixtures("small_segments")
async def test_two_runners_of_one_batch_do_no_harm(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if Redis had given the lease to both."""
    monkeypatch.setattr(BatchLeases, "take", _always)
    settings = settings_for(tmp_path, redis_url=redis_url)
    async with (
        running_api(settings) as api,
        running_runner(api, settings),
        running_runner(api, settings),
    ):
        client = api.openai()
        batches = [
            await created(client, jsonl(line(str(n), f"{k} {n}") for n in range(40)))
            for k in range(3)
        ]
        for batch in batches:
            done = await until(client, batch)
            assert done.request_counts.model_dump() == {"completed": 40, "failed": 0, "total": 40}
            found = await answers(client, done.output_file_id)
            assert [one["custom_id"] for one in found] == [str(n) for n in range(40)]


async def _always(self: Any, batch_id: str) -> bool:
    return True


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
    with pytest.raises(validation.FileRefused) as caught:
        await validation.validate(
            batch, found, api.dependencies.batch_files, api.dependencies.catalog
        )
    assert [one.code for one in caught.value.errors] == ["model_not_found"]


@pytest.mark.parametrize(
    "error", [Unavailable(), Overloaded(retry_after_s=0.05), DeadlineExceeded(), Canceled()]
)
async def test_lines_that_cannot_run_now_are_tried_again(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch, error: PenstockError
) -> None:
    real, failures = Dispatcher.dispatch, iter([True] * 5)

    async def dispatch(self: Dispatcher, request: InferenceRequest) -> InferenceResponse:
        if next(failures, False):
            raise error
        return await real(self, request)

    monkeypatch.setattr(Dispatcher, "dispatch", dispatch)
    client = api.openai()
    done = await until(client, await created(client, jsonl(line(str(n)) for n in range(5))))
    assert done.request_counts.completed == 5


async def test_creation_that_broke_off_is_forgotten(api: ApiUnderTest) -> None:
    store = api.dependencies.batches._store
    owner = owner_of("default")
    batch_id = "batch_" + "f" * 12 + "0" * 20
    await store._objects.create(f"batches/open/{owner}/{batch_id}/open", b"{}", "application/json")
    async with asyncio.timeout(WAIT_LIMIT_S):
        while await store.open():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_lines_stay_within_the_budget_of_the_month(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates are for requests only. A budget that is spent holds lines back until the end."""
    monkeypatch.setattr(service, "WINDOW_S", 3)
    keys = keys_url(
        tmp_path,
        plans={
            "poor": Plan(budget_usd_per_month=0.0),
            "slow": Plan(requests_per_min=1, budget_usd_per_month=1000.0),
        },
        tenants={"alice": "poor", "bob": "slow"},
        a="alice",
        b="bob",
    )
    async with batching(tmp_path, redis_url, keys_url=keys) as (api, _):
        poor, slow = api.openai(api_key=key_for("a")), api.openai(api_key=key_for("b"))
        held = await created(poor, jsonl(line(str(n)) for n in range(3)))
        done = await until(slow, await created(slow, jsonl(line(str(n)) for n in range(20))))
        assert done.request_counts.completed == 20
        assert (await until(poor, held)).status == "expired"
    assert {job.envelope.tenant for job in api.worker.jobs} == {"bob"}


def test_bodies_name_the_endpoints_that_there_are() -> None:
    schema = BatchBody.model_json_schema()
    assert set(schema["properties"]["endpoint"]["enum"]) == set(ENDPOINTS)


def test_documents_of_earlier_releases_are_read() -> None:
    known = msgspec.json.encode(
        BatchCreated(
            id="b",
            tenant="t",
            endpoint="/v1/embeddings",
            input_file_id="f",
            created_at_s=1.0,
            expires_at_s=2.0,
            output_keep_s=3,
        )
    )
    assert msgspec.json.decode(known[:-1] + b',"later":1}', type=BatchCreated).id == "b"
