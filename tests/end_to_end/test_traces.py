"""One trace from the caller through API, broker and worker and back, as a collector receives it
from the real processes.
"""

from __future__ import annotations

import secrets
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.local.stack import Stack
from shared.broker.transport import jobs_topic_id
from shared.brokers import transport_of
from tests.end_to_end.conftest import EMBEDDER, REPORTING_KEY
from tests.limits import WAIT_LIMIT_S
from tests.otlp import Collector, ReceivedSpan

pytestmark = pytest.mark.slow

PAINTER = "stable-diffusion-tiny"
STAGES = {"receive", "cache", "publish", "queue", "batch", "infer", "reply"}
MARKER = "marmalade-and-thistle"
"""Included in every text in this file. It must not show up anywhere."""
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "embedding": (
        "/v1/embeddings",
        {"model": EMBEDDER, "input": f"{MARKER} {secrets.token_hex()}"},
    ),
    "image": (
        "/v1/images/generations",
        {
            "model": PAINTER,
            "prompt": f"a red circle {MARKER}",
            "size": "64x64",
            "num_inference_steps": 2,
            "seed": secrets.randbits(40),
        },
    ),
}
OPERATION = {"embedding": "embeddings", "image": "generate_content"}


class Caller:
    """A caller that traces its work: a trace, and the span for the request."""

    def __init__(self, flags: str = "01") -> None:
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)
        self.headers = {
            "traceparent": f"00-{self.trace_id}-{self.span_id}-{flags}",
            "tracestate": "vendor=their-own",
            "authorization": f"Bearer {REPORTING_KEY}",
        }

    def post(self, stack: Stack, path: str, body: dict[str, Any]) -> httpx.Response:
        url = f"{stack.api_url}{path}"
        return httpx.post(url, json=body, headers=self.headers, timeout=WAIT_LIMIT_S)


@pytest.mark.parametrize("asked", ASKED)
def test_seven_spans_of_one_trace(stack: Stack, collector: Collector, asked: str) -> None:
    caller, (path, body) = Caller(), ASKED[asked]
    answer = caller.post(stack, path, body)
    assert answer.status_code == 200, answer.text
    spans = collector.stages(caller.trace_id, STAGES)
    assert set(spans) == STAGES
    assert spans["receive"].parent_id == caller.span_id
    for stage in ("cache", "publish"):
        assert spans[stage].parent_id == spans["receive"].span_id
    for stage in ("queue", "batch", "infer", "reply"):
        assert spans[stage].parent_id == spans["publish"].span_id
    assert {span.trace_state for span in spans.values()} == {"vendor=their-own"}
    check_times(spans)
    check_conventions(
        spans, path, str(body["model"]), OPERATION[asked], stack.settings.messaging_system
    )
    assert {stage: spans[stage].resource["service.name"] for stage in STAGES} == {
        **dict.fromkeys(("receive", "cache", "publish"), "penstock-api"),
        **dict.fromkeys(("queue", "batch", "infer", "reply"), "penstock-worker"),
    }
    assert spans["infer"].resource["gcp.project_id"] == stack.settings.project


def check_times(spans: dict[str, ReceivedSpan]) -> None:
    """A machine has a single clock, so each span must fall where it belongs."""
    receive = spans["receive"]
    assert all(span.start_ns <= span.end_ns for span in spans.values())
    for stage in ("cache", "publish", "queue", "batch", "infer"):
        assert receive.start_ns <= spans[stage].start_ns <= spans[stage].end_ns <= receive.end_ns
    # The caller may have the response before the worker knows that the broker has its reply.
    assert receive.start_ns <= spans["reply"].start_ns <= receive.end_ns
    assert spans["cache"].end_ns <= spans["publish"].start_ns == spans["queue"].start_ns
    in_worker = [spans[stage] for stage in ("queue", "batch", "infer", "reply")]
    for before, after in pairwise(in_worker):
        assert before.end_ns <= after.start_ns


def check_conventions(
    spans: dict[str, ReceivedSpan], path: str, model: str, operation: str, broker: str
) -> None:
    receive, publish, queue, infer = (
        spans[stage] for stage in ("receive", "publish", "queue", "infer")
    )
    assert (receive.name, receive.kind) == (f"POST {path}", "server")
    assert receive.attributes["http.route"] == path
    assert receive.attributes["http.response.status_code"] == 200
    assert receive.attributes["penstock.tenant"] == "reporting"
    assert receive.attributes["penstock.cache"] == "miss"
    assert (publish.name, publish.kind) == (f"publish jobs.{model}", "producer")
    assert (queue.name, queue.kind) == (f"receive jobs.{model}", "consumer")
    for span in (publish, queue, spans["reply"]):
        assert span.attributes["messaging.system"] == broker
    assert queue.attributes["messaging.destination.subscription.name"] == f"jobs.{model}.workers"
    assert (infer.name, infer.attributes["gen_ai.request.model"]) == (f"{operation} {model}", model)


