"""Items join and leave a batch between two steps: a worker with a real model process, whose model
spells.
"""

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import inbox_topic_id
from shared.messages import Envelope, Item, ItemOutcome, Job, JobBody, record_id
from shared.models.catalog import Model
from shared.models.entry import Batch, Cache, Generation, Price
from shared.models.tasks.text import GenerationInput, GenerationResult
from shared.stores.stream_chunks import Chunk
from shared.tenants.plan import Priority
from tests.limits import WAIT_LIMIT_S
from tests.workers.speller import FIRST_LETTERS, SpellerPreparer
from tests.workers.worker_harness import WorkerHarness, running_worker
from workers.jobs.deadlines import Clock
from workers.metrics import FADE_S
from workers.runtime.pool import HostedModel, ModelPool

pytestmark = [pytest.mark.slow(about_s=25), pytest.mark.anyio]

MODEL = Model(
    name="letters",
    task="text",
    source="local:nowhere",
    batch=Batch(max_tokens=400, max_items=4),
    generation=Generation(context_tokens=400, default_tokens=4, longest_tokens=300),
    cache=Cache(ttl_s=60),
    price=Price(per_million_tokens_usd=2.0, per_million_output_tokens_usd=6.0, cached_share=0.25),
)
FOREVER = 10**8
"""More tokens than any test waits for."""


@asynccontextmanager
async def spelling(
    redis_url: str,
    folder: Path,
    drain_s: float = WAIT_LIMIT_S,
    model: Model = MODEL,
    clock: Clock | None = None,
    broker: InMemoryBroker | None = None,
) -> AsyncIterator[WorkerHarness]:
    command = (sys.executable, "-m", "tests.workers.speller")
    async with (
        ModelPool([HostedModel(model, folder)], device="cpu", processes=1, command=command) as pool,
        running_worker(
            redis_url,
            folder,
            pool=pool,
            model=model,
            preparer=SpellerPreparer(),
            drain_s=drain_s,
            clock=clock,
            broker=broker,
        ) as harness,
    ):
        harness.pool = pool  # type: ignore[attr-defined]
        yield harness


async def ask(
    harness: WorkerHarness,
    request_id: str,
    prompt: str,
    tokens: int,
    *,
    left_s: float = WAIT_LIMIT_S,
    priority: Priority = "interactive",
    tenant: str = "t",
    is_streamed: bool = False,
    attempt: int = 1,
    cache_key: str | None = None,
) -> None:
    """Publishes a job with one text. A streamed text is a prediction."""
    now_s = time.time()
    if is_streamed:
        await harness.stores.predictions.create(
            record_id(request_id, 0), tenant, b"{}", deadline_s=now_s + left_s, keep_s=60
        )
    given = GenerationInput(tokens, 0, prompt=prompt, is_streamed=is_streamed)
    await publish(
        harness,
        request_id,
        given,
        cache_key=cache_key,
        left_s=left_s,
        attempt=attempt,
        tenant=tenant,
        priority=priority,
        prediction="1" if is_streamed else "",
    )


async def publish(
    harness: WorkerHarness,
    request_id: str,
    given: GenerationInput,
    *,
    cache_key: str | None = None,
    left_s: float = 300,
    attempt: int = 1,
    tenant: str = "t",
    priority: Priority = "interactive",
    prediction: str = "1",
) -> None:
    now_s = time.time()
    envelope = Envelope(
        request_id=request_id,
        part=0,
        model=MODEL.name,
        tenant=tenant,
        inbox=inbox_topic_id("1"),
        slot="0",
        deadline_s=now_s + left_s,
        received_at_s=now_s,
        published_at_s=now_s,
        attempt=attempt,
        priority=priority,
        prediction=prediction,
    )
    await harness.publish(Job(envelope, JobBody([Item(0, given, cache_key)])))


async def outcome(harness: WorkerHarness) -> tuple[str, ItemOutcome]:
    reply = await harness.reply()
    return reply.request_id, reply.body.outcomes[0]


def text_of(outcome: ItemOutcome) -> str:
    assert isinstance(outcome.result, GenerationResult), outcome
    return outcome.result.text


