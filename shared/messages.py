"""The wire format between the API and workers: jobs on `jobs.<model>` and replies on an inbox.

A **request** is one HTTP call. Its **items** (texts or images) travel in one or more **jobs**. A
job is one Pub/Sub message, identified by (request_id, part). Everything needed to route or identify
a message is in its attributes, where filters, the dead-letter function, and people using the
console can see it. The body is JSON and contains the items.

A job on the wire:

    attributes: {"schema": "1", "request_id": "req_6f0c…", "part": "0", "model": "all-MiniLM-L6-v2",
                 "tenant": "default", "inbox": "inbox.7", "slot": "17", "deadline_s":
                 "1790000000.25", "received_at_s": "…", "published_at_s": "…", "attempt": "1",
                 "api_instance": "api-3f"}
    data:       {"items": [{"index": 0, "input": {"type": "text", "text": "a cat"}, "cache_key":
        "9b1d…"}]}

The reply includes the same `slot`, `request_id`, and `part`, with one outcome per item, in the same
order as the items.

A job with `"replies": "n"` comes from an instance that accepts multiple replies in one message:

    attributes: {"schema": "1", "replies": "2"}
    data:       {"replies": [{"request_id": "req_6f0c…", "part": 0, "body": {"outcomes": […]}}, …]}

Earlier releases neither send this attribute nor read such messages, so they receive each reply
separately.

The functions here encode and decode both formats. A publisher checks that the broker can carry the
message and that the reader can decode it. If a message can't be decoded as a job, a lenient decoder
reads as much of it as possible so that the job's callers get a reply.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from shared.errors import MALFORMED, InputTooLarge, PenstockError, UndecodableMessage
from shared.models.tasks import Input, Result
from shared.models.tasks.custom import PieceChunk
from shared.tenants.plan import HEAVIEST, LIGHTEST, Priority
from shared.tracing.spans import TraceContext, current, read_context

SCHEMA_VERSION = "1"
UnixTime = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Seconds since 1970, checked when a message is read, because a deadline of `nan` would never pass.
"""
Weight = Annotated[float, msgspec.Meta(ge=LIGHTEST, le=HEAVIEST)]
"""A tenant's share of the work, relative to other tenants waiting for the same model."""

PriceShare = Annotated[float, msgspec.Meta(ge=0, le=1)]

_LEFT_OUT = {
    "lane": "interactive",
    "start_by_s": 0.0,
    "weight": 1.0,
    "price_share": 1.0,
    "retries": 0,
    "tries": 0,
}
"""Values that are omitted from messages, by wire field name. For other fields, an empty string is
omitted.
"""

_STATUSES = {"deadline_exceeded": "expired", "canceled": "canceled"}

MAX_ATTRIBUTE_BYTES = 1024
MAX_DATA_BYTES = 9 * 1024 * 1024
"""Pub/Sub accepts up to 10 MB of data and attributes combined
(https://cloud.google.com/pubsub/quotas).
"""

_encoder = msgspec.json.Encoder()

MAX_REPLY_BATCH_BYTES = 256 * 1024
"""Maximum size, in bytes, of the replies in one message.

A message of that size blocks the event loop for about 1 ms when it is read.
"""


class Item(msgspec.Struct, omit_defaults=True):
    """One unit of work. `index` is the item's position in the request.

    An item without a cache_key is not shared.
    """

    index: int
    input: Input
    cache_key: str | None = None


def record_id(request_id: str, part: int) -> str:
    """Returns the ID of a job's record. For a request's first job, that is the request's own ID."""
    return f"{request_id}:{part}" if part else request_id


