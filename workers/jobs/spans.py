"""A job's spans, recorded when the job finishes: `queue`, `batch`, and `infer`.

The message identifies the spans' parent, which is the span that published the job. A batch has
items from many jobs, so each job gets a separate `infer` span with the batch's times and links to
the other jobs in the batch (docs/decisions/0037-traces.md).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from shared.broker.transport import batch_subscription_id, jobs_topic_id, workers_subscription_id
from shared.messages import ItemOutcome
from shared.models.catalog import Model
from shared.tracing.spans import STAGE, Attributes, SpanBlock, TraceContext, record, span
from workers.scheduling.job import ItemRun, PulledJob, QueuedItem


def record_spans(pulled: PulledJob, model: Model, device: str) -> None:
    """Records the spans of a job whose items all have outcomes, if its trace is sampled."""
    if pulled.runs is None:
        return
    _record_queue(pulled, model.deployed_name)
    batches = dict[int, list[ItemRun]]()
    for run in pulled.runs:
        batches.setdefault(id(run.computed.batch), []).append(run)
    for runs in batches.values():
        _record_batch(pulled, runs[0].queued_at_s, runs[0].computed.batch.started_at_s, len(runs))
        _record_infer(pulled, model, runs, device)
    ran = {run.index for run in pulled.runs}
    given_up = [
        outcome
        for outcome in pulled.outcomes.values()
        if outcome.error is not None and outcome.index not in ran
    ]
    if given_up:
        _record_batch(pulled, pulled.pulled_at_s, time.time(), len(given_up), _error_of(given_up))


def reply_span(topic_id: str) -> SpanBlock:
    """Returns the span for publishing a reply, as a child of the current span."""
    facts: Attributes = {
        STAGE: "reply",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic_id,
    }
    return span(f"publish {topic_id}", "producer", facts)


def _record_queue(pulled: PulledJob, model: str) -> None:
    envelope, topic_id = pulled.envelope, jobs_topic_id(model)
    subscription_of = (
        batch_subscription_id if envelope.priority == "batch" else workers_subscription_id
    )
    facts: Attributes = {
        STAGE: "queue",
        "messaging.operation.name": "receive",
        "messaging.operation.type": "receive",
        "messaging.destination.name": topic_id,
        "messaging.destination.subscription.name": subscription_of(model),
        "messaging.message.id": pulled.message.message_id,
        "penstock.attempt": envelope.attempt,
        "penstock.request_id": envelope.request_id,
        "penstock.tenant": envelope.tenant,
    }
    times_s = envelope.published_at_s, pulled.pulled_at_s
    record(f"receive {topic_id}", "consumer", times_s, facts, parent=pulled.trace)


def _record_batch(
    pulled: PulledJob, queued_at_s: float, started_at_s: float, items: int, error: str = ""
) -> None:
    """Records how long the job waited for a batch.

    A coalesced item's wait starts with its own job, not with the earlier job.
    """
    facts: Attributes = {STAGE: "batch", "penstock.items": items}
    times_s = max(pulled.pulled_at_s, queued_at_s), max(pulled.pulled_at_s, started_at_s)
    record("batch", "internal", times_s, facts, parent=pulled.trace, error=error)


def _record_infer(pulled: PulledJob, model: Model, runs: Sequence[ItemRun], device: str) -> None:
    batch = runs[0].computed.batch
    if batch.finished_at_s < pulled.pulled_at_s:
        return  # coalesced with an existing result
    operation = model.definition.gen_ai_operation or model.task
    outcomes = [pulled.outcomes[run.index] for run in runs]
    facts: Attributes = {
        STAGE: "infer",
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": model.name,
        "gen_ai.usage.input_tokens": sum(outcome.receipt.tokens or 0 for outcome in outcomes),
        "penstock.items": len(runs),
        "penstock.batch.items": len(batch.results),
        "penstock.cache": outcomes[0].receipt.cache,
        "penstock.device": device,
        "penstock.deaths": runs[0].deaths,
    }
    record(
        f"{operation} {model.name}",
        "internal",
        (max(pulled.pulled_at_s, batch.started_at_s), batch.finished_at_s),
        facts,
        parent=pulled.trace,
        links=[trace for trace in runs[0].computed.traces if trace != pulled.trace],
        error=_error_of(outcomes),
    )


def _error_of(outcomes: Sequence[ItemOutcome]) -> str:
    """Returns the first error's code, or an empty string."""
    return next((outcome.error.code for outcome in outcomes if outcome.error is not None), "")


def traces_of(batch: Iterable[QueuedItem]) -> list[TraceContext]:
    """Returns the sampled traces of a batch's jobs, without duplicates."""
    status = (
        pulled.trace for queued in batch for pulled, _ in queued.waiters if pulled.runs is not None
    )
    return list(dict.fromkeys(trace for trace in status if trace is not None))
