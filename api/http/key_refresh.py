"""Keeps the in-memory key directory up to date.

Requests read an in-memory snapshot. A task checks the store for a new version every REFRESH_S
seconds. An unreadable or invalid version does not replace the snapshot, because a broken file must
not lock everyone out. The directory also survives an outage of its store for up to STALE_LIMIT_S.
If the store is in another region, a copy in the local region's Redis lets new instances start
during an outage.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import Self

from prometheus_client import Counter, Gauge

from shared.errors import MALFORMED, ConfigurationError, PenstockError, Unavailable
from shared.process.concurrency import BackgroundTask
from shared.stores.key_stores import KeyCopy
from shared.tenants.api_key import SALT_BYTES, ApiKey, hash_of
from shared.tenants.directory import BudgetHolder, Directory, decode_document, mistake_in
from shared.tenants.key_store import KeyStore, StoredDocument
from shared.tenants.rules import Served, document_mistakes

REFRESH_S = 2.0
"""A change takes effect within this time, plus the time one read takes."""
READ_LIMIT_S = 2.0
LOOK_AGAIN_S = 1.0
"""Minimum interval between lookups of unknown keys, across all requests."""
MAX_CHECKED_DIGESTS = 4096
MAX_WAITING_REQUESTS = 64
"""Maximum number of requests that may wait for a lookup. Further requests use the snapshot."""
NOTE_USES_S = 60.0
"""Interval at which key usage is written."""
COPY_S = 60.0
"""Interval at which the copy is written, in addition to being written after each change."""
STALE_LIMIT_S = 86_400.0
"""While the store is unreachable, keys can't be revoked.

