"""Moves flows from step to step. The process that finishes a step publishes the next ones.

There is no orchestrator. The API publishes a run's first steps, and each worker publishes the steps
that follow its items. For items that no worker could compute, the dead-letter function publishes
the next steps. All of these processes use this engine, and the result is the same no matter how
many times they run these steps (shared/stores/flow_runs.py):

1. `mark`: records the outcomes of a job's items. The first outcome wins. 2. `advance`: publishes
more of the step's jobs. If the step is finished, plans the steps that depend on it and publishes
their first jobs, or ends the run. 3. The caller writes rows and acks its message last. If the
caller dies before that, the message is redelivered, its items are found to be finished, and the run
is advanced again.

A step job's IDs are derived from its position: its request is the run, and its part and item
indexes are based on step and position. As a result, a job that is published twice is computed only
once, unless its deliveries are concurrent; then only one of them counts.

A run that fails, is late, or is canceled is closed first, so that no further items count. This way,
the run's reply matches the charges in its rows.

Calls raise Unavailable if Redis or the broker does not respond.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import msgspec

from shared.broker.transport import Publisher, jobs_topic_id
from shared.errors import (
    BadInput,
    Canceled,
    DeadlineExceeded,
    InputTooLarge,
    ModelFailed,
    ModerationBlocked,
    Overloaded,
    PenstockError,
    Unavailable,
    UnknownModel,
)
from shared.flows.run import Run, RunFailed, receipts_of
from shared.messages import (
    MAX_DATA_BYTES,
    Envelope,
    Item,
    ItemError,
    ItemOutcome,
    Job,
    JobBody,
    ReplyBody,
    encode_job,
    encode_reply_body,
    error_item,
    failure,
    reply_attributes,
)
from shared.models.after_image import WITHHELD
from shared.models.catalog import Catalog, Model
from shared.models.flow_plan import (
    FlowPlan,
    FlowStep,
    index_of,
    plan_step,
    step_of,
)
from shared.models.flow_types import check_values
from shared.models.tasks import Input
from shared.models.tasks.base import MAX_JOB_ITEMS
from shared.models.tasks.image import ImagesResult
from shared.money import slo
from shared.predictions import Prediction, decode_document
from shared.stores.cache import ResultCache, cache_key, compute_owed
from shared.stores.flow_runs import WINDOW_JOBS, FlowRuns, Look, Marked, RunState
from shared.stores.record_state import Record
from shared.stores.records import EndState, Records
from shared.tracing.spans import current
from shared.webhooks.publisher import WebhookPublisher

NOT_RETRIED = frozenset(
    {"invalid_input", "input_too_large", "context_length_exceeded", "model_withdrawn"}
)
"""Codes for errors that would recur with the same input."""
MAX_JOB_BYTES = MAX_DATA_BYTES - 64 * 1024
"""Maximum JSON size of a job's items. The rest is reserved for the message's other parts."""
ORPHANED_S = 5.0
"""Number of seconds after arrival when a run is taken over if its API instance has not reported
that all of the first jobs have been published.
"""
log = logging.getLogger(__name__)

_outcomes = msgspec.json.Decoder(ItemOutcome)
_bodies = msgspec.json.Decoder(JobBody)
_errors = msgspec.json.Decoder(ItemError)


class StepRow(NamedTuple):
    """An item that no worker had to process: its result was cached, or its input was invalid.

    The process that planned the item's step writes the row.
    """

    model: Model
    envelope: Envelope
    outcome: ItemOutcome


class JobEnd(NamedTuple):
    """The outcomes of a job's items, used in its rows."""

    marked: Marked
    outcomes: list[ItemOutcome]
    """The outcome that counts for each item."""


