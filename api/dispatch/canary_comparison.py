"""Compares canary results with the other revision's after the caller has received them.

A share of the requests served by a canary is also sent to the other revision, at batch priority and
without a tenant, so the caller neither waits for nor pays for the comparison.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from api import metrics
from api.dispatch.canary_routing import Counters
from api.dispatch.closeness import is_close, repeat_input
from api.dispatch.request import InferenceRequest, InferenceResponse
from shared.canary.verdict import COMPARISON_TENANT, CanaryCounts
from shared.errors import PenstockError
from shared.models.blob import Blob
from shared.models.catalog import Revision
from shared.models.entry import Tolerance
from shared.models.tasks import Input, Result
from shared.models.tasks.image import ImageResult
from shared.stores.objects import ObjectStore

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Maximum concurrent comparisons in this process. Further requests are not compared."""
MAX_REQUEST = 16
"""Maximum number of items compared per request."""

COMPARE_LIMIT_S = 30.0
MAX_IMAGE_BYTES = 64 * 1024 * 1024

Dispatch = Callable[[InferenceRequest], Awaitable[InferenceResponse]]


class ImageComparer(Protocol):
    """Compares images. Implemented by api/inputs/image_codec.py."""

    async def psnr_db(self, ours: bytes, theirs: bytes, deadline_s: float) -> float:
        """Returns the peak signal-to-noise ratio of two PNGs, in dB."""


class CanaryComparisons:
    """Runs comparisons in the background. The owner calls `close` when done.

    Args:
        dispatch: runs a request on the revision that the request names.
    """

    def __init__(
        self,
        canary_store: Counters,
        dispatch: Dispatch,
        objects: ObjectStore,
        images: ImageComparer,
    ) -> None:
        self._canary_store = canary_store
        self._dispatch = dispatch
        self._objects = objects
        self._images = images
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        return self._tasks

    def consider(
        self, request: InferenceRequest, canary: Revision, response: InferenceResponse
    ) -> None:
        """For a share of requests, starts a comparison of the canary's results.

        Args:
            request: the request, with the model named by the caller.
            canary: the model that the request was routed to.
        """
        if random.random() >= canary.canary.compare_share or len(self._tasks) >= AT_ONCE:
            return
        results = [
            outcome.result
            for outcome in response.outcomes
            if outcome.result is not None and outcome.receipt.revision == canary.revision
        ]
        if len(results) < len(response.outcomes):  # served by the other revision or the cache
            return
        tolerance = _tolerance_of(canary)
        compared = [
            (again, result)
            for value, result in zip(request.inputs, results[:MAX_REQUEST], strict=False)
            if (again := repeat_input(value, result, tolerance)) is not None
        ]
        if not compared:
            return
        shadow = _shadow_of(request, [again for again, _ in compared])
        ours = [result for _, result in compared]
        task = asyncio.create_task(self._compare(shadow, canary, ours))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compare(
        self, shadow: InferenceRequest, canary: Revision, results: list[Result]
    ) -> None:
        try:
            counts = CanaryCounts()
            with await self._dispatch(shadow) as response:
                for ours, outcome in zip(results, response.outcomes, strict=True):
                    if outcome.result is not None:  # otherwise there is nothing to compare
                        await self._count(counts, canary, ours, outcome.result)
            if counts.compared:
                await self._canary_store.count(canary, counts)
        except PenstockError as error:
            log.debug("results not compared", extra={"reason": error.message})

    async def _count(
        self, counts: CanaryCounts, canary: Revision, ours: Result, theirs: Result
    ) -> None:
        tolerance = _tolerance_of(canary)
        if isinstance(ours, ImageResult) and isinstance(theirs, ImageResult):
            deadline_s = time.time() + COMPARE_LIMIT_S
            pngs = await self._bytes_of(ours.image), await self._bytes_of(theirs.image)
            distance_db = await self._images.psnr_db(*pngs, deadline_s)
            is_within: bool | None = distance_db >= tolerance.psnr_db
        else:
            is_within = is_close(ours, theirs, tolerance)
        if is_within is None:
            return
        counts.compared += 1
        counts.outside += not is_within
        within = "yes" if is_within else "no"
        metrics.CANARY_COMPARED.labels(canary.public_name, within).inc()

    async def _bytes_of(self, blob: Blob) -> bytes:
        if blob.data is not None:
            return blob.data
        return await self._objects.get(blob.object_key or "", MAX_IMAGE_BYTES)


def _tolerance_of(canary: Revision) -> Tolerance:
    return canary.canary.tolerance or canary.tolerance


def _shadow_of(request: InferenceRequest, inputs: list[Input]) -> InferenceRequest:
    now_s = time.time()
    facts = msgspec.structs.replace(
        request.facts,
        request_id=f"cmp_{secrets.token_hex(12)}",
        client_request_id="",
        tenant=COMPARISON_TENANT,
        received_at_s=now_s,
        key_id="",
        weight=1.0,
        priority="batch",
        price_share=0.0,
    )
    return msgspec.structs.replace(
        request,
        facts=facts,
        inputs=inputs,
        is_repeatable=False,
        deadline_s=now_s + request.model.deadline.longest_s,
        options=msgspec.structs.replace(
            request.options,
            queue_limit_s=None,
            cache_read=False,
            cache_write=False,
            idempotency_key="",
        ),
    )
