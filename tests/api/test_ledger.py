"""No matter how a request ends, its response, its rows, and its key's and tenant's counters agree.

There is one test for each ending. Each compares the three books and checks how much each key pays.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
from prometheus_client import REGISTRY

from api.batch_runner.runner import open_runner
from api.dispatch.admission import Admission
from shared.errors import Overloaded, Unavailable
from shared.stores.cache import Hit, RedisLevel, ResultCache
from shared.stores.records import LATE_LOOK_S, Records
from shared.usage.row_list import RowList
from tests.api.batches.batching import created, jsonl, line, until
from tests.api.harness import already_open
from tests.api.ledger import EXACT_USD, Ledger, LedgerWorld, ledger_keys, ledger_world
from tests.api.predicting import OVER
from tests.api.test_generation_charges import BODY as STREAM
from tests.api.test_generation_charges import LONG
from tests.canary.world import CANARY, running_world
from tests.keys import bearer, key_for
from tests.limits import PATIENCE, WAIT_LIMIT_S
from tests.workers.test_steps import spelling
from tests.workers.worker_harness import MODEL

pytestmark = pytest.mark.anyio

LETTER_USD = 0.001
WORD_USD = 4 * LETTER_USD
LATE_MS = str(int(500 * PATIENCE))
"""A deadline that passes in the test."""
DEADLINES_MS = tuple(str(int(LATE_MS) * 4**attempt) for attempt in range(5))
"""Deadlines to try one after another, when the worker has to meet a deadline that the caller
misses.
"""
End = Callable[[LedgerWorld], Awaitable[dict[str, float]]]


@pytest.fixture
async def world(redis_url: str, tmp_path: Path) -> AsyncIterator[LedgerWorld]:
    async with ledger_world(redis_url, tmp_path) as running:
        yield running


def words(count: int, start: int = 0) -> list[str]:
    """Distinct four-letter texts.

    A message has 16 items; the model's batch size is four.
    """
    digits = "abcdefghij"
    return ["".join(digits[int(one)] for one in f"{start + at:04d}") for at in range(count)]


def code_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


def replies(world: LedgerWorld, count: int) -> Callable[[], bool]:
    """True if workers have replied to `count` items."""
    return lambda: len(world.harness.rows) >= count


async def delivered(world: LedgerWorld) -> dict[str, float]:
    """Texts are computed, found in the cache, and repeated within one request."""
    texts = words(20)
    for asked in (texts, texts, [*texts[:3], texts[0], "new"]):
        assert (await world.ledger.embed("one", asked)).status_code == 200
    return {"one": 20 * WORD_USD * 1.25 + 4 * WORD_USD / 4 + 3 * LETTER_USD}


async def one_item_is_bad(world: LedgerWorld) -> dict[str, float]:
    """Results come from the same job, another job, the cache, and a joined item."""
    texts = words(20)
    await world.ledger.embed("one", texts[:2])
    for asked in ([*texts, "0"], ["0", *words(40, 100)], [texts[0], "0", texts[0]]):
        answer = await world.ledger.embed("one", asked)
        assert (answer.status_code, code_of(answer)) == (400, "invalid_input")
        assert answer.headers["x-penstock-cost-usd"] == "0"
        await world.ledger.until_idle()
        rows = [row for row in world.ledger.rows() if row.row_id.startswith(_id_of(answer))]
        assert {row.status for row in rows} == {"failed", "canceled"}
        assert len(rows) == len(asked)
    return {"one": 2 * WORD_USD}


async def model_fails(world: LedgerWorld) -> dict[str, float]:
    answer = await world.ledger.embed("one", [*words(20), "!"])
    assert (answer.status_code, code_of(answer)) == (500, "model_failed")
    return {}


async def answer_cant_be_made(world: LedgerWorld) -> dict[str, float]:
    """These vectors can't be converted to floats."""
    answer = await world.ledger.embed("one", ["abc"], encoding="float")
    assert (answer.status_code, code_of(answer)) == (500, "internal")
    return {}


async def caller_hangs_up_at_once(world: LedgerWorld) -> dict[str, float]:
    world.harness.process.gate.clear()
    texts = words(40)
    await world.hang_up("one", texts, lambda: world.harness.process.started.is_set())
    return {}