After a day, that is worse than an outage. Keys still expire while the store is unreachable.
"""
UP = Gauge("penstock_keys_up", "1 if API keys could be read at the last attempt, else 0.")
AGE_SECONDS = Gauge(
    "penstock_keys_age_seconds",
    "Seconds since the current API keys were last confirmed to be up to date.",
)
FAILURES = Counter(
    "penstock_keys_refresh_failures_total",
    "Failed reads of API keys. invalid: the document is not valid. unavailable: its store is "
    "unreachable.",
    ["reason"],
)
log = logging.getLogger(__name__)


class LiveDirectory:
    """A store's latest valid directory. An async context manager that runs the refresh task.

    Args:
        store: the directory's store. Opened and closed by this object.
        clock: monotonic seconds.
        served: models that plans and keys may name. A file that names any other model is invalid.
            In Redis, changes are checked when they are made, so a name missing from the catalog
            means that the catalog has changed since then, and the missing name is only logged. None
            if not known.
        copy: stores a copy for instances that start while the main store is unreachable. This
            object opens and closes it. None disables the copy.

    Raises:
        ConfigurationError: the directory in the store is invalid at startup.
    """

    def __init__(
        self,
        store: KeyStore,
        clock: Callable[[], float] = time.monotonic,
        refresh_s: float = REFRESH_S,
        served: Served | None = None,
        copy: KeyCopy | None = None,
    ) -> None:
        self.store = store
        self._copy = copy
        self._stored: StoredDocument | None = None
        self._copied_s = -math.inf
        self._clock = clock
        self._refresh_s = refresh_s
        self._served = served
        self._directory: Directory | None = None
        self._version = ""
        self._current_s = clock()
        self._failure: PenstockError | None = None
        self._refresh_lock = asyncio.Lock()
        self._refresh_task = BackgroundTask("refreshing API keys", self._run, self._stop_serving)
        self._salt, self._checked_digests = secrets.token_bytes(SALT_BYTES), set[bytes]()
        self._lookup_lock, self._last_lookup_s, self._waiting = asyncio.Lock(), -math.inf, 0
        self.uses: dict[str, int] = {}
        """When keys were last used (Unix seconds), keyed by ID. Excludes uses that have already
        been written.
        """
        if (first := store.read_at_start()) is not None:
            self._directory, self._version = self._decode(first), first.version

    async def __aenter__(self) -> Self:
        await self.store.__aenter__()
        if self._copy is not None:
            await self._copy.__aenter__()
        await self.refresh()
        self._refresh_task.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._refresh_task.stop()
        await self.note_uses()
        if self._copy is not None:
            await self._copy.__aexit__(*exc)
        await self.store.__aexit__(*exc)

    def current(self) -> Directory | None:
        """The directory used to check keys. None if there is no directory or it is too old."""
        if self._clock() - self._current_s > STALE_LIMIT_S:
            return None
        return self._directory

    def budgets(self) -> frozenset[BudgetHolder] | None:
        """Tenants and keys that have a budget. None if the last read of the store failed."""
        if self._failure is not None or self._directory is None:
            return None
        return self._directory.budgets

    def status(self) -> str:
        """Returns `ok` if keys can be checked, or a reason that may be made public.

        Details are logged.
        """
        if self.current() is not None:
            return "ok"
        return self._failure.public_message if self._failure else "not loaded yet"

    async def refresh(self) -> None:
        """Checks the directory once, and reads it if it has changed."""
        async with self._refresh_lock:
            await self._refresh()

    async def look_again(self, key: ApiKey) -> None:
        """Reads the directory again when a key is unknown, because the key may be brand new.

        Concurrent requests with unknown keys wait for the same read. The next read for any caller
        is at least LOOK_AGAIN_S later. As long as the directory is unchanged, each key is looked up
        only once, so a caller with an invalid key does not wait every time.
        """
        digest = hash_of(self._salt, key)
        if digest in self._checked_digests or self._waiting >= MAX_WAITING_REQUESTS:
            return
        arrived_s = self._clock()
        self._waiting += 1
        try:
            async with self._lookup_lock:
                if self._last_lookup_s > arrived_s:
                    return
                await asyncio.sleep(self._last_lookup_s + LOOK_AGAIN_S - self._clock())
                self._last_lookup_s = self._clock()
                await self.refresh()
        finally:
            self._waiting -= 1
            if len(self._checked_digests) >= MAX_CHECKED_DIGESTS:
                self._checked_digests.clear()
            self._checked_digests.add(digest)

    async def _refresh(self) -> None:
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                document = await self.store.read(self._version)
            self._current_s = self._clock()
            if document is not None:
                # With thousands of keys, this takes tens of milliseconds, and requests continue to
                # be served.
                self._directory = await asyncio.to_thread(self._decode, document)
                self._version = document.version
                self._stored, self._copied_s = document, -math.inf
                self._checked_digests.clear()
                log.info("API keys read", extra={"source": self.store.source})
        except TimeoutError:
            self._report_failure(
                "unavailable", Unavailable(f"no response within {READ_LIMIT_S:g} s")
            )
        except Unavailable as error:
            self._report_failure("unavailable", error)
        except ConfigurationError as error:
            self._report_failure("invalid", error)
        else:
            self._failure = None
        await self._use_copy()
        UP.set(self._failure is None)
        AGE_SECONDS.set(self._clock() - self._current_s)

    async def _use_copy(self) -> None:
        """Writes the copy when due, or reads it if there is no directory."""
        if self._copy is None:
            return
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                if self._directory is None:
                    await self._read_copy(self._copy)
                elif self._failure is None and self._clock() - self._copied_s >= COPY_S:
                    await self._write_copy(self._copy)
        except (TimeoutError, Unavailable, ConfigurationError, *MALFORMED) as error:
            self._copied_s = self._clock()
            log.info("no copy of API keys", extra={"reason": str(error)})

    async def _read_copy(self, copy: KeyCopy) -> None:
        contents = await copy.read()
        if contents is None:
            return
        document, at_s = contents
        self._directory = await asyncio.to_thread(self._decode, document)
        self._version, self._stored = document.version, document
        self._current_s = self._clock() - max(0.0, time.time() - at_s)
        log.warning(
            "using a copy of the API keys; their store is unreachable", extra={"at_s": at_s}
        )

    async def _write_copy(self, copy: KeyCopy) -> None:
        if self._stored is not None:
            await copy.keep(self._stored, time.time(), STALE_LIMIT_S)
            self._copied_s = self._clock()

    def _stop_serving(self) -> None:
        """Stops serving, because without refreshes this instance would no longer see changes."""
        self._failure = Unavailable(public="API keys are no longer being refreshed")
        self._directory = None

    def _decode(self, stored: StoredDocument) -> Directory:
        document = decode_document(stored.data, self.store.source)
        for mistake in document_mistakes(document, self._served, time.time()):
            wrong = mistake_in(stored.data, self.store.source, mistake)
            if self.store.read_only:
                raise wrong
            log.warning("API keys refer to unknown models", extra={"reason": wrong.message})
        return Directory(document)

    def _report_failure(self, reason: str, error: PenstockError) -> None:
        FAILURES.labels(reason).inc()
        if self._failure is None or self._failure.message != error.message:
            log.error(
                "could not read API keys; still using the last known ones",
                extra={"source": self.store.source, "reason": error.message},
            )
        self._failure = error

    async def note_uses(self) -> None:
        """Records which keys were used since the last write.

        If the write fails, it is retried later.
        """
        uses, self.uses = self.uses, {}
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                await self.store.note_uses(uses)
        except (TimeoutError, Unavailable):
            self.uses = uses | self.uses

    async def _run(self) -> None:
        noted_s = self._clock()
        while True:
            await asyncio.sleep(self._refresh_s)
            await self.refresh()
            if self._clock() - noted_s >= NOTE_USES_S:
                noted_s = self._clock()
                await self.note_uses()