class RequestFacts(msgspec.Struct, kw_only=True):
    """A request's caller, time, and terms, which stay the same from the request headers to the row.

    The API fills in the fields until the request is dispatched. From then on, they are copied as a
    unit to each job's envelope and each row.
    """

    request_id: str
    """ID used in messages, records, and rows.

    Always generated, except for predictions with custom IDs.
    """
    tenant: str
    received_at_s: UnixTime
    """Unix time of arrival, the starting point for time limits."""
    client_request_id: str = ""
    """The caller's `x-request-id` (at most 128 characters), used only in rows. Empty if none was
    sent.
    """
    key_id: str = ""
    """Public part of the caller's API key, used in rows. Empty if keys are not required."""
    plan: str = ""
    """Name of the tenant's plan, used in rows. Empty if there is none."""
    weight: Weight = 1.0
    """The tenant's share of a busy model, from its plan. Omitted from messages if 1."""
    priority: Priority = msgspec.field(default="interactive", name="lane")
    """Subscriptions filter on this field by its wire name.

    Omitted from messages if interactive.
    """
    user_agent_family: str = ""
    """Kind of client, used in rows (api/http/request_options.py)."""
    price_share: PriceShare = 1.0
    """Fraction of the list price charged for the request. Omitted from messages if 1."""
    batch_id: str = ""
    """The batch that includes the request as one of its lines, used in rows. Empty if there is
    none.
    """

    def row_columns(self) -> dict[str, Any]:
        """Returns the columns that are the same in all of the request's rows, keyed by name."""
        return {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "received_at_s": self.received_at_s,
            "client_request_id": self.client_request_id or None,
            "key_id": self.key_id or None,
            "plan": self.plan or None,
            "priority": self.priority,
            "user_agent_family": self.user_agent_family or None,
            "batch_id": self.batch_id or None,
        }


class Envelope(RequestFacts, kw_only=True):
    """A job's attributes: facts about its request, its model, and the reply's destination."""

    part: int
    """The job's index within its request."""
    model: str
    inbox: str = ""
    """Topic ID of the inbox waiting for the reply. Empty if no caller is waiting."""
    slot: str = ""
    deadline_s: UnixTime
    """Unix time after which the reply is useless."""
    published_at_s: UnixTime
    api_instance: str = ""
    attempt: int = 1
    traceparent: str = ""
    """The span that published the job (W3C Trace Context).

    The span's flag determines whether spans are kept.
    """
    tracestate: str = ""
    cache_key: str = ""
    """Cache key of the first item, for people and tools that inspect the topic."""
    prediction: str = ""
    """`1` if the API created a record for the job. The record must be finished before the job is
    acked.
    """
    webhook: str = ""
    """Events sent to the prediction's webhook, comma-separated. The record contains the webhook's
    URL.
    """
    start_by_s: UnixTime = 0.0
    """Unix time after which the model no longer starts the job. If 0, only the deadline applies."""
    replies: str = ""
    """`n` if the inbox accepts multiple replies in one message.

    Inboxes from earlier releases don't accept them.
    """
    flow: str = ""
    """The flow the job belongs to, if any; in that case, request_id is the run's ID. Empty if there
    is no flow.
    """
    step: str = ""
    """ID of the flow's step."""
    retries: int = 0
    """How many times a failed item in the step may be retried."""
    tries: int = 0
    """How many times this job's items have been retried."""

    @property
    def has_record(self) -> bool:
        """Returns whether the API created a record for the job, which must then be finished."""
        return bool(self.prediction)

    @property
    def trace(self) -> TraceContext | None:
        """The trace that the job belongs to."""
        return read_context(self.traceparent, self.tracestate) if self.traceparent else None

    @property
    def webhook_events(self) -> list[str]:
        """The events in `webhook`."""
        return self.webhook.split(",") if self.webhook else []

    def to_attributes(self) -> dict[str, str]:
        """Returns the attributes of the job's message. Empty fields are omitted."""
        attributes = {"schema": SCHEMA_VERSION}
        values = zip(_ENVELOPE_FIELDS, msgspec.structs.astuple(self), strict=True)
        for (on_wire, left_out), value in values:
            if value != left_out:
                attributes[on_wire] = value if type(value) is str else repr(value)
        return attributes

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, str]) -> Envelope:
        """Parses attributes.

        Raises:
            UndecodableMessage: the schema or a field is missing or malformed. `field` is its name.
        """
        check_schema(attributes)
        try:
            return msgspec.convert(dict(attributes), cls, strict=False)
        except msgspec.ValidationError as error:
            raise UndecodableMessage(f"attributes: {error}", field="attributes") from error