async def test_a_short_text_joins_a_long_one_and_leaves_first(
    redis_url: str, tmp_path: Path
) -> None:
    async with spelling(redis_url, tmp_path) as harness:
        await ask(harness, "long", "ab", FOREVER, left_s=300)
        await harness.until(lambda: len(running(harness)) == 1)
        for number in range(5):
            await ask(harness, f"short{number}", "xyz", 4)
            name, short = await outcome(harness)
            assert (name, text_of(short)) == (f"short{number}", "xyzx")
            assert short.receipt.batch_size == 2
            assert (short.receipt.tokens, short.receipt.output_tokens) == (7, 4)
        await harness.until(lambda: len(harness.rows) == 5)
        assert harness.rows[0].input_tokens == 3
        assert harness.rows[0].cost_usd == pytest.approx((3 * 2 + 4 * 6) / 1e6)
        await harness.stores.records.cancel(record_id("long", 0))
        name, long = await outcome(harness)
        assert (name, long.status) == ("long", "canceled")


async def test_texts_beside_each_other_share_the_seconds_of_the_worker(
    redis_url: str, tmp_path: Path
) -> None:
    async with spelling(redis_url, tmp_path) as harness:
        before = computed()
        for number in range(4):
            await ask(harness, f"r{number}", "ab", 200)
        receipts = [(await outcome(harness))[1].receipt for _ in range(4)]
        items, seconds, beside = (now - then for now, then in zip(computed(), before, strict=True))
        assert items == 4
        assert beside > 4
        # The time shares reported for the texts add up to exactly the worker's time.
        shares_ms = [one.inference_ms / one.batch_size for one in receipts]  # type: ignore[operator]
        assert seconds == pytest.approx(sum(shares_ms) / 1000)


async def test_a_lone_text_leaves_most_of_its_worker_to_others(
    redis_url: str, tmp_path: Path
) -> None:
    def busy() -> float:
        labels = {"lane": "interactive"}
        return REGISTRY.get_sample_value("penstock_worker_busy_ratio", labels) or 0.0

    async with spelling(redis_url, tmp_path) as harness:
        before, spare = computed(), _total(SPARE)
        began_s = time.monotonic()
        await ask(harness, "alone", "ab", FOREVER, left_s=300)
        await harness.until(lambda: running(harness) == ["alone"])

        def is_told() -> bool:
            # The speller's step takes as long for one text as for four, which fill the step.
            of_whole = 1 - math.exp((began_s - time.monotonic()) / FADE_S)
            return of_whole > 0.03 and 0.0 < busy() < 0.7 * of_whole

        await harness.until(is_told)
        await harness.stores.records.cancel(record_id("alone", 0))
        receipt = (await outcome(harness))[1].receipt
        seconds = computed()[1] - before[1]
        assert receipt.inference_ms == pytest.approx(seconds * 1000), "it is told all of its time"
        spare = _total(SPARE) - spare
        assert 0.0 < spare <= 0.75 * seconds


SPARE = "penstock_worker_spare_seconds_total"


def computed() -> list[float]:
    """Items, seconds in the model, and concurrent items, as totaled by the worker's metrics."""
    names = ("batch_items", "inference_seconds", "items_at_a_time")
    return [_total(f"penstock_worker_{name}_sum") for name in names]


def _total(sample: str) -> float:
    """A metric, summed over all models."""
    found = (one for metric in REGISTRY.collect() for one in metric.samples)
    return sum(one.value for one in found if one.name == sample)


def running(harness: WorkerHarness) -> list[str]:
    """Requests whose texts are being generated."""
    assert harness.consumer is not None
    batches = harness.consumer.queue.running
    return [
        pulled.envelope.request_id
        for batch in batches
        for queued in batch
        for pulled, _ in queued.waiters
    ]


async def test_a_deadline_ends_one_text_between_two_steps(redis_url: str, tmp_path: Path) -> None:
    async with spelling(redis_url, tmp_path) as harness:
        await ask(harness, "stays", "ab", FOREVER, left_s=300)
        await ask(harness, "late", "cd", FOREVER, left_s=0.3)
        name, late = await outcome(harness)
        assert (name, late.status) == ("late", "expired")
        await harness.until(lambda: len(harness.rows) == 1)
        assert harness.rows[0].cost_usd == 0.0
        await harness.until(lambda: running(harness) == ["stays"])
        await ask(harness, "next", "e", 2)
        name, done = await outcome(harness)
        assert (name, text_of(done)) == ("next", "ee")
        await harness.stores.records.cancel(record_id("stays", 0))
        await outcome(harness)


async def test_places_and_budget_bound_who_is_in(redis_url: str, tmp_path: Path) -> None:
    async with spelling(redis_url, tmp_path) as harness:
        names = [f"r{number}" for number in range(6)]
        for name in names:
            await ask(harness, name, "ab", FOREVER, left_s=300)
        await harness.until(lambda: len(running(harness)) == 4)
        assert harness.consumer is not None
        queue = harness.consumer.queue
        await harness.until(lambda: queue.waiting == 2)
        await harness.stores.records.cancel(record_id("r0", 0))
        assert (await outcome(harness))[0] == "r0"
        await harness.until(lambda: "r4" in running(harness))
        assert len(running(harness)) == 4
        for name in names[1:]:
            await harness.stores.records.cancel(record_id(name, 0))
        assert {(await outcome(harness))[0] for _ in names[1:]} == set(names[1:])