async def caller_hangs_up_with_a_part_done(world: LedgerWorld) -> dict[str, float]:
    """The first message has received its reply; only one batch of the second has."""
    texts = words(32)
    world.harness.process.holds = texts[20]
    await world.hang_up("one", texts, replies(world, 16))
    return {}


async def worker_never_hears_of_the_hang_up(world: LedgerWorld) -> dict[str, float]:
    """The row with the result is written after the row that records the hang-up."""
    texts = words(3)
    world.harness.process.gate.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Records, "cancel", _away)
        await world.hang_up("one", texts, lambda: world.harness.process.started.is_set())
        await world.harness.until(lambda: len(world.api.rows) == 3)
        world.harness.process.gate.set()
        await world.harness.until(replies(world, 3))
    assert {row.status for row in world.harness.rows} == {"succeeded"}
    assert {row.status for row in world.ledger.rows()} == {"canceled"}
    return {}


async def deadline_passes(world: LedgerWorld) -> dict[str, float]:
    world.harness.process.gate.clear()
    answer = await world.ledger.embed("one", words(20), x_penstock_deadline_ms=LATE_MS)
    assert (answer.status_code, code_of(answer)) == (504, "deadline_exceeded")
    assert answer.headers["x-penstock-cost-usd"] == "0"
    world.harness.process.gate.set()
    return {}


async def deadline_passes_with_a_part_done(world: LedgerWorld) -> dict[str, float]:
    for attempt, deadline_ms in enumerate(DEADLINES_MS):
        texts, before = words(32, 32 * attempt), len(world.harness.rows)
        world.harness.process.holds = texts[20]
        answer = await world.ledger.embed("one", texts, x_penstock_deadline_ms=deadline_ms)
        assert (answer.status_code, code_of(answer)) == (504, "deadline_exceeded")
        is_part_done = replies(world, before + 16)()
        world.harness.process.gate.set()
        if is_part_done:
            return {}
        await world.ledger.until_idle()
    raise AssertionError("no part was done before a deadline")


async def reply_is_lost(world: LedgerWorld) -> dict[str, float]:
    """The worker responded in time and wrote its row, but the caller got nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("api.dispatch.reply_inbox.OpenInbox.deliver", lambda *_: None)
        patch.setattr(Records, "read", _away)
        for attempt, deadline_ms in enumerate(DEADLINES_MS):
            texts, before = words(3, 3 * attempt), len(world.harness.rows)
            answer = await world.ledger.embed("one", texts, x_penstock_deadline_ms=deadline_ms)
            assert (answer.status_code, code_of(answer)) == (504, "deadline_exceeded")
            await world.ledger.until_idle()
            if {row.status for row in world.harness.rows[before:]} == {"succeeded"}:
                return {}
    raise AssertionError("the worker met no deadline")


async def broker_confirms_a_reply_late(world: LedgerWorld) -> dict[str, float]:
    """It delivered the reply in time, but the worker doesn't find out until after the deadline."""
    publish = world.harness.broker.publish
    for attempt, deadline_ms in enumerate(DEADLINES_MS):
        answered, before = asyncio.Event(), len(world.harness.rows)
        confirm_s = int(deadline_ms) / 1000 + LATE_LOOK_S

        async def slow(
            topic_id: str,
            *args: Any,
            answered: asyncio.Event = answered,
            confirm_s: float = confirm_s,
            **given: Any,
        ) -> str:
            sent = await publish(topic_id, *args, **given)
            if topic_id.startswith("inbox"):
                await answered.wait()
                await asyncio.sleep(confirm_s)
            return sent

        world.harness.broker.publish = slow  # type: ignore[method-assign]
        texts = words(3, 3 * attempt)
        answer = await world.ledger.embed("one", texts, x_penstock_deadline_ms=deadline_ms)
        answered.set()
        if answer.status_code == 200:
            await world.harness.until(replies(world, before + 3))
            return {"one": 3 * WORD_USD}
        await world.ledger.until_idle()
    raise AssertionError("the worker met no deadline")


