"""Batches with reserved, spent, and raised budgets, and the room they leave for other batches."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from api.batch_runner import execution, run, terms, turn_progress
from api.batch_runner import runner as runner_module
from api.dispatch.dispatcher import Dispatcher
from api.dispatch.request import InferenceRequest, InferenceResponse
from shared.errors import DeadlineExceeded, PenstockError, Unavailable
from shared.models.catalog import Catalog
from shared.models.entry import EmbeddingLimits, Price
from shared.stores.key_stores import key_store
from shared.tenants.administration import Administration
from shared.tenants.directory import StoredKey
from shared.tenants.plan import Limits, Plan
from tests.api.batches.batching import (
    Running,
    answers,
    batching,
    created,
    jsonl,
    line,
    until,
    until_completed,
)
from tests.api.harness import CATALOG, TEXT_MODEL, ApiUnderTest
from tests.keys import key_for, keys_url, stored
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
PRICED = Catalog(
    tuple(
        model.model_copy(update={"price": Price(per_million_tokens_usd=1e6)})
        if model.name == TEXT_MODEL.name
        else model
        for model in CATALOG.models
    )
)
RESERVED_USD, SPENT_USD = 21.0, 1.5
"""Half the list price of the 42 tokens that each of `_lines` may use, and of the 3 that each
actually uses.
"""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(runner_module, "MAX_PAUSE_S", 0.05)
    monkeypatch.setattr(terms, "REFRESH_S", 0.0)


def _lines(many: int, of: str = "x") -> bytes:
    texts = (f"{of}{number:03}".ljust(40, "-") for number in range(many))
    return jsonl(line(str(number), text) for number, text in enumerate(texts))


def _keys(folder: Path, *, plan_usd: float = 1000.0, poor_usd: float | None = None) -> str:
    """Two keys of one tenant, one with a separate budget, and a key of another tenant."""
    own: list[StoredKey] = [
        stored("poor", "acme", limits=Limits(budget_usd_per_month=poor_usd)),
        stored("rich", "acme"),
    ]
    plans = {"paying": Plan(budget_usd_per_month=plan_usd)}
    return keys_url(folder, plans=plans, tenants={"acme": "paying"}, keys=own, other="other")


def _computed(api: ApiUnderTest, batch: Any) -> Counter[str]:
    """How many times each of a batch's lines was processed, keyed by request id."""
    ids = (job.envelope.request_id for job in api.worker.jobs)
    return Counter(one for one in ids if one.startswith(batch.id))