async def test_another_tenant_gets_a_place_though_all_are_taken(
    redis_url: str, tmp_path: Path
) -> None:
    async with spelling(redis_url, tmp_path) as harness:
        names = [f"r{number}" for number in range(9)]  # two batches and one item
        for name in names:
            await ask(harness, name, "ab", FOREVER, left_s=300)
        await harness.until(lambda: len(running(harness)) == 4)
        for number in range(3):
            await ask(harness, f"other{number}", "xy", 4, tenant="other")
            name, done = await outcome(harness)
            assert (name, text_of(done)) == (f"other{number}", "xyxy")
        await harness.until(lambda: len(running(harness)) == 4)
        for name in names:
            await harness.stores.records.cancel(record_id(name, 0))
        assert {(await outcome(harness))[0] for _ in names} == set(names)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_text_that_gave_its_place_away_goes_on_from_its_tokens(
    redis_url: str, tmp_path: Path, is_streamed: bool
) -> None:
    tokens, names = 4 * FIRST_LETTERS, ["=a", "=b", "=c", "=d"]
    async with spelling(redis_url, tmp_path) as harness:
        for name in names:
            await ask(harness, name, name, tokens, left_s=300, is_streamed=is_streamed)
        await harness.until(lambda: len(running(harness)) == 4)
        # None of them continues until this one has finished, so one must be preempted.
        await ask(harness, "e", "e", 3, tenant="other")
        found = dict([await outcome(harness) for _ in range(5)])
        if is_streamed:  # in that case, the reply only refers to the record
            found |= {name: await _recorded(harness, name) for name in names}
        assert text_of(found.pop("e")) == "eee"
        for name, done in found.items():
            assert text_of(done) == (name * tokens)[:tokens]
        # A speller reports the letters from its last run as cached tokens.
        assert sorted(map(_computed, found.values())) == [tokens - FIRST_LETTERS] + [tokens] * 3


async def _recorded(harness: WorkerHarness, name: str) -> ItemOutcome:
    record = await harness.stores.records.read(record_id(name, 0))
    assert record is not None
    assert record.reply is not None
    return record.reply.outcomes[0]


def _computed(done: ItemOutcome) -> int:
    assert isinstance(done.result, GenerationResult)
    return done.result.cached_tokens


async def test_a_limit_of_the_queue_ends_no_text_that_gave_its_place_away(
    redis_url: str, tmp_path: Path
) -> None:
    async with spelling(redis_url, tmp_path) as harness:
        for name in "abcd":
            await ask(harness, name, name, FOREVER, left_s=300)
        await harness.until(lambda: len(running(harness)) == 4)
        assert harness.consumer is not None
        for (queued,) in harness.consumer.queue.running:
            for pulled, _ in queued.waiters:
                pulled.envelope.start_by_s = time.time() - 1  # the limit passes while they run
        await ask(harness, "e", "e", 3, tenant="other")
        assert (await outcome(harness))[0] == "e"
        await harness.until(lambda: sorted(running(harness)) == ["a", "b", "c", "d"])
        for name in "abcd":
            await harness.stores.records.cancel(record_id(name, 0))
        assert {(await outcome(harness))[1].status for _ in "abcd"} == {"canceled"}


async def test_a_failing_step_fails_its_cause_alone(redis_url: str, tmp_path: Path) -> None:
    async with spelling(redis_url, tmp_path) as harness:
        await ask(harness, "long", "ab", 300)
        await ask(harness, "bang", "!", 4)
        await ask(harness, "refused", "?", 4)
        found = dict([await outcome(harness) for _ in range(3)])
        assert text_of(found["long"]) == "ab" * 150
        assert found["bang"].error is not None
        assert "RuntimeError: a bang" in found["bang"].error.message
        assert found["refused"].error is not None
        assert found["refused"].error.code == "invalid_input"
        await ask(harness, "after", "x", 3)
        assert text_of((await outcome(harness))[1]) == "xxx"


