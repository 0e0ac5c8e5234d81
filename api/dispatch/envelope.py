"""Builds the envelope and the message of a job, for requests and predictions alike."""

from __future__ import annotations

from collections.abc import Sequence

from api.dispatch.request import RequestOptions
from shared.message_encoding import encode_job
from shared.messages import Envelope, Item, Job, JobBody
from shared.tracing.context import current
from shared.tracing.spans import STAGE, Attributes, SpanBlock, span


def build_envelope(
    *,
    request_id: str,
    client_request_id: str,
    model: str,
    tenant: str,
    key_id: str,
    plan: str,
    price_share: float,
    weight: float,
    received_at_s: float,
    deadline_s: float,
    options: RequestOptions,
    api_instance: str,
    batch_id: str = "",
) -> Envelope:
    """The envelope of the first job of a request.

    It is complete except for the inbox and the time of publishing. It belongs to the current trace.
    """
    trace = current()
    return Envelope(
        request_id=request_id,
        part=0,
        model=model,
        tenant=tenant,
        key_id=key_id,
        plan=plan,
        batch_id=batch_id,
        user_agent_family=options.user_agent_family,
        price_share=price_share,
        weight=weight,
        deadline_s=deadline_s,
        received_at_s=received_at_s,
        published_at_s=0.0,
        api_instance=api_instance,
        traceparent=trace.traceparent if trace else "",
        tracestate=trace.tracestate if trace else "",
        lane=options.lane,
        start_by_s=options.start_by_s,
        client_request_id=client_request_id,
    )


def publish_span(topic_id: str, *, items: int, started_s: float) -> SpanBlock:
    """The span of publishing a job, which the worker's spans are below. Unix time."""
    facts: Attributes = {
        STAGE: "publish",
        "penstock.items": items,
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic_id,
    }
    return span(f"publish {topic_id}", "producer", facts, started_s=started_s)


def encode_message(
    envelope: Envelope, items: Sequence[Item], options: RequestOptions
) -> tuple[bytes, dict[str, str]]:
    """The data and attributes of a job with these items.

    Raises:
        UndecodableMessage: workers could not read it.
    """
    envelope.cache_key = items[0].cache_key or ""
    body = JobBody(list(items), options.cache_read, options.cache_write)
    return encode_job(Job(envelope, body))