async def broker_is_away(world: LedgerWorld) -> dict[str, float]:
    world.harness.broker.outage = Unavailable("the broker is away")
    answer = await world.ledger.embed("one", words(20))
    assert (answer.status_code, code_of(answer)) == (503, "unavailable")
    world.harness.broker.outage = None
    return {}


async def budget_is_too_small(world: LedgerWorld) -> dict[str, float]:
    answer = await world.ledger.embed("poor", words(20))
    assert (answer.status_code, code_of(answer)) == (429, "insufficient_quota")
    return {}


async def answer_is_replayed(world: LedgerWorld) -> dict[str, float]:
    """The request is charged once, even if the caller hung up and gets its response on the next
    try.
    """
    for _ in range(2):
        assert (await world.ledger.embed("one", words(3), idempotency_key="a")).is_success
    world.harness.process.gate.clear()
    world.harness.process.started.clear()
    texts = words(5, 100)
    await world.hang_up(
        "one", texts, lambda: world.harness.process.started.is_set(), idempotency_key="b"
    )
    world.harness.process.gate.set()
    answer = await world.ledger.embed("one", texts, idempotency_key="b")
    assert answer.headers["idempotent-replayed"] == "true"
    world.ledger.tell("one", 5 * WORD_USD)  # the cost in the response that never arrived
    return {"one": 8 * WORD_USD}


async def items_are_joined(world: LedgerWorld) -> dict[str, float]:
    """The first caller pays in full; the others pay a reduced share for the items they share."""
    world.harness.process.gate.clear()
    asked = [await _begun(world, key) for key in ("one", "two", "two")]
    world.harness.process.gate.set()
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    return {"one": 3 * WORD_USD, "two": 3 * WORD_USD / 2}


async def who_was_joined_hangs_up(world: LedgerWorld) -> dict[str, float]:
    """The first of the remaining callers pays in full: the item was computed only for them."""
    world.harness.process.gate.clear()
    first, *others = [await _begun(world, key) for key in ("one", "two", "other", "two")]
    first.cancel()
    await asyncio.wait([first])
    world.harness.process.gate.set()
    assert {answer.status_code for answer in await asyncio.gather(*others)} == {200}
    assert len(world.harness.process.batches) == 2, "of each tenant one"
    return {"two": 3 * WORD_USD * 1.25, "other": 3 * WORD_USD}


async def who_joined_hangs_up(world: LedgerWorld) -> dict[str, float]:
    world.harness.process.gate.clear()
    first, second = await _begun(world, "one"), await _begun(world, "two")
    second.cancel()
    await asyncio.wait([second])
    world.harness.process.gate.set()
    assert (await first).status_code == 200
    return {"one": 3 * WORD_USD}


async def who_was_joined_gets_an_error(world: LedgerWorld) -> dict[str, float]:
    """The first request fails as a whole, so the request that joined it pays in full."""
    world.harness.process.gate.clear()
    first = await _begun(world, "one", "0")
    second = await _begun(world, "two")
    world.harness.process.gate.set()
    assert (await first).status_code == 400
    assert (await second).status_code == 200
    return {"two": 3 * WORD_USD}


async def unpaid_results_of_a_bad_request_are_asked_for_again(
    world: LedgerWorld,
) -> dict[str, float]:
    """The first hit pays like a miss, and later hits pay their reduced share."""
    texts = words(20)
    await _leave_unpaid(world, texts)
    for key in ("one", "two"):
        assert (await world.ledger.embed(key, texts)).status_code == 200
    assert _computed_once(world)
    return {"one": 20 * WORD_USD, "two": 20 * WORD_USD / 4}


async def unpaid_results_are_asked_for_together(world: LedgerWorld) -> dict[str, float]:
    """If several requests come in at once, only one pays, even if a request repeats texts."""
    texts = words(3)
    await _leave_unpaid(world, texts)
    asked = (world.ledger.embed("one", [*texts, *texts]) for _ in range(4))
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert _computed_once(world)
    return {"one": 3 * WORD_USD + 21 * WORD_USD / 4}


