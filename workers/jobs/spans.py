"""The spans of a job in a worker: `queue`, `batch` and `infer`, made at its end from times it has.

The message names their parent, the span that published the job. All three are siblings below it.
A batch has items of many jobs, so each job has an `infer` span of its own with the times of its
batch, and links to the other jobs in it (docs/decisions/0037-traces.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from shared.catalog import Model
from shared.messages import ItemOutcome
from shared.topics import batch_subscription_id, jobs_topic_id, workers_subscription_id
from shared.tracing.spans import STAGE, Attributes, SpanBlock, record, span
from workers.job import PulledJob, Run


def record_spans(pulled: PulledJob, model: Model, device: str) -> None:
    """Makes the spans of a job whose items all have outcomes, if its trace is kept."""
    if pulled.runs is None:
        return
    _record_queue(pulled, model.name)
    batches = dict[int, list[Run]]()
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
    """The span of publishing a reply, below the current one."""
    facts: Attributes = {
        STAGE: "reply",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic_id,
    }
    return span(f"publish {topic_id}", "producer", facts)


def _record_queue(pulled: PulledJob, model: str) -> None:
    envelope, topic_id = pulled.envelope, jobs_topic_id(model)
    subscription_of = batch_subscription_id if envelope.lane == "batch" else workers_subscription_id
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
    """The wait for a batch. An item that joined another waits from when its own job came."""
    facts: Attributes = {STAGE: "batch", "penstock.items": items}
    times_s = max(pulled.pulled_at_s, queued_at_s), max(pulled.pulled_at_s, started_at_s)
    record("batch", "internal", times_s, facts, parent=pulled.trace, error=error)


def _record_infer(pulled: PulledJob, model: Model, runs: Sequence[Run], device: str) -> None:
    batch = runs[0].computed.batch
    if batch.finished_at_s < pulled.pulled_at_s:
        return  # joined a result that was there
    operation = model.definition.gen_ai_operation or model.task
    outcomes = [pulled.outcomes[run.index] for run in runs]
    facts: Attributes = {
        STAGE: "infer",
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": model.name,
        "gen_ai.usage.input_tokens": sum(one.receipt.tokens or 0 for one in outcomes),
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
    """The code of the first error, or empty."""
    return next((outcome.error.code for outcome in outcomes if outcome.error is not None), "")
