"""The spans of a worker's jobs, built from times that the worker already measures."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.exposition import generate_latest

from shared.broker.transport import inbox_topic_id
from tests.kept_spans import KeptSpans, new_trace
from tests.workers.worker_harness import MODEL, WorkerHarness, running_worker

pytestmark = pytest.mark.anyio


async def acked(harness: WorkerHarness, rows: int) -> None:
    """Waits until the jobs with this many items have finished."""
    await harness.until(lambda: len(harness.rows) == rows)


async def test_job_has_four_spans_below_the_one_that_published_it(
    redis_url: str, tmp_path: Path, kept: KeptSpans
) -> None:
    caller = new_trace()
    async with running_worker(redis_url, tmp_path) as harness:
        await harness.send("a", "bb", trace=caller, age_s=2.0)
        await harness.reply()
        await acked(harness, 2)
    spans = [kept.the(stage) for stage in ("queue", "batch", "infer", "reply")]
    queue, batch, infer, reply = spans
    assert len(kept.spans) == 4
    assert {span.parent for span in spans} == {caller}
    assert queue.ended_s - queue.started_s >= 2.0
    assert queue.ended_s <= batch.started_s <= batch.ended_s == infer.started_s
    assert infer.started_s <= infer.ended_s <= reply.started_s <= reply.ended_s
    assert infer.name == f"embeddings {MODEL.name}"
    assert infer.attributes["gen_ai.usage.input_tokens"] == 3
    assert (infer.attributes["penstock.items"], infer.attributes["penstock.batch.items"]) == (2, 2)
    assert reply.name == f"publish {inbox_topic_id('1')}"


async def test_jobs_of_a_batch_link_to_each_other(
    redis_url: str, tmp_path: Path, kept: KeptSpans
) -> None:
    first, second = new_trace(), new_trace()
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.gate.clear()
        await harness.send("a", request_id="before")
        await harness.process.started.wait()
        await harness.send("b", "bb", request_id="one", trace=first)
        await harness.send("c", request_id="two", trace=second)
        await harness.send("d", request_id="not-kept", trace=new_trace("00"))
        assert harness.consumer is not None
        queue = harness.consumer.queue
        await harness.until(lambda: queue.waiting == 4)
        harness.process.gate.set()
        await acked(harness, 5)
        assert harness.process.batches == [["a"], ["b", "bb", "c", "d"]]
    of = {span.parent: span for span in kept.of("infer")}
    assert (of[first].links, of[second].links) == ([second], [first])
    assert of[first].started_s == of[second].started_s
    assert {span.attributes["penstock.batch.items"] for span in of.values()} == {4}
    assert set(of) == {first, second}


async def test_job_that_joins_waits_from_when_it_came(
    redis_url: str, tmp_path: Path, kept: KeptSpans
) -> None:
    first, second = new_trace(), new_trace()
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.gate.clear()
        await harness.send("same", request_id="one", trace=first)
        await harness.process.started.wait()
        await harness.send("same", request_id="two", trace=second)
        await harness.until(lambda: _in_hand(harness) == 2)
        harness.process.gate.set()
        await acked(harness, 2)
    joined = {span.stage: span for span in kept.spans if span.parent == second}
    assert joined["infer"].attributes["penstock.cache"] == "joined"
    assert joined["queue"].ended_s <= joined["batch"].started_s
    assert joined["batch"].ended_s <= joined["infer"].started_s <= joined["infer"].ended_s


def _in_hand(harness: WorkerHarness) -> int:
    assert harness.consumer is not None
    return len(harness.consumer.batches._completion.registry.find())


async def test_hit_has_no_batch(redis_url: str, tmp_path: Path, kept: KeptSpans) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await harness.ask("cat")
        await acked(harness, 1)
        await harness.ask("cat", request_id="again", trace=new_trace(), age_s=1.0)
        await acked(harness, 2)
    assert [span.stage for span in kept.spans] == ["queue", "reply"]


async def test_job_that_runs_out_of_time_says_where(
    redis_url: str, tmp_path: Path, kept: KeptSpans
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.gate.clear()
        await harness.send("a", request_id="before")
        await harness.process.started.wait()
        await harness.send("b", request_id="late", queue_limit_s=0.05, trace=new_trace())
        reply = await harness.reply()
        assert reply.body.outcomes[0].status == "expired"
        harness.process.gate.set()
        await acked(harness, 2)
    batch = kept.the("batch")
    assert (batch.error, kept.of("infer")) == ("deadline_exceeded", [])


async def test_item_that_fails_and_the_deaths_before_it_are_in_the_span(
    redis_url: str, tmp_path: Path, kept: KeptSpans
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await harness.ask("bang!", trace=new_trace())
        await acked(harness, 1)
        harness.process.deaths = 1
        await harness.ask("fine", request_id="again", trace=new_trace())
        await acked(harness, 2)
    failed, died = kept.of("infer")
    assert (failed.error, died.error) == ("model_failed", "")
    assert (failed.attributes["penstock.deaths"], died.attributes["penstock.deaths"]) == (0, 1)


async def test_reply_of_a_kept_trace_carries_it_on(
    redis_url: str, tmp_path: Path, kept: KeptSpans
) -> None:
    carried = []
    async with running_worker(redis_url, tmp_path) as harness:
        publish = harness.broker.publish

        async def listen(
            topic: str, data: bytes, attributes: dict[str, str], **given: object
        ) -> str:
            if topic == inbox_topic_id("1"):
                carried.append(attributes.get("traceparent", ""))
            return await publish(topic, data, attributes, **given)  # type: ignore[arg-type]

        harness.broker.publish = listen  # type: ignore[assignment,method-assign]
        await harness.ask("a", trace=new_trace())
        await harness.ask("b", request_id="again", trace=new_trace("00"))
        await acked(harness, 2)
    assert carried == [kept.the("reply").context.traceparent, ""]


async def test_latencies_have_exemplars(redis_url: str, tmp_path: Path, kept: KeptSpans) -> None:
    caller = new_trace()
    async with running_worker(redis_url, tmp_path) as harness:
        await harness.ask("a", trace=caller)
        await acked(harness, 1)
    exposed = generate_latest(REGISTRY).decode()  # type: ignore[no-untyped-call]
    names = {line.partition("{")[0] for line in exposed.splitlines() if caller.trace_id in line}
    assert names == {
        "penstock_worker_wait_seconds_bucket",
        "penstock_worker_inference_seconds_bucket",
    }