async def unpaid_results_fail_again(world: LedgerWorld) -> dict[str, float]:
    """They stay unpaid until some request receives them."""
    texts = words(3)
    for more in ("0", "0", "!"):
        assert not (await world.ledger.embed("one", [*texts, more])).is_success
        await world.ledger.until_idle()
    assert (await world.ledger.embed("two", texts)).status_code == 200
    assert _computed_once(world)
    return {"two": 3 * WORD_USD}


async def unpaid_results_meet_a_refusal(world: LedgerWorld) -> dict[str, float]:
    """A request that is rejected before any of it is computed pays for none of its hits."""
    texts = words(3)
    await _leave_unpaid(world, texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Admission, "admit", _full)
        assert (await world.ledger.embed("one", [*texts, "new"])).status_code == 429
    assert (await world.ledger.embed("one", texts)).status_code == 200
    assert _computed_once(world)
    return {"one": 3 * WORD_USD}


async def results_of_a_hang_up_are_asked_for_again(world: LedgerWorld) -> dict[str, float]:
    """One job had replied before its caller hung up, and one is computed again."""
    texts = words(32)
    world.harness.process.holds = texts[20]
    await world.hang_up("one", texts, replies(world, 16))
    world.harness.process.holds = ""
    world.harness.process.gate.set()
    await world.ledger.until_idle()
    for _ in range(2):
        assert (await world.ledger.embed("one", texts)).status_code == 200
    return {"one": 32 * WORD_USD * 1.25}


async def results_are_on_their_way_at_a_hang_up(world: LedgerWorld) -> dict[str, float]:
    """The worker has replied, but the API has not received the reply yet."""
    texts = words(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("api.dispatch.reply_inbox.OpenInbox.deliver", lambda *_: None)
        await world.hang_up("one", texts, replies(world, 3))
    await world.api.until_idle()
    return await _pay_once(world, texts)


async def answer_that_cant_be_made_is_asked_for_again(world: LedgerWorld) -> dict[str, float]:
    """This time, the request asks for a usable format."""
    for encoding, status in (("float", 500), ("base64", 200), ("base64", 200)):
        answer = await world.ledger.embed("one", ["abc"], encoding=encoding)
        assert answer.status_code == status
    return {"one": 3 * LETTER_USD * 1.25}


async def prediction_gets_unpaid_results(world: LedgerWorld) -> dict[str, float]:
    """Its worker finds them in the cache."""
    await _leave_unpaid(world, ["abcd"])
    for _ in range(2):
        await _prediction(world, "abcd")
    assert _computed_once(world)
    world.ledger.tell("one", WORD_USD * 1.25)
    return {"one": WORD_USD * 1.25}


async def results_computed_again_are_not_delivered(world: LedgerWorld) -> dict[str, float]:
    """`no-cache` recomputes and replaces the cached result, so the new result is unpaid."""
    texts = words(3)
    await _leave_unpaid(world, texts, cache_control="no-cache")
    return await _pay_once(world, texts)


async def results_computed_again_meet_a_hang_up(world: LedgerWorld) -> dict[str, float]:
    """The worker has replied, but the API has not received the reply yet."""
    texts = words(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("api.dispatch.reply_inbox.OpenInbox.deliver", lambda *_: None)
        await world.hang_up("one", texts, replies(world, 3), cache_control="no-cache")
    await world.api.until_idle()
    await world.ledger.until_idle()
    return await _pay_once(world, texts)


async def paid_results_replace_unpaid_ones(world: LedgerWorld) -> dict[str, float]:
    """The second computation was paid for, so later hits pay their reduced share."""
    texts = words(3)
    await _leave_unpaid(world, texts)
    answer = await world.ledger.embed("one", texts, cache_control="no-cache")
    assert answer.status_code == 200
    await world.ledger.until_idle()
    assert (await world.ledger.embed("one", texts)).status_code == 200
    await _prediction(world, texts[0])
    world.ledger.tell("one", WORD_USD / 4)
    return {"one": 3 * WORD_USD * 1.25 + WORD_USD / 4}


async def caller_hangs_up_as_its_hits_are_found(world: LedgerWorld) -> dict[str, float]:
    """Redis has already deleted the marks. They are written again."""
    texts = words(3)
    await _leave_unpaid(world, texts)
    take, taken, left = RedisLevel.take, asyncio.Event(), asyncio.Event()
    rows = len(world.api.rows)

    async def held(level: RedisLevel, keys: Sequence[str]) -> list[bytes | None] | None:
        values = await take(level, keys)
        taken.set()
        await left.wait()
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RedisLevel, "take", held)
        await world.hang_up("one", texts, taken.is_set)
        await world.harness.until(lambda: len(world.api.rows) == rows + 3)
        left.set()
    return await _pay_once(world, texts)


async def prediction_is_canceled_as_its_hit_is_found(world: LedgerWorld) -> dict[str, float]:
    """The worker has already taken the mark, and writes it again."""
    await _leave_unpaid(world, ["abcd"])
    get_many, registry = ResultCache.get_many, world.harness.registry
    assert registry is not None

    async def canceled(cache: ResultCache, keys: Iterable[str]) -> dict[str, Hit]:
        hits = await get_many(cache, keys)
        for job in registry.find():
            path = f"/v1/predictions/{job.envelope.request_id}/cancel"
            await world.api.http.post(path, headers=bearer("one"))
        await world.harness.until(lambda: all(job.is_over for job in registry.find()))
        return hits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResultCache, "get_many", canceled)
        await _prediction(world, "abcd")
        await world.ledger.until_idle()
    await _until_marked(world)
    return await _pay_once(world, ["abcd"])