class FlowEngine:
    """Advances all flows' runs.

    Args:
        cache: a cache that may contain step results. If None, the cache is not used before
            publishing.
        purges: returns how many times a revision's cached results have been purged.
    """

    def __init__(
        self,
        catalog: Catalog,
        records: Records,
        runs: FlowRuns,
        publisher: Publisher,
        cache: ResultCache | None = None,
        purges: Callable[[Model], int] = lambda _: 0,
    ) -> None:
        self._catalog = catalog
        self._records = records
        self._runs = runs
        self._publisher = publisher
        self._webhooks = WebhookPublisher(publisher)
        self._cache = cache
        self._purges = purges

    async def start(self, envelope: Envelope, body: JobBody) -> list[StepRow]:
        """Publishes the first steps of a run whose record exists. May be called more than once.

        Args:
            envelope: the run's envelope: like a model's job, but with the name of the flow.
            body: the single item, and whether to use the cache.
        """
        data = msgspec.json.encode(body.items[0].input)
        await self._runs.open(envelope.request_id, data)
        run = msgspec.structs.replace(envelope, flow=envelope.model)
        return await self._advance(run, body, is_repeated=True)

    async def look(self, jobs: Sequence[Job]) -> list[Look]:
        """Returns whether any step jobs still need to be run."""
        return await self._runs.look(
            [(job.envelope.request_id, [item.index for item in job.body.items]) for job in jobs]
        )

    async def mark(self, job: Job, outcomes: Sequence[ItemOutcome]) -> JobEnd:
        """Records the outcomes of a job's items. Only the first call for each item counts.

        Args:
            outcomes: outcomes for some or all items. Large results are in the object store.

        Raises:
            Unavailable: Redis did not respond, but may have recorded the outcomes.
        """
        encoded = {outcome.index: msgspec.json.encode(outcome) for outcome in outcomes}
        step = step_of(outcomes[0].index)
        marked = await self._runs.mark(job.envelope.request_id, step, encoded)
        counting = []
        for outcome, recorded in zip(outcomes, marked.outcomes, strict=True):
            if recorded is not None:
                counting.append(_outcomes.decode(recorded))
            else:  # it was too late
                is_over = outcome.status in ("canceled", "expired")
                counting.append(
                    outcome if is_over else failure(outcome.index, Canceled(), outcome.receipt)
                )
        return JobEnd(marked, counting)

    async def advance(self, job: Job, end: JobEnd) -> list[StepRow]:
        """Continues the run after a job's items are done. Returns rows to write."""
        envelope, marked = job.envelope, end.marked
        if marked.is_open and marked.jobs:
            step = step_of(end.outcomes[0].index)
            await self._publish(envelope, step, marked.jobs)
        has_failed = any(outcome.error is not None for outcome in end.outcomes)
        age_s = time.time() - envelope.received_at_s
        is_orphan = marked.is_open and not marked.is_published and age_s > ORPHANED_S
        if marked.is_open and not (marked.is_complete or has_failed or is_orphan):
            return []
        is_repeated = marked.is_repeated or envelope.attempt > 1 or is_orphan
        rows = await self._advance(envelope, job.body, is_repeated=is_repeated)
        if is_orphan:
            await self._records.mark_published(envelope.request_id)
        return rows

    async def retry(self, job: Job, indexes: Sequence[int]) -> None:
        """Republishes a job's failed items. The caller checks that they may be retried."""
        items = [item for item in job.body.items if item.index in indexes]
        envelope = msgspec.structs.replace(job.envelope, tries=job.envelope.tries + 1)
        await self._send(envelope, msgspec.structs.replace(job.body, items=items))

    async def fail(self, prediction: Prediction, error: PenstockError) -> bool:
        """Ends a run with an error. Returns whether this call ended it as failed."""
        await self._runs.close(prediction.record, msgspec.json.encode(error_item(error)))
        return await self.settle(prediction)

    async def abandon(self, run_id: str, error: PenstockError) -> None:
        """Ends a run because one of its jobs could not be read."""
        record = await self._records.read(run_id)
        if record is not None and record.document:
            await self.fail(decode_document(record.document), error)

    async def settle(self, prediction: Prediction) -> bool:
        """Ends the record of a closed or canceled run and records the cost of its items.

        Returns whether this call ended it as failed.
        """
        run_id = prediction.record
        record = await self._records.read(run_id)
        if record is None or record.reply is not None:
            return False
        has_failed = await self._end_closed(run_id, record, await self._runs.read(run_id))
        await self._publish_end(run_id, prediction)
        return has_failed

    async def _advance(
        self, envelope: Envelope, body: JobBody, *, is_repeated: bool
    ) -> list[StepRow]:
        run_id, rows = envelope.request_id, list[StepRow]()
        # The process that ended the run may have died before notifying anyone.
        must_notify = is_repeated
        while True:
            record = await self._records.read(run_id)
            if record is None or not record.document:  # dropped or deleted
                return rows
            prediction, state = decode_document(record.document), await self._runs.read(run_id)
            if is_repeated:
                # The process that planned the items may have died before their rows were written.
                rows[:] = self._build_planned_rows(prediction, state, envelope)
            if record.is_over or record.closed:
                if record.reply is None:
                    await self._end_closed(run_id, record, state, envelope)
                if record.reply is None or must_notify:
                    await self._publish_end(run_id, prediction)
                    await self._wake_waiter(envelope)
                return rows
            try:
                run = Run(run_id, plan_of(prediction), state)
                run.check()
                if run.is_over:
                    await self._succeed(run, envelope)
                    must_notify = True
                elif not await self._plan_ready(run, envelope, body, rows, is_repeated=is_repeated):
                    return rows
            except (BadInput, ModelFailed) as error:
                await self._runs.close(run_id, msgspec.json.encode(error_item(error)))

    def _build_planned_rows(
        self, prediction: Prediction, state: RunState, envelope: Envelope
    ) -> list[StepRow]:
        """Returns the items that no worker completed. Workers record items when they pull them."""
        rows, steps = [], plan_of(prediction).steps
        for index, data in state.outcomes.items():
            outcome, step = _outcomes.decode(data), steps[step_of(index)]
            if outcome.receipt.pulled_at_s is not None:
                continue
            with suppress(UnknownModel):  # the model was removed from the catalog
                model = self._catalog.find(step.model)
                rows.append(StepRow(model, _step_envelope(envelope, step, model, index), outcome))
        return rows

    async def _plan_ready(
        self,
        run: Run,
        envelope: Envelope,
        body: JobBody,
        rows: list[StepRow],
        *,
        is_repeated: bool,
    ) -> bool:
        """Plans steps that can start. Returns whether any of those steps is already finished.

        Raises:
            RunFailed: a step can't be planned.
        """
        is_any_over = False
        for number in run.ready:
            is_any_over |= await self._plan(run, number, envelope, body, rows)
        if is_repeated:
            for number in run.unpublished:
                await self._publish_first(run, number, run.state.steps[number].jobs, envelope)
        return is_any_over

    async def _plan(
        self, run: Run, number: int, envelope: Envelope, body: JobBody, rows: list[StepRow]
    ) -> bool:
        """Plans a step and publishes its first jobs. Returns whether it is already finished."""
        step = run.plan.steps[number]
        model, inputs = self._find_inputs(step, run)
        items, done = self._build_items(number, inputs, model, envelope.tenant, body)
        done |= await self._find_cached(items, model, body)
        pending_items = [item for item in items if item.index not in done]
        jobs = [
            msgspec.json.encode(msgspec.structs.replace(body, items=group))
            for group in divide_into_jobs(pending_items, model.definition.largest_job(model))
        ]
        ended = {index: msgspec.json.encode(outcome) for index, outcome in done.items()}
        planned = await self._runs.plan(run.id, number, jobs, len(inputs), ended)
        if planned != "stored":  # so this run is not charged for them
            self._mark_unpaid(items, done, model)
            if planned == "no_room":
                reason = (
                    f"step {step.id!r}: unfinished predictions have used up the storage it needs"
                )
                raise RunFailed(ItemError(Overloaded.code, reason))
            return planned == "ended"
        own = _step_envelope(envelope, step, model, index_of(number, 0))
        rows += [StepRow(model, own, outcome) for outcome in done.values()]
        await self._publish_first(run, number, len(jobs), envelope)
        return not jobs or any(outcome.error is not None for outcome in done.values())

    def _find_inputs(
        self, step: FlowStep, run: Run
    ) -> tuple[Model, Mapping[int, Mapping[str, Any]]]:
        """Returns a step's model, and its items' inputs, keyed by position.

        Raises:
            RunFailed: a value is missing, or the model was removed.
        """
        try:
            return self._catalog.find(step.model), plan_step(step, run.scope)
        except BadInput as error:
            at_step = "" if error.field else f"step {step.id!r}: "
            reason = f"{at_step}{error.message}"
            raise RunFailed(ItemError(error.code, reason, error.field)) from error

    def _build_items(
        self,
        number: int,
        inputs: Mapping[int, Mapping[str, Any]],
        model: Model,
        tenant: str,
        body: JobBody,
    ) -> tuple[list[Item], dict[int, ItemOutcome]]:
        """Returns a step's items, and the outcomes of items with invalid input."""
        items, failed = list[Item](), dict[int, ItemOutcome]()
        is_kept, purges = body.cache_write and model.cache.ttl_s > 0, self._purges(model)
        input_schemas = model.definition.step_schema(model).inputs
        for position, values in inputs.items():
            index = index_of(number, position)
            try:
                step_input = model.definition.step_input(model, check_values(values, input_schemas))
                task_input = cast(Input, step_input.input)
                is_keyed = is_kept and step_input.is_repeatable
                key = cache_key(model, task_input, tenant, purges) if is_keyed else None
                item = Item(index, task_input, key)
                if (size := _bytes_of(item)) > MAX_JOB_BYTES:
                    maximum = f"which exceeds the maximum of {MAX_JOB_BYTES}"
                    raise InputTooLarge(f"the input is {size} bytes as JSON, {maximum}")
            except BadInput as error:
                failed[index] = failure(index, error)
            except Exception:
                # Otherwise, every process that advances the run would fail here, and the run would
                # never end.
                log.exception("input not prepared", extra={"model": model.name})
                failed[index] = failure(index, ModelFailed("the input could not be prepared"))
            else:
                items.append(item)
        return items, failed

    async def _find_cached(
        self, items: Sequence[Item], model: Model, body: JobBody
    ) -> dict[int, ItemOutcome]:
        if self._cache is None or not body.cache_read:
            return {}
        cached = await self._cache.get_many(item.cache_key for item in items if item.cache_key)
        hits = {}
        for item in items:
            if item.cache_key in cached:
                hit = cached[item.cache_key]
                cached[item.cache_key] = hit.repeated
                hits[item.index] = ItemOutcome(item.index, "succeeded", hit.receipt(), hit.result)
        return hits

    def _mark_unpaid(
        self, items: Sequence[Item], done: Mapping[int, ItemOutcome], model: Model
    ) -> None:
        """Resets the status of the items' cached results to unpaid."""
        if self._cache is None:
            return
        owed = {
            item.cache_key: mark
            for item in items
            if item.cache_key
            and item.index in done
            and (mark := compute_owed(done[item.index].receipt)) is not None
        }
        self._cache.mark_unpaid(owed, model.cache.ttl_s)

    async def _publish_first(self, run: Run, number: int, jobs: int, envelope: Envelope) -> None:
        await self._publish(envelope, number, range(min(jobs, WINDOW_JOBS)), run.plan.steps[number])
        await self._runs.note_published(run.id, number)

    async def _publish(
        self,
        envelope: Envelope,
        number: int,
        jobs: Sequence[int],
        step: FlowStep | None = None,
    ) -> None:
        """Publishes a step's jobs. Defaults to the envelope's step."""
        model = None if step is None else self._catalog.find(step.model)
        sending = []
        for data in await self._runs.jobs(envelope.request_id, number, jobs):
            body = _bodies.decode(data)
            first = body.items[0].index
            if step is not None and model is not None:
                own = _step_envelope(envelope, step, model, first)
            else:
                own = msgspec.structs.replace(envelope, part=first + 1, tries=0)
            sending.append(self._send(own, body))
        await asyncio.gather(*sending)

    async def _send(self, envelope: Envelope, body: JobBody) -> None:
        trace = current()
        own = msgspec.structs.replace(
            envelope,
            published_at_s=time.time(),
            attempt=1,
            cache_key=body.items[0].cache_key or "",
            traceparent=trace.traceparent if trace else envelope.traceparent,
            tracestate=trace.tracestate if trace else envelope.tracestate,
        )
        data, attributes = encode_job(Job(own, body))
        topic_id = jobs_topic_id(self._catalog.find_deployed_name(own.model))
        try:
            await self._publisher.publish(topic_id, data, attributes)
        except BadInput as error:
            raise Unavailable(f"the broker rejected the job: {error.message}") from error

    async def _succeed(self, run: Run, envelope: Envelope) -> None:
        output = run.output()
        reply = ReplyBody(run.receipts, replied_at_s=time.time(), output=output)
        if await self._finish(run.id, "succeeded", reply):
            self._count_toward_slo(envelope, "succeeded")
            if isinstance(output, ImagesResult) and output.withheld:
                WITHHELD.labels(envelope.flow).inc(output.withheld)

    def _count_toward_slo(self, envelope: Envelope, status: str) -> None:
        """Counts a run toward the SLO. Runs ended by the API always count as late."""
        with suppress(UnknownModel):  # the flow was removed from the catalog
            flow = self._catalog.find(envelope.flow)
            limits_s = (
                until_s - envelope.received_at_s
                for until_s in (envelope.deadline_s, envelope.start_by_s)
                if until_s
            )
            if slo.counts_toward_slo(flow.deadline, envelope.priority, limits_s):
                slo.count_ended(flow.name, status)

    async def _end_closed(
        self, run_id: str, record: Record, state: RunState, envelope: Envelope | None = None
    ) -> bool:
        """Ends the record of a closed or canceled run, including the cost of its items.

        Returns whether this call ended it as failed.

        Args:
            envelope: used to count the end of the run in metrics. None if the API counts the end of
                the run.
        """
        error = _errors.decode(record.closed) if record.closed else None
        reply = ReplyBody(receipts_of(state), error, replied_at_s=time.time())
        end: EndState = "canceled" if record.state == "canceled" else "failed"
        is_ours = await self._finish(run_id, end, reply)
        has_failed = is_ours and end == "failed"
        if not is_ours or envelope is None or error is None:
            return has_failed
        is_late = error.code == DeadlineExceeded.code
        self._count_toward_slo(envelope, "expired" if is_late else end)
        if error.code == ModerationBlocked.code:
            images = sum(step_of(outcome.index) == 0 for outcome in reply.outcomes)
            WITHHELD.labels(envelope.flow).inc(images)
        return has_failed

    async def _publish_end(self, run_id: str, prediction: Prediction) -> None:
        for event in ("output", "completed"):
            await self._webhooks.publish(run_id, prediction.webhook_events, event)

    async def _wake_waiter(self, envelope: Envelope) -> None:
        """Notifies the API instance whose caller is waiting for the run."""
        if not envelope.inbox:
            return
        attributes = reply_attributes(envelope.request_id, 0, envelope.slot)
        data = encode_reply_body(ReplyBody([], replied_at_s=time.time()))
        with suppress(BadInput):  # neither the instance nor its caller exists anymore
            await self._publisher.publish(envelope.inbox, data, attributes)

    async def _finish(self, run_id: str, state: EndState, reply: ReplyBody) -> bool:
        """Ends the record unless it has already ended or a caller canceled it first.

        Returns whether this call ended it in that state.
        """
        finish = await self._records.finish(run_id, state, encode_reply_body(reply))
        is_ours = finish is not None and finish.is_ours
        if finish is not None and finish.is_lost_to_cancel:
            canceled = msgspec.structs.replace(reply, output=None, error=None)
            finish = await self._records.finish(run_id, "canceled", encode_reply_body(canceled))
        if finish is None:
            raise Unavailable("the run's record could not be closed")
        return is_ours


