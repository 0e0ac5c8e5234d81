"""Creates, finds, lists, and cancels batches for the API. The runner does the rest."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from api.batches.documents import WINDOW_S, BatchCreated, BatchState, Status
from api.batches.files import KEEP_S, BatchFile, BatchFiles, is_of
from api.batches.names import new_batch_id, owner_of, parse_created_at_s
from api.batches.store import BatchStore
from api.errors import DamagedDocument, NoneMatched
from shared.errors import BadInput, Overloaded
from shared.tenants.plan import Caller

MAX_OPEN = 50
"""Maximum number of open batches per tenant."""
FULL_RETRY_S = 60.0
INPUT_KEEP_S = 3600
"""Minimum time, in seconds, to keep the input after the batch's completion window."""
PAGE = 100
"""Maximum number of batches per page, and the number read at a time to find matches."""
MAX_CHECKED = 1000
"""Maximum number of batches checked for a page."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A caller's request for a batch."""

    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None = None
    output_keep_s: int | None = None
    webhook: str = ""
    base_url: str = ""


@dataclass(frozen=True, slots=True)
class BatchFilter:
    """Selects the batches to list. By default, all of them."""

    model: str = ""
    """Model name in the catalog. Empty means all models."""
    status: Status | None = None
    """None means all statuses."""
    key_id: str = ""
    """Public part of the API key that created the batches. Empty means all keys."""
    after_s: float = -math.inf
    """Earliest creation time (inclusive), in Unix seconds."""
    before_s: float = math.inf
    """Latest creation time (exclusive), in Unix seconds."""
    models: Collection[str] | None = None
    """Only batches that use these models or whose model is not known yet. None means all batches.
    """

    def matches(self, state: BatchState) -> bool:
        """Returns whether this batch belongs in the list."""
        return (
            self.model in ("", state.model)
            and self.status in (None, state.status)
            and self.key_id in ("", state.created.key_id)
            and self.after_s <= state.created.created_at_s < self.before_s
            and is_of(self.models, state.model)
        )


@dataclass(frozen=True, slots=True)
class BatchPage:
    """One page of a listing, and whether another page follows."""

    batches: Sequence[BatchState]
    has_more: bool
    last_id: str | None
    """`after` for the next page: the ID of the last batch that was listed or checked. None if no
    batch was listed or checked.
    """


