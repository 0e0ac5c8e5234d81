"""Sends jobs that a canary did not process to the other revision.

A job keeps its ID, so it still has a single record, reply, and row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from shared.broker.transport import Publisher, ReceivedMessage, jobs_topic_id
from shared.messages import Job, decode_job, encode_job


class JobMessage(NamedTuple):
    """A published job: its model, data, and attributes."""

    model: str
    data: bytes
    attributes: Mapping[str, str]


def build_forwarded_job(model: str, data: bytes, attributes: Mapping[str, str]) -> JobMessage:
    """Returns a canary's job, changed to run on the other revision.

    Its items lose their cache keys, which belong to the canary.

    Raises:
        UndecodableMessage: the message is not a job.
    """
    read = decode_job(data, attributes)
    read.envelope.model, read.envelope.cache_key, read.envelope.attempt = model, "", 1
    items = [msgspec.structs.replace(item, cache_key=None) for item in read.body.items]
    body = msgspec.structs.replace(read.body, items=items)
    return JobMessage(model, *encode_job(Job(read.envelope, body)))


async def forward(publisher: Publisher, model: str, message: ReceivedMessage) -> None:
    """Republishes a job that a canary received so that it runs on the other revision.

    Raises:
        UndecodableMessage: the message is not a job.
        PenstockError: the broker did not accept it.
    """
    job = build_forwarded_job(model, message.data, message.attributes)
    await publisher.publish(jobs_topic_id(job.model), job.data, job.attributes)
