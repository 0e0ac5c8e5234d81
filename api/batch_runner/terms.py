"""Current limits of a batch's tenant and key, from the key directory.

A batch may run for up to a day. If a budget is raised in the meantime, the batch's lines continue.
If the budget is lowered, the lines wait. Price, weight, and models are fixed when the batch is
created.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Self

from api.batches.documents import BatchCreated
from shared.errors import ConfigurationError, Unavailable
from shared.tenants.directory import Document, decode_document, is_frozen, plan_name_of, plan_of
from shared.tenants.key_store import KeyStore
from shared.tenants.plan import Caller, Limits

REFRESH_S = 2.0
"""Interval between reads. API instances take equally long to notice a change."""
READ_LIMIT_S = 2.0
log = logging.getLogger(__name__)


class CurrentTerms:
    """Reads the directory on demand. An async context manager that owns the store.

    Args:
        store: the key directory. If None, keys are not required, and the limits set at creation
            apply.
        clock: monotonic seconds.
    """

    def __init__(self, store: KeyStore | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._version = ""
        self._document = Document()
        self._limits: dict[str, Limits | None] = {}
        self._asked_s = -math.inf
        self._reason = ""
        self._reading = asyncio.Lock()

    async def __aenter__(self) -> Self:
        if self._store is not None:
            await self._store.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._store is not None:
            await self._store.__aexit__(*exc)

    async def caller_of(self, batch: BatchCreated) -> Caller:
        """Returns the caller who pays for a batch's lines, with the caller's current budgets.

        If the key no longer exists or the directory can't be read, the limits from the batch's
        creation apply. Rate limits apply only to requests.
        """
        await self._refresh()
        if not self._version:
            return batch.caller(batch.plan, batch.plan_name, batch.key_limits)
        return batch.caller(
            plan_of(batch.tenant, self._document),
            plan_name_of(batch.tenant, self._document),
            self._limits.get(batch.key_id, batch.key_limits),
        )

    async def is_frozen(self, tenant: str) -> bool:
        """Returns whether the tenant is frozen, so that its batches wait."""
        await self._refresh()
        return is_frozen(tenant, self._document)

    async def _refresh(self) -> None:
        async with self._reading:
            if self._store is None or self._clock() < self._asked_s + REFRESH_S:
                return
            self._asked_s = self._clock()
            try:
                async with asyncio.timeout(READ_LIMIT_S):
                    stored = await self._store.read(self._version)
                if stored is None:
                    return
                source = self._store.source
                # With thousands of keys, this takes tens of milliseconds, during which lines
                # continue to run.
                document = await asyncio.to_thread(decode_document, stored.data, source)
            except (TimeoutError, Unavailable, ConfigurationError) as error:
                self._note_failure(str(error) or f"no response within {READ_LIMIT_S:g} s")
                return
            self._reason = ""
            self._document, self._version = document, stored.version
            self._limits = {key.id: key.limits for key in document.keys}

    def _note_failure(self, reason: str) -> None:
        """Logs each reason only once, because the store is read repeatedly."""
        if self._store is not None and reason != self._reason:
            facts = {"source": self._store.source, "reason": reason}
            log.warning("could not read batch limits; using the last known limits", extra=facts)
        self._reason = reason