_ENVELOPE_FIELDS = tuple(
    (name, _LEFT_OUT.get(name, "")) for name in Envelope.__struct_encode_fields__
)


class JobBody(msgspec.Struct, omit_defaults=True):
    """The body of a job: its items, and whether cached results may be used and stored."""

    items: list[Item]
    cache_read: bool = True
    cache_write: bool = True


class Job(msgspec.Struct):
    """One message on `jobs.<model>`."""

    envelope: Envelope
    body: JobBody


class ItemError(msgspec.Struct, omit_defaults=True):
    """The reason an item has no result. `code` is defined in shared.errors."""

    code: str
    message: str
    field: str | None = None


class Receipt(msgspec.Struct, omit_defaults=True):
    """One item's cost, as measured by the worker.

    It is sent in the reply and becomes the item's row.

    Times are in Unix seconds, and durations are in milliseconds. `cache` is where the result came
    from: `miss` (computed), `memory`, `redis`, `joined` (an identical item was being computed), or
    `none` (cache not used). `steps_saved` is the number of steps that were skipped for a canceled
    or late image. `padded_tokens` is the number of tokens processed, including padding, or None if
    there are none.
    """

    cache: str = "none"
    pulled_at_s: float | None = None
    started_at_s: float | None = None
    finished_at_s: float | None = None
    batch_wait_ms: float | None = None
    inference_ms: float | None = None
    batch_size: int | None = None
    tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Number of input tokens that a text model had already processed."""
    pixel_steps: int | None = None
    steps_saved: int | None = None
    revision: str | None = None
    """Revision that served the item. Only for a model with a canary."""
    padded_tokens: int | None = None
    work: int | None = None
    """The item's weight, for a custom model."""
    is_delivered_in_part: bool = False
    """True if there is no result, but a reader received part of the streamed output.

    For a generation, `tokens` counts the tokens in that part and in the prompt.
    """
    cold_start: bool = False
    """True if the process that computed the item loaded the model after the job was published."""
    adapter: str | None = None
    """Adapter used to draw the image."""
    spent_work: int | None = None
    """Work done for an item without a result, in its model's unit.

    This work counts toward limits but costs nothing.
    """

    def count(self, result: Result) -> None:
        """Adds the work reported in a result."""
        for name in _list_reported_fields(type(result)):
            setattr(self, name, getattr(result, name))


@lru_cache
def _list_reported_fields(kind: type) -> tuple[str, ...]:
    """Returns the fields of a receipt that results of this type report."""
    names = ("tokens", "output_tokens", "cached_tokens", "pixel_steps", "work", "adapter")
    return tuple(name for name in names if hasattr(kind, name))


class PrintedLogs(msgspec.Struct, frozen=True, array_like=True):
    """Text that a custom model printed while processing an item.

    If it is long, only the end is kept.
    """

    text: str = ""
    left_out: int = 0
    """Number of characters omitted from the start of the text."""

    @property
    def end(self) -> int:
        return self.left_out + len(self.text)

    def after(self, seen: int) -> str:
        """Returns the text after the first `seen` characters, noting any missing part."""
        if seen >= self.end:
            return ""
        missing = self.left_out - seen
        if missing <= 0:
            return self.text[seen - self.left_out :]
        return f"… {missing} characters are omitted …\n{self.text}"


class ItemOutcome(msgspec.Struct, omit_defaults=True):
    """The outcome of one item: a result or an error, and its receipt.

    `status`: succeeded, failed, expired, or canceled.
    """

    index: int
    status: str
    receipt: Receipt
    result: Result | None = None
    error: ItemError | None = None
    logs: PrintedLogs | None = None
    partial: PieceChunk | None = None
    """If there is no result, the output that a custom class had already yielded. Contains only as
    much as the caller may receive.
    """


