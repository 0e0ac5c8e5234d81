"""The runner: turns, takeovers, retries, and budgets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.batch_runner import runner as runner_module
from api.batch_runner.leases import BatchLeases
from api.batches import service
from api.batches.documents import HEADER_BYTES
from api.batches.names import owner_of
from api.dispatch.dispatcher import Dispatcher
from api.dispatch.request import InferenceRequest, InferenceResponse
from shared.errors import Canceled, DeadlineExceeded, Overloaded, PenstockError, Unavailable
from shared.tenants.plan import Plan
from tests.api.batches.batching import (
    answers,
    batching,
    created,
    jsonl,
    line,
    running_runner,
    until,
    until_completed,
)
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.keys import key_for, keys_url
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio


@pytest.mark.usefixtures("small_segments")
async def test_tenants_take_turns(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MAX_AT_ONCE", 1)
    async with batching(tmp_path, redis_url, keys_url=keys_url(tmp_path, a="alice", b="bob")) as (
        api,
        _,
    ):
        alice, bob = api.openai(api_key=key_for("a")), api.openai(api_key=key_for("b"))
        api.worker.go.clear()
        large = await created(alice, jsonl(line(str(n)) for n in range(280)))
        await api.worker.until_taken(7)
        small = await created(bob, jsonl([line("1", "of bob")]))
        await asyncio.sleep(0.1)  # the runner sees it
        api.worker.go.set()
        assert (await until(bob, small)).status == "completed"
        assert (await until(alice, large)).request_counts.completed == 280
    order = [job.envelope.tenant for job in api.worker.jobs]
    assert order.index("bob") <= 128 + 7, "it waited for what was in flight"


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
            await until_completed(client, batch, 14)
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


async def test_next_runner_runs_lines_of_a_damaged_log_again(
    tmp_path: Path, redis_url: str, held_after: Callable[[int], asyncio.Event]
) -> None:
    settings = settings_for(tmp_path, redis_url=redis_url)
    async with running_api(settings) as api:
        client = api.openai()
        async with running_runner(api, settings):
            go = held_after(4)
            batch = await created(client, jsonl(line(str(n)) for n in range(8)))
            await until_completed(client, batch, 4)
        logs = list((tmp_path / "objects").rglob(f"{batch.id}/answers/*"))
        for log in logs:
            log.write_bytes(b"{".ljust(HEADER_BYTES) + b"{")
        assert logs
        assert [listed.id async for listed in client.batches.list()] == [batch.id]
        go.set()
        async with running_runner(api, settings):
            done = await until(client, batch)
        found = await answers(client, done.output_file_id)
        assert [answer["custom_id"] for answer in found] == [str(n) for n in range(8)]


@pytest.mark.usefixtures("small_segments")
async def test_two_runners_of_one_batch_do_no_harm(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a Redis that granted the lease to both runners."""
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


@pytest.mark.slow  # waits for a 3 s window to end
async def test_lines_stay_within_the_budget_of_the_month(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates apply only to requests.

    If the budget is spent, lines wait until the batch's window ends.
    """
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