class Batches:
    """All tenants' batches.

    Args:
        endpoints: paths of the endpoints that lines may use.
    """

    def __init__(self, store: BatchStore, files: BatchFiles, endpoints: Collection[str]) -> None:
        self._store = store
        self._files = files
        self._endpoints = endpoints

    async def create(self, caller: Caller, new: NewBatch) -> BatchState:
        """Creates a batch. The runner validates its lines.

        Raises:
            NotFound: the tenant has no such file.
            BadInput: the file is not for a batch, or batch lines may not use the endpoint.
            Overloaded: too many of the tenant's batches are open.
            Unavailable: the object store is unreachable.
        """
        if new.endpoint not in self._endpoints:
            accepted = ", ".join(self._endpoints)
            raise BadInput(f"endpoint: must be one of {accepted}", field="endpoint")
        file = await self._find_input(caller.tenant, new.input_file_id)
        now_s = time.time()
        await self._files.keep_until(file, now_s + WINDOW_S + INPUT_KEEP_S)
        created = BatchCreated(
            id=new_batch_id(now_s),
            tenant=caller.tenant,
            endpoint=new.endpoint,
            input_file_id=file.id,
            created_at_s=now_s,
            expires_at_s=now_s + WINDOW_S,
            metadata=new.metadata,
            output_keep_s=new.output_keep_s or KEEP_S,
            webhook=new.webhook,
            base_url=new.base_url,
            key_id=caller.key_id,
            price_share=caller.plan.batch_price_share,
            weight=caller.plan.weight,
            plan=caller.plan,
            plan_name=caller.plan_name,
            key_limits=caller.key_limits,
            models=None if caller.models is None else sorted(caller.models),
        )
        if not await self._store.create(created, MAX_OPEN):
            raise Overloaded(
                f"you already have {MAX_OPEN} open batches, which is the maximum; wait for one "
                "to finish or cancel one",
                retry_after_s=FULL_RETRY_S,
            )
        return BatchState(created)

    async def _find_input(self, tenant: str, file_id: str) -> BatchFile:
        file = await self._files.find(tenant, file_id)
        if file.purpose != "batch":
            reason = f"the file's purpose must be batch, got {file.purpose}"
            raise BadInput(f"input_file_id: {reason}", field="input_file_id")
        return file

    async def find(self, tenant: str, batch_id: str) -> BatchState:
        """Finds one of this tenant's batches.

        Raises:
            NotFound: the tenant has no such batch.
            Unavailable: the object store is unreachable.
        """
        return await self._store.find(tenant, batch_id)

    async def page(self, tenant: str, *, after: str, limit: int, wanted: BatchFilter) -> BatchPage:
        """Returns a page of a tenant's batches, newest first.

        If few batches match, the page ends after MAX_CHECKED batches have been checked, so it may
        be short even if another page follows. OpenAI's clients stop at an empty page, so only the
        last page can be empty.

        Args:
            after: the previous page's `last_id`, or a batch on that page. If empty, the listing
                starts at the beginning.
            limit: maximum number of batches, up to PAGE.

        Raises:
            NoneMatched: none of the first MAX_CHECKED batches matches.
            Unavailable: the object store is unreachable.
        """
        # IDs have millisecond resolution.
        ids = [
            batch_id
            for batch_id in await self._store.ids(tenant)
            if batch_id > after
            and wanted.after_s - 0.001 <= parse_created_at_s(batch_id) < wanted.before_s
        ]
        owner, batches = owner_of(tenant), list[BatchState]()
        checked, window = 0, limit + 1
        max_checked = min(len(ids), MAX_CHECKED)
        while checked < max_checked and len(batches) <= limit:
            some = ids[checked : min(checked + window, max_checked)]
            read = await asyncio.gather(*(self._read_state(owner, batch_id) for batch_id in some))
            batches += [state for state in read if state is not None and wanted.matches(state)]
            checked, window = checked + len(some), PAGE
        if len(batches) > limit:
            return BatchPage(batches[:limit], True, batches[limit - 1].created.id)
        if checked < len(ids):
            if not batches:
                raise _too_many_checked(parse_created_at_s(ids[checked]))
            return BatchPage(batches, True, ids[checked - 1])
        return BatchPage(batches, False, batches[-1].created.id if batches else None)

    async def _read_state(self, owner: str, batch_id: str) -> BatchState | None:
        """Returns a batch's state, or None if the batch does not exist or is damaged."""
        try:
            return await self._store.state(owner, batch_id)
        except DamagedDocument as error:
            log.error("batch not listed", extra={"batch": batch_id, "reason": error.message})
            return None

    async def cancel(self, tenant: str, batch_id: str) -> BatchState:
        """Cancels an open batch. Calling it again has no effect.

        Raises:
            NotFound: the tenant has no such batch.
            BadInput: the batch is already finished.
            Unavailable: the object store is unreachable.
        """
        state = await self._store.find(tenant, batch_id)
        if state.ended is None:
            await self._store.cancel(owner_of(tenant), batch_id)
            state = await self._store.find(tenant, batch_id)
        elif state.ended.end != "cancelled":
            raise BadInput(f"a batch with status {state.status} can't be canceled")
        return state

    async def check_unused(self, tenant: str, file_id: str) -> None:
        """Checks that no open batch is reading one of the tenant's files.

        Raises:
            BadInput: an open batch is reading the file.
            Unavailable: the object store is unreachable.
        """
        owner = owner_of(tenant)
        for batch in await self._store.open(owner):
            try:
                created = await self._store.read(owner, batch.id, "created", BatchCreated)
            except DamagedDocument as error:  # the batch can't run
                log.error("batch not checked", extra={"batch": batch.id, "reason": error.message})
                continue
            if created is not None and created.input_file_id == file_id:
                raise BadInput(
                    f"file_id: batch {batch.id} is reading this file; cancel it or wait for it "
                    "to finish",
                    field="file_id",
                )


def _too_many_checked(next_at_s: float) -> NoneMatched:
    moment = datetime.fromtimestamp(next_at_s + 0.001, UTC)
    # In a URL, the + in +00:00 stands for a space.
    following = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    reason = f"none of the {MAX_CHECKED} newest batches in this range match"
    return NoneMatched(
        f"created_before: {reason}; to search older batches, set it to {following}",
        created_before=following,
    )
