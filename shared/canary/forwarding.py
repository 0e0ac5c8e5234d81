"""Sends a job of a canary to the other revision: what the canary did not do, that one does.

The job keeps its id, so its record, its reply and its row stay one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from shared.catalog import CANARY_SUFFIX
from shared.messages import Job, decode_job, encode_job
from shared.transport import Publisher, ReceivedMessage, jobs_topic_id


class JobMessage(NamedTuple):
    """A job as it is published: for which model, with which data and attributes."""

    model: str
    data: bytes
    attributes: Mapping[str, str]


def forwarded(job: JobMessage) -> JobMessage:
    """A job of a canary, for the other revision.

    Its items lose their cache keys, which are those of the canary.

    Raises:
        UndecodableMessage: the message is not a job.
    """
    read = decode_job(job.data, job.attributes)
    model = job.model.removesuffix(CANARY_SUFFIX)
    read.envelope.model, read.envelope.cache_key, read.envelope.attempt = model, "", 1
    items = [msgspec.structs.replace(item, cache_key=None) for item in read.body.items]
    body = msgspec.structs.replace(read.body, items=items)
    return JobMessage(model, *encode_job(Job(read.envelope, body)))


async def forward(publisher: Publisher, canary: str, message: ReceivedMessage) -> None:
    """Publishes a received job of a canary again, for the other revision.

    Raises:
        UndecodableMessage: the message is not a job.
        PenstockError: the broker did not take it.
    """
    job = forwarded(JobMessage(canary, message.data, message.attributes))
    await publisher.publish(jobs_topic_id(job.model), job.data, job.attributes)