async def _leave_unpaid(world: LedgerWorld, texts: Sequence[str], **options: Any) -> None:
    """Computes texts for a request that fails, so that they remain unpaid."""
    answer = await world.ledger.embed("one", [*texts, "0"], **options)
    assert (answer.status_code, code_of(answer)) == (400, "invalid_input")
    await world.ledger.until_idle()
    await _until_marked(world)


async def _until_marked(world: LedgerWorld) -> None:
    """Waits until Redis has a mark for an unpaid result. Marks are written in the background."""
    async with (
        redis.asyncio.Redis.from_url(world.ledger.redis_url) as client,
        asyncio.timeout(WAIT_LIMIT_S),
    ):
        while not [key async for key in client.scan_iter("*unpaid:*")]:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def _pay_once(world: LedgerWorld, texts: Sequence[str]) -> dict[str, float]:
    """Requests unpaid results twice: the first hit pays in full, the second only its share."""
    for _ in range(2):
        assert (await world.ledger.embed("one", texts)).status_code == 200
    assert _computed_once(world)
    return {"one": len(texts) * WORD_USD * 1.25}


def _computed_once(world: LedgerWorld) -> bool:
    computed = [text for batch in world.harness.process.batches for text in batch if text != "!"]
    return len(computed) == len(set(computed))


def _full(*_: object, **__: object) -> None:
    raise Overloaded("this instance is full")


async def predictions_end(world: LedgerWorld) -> dict[str, float]:
    """Predictions that succeeded, were repeated, failed, or were canceled during computation."""
    for text in ("abcd", "!"):
        for _ in range(2):
            await _prediction(world, text, idempotency_key=f"key-{len(text)}")
    world.harness.process.gate.clear()
    world.harness.process.started.clear()
    canceled = await _create(world, "efgh")
    await world.harness.until(lambda: world.harness.process.started.is_set())
    await world.ledger.post("one", f"/v1/predictions/{canceled['id']}/cancel", {})
    world.ledger.tell("one", WORD_USD)  # for the prediction that succeeded
    return {"one": WORD_USD}


async def prediction_is_published_by_who_asks_again(world: LedgerWorld) -> dict[str, float]:
    """The first prediction could not be published, and its caller was notified."""
    world.harness.broker.outage = Unavailable("the broker is away")
    put: Any = {"version": MODEL.name, "input": {"text": "abcd"}}
    first = await _put(world, put)
    assert first.status_code == 503
    world.harness.broker.outage = None
    assert (await _put(world, put)).status_code == 200
    await world.harness.until(replies(world, 1))
    world.ledger.tell("one", WORD_USD)
    return {"one": WORD_USD}