def plan_of(prediction: Prediction) -> FlowPlan:
    return FlowPlan.model_validate(prediction.flow)


def may_retry(job: Job, outcome: ItemOutcome) -> bool:
    """Returns whether to retry an item in a step."""
    return (
        job.envelope.tries < job.envelope.retries
        and outcome.status == "failed"
        and outcome.error is not None
        and outcome.error.code not in NOT_RETRIED
    )


def divide_into_jobs(items: Sequence[Item], largest: int) -> list[list[Item]]:
    """Groups items into jobs that fit into messages.

    Identical items share a job so that they are processed only once.

    Args:
        largest: maximum number of distinct items per job.
    """
    equal: dict[str, list[Item]] = {}
    for item in items:
        equal.setdefault(item.cache_key or f":{item.index}", []).append(item)
    jobs, left_bytes = list[list[Item]](), 0
    for group in equal.values():
        size = _bytes_of(group[0])
        if jobs and len(jobs[-1]) + len(group) <= largest and len(group) * size <= left_bytes:
            jobs[-1] += group
            left_bytes -= len(group) * size
        else:
            max_items = max(1, min(MAX_JOB_ITEMS, MAX_JOB_BYTES // size))
            jobs += [group[at : at + max_items] for at in range(0, len(group), max_items)]
            left_bytes = MAX_JOB_BYTES - len(jobs[-1]) * size
    return jobs


def _bytes_of(item: Item) -> int:
    return len(msgspec.json.encode(item))


def _step_envelope(envelope: Envelope, step: FlowStep, model: Model, first: int) -> Envelope:
    """Returns the envelope of the step job that starts with the item at this index."""
    return msgspec.structs.replace(
        envelope,
        model=model.name,
        step=step.id,
        part=first + 1,
        attempt=1,
        retries=step.retries,
        tries=0,
        prediction="",
        start_by_s=0.0 if step.depends_on else envelope.start_by_s,
    )
