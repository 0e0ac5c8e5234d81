"""Items counted toward the deadline objective, and their labels, parsed the way Prometheus does."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from shared.errors import Overloaded
from shared.money.slo import ENDS
from tests.api.dispatcher_harness import running_dispatcher
from tests.api.harness import TEXT_MODEL, ApiUnderTest
from tests.limits import PATIENCE

pytestmark = pytest.mark.anyio
MODEL = TEXT_MODEL.name
TEXTS = {"model": MODEL, "input": ["a cat", "a dog"]}
SOON_S = 0.2 * PATIENCE
"""A deadline that passes in the test."""


def counted() -> dict[str, float]:
    found = {
        end: REGISTRY.get_sample_value("penstock_slo_items_total", {"model": MODEL, "end": end})
        for end in ENDS
    }
    return {end: value or 0.0 for end, value in found.items()}


@contextmanager
def counts(**expected: int) -> Iterator[None]:
    """Checks each counter's increase during the block; counters that are not listed must not
    change.
    """
    before = counted()
    yield
    after = counted()
    assert {end: after[end] - before[end] for end in ENDS} == dict.fromkeys(ENDS, 0) | expected


async def test_counters_are_there_before_the_first_request(api: ApiUnderTest) -> None:
    for end in ENDS:
        labels = {"model": MODEL, "end": end}
        assert REGISTRY.get_sample_value("penstock_slo_items_total", labels) is not None


async def test_answered_items_are_in_time(api: ApiUnderTest) -> None:
    with counts(in_time=4):
        await api.http.post("/v1/embeddings", json=TEXTS)
        await api.http.post("/v1/embeddings", json=TEXTS)  # from the cache


@pytest.mark.parametrize(
    "headers",
    [
        {"x-penstock-lane": "batch"},
        {"x-penstock-deadline-ms": "20000"},
        {"x-penstock-queue-limit-ms": "20000"},
    ],
    ids=lambda headers: next(iter(headers)),
)
async def test_what_may_wait_or_has_less_time_is_not_counted(
    api: ApiUnderTest, headers: dict[str, str]
) -> None:
    with counts():
        assert (await api.http.post("/v1/embeddings", json=TEXTS, headers=headers)).is_success


async def test_longer_deadline_counts(api: ApiUnderTest) -> None:
    with counts(in_time=2):
        await api.http.post(
            "/v1/embeddings", json=TEXTS, headers={"x-penstock-deadline-ms": "60000"}
        )


async def test_wrong_input_is_not_counted(api: ApiUnderTest) -> None:
    with counts():
        refused = await api.http.post("/v1/embeddings", json=TEXTS | {"input": ""})
        assert refused.status_code == 400


async def test_item_without_an_answer_at_its_deadline_is_late(tmp_path: Path) -> None:
    async with running_dispatcher(tmp_path) as harness:
        harness.worker.go.clear()
        with counts(late=1):
            await harness.ask("a cat", deadline_in_s=SOON_S)


async def test_tiny_deadline_of_a_caller_does_not_count(tmp_path: Path) -> None:
    async with running_dispatcher(tmp_path) as harness:
        harness.worker.go.clear()
        with counts():
            await harness.ask("a cat", deadline_in_s=SOON_S, deadline_s=SOON_S)


async def test_request_without_room_is_refused(tmp_path: Path) -> None:
    async with running_dispatcher(tmp_path, max_in_flight=1) as harness:
        harness.worker.go.clear()
        first = harness.ask("first")
        await asyncio.sleep(0)
        with counts(refused=2), pytest.raises(Overloaded):
            await harness.ask("a cat", "a dog")
        with counts(), pytest.raises(Overloaded):
            await harness.ask("a cat", "a dog", deadline_s=SOON_S)
        with counts(in_time=1):
            harness.worker.go.set()
            await first


async def test_request_whose_caller_hung_up_is_not_counted(tmp_path: Path) -> None:
    async with running_dispatcher(tmp_path) as harness:
        harness.worker.go.clear()
        asked = harness.ask("a cat")
        await harness.worker.until_taken(1)
        with counts():
            asked.cancel()
            await asyncio.wait([asked])
        harness.worker.go.set()