async def batch_ends(world: LedgerWorld) -> dict[str, float]:
    """A line with an error is not charged, no matter how much of it was computed."""
    client = world.api.openai(api_key=key_for("one"))
    async with running_batches(world):
        batch = await _batch(client, ["abcd"], ["efgh", "0"], ["ijkl", "!"], words(20))
        batch = await until(client, batch)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 2)
    world.ledger.tell("one", 21 * WORD_USD / 2)
    return {"one": 21 * WORD_USD / 2}


async def batch_is_canceled(world: LedgerWorld) -> dict[str, float]:
    """Part of one line is computed, and none of the other."""
    client = world.api.openai(api_key=key_for("one"))
    texts = words(32)
    world.harness.process.holds = texts[20]
    async with running_batches(world):
        batch = await _batch(client, texts, ["abcd"])
        await world.harness.until(replies(world, 16))
        await client.batches.cancel(batch.id)
        batch = await until(client, batch)
        world.harness.process.gate.set()
    assert (batch.status, batch.request_counts.completed) == ("cancelled", 0)
    return {}


async def batch_is_canceled_after_its_process_died(world: LedgerWorld) -> dict[str, float]:
    """Results that were computed and charged are delivered, even though none of their segments were
    written.
    """
    client = world.api.openai(api_key=key_for("one"))
    batch = await _left_by_its_process(world, client)
    await client.batches.cancel(batch.id)
    async with running_batches(world):
        batch = await until(client, batch)
    assert (batch.status, batch.request_counts.completed) == ("cancelled", 3)
    assert len((await client.files.content(batch.output_file_id)).text.splitlines()) == 3
    world.ledger.tell("one", 30 * WORD_USD / 2)
    return {"one": 30 * WORD_USD / 2}


async def batch_is_canceled_and_its_results_are_gone(world: LedgerWorld) -> dict[str, float]:
    """Results that can't be delivered are not charged, although they were computed."""
    client = world.api.openai(api_key=key_for("one"))
    batch = await _left_by_its_process(world, client)
    await client.batches.cancel(batch.id)
    async with redis.asyncio.Redis.from_url(world.settings.redis_url) as store:
        for kind in ("record", "result"):
            await store.delete(*await store.keys(f"penstock:{kind}:*"))
    async with running_batches(world):
        batch = await until(client, batch)
    assert (batch.status, batch.request_counts.completed) == ("cancelled", 0)
    return {}


async def _left_by_its_process(world: LedgerWorld, client: Any) -> Any:
    """A batch of four lines. Three had finished when its process died, and none was stored."""
    texts = words(40)
    world.harness.process.holds = texts[39]
    before = _completed_lines()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("api.batch_runner.segments.FLUSH_S", 3600.0)
        async with running_batches(world):
            batch = await _batch(client, *(texts[at : at + 10] for at in range(0, 40, 10)))
            await world.harness.until(lambda: _completed_lines() == before + 3)
    world.harness.process.holds = ""
    world.harness.process.gate.set()
    await world.ledger.until_idle()
    return batch


async def batch_process_ends(world: LedgerWorld) -> dict[str, float]:
    """The next process sends the same ids and gets the results computed so far."""
    client = world.api.openai(api_key=key_for("one"))
    texts = words(32)
    world.harness.process.holds = texts[20]
    async with running_batches(world):
        batch = await _batch(client, texts)
        await world.harness.until(replies(world, 16))
    world.harness.process.holds = ""
    world.harness.process.gate.set()
    # The first process's lease would make the next one wait longer.
    await world.ledger.until_idle()
    async with running_batches(world):
        batch = await until(client, batch)
    assert batch.request_counts.completed == 1
    await world.ledger.until_idle()
    cost_usd = world.ledger.charged_usd("one")
    world.ledger.tell("one", cost_usd)
    assert 0 < cost_usd <= 32 * WORD_USD / 2 + EXACT_USD, "each is charged once at most"
    return {"one": cost_usd}