def test_hit_has_no_span_of_a_worker(stack: Stack, collector: Collector) -> None:
    first, again = Caller(), Caller()
    body = {"model": EMBEDDER, "input": f"{MARKER} {secrets.token_hex()}"}
    for caller in (first, again):
        assert caller.post(stack, "/v1/embeddings", body).status_code == 200
    spans = collector.stages(again.trace_id, {"receive", "cache"})
    assert set(spans) == {"receive", "cache"}
    assert spans["cache"].attributes["penstock.cache.hits"] == 1
    assert spans["receive"].attributes["penstock.cache"] == "hit"


def test_trace_that_its_caller_does_not_keep_is_not_exported(
    stack: Stack, collector: Collector
) -> None:
    dropped, kept = Caller("00"), Caller()
    for caller in (dropped, kept):
        body = {"model": EMBEDDER, "input": f"{MARKER} {secrets.token_hex()}"}
        assert caller.post(stack, "/v1/embeddings", body).status_code == 200
    collector.stages(kept.trace_id, STAGES)
    assert collector.of_trace(dropped.trace_id) == []


@pytest.mark.anyio
async def test_dead_letter_belongs_to_the_trace_of_its_job(
    stack: Stack, collector: Collector
) -> None:
    """The worker can't read the job, so the dead-letter function replies instead."""
    caller = Caller()
    attributes = {
        "schema": "0",
        "request_id": f"req_{caller.span_id}",
        "part": "0",
        "model": EMBEDDER,
        "traceparent": caller.headers["traceparent"],
    }
    settings = stack.settings
    async with transport_of(settings) as broker:
        await broker.publish(jobs_topic_id(EMBEDDER), b"{}", attributes)
    span = collector.stages(caller.trace_id, {"dead_letter"})["dead_letter"]
    assert (span.parent_id, span.kind) == (caller.span_id, "consumer")
    assert span.name == f"process jobs.{EMBEDDER}.dead"


def test_neither_texts_nor_keys_leave_in_spans_or_logs(stack: Stack, collector: Collector) -> None:
    """This holds even if callers put them there by mistake, and for requests that fail."""
    url, key = stack.api_url, f"sk-{MARKER}-key"
    caller = Caller()
    for request in (
        httpx.Request("POST", f"{url}/v1/{MARKER}?key={key}", headers=caller.headers),
        httpx.Request(MARKER.upper(), f"{url}/v1/embeddings", headers=caller.headers),
        httpx.Request(
            "GET", f"{url}/v1/predictions/{MARKER}?{MARKER}={key}", headers=caller.headers
        ),
        httpx.Request(
            "POST",
            f"{url}/v1/embeddings",
            headers=caller.headers | {"authorization": f"Bearer {key}"},
        ),
        httpx.Request(
            "POST",
            f"{url}/v1/embeddings",
            headers=caller.headers | {"user-agent": MARKER, "x-penstock-lane": MARKER},
            json={"model": MARKER, "input": MARKER},
        ),
        httpx.Request(
            "POST", f"{url}/v1/embeddings", headers=caller.headers, content=f'{{"{MARKER}": '
        ),
        httpx.Request(
            "POST",
            f"{url}/v1/embeddings",
            headers=caller.headers,
            json={"model": EMBEDDER, "input": f"{MARKER} " * 3000},
        ),
    ):
        with httpx.Client(timeout=WAIT_LIMIT_S) as client:
            assert 400 <= client.send(request).status_code < 500
    last = Caller()
    path, body = ASKED["embedding"]
    last.post(stack, path, body | {"input": f"{MARKER} {secrets.token_hex()}"})
    collector.stages(last.trace_id, STAGES)
    # The unknown method does not get past the HTTP parser.
    collector.until(lambda: len(collector.of_trace(caller.trace_id)) == 6)
    assert all(not span.is_error for span in collector.of_trace(caller.trace_id))
    exported = b"".join(collector.bodies)
    logged = b"".join(path.read_bytes() for path in Path(stack.log_dir).iterdir())
    for secret in (MARKER, key, REPORTING_KEY):
        for found in (exported, logged):
            assert secret.lower().encode() not in found.lower()
