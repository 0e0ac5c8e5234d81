"""Messages as bytes and attributes: what is published, and what is read again.

A publisher checks that the broker carries the message and that its reader can decode it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shared.errors import UndecodableMessage
from shared.messages import SCHEMA_VERSION, Envelope, Job, JobBody, Reply, ReplyBody, check_schema
from shared.tracing.context import current

LONGEST_ATTRIBUTE_BYTES = 1024
LONGEST_DATA_BYTES = 9 * 1024 * 1024
"""Pub/Sub takes 10 MB of data and attributes together (https://cloud.google.com/pubsub/quotas)."""

_encoder = msgspec.json.Encoder()
_job_decoder = msgspec.json.Decoder(JobBody)
_reply_decoder = msgspec.json.Decoder(ReplyBody)


def encode_job(job: Job) -> tuple[bytes, dict[str, str]]:
    """The data and the attributes of the job's message, which `decode_job` can read.

    It decodes the message, which takes microseconds, because callers of an unreadable job would
    wait in vain.

    Raises:
        UndecodableMessage: workers could not read it, or Pub/Sub not carry it. `field` says why.
    """
    try:
        data, attributes = _encoder.encode(job.body), job.envelope.to_attributes()
    except (UnicodeError, OverflowError, RecursionError) as error:
        raise UndecodableMessage(f"data: {error}", field="data") from error
    _check_carried(data, attributes)
    decode_job(data, attributes)
    return data, attributes


def decode_job(data: bytes, attributes: Mapping[str, str]) -> Job:
    """Reads a job.

    Raises:
        UndecodableMessage: it is not a job. `field` is "schema", "attributes" or "data".
    """
    envelope = Envelope.from_attributes(attributes)
    try:
        body = _job_decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UndecodableMessage(f"data: {error}", field="data") from error
    if not body.items:
        raise UndecodableMessage("data: a job has at least one item", field="data")
    if len({item.index for item in body.items}) != len(body.items):
        raise UndecodableMessage("data: two items have the same index", field="data")
    return Job(envelope, body)


def encode_reply(reply: Reply) -> tuple[bytes, dict[str, str]]:
    """The data and the attributes of the reply's message."""
    return encode_reply_body(reply.body), reply_attributes(reply.request_id, reply.part, reply.slot)


def reply_attributes(request_id: str, part: int, slot: str) -> dict[str, str]:
    """The attributes of a reply's message. Its data is what `encode_reply_body` returns.

    A reply whose trace is kept carries it on.
    """
    attributes = {"schema": SCHEMA_VERSION, "request_id": request_id, "part": str(part)}
    if slot:
        attributes["slot"] = slot
    trace = current()
    return attributes | trace.attributes() if trace and trace.is_sampled else attributes


def encode_reply_body(body: ReplyBody) -> bytes:
    """The data of a reply's message, as a record keeps it."""
    return _encoder.encode(body)


def decode_reply_body(data: bytes) -> ReplyBody:
    """Reads what `encode_reply_body` wrote.

    Raises:
        UndecodableMessage: it is not a reply.
    """
    try:
        return _reply_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise UndecodableMessage(f"reply: {error}", field="data") from error


def decode_reply(data: bytes, attributes: Mapping[str, str]) -> Reply:
    """Reads a reply.

    Raises:
        UndecodableMessage: it is not a reply.
    """
    check_schema(attributes)
    try:
        part = int(attributes["part"])
        return Reply(
            attributes["request_id"], part, attributes.get("slot", ""), _reply_decoder.decode(data)
        )
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise UndecodableMessage(f"reply: {error}", field="data") from error


def _check_carried(data: bytes, attributes: Mapping[str, str]) -> None:
    if len(data) > LONGEST_DATA_BYTES:
        raise UndecodableMessage(
            f"data: {len(data)} bytes are too long for a message", field="data"
        )
    for name, value in attributes.items():
        # A character has four bytes at most, so only long values are counted.
        if (
            len(value) * 4 > LONGEST_ATTRIBUTE_BYTES
            and len(value.encode()) > LONGEST_ATTRIBUTE_BYTES
        ):
            raise UndecodableMessage(
                f"attributes: {name} is too long for a message", field="attributes"
            )
