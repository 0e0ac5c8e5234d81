"""Compares a canary's outputs from both revisions' workers, if only workers have the code for that.

The API compares all other outputs (api/dispatch/canary_comparison.py). A custom class decides for
itself which outputs are close, and it computes only predictions, which the API does not wait for.
The canary's worker therefore has the other revision recompute a share of its items, sending its own
output along with the input, and that revision's worker compares the two outputs. As in the API,
this has `batch` priority, does not belong to a tenant, and costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Sequence

import msgspec

from shared.broker.transport import Publisher, jobs_topic_id
from shared.canary.verdict import COMPARISON_TENANT
from shared.errors import PenstockError
from shared.messages import Envelope, Item, ItemOutcome, Job, JobBody, encode_job
from shared.models.blob import Blob
from shared.models.catalog import Model, Revision
from shared.models.tasks.custom import CustomInput, CustomResult
from shared.stores.objects import ObjectStore
from workers.models.base import IsClose
from workers.scheduling.job import PulledJob

log = logging.getLogger(__name__)

COMPUTED = ("miss", "none")
"""The sources of results that this revision computed (`Receipt.cache`)."""
MAX_FILE_BYTES = 64 * 1024 * 1024


class RevisionComparison:
    """One worker's part: the canary's worker requests comparisons, and the other one compares.

    Args:
        is_close: compares two outputs. May block, and may raise PenstockError.
    """

    def __init__(
        self, model: Model, publisher: Publisher, objects: ObjectStore, is_close: IsClose
    ) -> None:
        self._model = model
        self._publisher = publisher
        self._objects = objects
        self._is_close = is_close

    async def after(self, pulled: PulledJob, outcomes: Sequence[ItemOutcome]) -> list[bool]:
        """Requests comparisons for a finished job, or performs them. Never fails.

        Returns:
            True for each compared output that was close.
        """
        compared = []
        for item, outcome in zip(pulled.items, outcomes, strict=False):
            if not isinstance(item.input, CustomInput) or not isinstance(
                outcome.result, CustomResult
            ):
                continue
            try:
                if isinstance(self._model, Revision):
                    await self._ask(self._model, item.input, outcome, outcome.result)
                elif (canarys := item.input.compared_with) is not None:
                    compared.append(await self._compare(outcome.result, canarys))
            except PenstockError as error:
                log.debug("outputs not compared", extra={"reason": error.message})
        return compared

    async def _ask(
        self, canary: Revision, value: CustomInput, outcome: ItemOutcome, result: CustomResult
    ) -> None:
        is_own = outcome.receipt.cache in COMPUTED
        if not is_own or random.random() >= canary.canary.compare_share:
            return
        now_s, name = time.time(), canary.public_name
        envelope = Envelope(
            request_id=f"cmp_{secrets.token_hex(12)}",
            tenant=COMPARISON_TENANT,
            received_at_s=now_s,
            priority="batch",
            price_share=0.0,
            part=0,
            model=name,
            deadline_s=now_s + canary.deadline.longest_s,
            published_at_s=now_s,
        )
        again = msgspec.structs.replace(value, is_streamed=False, compared_with=result)
        body = JobBody([Item(0, again)], cache_read=False, cache_write=False)
        await self._publisher.publish(jobs_topic_id(name), *encode_job(Job(envelope, body)))

    async def _compare(self, ours: CustomResult, theirs: CustomResult) -> bool:
        return await asyncio.to_thread(
            self._is_close, await self._inline(ours), await self._inline(theirs)
        )

    async def _inline(self, result: CustomResult) -> CustomResult:
        return result.with_blobs([await self._read(blob) for blob in result.blobs])

    async def _read(self, blob: Blob) -> Blob:
        if blob.object_key is None:
            return blob
        data = await self._objects.get(blob.object_key, MAX_FILE_BYTES)
        return Blob(blob.media_type, data=data)