async def test_an_item_that_kills_its_process_is_given_up_and_no_other(
    redis_url: str, tmp_path: Path
) -> None:
    async with spelling(redis_url, tmp_path) as harness:
        await ask(harness, "good", "ab", 200)
        await ask(harness, "poison", "†", 4)
        found = dict([await outcome(harness) for _ in range(2)])
        assert text_of(found["good"]) == "ab" * 100
        assert found["poison"].error is not None
        assert "model processes died while processing this item" in found["poison"].error.message


@pytest.mark.parametrize(("deaths", "company"), [(1, 2), (4, 2), (5, 1)])
async def test_a_text_whose_worker_died_joins_others_but_not_after_a_fifth_death(
    redis_url: str, tmp_path: Path, deaths: int, company: int
) -> None:
    async with spelling(redis_url, tmp_path) as harness:
        await ask(harness, "long", "ab", FOREVER, left_s=300)
        await harness.until(lambda: running(harness) == ["long"])
        await harness.stores.predictions.create("died", "t", b"{}", deadline_s=4e9, keep_s=60)
        for _ in range(deaths):
            await harness.stores.records.claim(["died"])
        await publish(harness, "died", GenerationInput(4, 0, prompt="xyz"))
        if company == 1:
            assert harness.consumer is not None
            queue = harness.consumer.queue
            await harness.until(lambda: queue.waiting == 1)
        else:
            await harness.until(lambda: bool(harness.rows))
        await harness.stores.records.cancel(record_id("long", 0))
        found = dict([await outcome(harness) for _ in range(2)])
        assert found["died"].status == "succeeded"
        assert found["died"].receipt.batch_size == company


@pytest.mark.parametrize("deaths_alone", [0, 1, 2])
async def test_only_a_text_that_workers_died_with_while_it_was_alone_is_given_up(
    redis_url: str, tmp_path: Path, deaths_alone: int
) -> None:
    async with spelling(redis_url, tmp_path) as harness:
        await harness.stores.predictions.create("died", "t", b"{}", deadline_s=4e9, keep_s=60)
        for number in range(4):
            await harness.stores.records.claim(["died"])
            if number < deaths_alone:
                await harness.stores.records.note_alone("died", begins=True)
        await publish(harness, "died", GenerationInput(4, 0, prompt="xyz"))
        _, found = await outcome(harness)
        if deaths_alone < 2:
            assert found.status == "succeeded"
            return
        assert found.error is not None
        assert found.error.message == (
            "4 workers died while holding this job, 2 of them while it was their only job"
        )


async def test_an_item_without_room_waits_until_others_have_left(
    redis_url: str, tmp_path: Path
) -> None:
    async with spelling(redis_url, tmp_path) as harness:
        await ask(harness, "long", "ab", FOREVER, left_s=300)
        await harness.until(lambda: running(harness) == ["long"])
        await ask(harness, "large", "~", 3)
        assert harness.consumer is not None
        await ask(harness, "small", "x", 3)
        assert (await outcome(harness))[0] == "small"
        await harness.stores.records.cancel(record_id("long", 0))
        found = dict([await outcome(harness) for _ in range(2)])
        assert found["long"].status == "canceled"
        assert text_of(found["large"]) == "~~~"


async def test_tokens_reach_the_stream_and_a_killed_process_goes_on_from_them(
    redis_url: str, tmp_path: Path
) -> None:
    async with spelling(redis_url, tmp_path) as harness:
        await ask(harness, "stream", "abc", FOREVER, left_s=300, is_streamed=True)
        record = record_id("stream", 0)
        chunks = await read_until(harness, record, 1000)
        pid = harness.pool.processes[0].pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
        after = await read_until(harness, record, chunks[-1].end + 1000)
        assert_gapless(after)
        await harness.stores.records.cancel(record)
        assert (await outcome(harness))[1].status == "canceled"


@pytest.mark.parametrize("end", ["cancel", "deadline", "nobody read"])
async def test_tokens_that_were_read_before_a_cancel_are_charged(
    redis_url: str, tmp_path: Path, end: str
) -> None:
    async with spelling(redis_url, tmp_path) as harness:
        left_s = 2.0 if end == "deadline" else 300
        await ask(harness, "left", "abc", FOREVER, left_s=left_s, is_streamed=True)
        record, read = record_id("left", 0), 0
        await harness.until(lambda: running(harness) == ["left"])
        if end != "nobody read":
            read = (await read_until(harness, record, 20))[-1].end
        if end != "deadline":
            await harness.stores.records.cancel(record)
        ended = (await outcome(harness))[1]
        await harness.until(lambda: len(harness.rows) == 1)
        [row] = harness.rows
        assert row.status == ended.status == ("expired" if end == "deadline" else "canceled")
        if read:
            assert (row.input_tokens, row.output_tokens, row.charged_share) == (3, read, 1.0)
        assert row.cost_usd == pytest.approx((3 * 2 + read * 6) / 1e6 if read else 0.0)
        found = await harness.stores.records.read(record)
        assert found is not None
        assert found.reply is not None
        assert found.reply.outcomes[0].receipt.output_tokens == (read or None)
        after = (await harness.stores.tokens.read([(record, 0, 0)]))[0].chunks
        assert (after[-1].end if after else 0) == read, "no more is read than is charged"