async def _until_next_is_due(running: Running) -> None:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not any(held.others.is_next_due for held in running.runner._held.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_lines_go_on_as_soon_as_reservations_come_back(
    tmp_path: Path, redis_url: str
) -> None:
    """All lines together reserve three times the budget, but spend less than the budget."""
    url = _keys(tmp_path, plan_usd=20 * SPENT_USD + RESERVED_USD)
    async with batching(tmp_path, redis_url, catalog=PRICED, keys_url=url) as (api, _):
        client = api.openai(api_key=key_for("rich"))
        async with asyncio.timeout(WAIT_LIMIT_S):
            done = await until(client, await created(client, _lines(20)))
        assert done.request_counts.completed == 20


async def test_batch_of_a_spent_budget_steps_aside_and_goes_on_when_it_is_raised(
    tmp_path: Path, redis_url: str
) -> None:
    url = _keys(tmp_path, poor_usd=4 * SPENT_USD + RESERVED_USD)
    async with batching(tmp_path, redis_url, catalog=PRICED, keys_url=url) as (api, _):
        poor, rich = api.openai(api_key=key_for("poor")), api.openai(api_key=key_for("rich"))
        stuck = await created(poor, _lines(12))
        await until_completed(poor, stuck, 5)
        async with asyncio.timeout(WAIT_LIMIT_S):
            done = await until(rich, await created(rich, _lines(12, "y")))
        assert done.request_counts.completed == 12
        held = await rich.batches.retrieve(stuck.id)
        assert held.status == "in_progress"
        assert held.request_counts.model_dump() == {"completed": 5, "failed": 0, "total": 12}
        _keys(tmp_path, poor_usd=100.0)
        async with asyncio.timeout(WAIT_LIMIT_S):
            done = await until(poor, stuck)
        assert done.request_counts.completed == 12
        found = await answers(poor, done.output_file_id)
        assert [one["custom_id"] for one in found] == [str(number) for number in range(12)]
        computed = _computed(api, stuck)
        assert (len(computed), set(computed.values())) == (12, {1}), "each line once"


async def test_line_larger_than_its_budget_is_refused_at_once(
    tmp_path: Path, redis_url: str
) -> None:
    """The batch's other lines run. Nothing waits for the batch to expire."""
    url = _keys(tmp_path, poor_usd=RESERVED_USD)
    async with batching(tmp_path, redis_url, catalog=PRICED, keys_url=url) as (api, _):
        poor = api.openai(api_key=key_for("poor"))
        data = jsonl([line("large", "x" * 50)]) + _lines(1)
        async with asyncio.timeout(WAIT_LIMIT_S):
            done = await until(poor, await created(poor, data))
        assert (done.status, done.request_counts.completed) == ("completed", 1)
        (refused,) = await answers(poor, done.error_file_id)
        assert (refused["custom_id"], refused["response"]["status_code"]) == ("large", 429)
        error = refused["response"]["body"]["error"]
        assert error["code"] == "insufficient_quota"
        assert error["message"].startswith("Request too large for the budget")


async def test_long_text_reserves_only_what_its_model_reads(tmp_path: Path, redis_url: str) -> None:
    """A budget for 42 tokens admits a 4,000-byte text if the model reads only 42 of its tokens."""
    models = [
        model.model_copy(update={"text": EmbeddingLimits(max_input_tokens=42)})
        if model.name == TEXT_MODEL.name
        else model
        for model in PRICED.models
    ]
    url = _keys(tmp_path, poor_usd=RESERVED_USD)
    async with batching(tmp_path, redis_url, catalog=Catalog(tuple(models)), keys_url=url) as (
        api,
        _,
    ):
        poor = api.openai(api_key=key_for("poor"))
        async with asyncio.timeout(WAIT_LIMIT_S):
            done = await until(poor, await created(poor, jsonl([line("long", "x" * 4000)])))
        assert (done.status, done.request_counts.completed) == ("completed", 1)


async def test_batch_of_a_frozen_tenant_waits_until_it_is_thawed(
    tmp_path: Path, redis_url: str
) -> None:
    url = _keys(tmp_path)
    async with batching(tmp_path, redis_url, catalog=PRICED, keys_url=url) as (api, _):
        rich, other = api.openai(api_key=key_for("rich")), api.openai(api_key=key_for("other"))
        api.worker.go.clear()
        stuck = await created(rich, _lines(12))
        later = await created(rich, _lines(3, "z"))
        await api.worker.until_taken(1)
        async with key_store(url, is_writable=True) as store:
            admin = Administration(store, actor="user x", address="")
            await admin.freeze_tenant("acme", is_frozen=True)
            api.worker.go.set()
            async with asyncio.timeout(WAIT_LIMIT_S):
                done = await until(other, await created(other, _lines(12, "y")))
            assert done.request_counts.completed == 12
            computed = _computed(api, later)
            assert not computed, "what had not begun waits"
            await admin.freeze_tenant("acme", is_frozen=False)
        async with asyncio.timeout(WAIT_LIMIT_S):
            await _until_let_in(rich)
            for batch in (stuck, later):
                done = await until(rich, batch)
        assert done.request_counts.completed == 3


async def _until_let_in(client: Any) -> None:
    """Waits until the API has learned that a tenant is no longer frozen."""
    while True:
        with suppress(openai.PermissionDeniedError):
            await client.batches.list()
            return
        await asyncio.sleep(0.02)


async def test_batch_that_stepped_aside_is_canceled_at_once(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "FIRST_PAUSE_S", 3600.0)
    url = _keys(tmp_path, poor_usd=RESERVED_USD)
    async with batching(tmp_path, redis_url, catalog=PRICED, keys_url=url) as (api, _):
        poor = api.openai(api_key=key_for("poor"))
        stuck = await created(poor, _lines(3))
        await until_completed(poor, stuck, 1)
        await poor.batches.cancel(stuck.id)
        async with asyncio.timeout(WAIT_LIMIT_S):
            done = await until(poor, stuck)
        assert (done.status, done.request_counts.completed) == ("cancelled", 1)
        assert len(await answers(poor, done.error_file_id)) == 2


async def test_spent_budgets_of_many_tenants_leave_hands_to_others(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MAX_AT_ONCE", 1)
    url = _keys(tmp_path, plan_usd=0.0)
    async with batching(tmp_path, redis_url, catalog=PRICED, keys_url=url) as (api, _):
        poor, other = api.openai(api_key=key_for("rich")), api.openai(api_key=key_for("other"))
        stuck = await created(poor, _lines(3))
        await until(poor, stuck, "in_progress")
        async with asyncio.timeout(WAIT_LIMIT_S):
            done = await until(other, await created(other, _lines(3)))
        assert done.request_counts.completed == 3
        assert (await poor.batches.retrieve(stuck.id)).request_counts.completed == 0


@pytest.mark.parametrize("error", [Unavailable(), DeadlineExceeded()])
async def test_batch_that_can_not_move_steps_aside_for_another_one_of_its_tenant(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, error: PenstockError
) -> None:
    """The worker for one model seems to be gone: the failure persists and is not caused by a
    budget.
    """
    monkeypatch.setattr(turn_progress, "STALLED_S", 0.2)
    monkeypatch.setattr(execution, "MAX_PAUSE_S", 0.05)
    real, is_back, late = Dispatcher.dispatch, asyncio.Event(), list[str]()

    async def dispatch(self: Dispatcher, request: InferenceRequest) -> InferenceResponse:
        number = int(request.facts.request_id.split("-")[1])
        if request.facts.batch_id == stuck.id and number > 2 and not is_back.is_set():
            late.append(request.facts.request_id)
            raise error
        return await real(self, request)

    async with batching(tmp_path, redis_url) as (api, _):
        client = api.openai()
        monkeypatch.setattr(Dispatcher, "dispatch", dispatch)
        stuck = await created(client, _lines(5))
        async with asyncio.timeout(WAIT_LIMIT_S):
            done = await until(client, await created(client, _lines(5, "y")))
        assert done.request_counts.completed == 5
        held = await client.batches.retrieve(stuck.id)
        assert (held.status, held.request_counts.completed) == ("in_progress", 2)
        is_back.set()
        async with asyncio.timeout(WAIT_LIMIT_S):
            assert (await until(client, stuck)).request_counts.completed == 5
        assert set(_computed(api, stuck).values()) == {1}
        if isinstance(error, DeadlineExceeded):
            assert len(late) == len(set(late)), "the record of a late job would only say so again"


async def test_older_batch_goes_on_before_newer_ones(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SEGMENT_LINES", 5)
    url = _keys(tmp_path, poor_usd=0.0)
    async with batching(tmp_path, redis_url, catalog=PRICED, keys_url=url) as (api, running):
        poor, rich = api.openai(api_key=key_for("poor")), api.openai(api_key=key_for("rich"))
        older = await created(poor, _lines(5))
        await until(poor, older, "in_progress")
        api.worker.go.clear()
        newer = await created(rich, _lines(300, "y"))
        await api.worker.until_taken(5)
        _keys(tmp_path, poor_usd=100.0)
        await _until_next_is_due(running)
        api.worker.go.set()
        assert (await until(poor, older)).request_counts.completed == 5
        assert (await until(rich, newer)).request_counts.completed == 300
    order = [job.envelope.request_id.split("-")[0] for job in api.worker.jobs]
    assert order.index(older.id) < 300 - 5, "before the end of the newer one"