async def batch_process_ends_within_a_segment(world: LedgerWorld) -> dict[str, float]:
    """Lines that have finished are sent again, because their segment was not written."""
    client = world.api.openai(api_key=key_for("one"))
    texts = words(40)
    world.harness.process.holds = texts[39]
    before = _completed_lines()
    async with running_batches(world):
        batch = await _batch(client, *(texts[at : at + 10] for at in range(0, 40, 10)))
        await world.harness.until(lambda: _completed_lines() == before + 3)
    world.harness.process.holds = ""
    world.harness.process.gate.set()
    await world.ledger.until_idle()
    async with running_batches(world):
        batch = await until(client, batch)
    assert batch.request_counts.completed == 4
    await world.ledger.until_idle()
    cost_usd = world.ledger.charged_usd("one")  # earlier results are in the cache by now
    world.ledger.tell("one", cost_usd)
    assert 0 < cost_usd <= 40 * WORD_USD / 2 + EXACT_USD, "each is charged once at most"
    return {"one": cost_usd}


ENDS: list[End] = [
    delivered,
    one_item_is_bad,
    model_fails,
    answer_cant_be_made,
    caller_hangs_up_at_once,
    caller_hangs_up_with_a_part_done,
    worker_never_hears_of_the_hang_up,
    deadline_passes,
    deadline_passes_with_a_part_done,
    reply_is_lost,
    broker_confirms_a_reply_late,
    broker_is_away,
    budget_is_too_small,
    answer_is_replayed,
    items_are_joined,
    who_was_joined_hangs_up,
    who_joined_hangs_up,
    who_was_joined_gets_an_error,
    unpaid_results_of_a_bad_request_are_asked_for_again,
    unpaid_results_are_asked_for_together,
    unpaid_results_fail_again,
    unpaid_results_meet_a_refusal,
    results_of_a_hang_up_are_asked_for_again,
    results_are_on_their_way_at_a_hang_up,
    answer_that_cant_be_made_is_asked_for_again,
    prediction_gets_unpaid_results,
    results_computed_again_are_not_delivered,
    results_computed_again_meet_a_hang_up,
    paid_results_replace_unpaid_ones,
    caller_hangs_up_as_its_hits_are_found,
    prediction_is_canceled_as_its_hit_is_found,
    predictions_end,
    prediction_is_published_by_who_asks_again,
    batch_ends,
    batch_is_canceled,
    batch_is_canceled_after_its_process_died,
    batch_is_canceled_and_its_results_are_gone,
    batch_process_ends,
    batch_process_ends_within_a_segment,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_three_books_agree(world: LedgerWorld, end: End) -> None:
    expected = await end(world)
    charged = {key: usd for key, usd in (await world.ledger.check()).items() if usd}
    assert charged == pytest.approx(expected, abs=1e-12)


async def test_unpaid_results_are_paid_at_any_instance(redis_url: str, tmp_path: Path) -> None:
    """They are charged once, to the first request that asks, regardless of which instance had the
    undelivered request.
    """
    async with ledger_world(redis_url, tmp_path, instances=3) as world:
        texts = words(3)
        assert (await world.ledger.embed("one", [*texts, "0"])).status_code == 400
        await world.ledger.until_idle()
        for at in (1, 0, 2):
            assert (await world.ledger.embed("one", texts, at=at)).status_code == 200
        charged = await world.ledger.check()
        assert charged["one"] == pytest.approx(3 * WORD_USD * 1.5)


async def test_three_books_agree_on_streams(redis_url: str, tmp_path: Path) -> None:
    """One is read to the end; only some of the other's letters are read before it is canceled."""
    worker = spelling(redis_url, tmp_path, model=LONG)
    async with ledger_world(redis_url, tmp_path, LONG, worker=worker) as world:
        http, key, rows = world.api.http, bearer("one"), world.harness.rows
        whole = await world.ledger.post("one", "/v1/completions", {**STREAM, "max_tokens": 3})
        assert "[DONE]" in whole.text
        async with http.stream("POST", "/v1/completions", json=STREAM, headers=key) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    break
        made = (await http.get("/v1/predictions", headers=key)).json()["results"][0]["id"]
        await http.post(f"/v1/predictions/{made}/cancel", headers=key)
        await world.harness.until(lambda: len(rows) == 2)
        for one in (await http.get("/v1/predictions", headers=key)).json()["results"]:
            found = (await http.get(f"/v1/predictions/{one['id']}", headers=key)).json()
            world.ledger.tell("one", found["metrics"]["cost_usd"])
        charged = await world.ledger.check()
        assert charged["one"] > (3 * 2 + 3 * 6) / 1e6 + (3 * 2 + 6) / 1e6, "what was read"


async def test_three_books_agree_on_canaries(redis_url: str, tmp_path: Path) -> None:
    """The caller pays once for items that fail on the canary and are computed by the other
    revision.
    """
    keys = ledger_keys(tmp_path)
    async with running_world(redis_url, tmp_path, keys_url=keys) as world:
        await world.until_serving()
        lists = [worker.rows for worker in world.workers.values()]

        async def until_idle() -> None:
            async with asyncio.timeout(WAIT_LIMIT_S):
                while sum(row.tenant == "acme" for rows in lists for row in rows) < 20:  # noqa: ASYNC110 - a list
                    await asyncio.sleep(0.01)

        ledger = Ledger(redis_url, [world.api], [world.api.rows, *lists], until_idle)
        for fault in ("", "errors"):
            world.workers[CANARY.name].process.fault = fault
            for text in words(10, 100 if fault else 0):
                assert (await ledger.embed("one", [text])).status_code == 200
        charged = await ledger.check()
        assert charged["one"] == pytest.approx(20 * 4 * 2.0 / 1e6)
        assert {row.revision for row in ledger.rows() if row.tenant == "acme"} == {"1", "2"}


def _completed_lines() -> float:
    return REGISTRY.get_sample_value("penstock_batch_lines_total", {"end": "completed"}) or 0.0


def _id_of(answer: httpx.Response) -> str:
    return f"{answer.headers['x-request-id']}:"


async def _away(*_: object) -> None:
    raise Unavailable("Redis is away")


async def _begun(world: LedgerWorld, key: str, *more: str) -> asyncio.Task[httpx.Response]:
    """A request for three texts that is waiting for its worker."""
    waiting = _waiters(world)
    texts = [*words(3), *more]
    asked = asyncio.create_task(world.ledger.embed(key, texts))
    await world.harness.until(lambda: _waiters(world) == waiting + 3 and _is_published(world))
    return asked


def _waiters(world: LedgerWorld) -> int:
    """How many of the three texts the API is waiting for."""
    flights = world.api.dependencies.dispatcher._single_flight._by_key.values()
    return sum(one.waiters for one in flights if getattr(one.item.input, "text", "") in words(3))


def _is_published(world: LedgerWorld) -> bool:
    flights = world.api.dependencies.dispatcher._single_flight._by_key.values()
    return all(one.job is not None and one.job.is_sent for one in flights)


@asynccontextmanager
async def running_batches(world: LedgerWorld) -> AsyncIterator[None]:
    """A process that runs batches. Its limiter returns unused amounts when the process exits."""
    rows, broker = RowList(), world.harness.broker
    world.ledger.row_lists.append(rows.rows)
    async with open_runner(
        world.settings, world.catalog, already_open(broker), already_open(broker), rows
    ) as runner:
        running = asyncio.create_task(runner.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def _batch(client: Any, *lines: list[str]) -> Any:
    """A batch with one line per list of texts."""
    given = {"model": MODEL.name, "encoding_format": "base64"}
    return await created(
        client,
        jsonl(line(str(number), **given, input=asked) for number, asked in enumerate(lines)),
    )


async def _create(world: LedgerWorld, text: str, **headers: Any) -> dict[str, Any]:
    body = {"version": MODEL.name, "input": {"text": text}}
    answer = await world.ledger.post("one", "/v1/predictions", body, **headers)
    assert answer.is_success, answer.text
    prediction: dict[str, Any] = answer.json()
    return prediction


async def _prediction(world: LedgerWorld, text: str, **headers: Any) -> None:
    """Creates a prediction and waits for it to finish."""
    created_one = await _create(world, text, **headers)
    http, key = world.api.http, bearer("one")
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            found = (await http.get(f"/v1/predictions/{created_one['id']}", headers=key)).json()
            if found["status"] in OVER:
                return
            await asyncio.sleep(0.02)


async def _put(world: LedgerWorld, body: object) -> httpx.Response:
    http = world.api.http
    return await http.put("/v1/predictions/mine", json=body, headers=bearer("one"))