async def test_the_worker_that_learns_of_a_cancel_charges_what_another_delivered(
    redis_url: str, tmp_path: Path
) -> None:
    async with spelling(redis_url, tmp_path, drain_s=0) as first:
        await ask(first, "gone", "abc", FOREVER, left_s=300, is_streamed=True)
        record = record_id("gone", 0)
        read = (await read_until(first, record, 20))[-1].end
        first.stop.set()
        await asyncio.wait_for(first.running, WAIT_LIMIT_S)  # type: ignore[arg-type]
        await first.stores.records.cancel(record)
    async with spelling(redis_url, tmp_path) as second:
        given = GenerationInput(50, 0, prompt="abc", is_streamed=True)
        await publish(second, "gone", given)
        assert (await outcome(second))[1].status == "canceled"
        await second.until(lambda: len(second.rows) == 1)
        [row] = second.rows
        assert (row.input_tokens, row.output_tokens) == (3, read)
        assert row.cost_usd == pytest.approx((3 * 2 + read * 6) / 1e6)


@pytest.mark.parametrize("reads", [("leaves", "stays"), ("leaves",), ("stays",)])
@pytest.mark.parametrize("first", ["leaves", "stays"])
async def test_each_reader_who_cancels_pays_what_it_has_read_of_a_shared_text(
    redis_url: str, tmp_path: Path, reads: tuple[str, ...], first: str
) -> None:
    async with spelling(redis_url, tmp_path) as harness:
        read = dict.fromkeys(("leaves", "stays"), 0)
        for name in sorted(read, key=lambda name: name != first):
            await ask(harness, name, "abc", FOREVER, left_s=300, is_streamed=True, cache_key="k")
        await harness.until(lambda: sorted(running(harness)) == ["leaves", "stays"])
        for name in read:
            if name in reads:
                read[name] = (await read_until(harness, record_id(name, 0), 20))[-1].end
            await harness.stores.records.cancel(record_id(name, 0))
            await outcome(harness)
        await harness.until(lambda: len(harness.rows) == 2)
        costs = {row.request_id: row.cost_usd for row in harness.rows}
        assert costs == pytest.approx(
            {name: (3 * 2 + end * 6) / 1e6 if end else 0.0 for name, end in read.items()}
        )


async def test_another_worker_goes_on_from_the_stream(redis_url: str, tmp_path: Path) -> None:
    async with spelling(redis_url, tmp_path, drain_s=0) as first:
        await ask(first, "taken", "abc", FOREVER, left_s=300, is_streamed=True)
        record = record_id("taken", 0)
        seen = await read_until(first, record, 500)
        first.stop.set()  # the job is returned
        await asyncio.wait_for(first.running, WAIT_LIMIT_S)  # type: ignore[arg-type]
        before = (await first.stores.tokens.read([(record, 0, 0)]))[0].chunks
        assert before[: len(seen)] == seen
        end = before[-1].end
        async with spelling(redis_url, tmp_path) as second:
            given = GenerationInput(end + 50, 0, prompt="abc", is_streamed=True)
            await publish(second, "taken", given)
            assert (await outcome(second))[1].status == "succeeded"
            found = await second.stores.records.read(record)
            assert found is not None
            assert found.reply is not None
            result = found.reply.outcomes[0].result
            assert isinstance(result, GenerationResult)
            assert result.text == ("abc" * (end // 3 + 20))[: end + 50]
            assert result.cached_tokens == 50, "it wrote only what was missing"


async def read_until(harness: WorkerHarness, record: str, tokens: int) -> list[Chunk]:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            [(chunks, _)] = await harness.stores.tokens.read([(record, 0, 0)])
            if chunks and chunks[-1].end >= tokens:
                return chunks
            await asyncio.sleep(0.002)


def assert_gapless(chunks: list[Chunk]) -> None:
    """Asserts that each token arrived once, in order, and as spelled by the model."""
    at = 0
    for chunk in chunks:
        assert chunk.first == at
        assert chunk.text == "".join("abc"[(at + n) % 3] for n in range(chunk.end - at))
        at = chunk.end