class ReplyBody(msgspec.Struct, omit_defaults=True):
    """The body of a reply: one outcome per item in the job, in order.

    If the job's body could not be read, there are no outcomes, and `error` contains the reason.
    """

    outcomes: list[ItemOutcome]
    error: ItemError | None = None
    worker: str = ""
    device: str = ""
    replied_at_s: float = 0.0
    output: Result | None = None
    """A successful flow's output. In that case, the outcomes have no results."""

    @property
    def delivered(self) -> list[ItemOutcome]:
        """Outcomes to respond with.

        For a successful flow, this is a single outcome with its output.
        """
        if self.output is None:
            return self.outcomes
        return [ItemOutcome(0, "succeeded", Receipt(), self.output)]


class Reply(msgspec.Struct):
    """One message on an inbox."""

    request_id: str
    part: int
    slot: str
    body: ReplyBody


class BatchedReply(msgspec.Struct):
    """One of several replies in a message. `body` is the result of `encode_reply_body`."""

    request_id: str
    part: int
    body: msgspec.Raw


class ReplyBatch(msgspec.Struct):
    """The body of a message with several replies for one inbox and slot."""

    replies: list[BatchedReply]


def reason_of(outcome: ItemOutcome) -> str:
    """Returns the reason an item has no result, naming the input if it caused the error."""
    if outcome.error is None:
        return f"item {outcome.index} has neither a result nor an error; this is a bug"
    prefix = f"input[{outcome.index}]: " if outcome.error.field == "input" else ""
    return prefix + outcome.error.message


def error_item(error: PenstockError) -> ItemError:
    """Returns an error's public form for messages and records, which callers can read."""
    return ItemError(error.code, error.public_message, error.field)


def failure(index: int, error: PenstockError, receipt: Receipt | None = None) -> ItemOutcome:
    """Returns the outcome for an item that failed with `error`."""
    status = _STATUSES.get(error.code, "failed")
    return ItemOutcome(index, status, receipt or Receipt(), error=error_item(error))


def check_schema(attributes: Mapping[str, str]) -> None:
    """Rejects messages with a different schema version.

    Raises:
        UndecodableMessage: `field` is "schema".
    """
    if attributes.get("schema") != SCHEMA_VERSION:
        raise UndecodableMessage(
            f"unsupported schema {attributes.get('schema', '')[:40]!r}; expected "
            f"{SCHEMA_VERSION!r}",
            field="schema",
        )


_job_decoder = msgspec.json.Decoder(JobBody)
_reply_decoder = msgspec.json.Decoder(ReplyBody)
_batch_decoder = msgspec.json.Decoder(ReplyBatch)


def encode_job(job: Job) -> tuple[bytes, dict[str, str]]:
    """Returns the data and attributes of the job's message, which `decode_job` can read.

    The message is decoded again as a check, which takes only microseconds, because an unreadable
    job would leave its callers waiting in vain.

    Raises:
        UndecodableMessage: workers can't read the message, or Pub/Sub can't carry it. `field` names
            the part.
        InputTooLarge: Pub/Sub does not accept messages of this size.
    """
    try:
        data, attributes = _encoder.encode(job.body), job.envelope.to_attributes()
    except (UnicodeError, OverflowError, RecursionError) as error:
        raise UndecodableMessage(f"data: {error}", field="data") from error
    if len(data) > MAX_DATA_BYTES:
        raise InputTooLarge(
            f"the request is {len(data)} bytes without its files, which exceeds the maximum "
            f"of {MAX_DATA_BYTES}; send less or split it into several requests"
        )
    _check_carried(attributes)
    decode_job(data, attributes)
    return data, attributes


def decode_job(data: bytes, attributes: Mapping[str, str]) -> Job:
    """Parses a job.

    Raises:
        UndecodableMessage: the message is not a job. `field` is "schema", "attributes", or "data".
    """
    envelope = Envelope.from_attributes(attributes)
    try:
        body = _job_decoder.decode(data)
    except MALFORMED as error:
        raise UndecodableMessage(f"data: {error}", field="data") from error
    if not body.items:
        raise UndecodableMessage("data: a job must have at least one item", field="data")
    if len({item.index for item in body.items}) != len(body.items):
        raise UndecodableMessage("data: items must have unique indexes", field="data")
    return Job(envelope, body)


def encode_reply(reply: Reply) -> tuple[bytes, dict[str, str]]:
    """Returns the data and attributes of the reply's message."""
    return encode_reply_body(reply.body), reply_attributes(reply.request_id, reply.part, reply.slot)


