"""The API's spans: for a request, its cache lookup, and its jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.exposition import generate_latest

from shared.errors import Unavailable
from shared.tracing.spans import TraceContext, use_context
from tests.api.dispatcher_harness import running_dispatcher
from tests.api.harness import TEXT_MODEL, ApiUnderTest
from tests.kept_spans import KeptSpans, new_trace
from tests.waiting import until

pytestmark = pytest.mark.anyio
MODEL = TEXT_MODEL.name


async def post(api: ApiUnderTest, text: str, trace: TraceContext | None = None) -> httpx.Response:
    headers = trace.attributes() if trace else {}
    body = {"model": MODEL, "input": text}
    return await api.http.post("/v1/embeddings", json=body, headers=headers)


async def test_request_and_its_jobs_are_spans_of_the_callers_trace(
    api: ApiUnderTest, kept: KeptSpans
) -> None:
    caller = TraceContext(new_trace().traceparent, "vendor=theirs")
    assert (await post(api, "a", caller)).status_code == 200
    receive, cache, publish = kept.the("receive"), kept.the("cache"), kept.the("publish")
    assert receive.parent == caller
    assert cache.parent == publish.parent == receive.context
    (job,) = api.worker.jobs
    assert job.envelope.trace == publish.context
    assert job.envelope.tracestate == "vendor=theirs"
    assert job.envelope.published_at_s == publish.started_s
    assert (receive.name, receive.kind, receive.error) == ("POST /v1/embeddings", "server", "")
    assert receive.started_s <= cache.started_s <= cache.ended_s <= publish.started_s
    assert publish.ended_s <= receive.ended_s
    assert receive.attributes["penstock.request_id"] == job.envelope.request_id


async def test_trace_without_a_caller_begins_here(api: ApiUnderTest, kept: KeptSpans) -> None:
    for headers in ({}, {"traceparent": "nonsense", "tracestate": "a=1"}):
        body = {"model": MODEL, "input": f"a{len(headers)}"}
        answer = await api.http.post("/v1/embeddings", json=body, headers=headers)
        assert answer.status_code == 200
        assert "traceparent" not in answer.headers
    first, second = kept.of("receive")
    assert (first.parent, second.parent) == (None, None)
    assert first.context.trace_id != second.context.trace_id
    assert [job.envelope.tracestate for job in api.worker.jobs] == ["", ""]


async def test_flag_of_the_caller_reaches_the_worker(api: ApiUnderTest, kept: KeptSpans) -> None:
    caller = new_trace("00")
    await post(api, "a", caller)
    assert kept.spans == []
    (job,) = api.worker.jobs
    assert job.envelope.trace is not None
    assert (job.envelope.trace.trace_id, job.envelope.trace.is_sampled) == (caller.trace_id, False)


async def test_caller_who_joins_has_no_job_of_its_own(api: ApiUnderTest, kept: KeptSpans) -> None:
    traces = [new_trace(), new_trace()]
    api.worker.go.clear()
    asked = [asyncio.create_task(post(api, "same", trace)) for trace in traces]
    await api.worker.until_taken(1)
    await until(lambda: len(kept.spans) == 4)
    api.worker.go.set()
    answers = [await one for one in asked]
    assert sorted(answer.headers["x-penstock-cache"] for answer in answers) == ["joined", "miss"]
    assert len(kept.of("publish")) == 1
    assert {str(span.attributes["penstock.cache"]) for span in kept.of("receive")} == {
        "joined",
        "miss",
    }


async def test_time_in_the_window_is_a_span(tmp_path: Path, kept: KeptSpans) -> None:
    async with running_dispatcher(tmp_path, window_floor=1) as harness:
        harness.worker.go.clear()
        first = harness.ask("first")
        await harness.worker.until_taken(1)
        caller = new_trace()
        with use_context(caller):
            second = harness.ask("second")
        await until(lambda: any(span.name == "hold" for span in kept.spans))
        harness.worker.go.set()
        await asyncio.gather(first, second)
    hold, publish = kept.the("hold"), kept.the("publish")
    assert hold.parent == publish.parent == caller
    assert hold.ended_s <= publish.started_s


@pytest.mark.parametrize(
    ("body", "status", "route"),
    [
        ({"model": MODEL}, 400, "/v1/embeddings"),
        ({"model": "unknown", "input": "a"}, 404, "/v1/embeddings"),
    ],
)
async def test_mistake_of_the_caller_is_no_error_of_ours(
    api: ApiUnderTest, kept: KeptSpans, body: dict[str, str], status: int, route: str
) -> None:
    answer = await api.http.post(route, json=body)
    assert answer.status_code == status
    span = kept.the("receive")
    assert (span.error, span.attributes["http.response.status_code"]) == ("", status)
    assert (span.name, span.attributes["http.route"]) == (f"POST {route}", route)


async def test_path_that_does_not_exist_is_not_in_the_span(
    api: ApiUnderTest, kept: KeptSpans
) -> None:
    await api.http.request("PROPFIND", "/v1/my-secret?key=my-secret")
    span = kept.the("receive")
    assert span.name == "_OTHER"
    assert "my-secret" not in f"{span}"


async def test_broker_that_is_away_is_an_error(
    api: ApiUnderTest, kept: KeptSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: object, **kwargs: object) -> str:
        raise Unavailable("the broker is away")

    monkeypatch.setattr(api.broker, "publish", refuse)
    assert (await post(api, "a")).status_code == 503
    assert (kept.the("publish").error, kept.the("receive").error) == ("unavailable", "unavailable")


async def test_probes_leave_no_span(api: ApiUnderTest, kept: KeptSpans) -> None:
    for path in ("/health", "/healthz", "/livez", "/readyz"):
        assert (await api.http.get(path, headers=new_trace().attributes())).status_code == 200
    assert kept.spans == []


async def test_latency_has_exemplars_of_kept_traces_only(
    api: ApiUnderTest, kept: KeptSpans
) -> None:
    dropped = new_trace("00")
    await post(api, "a", dropped)
    await post(api, "b", new_trace())
    span = kept.the("receive").context
    exposed = generate_latest(REGISTRY).decode()  # type: ignore[no-untyped-call]
    (found,) = [line for line in exposed.splitlines() if span.trace_id in line]
    assert found.startswith("penstock_api_request_seconds_bucket{")
    assert f'# {{span_id="{span.span_id}",trace_id="{span.trace_id}"}}' in found
    assert dropped.trace_id not in exposed