def reply_attributes(request_id: str, part: int, slot: str) -> dict[str, str]:
    """Returns the attributes of a reply's message.

    The message's data is the result of `encode_reply_body`.

    If the reply's trace is kept, the attributes include the trace.
    """
    attributes = {"schema": SCHEMA_VERSION, "request_id": request_id, "part": str(part)}
    if slot:
        attributes["slot"] = slot
    trace = current()
    return attributes | trace.attributes() if trace and trace.is_sampled else attributes


def encode_reply_batch(
    replies: Sequence[tuple[str, int, bytes]], slot: str
) -> tuple[bytes, dict[str, str]]:
    """Returns the data and attributes of a message with several replies.

    Args:
        replies: each reply's request_id, part, and encoded body.
        slot: the slot for all of the replies. Empty if the topic has no slots.
    """
    batched = [
        BatchedReply(request_id, part, msgspec.Raw(body)) for request_id, part, body in replies
    ]
    attributes = {"schema": SCHEMA_VERSION, "replies": str(len(batched))}
    if slot:
        attributes["slot"] = slot
    return _encoder.encode(ReplyBatch(batched)), attributes


def is_reply_batch(attributes: Mapping[str, str]) -> bool:
    """Returns whether a message has several replies."""
    return "replies" in attributes


def decode_reply_batch(data: bytes, attributes: Mapping[str, str]) -> list[BatchedReply]:
    """Parses the result of `encode_reply_batch`. Use `decode_reply_body` to decode the bodies.

    Raises:
        UndecodableMessage: the message does not contain several replies.
    """
    check_schema(attributes)
    try:
        return _batch_decoder.decode(data).replies
    except MALFORMED as error:
        raise UndecodableMessage(f"replies: {error}", field="data") from error


def encode_reply_body(body: ReplyBody) -> bytes:
    """Returns a reply message's data, which is also the form stored in records."""
    return _encoder.encode(body)


def decode_reply_body(data: bytes | msgspec.Raw) -> ReplyBody:
    """Parses the result of `encode_reply_body`.

    Raises:
        UndecodableMessage: the data is not a reply.
    """
    try:
        return _reply_decoder.decode(data)
    except MALFORMED as error:
        raise UndecodableMessage(f"reply: {error}", field="data") from error


def decode_reply(data: bytes, attributes: Mapping[str, str]) -> Reply:
    """Parses a reply.

    Raises:
        UndecodableMessage: the message is not a reply.
    """
    check_schema(attributes)
    try:
        part = int(attributes["part"])
        return Reply(
            attributes["request_id"], part, attributes.get("slot", ""), _reply_decoder.decode(data)
        )
    except (KeyError, ValueError, *MALFORMED) as error:
        raise UndecodableMessage(f"reply: {error}", field="data") from error


def _check_carried(attributes: Mapping[str, str]) -> None:
    # A character takes up at most four bytes, so only long values need an exact byte count.
    if max(map(len, attributes.values())) * 4 <= MAX_ATTRIBUTE_BYTES:
        return
    for name, value in attributes.items():
        if len(value.encode()) > MAX_ATTRIBUTE_BYTES:
            raise UndecodableMessage(
                f"attributes: {name} is too long for a message", field="attributes"
            )


def decode_leniently(attributes: Mapping[str, str]) -> Envelope | None:
    """Returns the envelope, with unreadable fields empty, or None if request_id or part is missing.

    This works for every schema version, because request_id, part, inbox, and slot have never
    changed.
    """
    known: dict[str, Any] = {}
    for field in msgspec.structs.fields(Envelope):
        if field.encode_name in attributes:
            try:
                known[field.name] = msgspec.convert(
                    attributes[field.encode_name], field.type, strict=False
                )
            except msgspec.ValidationError:
                continue
    if "request_id" not in known or "part" not in known:
        return None
    unknown: dict[str, Any] = {
        "model": "",
        "tenant": "",
        "deadline_s": 0.0,
        "received_at_s": time.time(),
        "published_at_s": 0.0,
    }
    return Envelope(**unknown | known)
