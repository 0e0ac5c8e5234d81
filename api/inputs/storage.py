"""Tenants' storage in the object store: enforces one quota per tenant, and removes expired files.

    batches/files/<owner>/<file>/data, file.json   files of batches, and their outputs
    files/kept/<owner>/<file>/data, file.json      files of predictions, and their data: images
    files/of/<owner>/<place>_<id>                  the same in the order in which they are listed
    files/reserved/<owner>/<until>_<bytes>_<id>    room that an upload has reserved
    files/held/<owner>/<until>_<bytes>_<id>        bytes elsewhere (shared/stores/held_bytes.py)

Stored files are counted by listing them, so a count can't be lost or stay wrong for long. An upload
first writes a reservation, then counts the files and the other reservations. Every upload sees all
reservations written before it counted, so concurrent uploads together never exceed the quota, no
matter how many instances there are. If little room is left, several uploads may be rejected even
though one of them would have fit. A reservation left behind by a dead instance expires.

A tenant may have many files and send many uploads at once, so the uploads on an instance share
listings: uploads that arrive during a listing share the next one, which starts once all their
reservations have been written. Documents are not reread until one of them may have expired.

Calls raise Unavailable if the object store is unreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
from prometheus_client import Counter

from api.errors import StorageFull
from shared.errors import MALFORMED, BadInput, PenstockError, Unavailable
from shared.stores.held_bytes import HELD, MARKER_NAME, hold, sum_held_bytes
from shared.stores.held_bytes import owner_of as owner_of
from shared.stores.objects import ObjectStore, StoredObject
from shared.tenants.plan import Caller

KEEP_S = 24 * 3600
"""Replicate keeps files for the same amount of time, as does the bucket for objects under `files/`.
"""
DEFAULT_TENANT_MAX_BYTES = 2 * 1024**3
"""The default for the `files_max_bytes` setting."""
BATCH_FILES, KEPT_FILES = "batches/files", "files/kept"
LISTED = "files/of"
RESERVED = "files/reserved"
MAX_FILES = 10_000
"""Maximum number of files per tenant. Each upload lists all of them."""
RESERVED_S, RENEW_S = 600.0, 300.0
"""A reservation's lifetime, and how often it is renewed while it is needed."""
STEP_BYTES = 8 * 1024 * 1024
"""Increment in which an upload of unknown size reserves space."""
LOOK_AGAIN_S = 60.0
"""Minimum interval between removals of expired files for a tenant that is out of space.

Another instance may have stored files that expire earlier than any seen here.
"""
MAX_OWNERS = 1000
"""Number of tenants whose last removal and last check are remembered."""
CHECKED_S = 10.0
"""How long a check is valid. A tenant can exceed its quota by as many results as arrive during this
period.
"""
_WHAT_TO_DO = "delete files that you no longer need or wait for them to expire"
ABANDONED_S = 3600.0
"""How long to keep data that an interrupted upload left without a document."""
LATEST_S = 9_999_999_999
SWEEP_EVERY_S, SWEEP_BY_AGE_EVERY_S = 3600.0, 24 * 3600.0
FOLDERS_BY_AGE = ("answers", "batches/runs", "inputs", "results")
"""Folders not organized by tenant. On Google Cloud, the bucket's lifecycle rules remove their
objects after Terraform's `objects_days`.
"""
OLDEST_S = 31 * 24 * 3600.0
"""Retention is limited to 30 days, no matter what plans and requests specify."""
_DOCUMENT_MAX_BYTES = 128 * 1024
_MARKER = "application/json"
_COUNTED_DOWN = re.compile(r"([0-9]{1,12})_[0-9a-f]+")
"""Names of objects in LISTED. Those in RESERVED and HELD match MARKER_NAME. Others are not ours."""

REMOVED = Counter(
    "penstock_stored_objects_removed_total",
    "Expired objects removed, by folder.",
    ["folder"],
)
log = logging.getLogger(__name__)


class _Expiring(msgspec.Struct):
    """The fields of a file's document that are used here. Times are Unix times."""

    expires_at_s: float


_decoder = msgspec.json.Decoder(_Expiring)


class StorageQuota(NamedTuple):
    """One tenant's storage quota."""

    tenant: str
    max_bytes: int
    field: str
    """The request field named in the error if the quota is used up."""


class _Listed(NamedTuple):
    """One tenant's objects."""

    stored: list[StoredObject]
    reserved: list[StoredObject]
    elsewhere_bytes: int
    """Bytes counted by HELD."""


class _Removal(NamedTuple):
    """One removal of expired files."""

    removed: int
    """Number of removed objects."""
    next_s: float
    """Unix time of the next removal: when a remaining file expires, but at most LOOK_AGAIN_S later.
    """


class _Checked(NamedTuple):
    """A tenant's storage at its last check, and the time of the check (Unix time)."""

    at_s: float
    size_bytes: int


class StorageUse(NamedTuple):
    """The storage used by a tenant, including reservations."""

    files: int
    size_bytes: int


class Storage:
    """All tenants' stored files.

    Args:
        clock: Unix time. Replaced by tests.
        tenant_max_bytes: maximum per tenant, unless the tenant's plan sets one.
    """

    def __init__(
        self,
        objects: ObjectStore,
        clock: Callable[[], float] = time.time,
        tenant_max_bytes: int = DEFAULT_TENANT_MAX_BYTES,
    ) -> None:
        self.objects = objects
        self._tenant_max_bytes = tenant_max_bytes
        self.clock = clock
        self._listing: dict[str, asyncio.Task[_Listed]] = {}
        self._next_listing: dict[str, asyncio.Task[_Listed]] = {}
        self._removals: OrderedDict[str, asyncio.Task[_Removal]] = OrderedDict()
        """The last removal for each owner that is out of space."""
        self._checked: OrderedDict[str, _Checked] = OrderedDict()
        """Each owner's last listing."""

    def quota_of(self, caller: Caller, field: str) -> StorageQuota:
        """Returns the storage quota for a caller's tenant. Quota errors mention `field`."""
        own_bytes = caller.plan.storage_max_bytes
        max_bytes = self._tenant_max_bytes if own_bytes is None else own_bytes
        return StorageQuota(caller.tenant, max_bytes, field)

    async def use(self, tenant: str, except_key: str = "") -> StorageUse:
        """Returns the storage a tenant currently uses, excluding the reservation `except_key`."""
        stored, reserved, elsewhere_bytes = await self._list_objects(owner_of(tenant))
        now_s = self.clock()
        names = [
            reservation.key.rpartition("/")[2]
            for reservation in reserved
            if reservation.key != except_key
        ]
        held = [
            int(match[2])
            for match in map(MARKER_NAME.fullmatch, names)
            if match is not None and int(match[1]) > now_s
        ]
        files = len({stored_object.key.rpartition("/")[0] for stored_object in stored}) + len(held)
        stored_bytes = sum(stored_object.size_bytes for stored_object in stored) + elsewhere_bytes
        return StorageUse(files, stored_bytes + sum(held))

    async def check(self, quota: StorageQuota) -> None:
        """Rejects work whose results need storage if the quota is already exceeded.

        The tenant's storage is not recounted until CHECKED_S has passed.

        Raises:
            StorageFull: the tenant's storage quota is used up.
        """
        owner, now_s = owner_of(quota.tenant), self.clock()
        checked = self._checked.pop(owner, None)
        if checked is None or checked.at_s + CHECKED_S <= now_s:
            size_bytes = (await self.use(quota.tenant)).size_bytes
            if size_bytes > quota.max_bytes and await self._make_room(owner):
                size_bytes = (await self.use(quota.tenant)).size_bytes
            checked = _Checked(now_s, size_bytes)
        self._checked[owner] = checked
        if len(self._checked) > MAX_OWNERS:
            self._checked.popitem(last=False)
        if checked.size_bytes > quota.max_bytes:
            raise StorageFull(
                f"{quota.field}: you have {checked.size_bytes} bytes stored, which exceeds your "
                f"maximum of {quota.max_bytes}; {_WHAT_TO_DO}",
                field=quota.field,
            )

    async def hold(self, tenant: str, size_bytes: int, until_s: float) -> None:
        """Counts bytes stored elsewhere toward the tenant's quota until `until_s` (Unix time)."""
        await hold(self.objects, tenant, size_bytes, until_s)

    async def _list_objects(self, owner: str) -> _Listed:
        """Lists an owner's objects, using a listing that starts after this call."""
        listing = self._next_listing.get(owner)
        if listing is None:
            listing = asyncio.create_task(self._list_after(owner, self._listing.get(owner)))
            listing.add_done_callback(_look_at)
            self._next_listing[owner] = listing
        return await asyncio.shield(listing)

    async def _list_after(self, owner: str, previous: asyncio.Task[_Listed] | None) -> _Listed:
        if previous is not None:
            await asyncio.wait([previous])
        this = self._listing[owner] = self._next_listing.pop(owner)
        try:
            batch_files, kept_files, reserved, elsewhere_bytes = await asyncio.gather(
                self.objects.listing(f"{BATCH_FILES}/{owner}", 4 * MAX_FILES),
                self.objects.listing(f"{KEPT_FILES}/{owner}", 4 * MAX_FILES),
                self.objects.listing(f"{RESERVED}/{owner}", MAX_FILES),
                self._count_held(owner),
            )
        finally:
            if self._listing[owner] is this:
                del self._listing[owner]
        return _Listed([*batch_files, *kept_files], reserved, elsewhere_bytes)

    async def _count_held(self, owner: str) -> int:
        """Returns how many bytes an owner has stored elsewhere, in any number of objects.

        Keys begin with the expiry time, so expired entries are not listed.
        """
        folder, now_s, size_bytes = f"{HELD}/{owner}", self.clock(), 0
        after = f"{folder}/{int(now_s):010d}"
        while True:
            part = await self.objects.listing(folder, 4 * MAX_FILES, after)
            size_bytes += sum_held_bytes(part, now_s)
            if len(part) < 4 * MAX_FILES:
                return size_bytes
            after = part[-1].key

    @asynccontextmanager
    async def reserve(
        self, quota: StorageQuota, size_bytes: int | None
    ) -> AsyncIterator[StorageReservation]:
        """Reserves space for one file while it is being written.

        If there is not enough space, removes expired files first.

        Args:
            size_bytes: maximum size. If None, the size is unknown, and the reservation grows with
                `cover`.

        Raises:
            StorageFull: the tenant's storage quota is used up.
        """
        reservation = StorageReservation(self, quota)
        try:
            try:
                await reservation.take(size_bytes or 0)
            except StorageFull:
                if not await self._make_room(owner_of(quota.tenant)):
                    raise
                await reservation.take(size_bytes or 0)
            yield reservation
        finally:
            with contextlib.suppress(Unavailable):  # it expires
                await reservation.end()

    async def sweep(self) -> int:
        """Removes all tenants' expired files. Returns the number of objects removed."""
        removed = 0
        folders = (BATCH_FILES, KEPT_FILES, LISTED, RESERVED, HELD)
        owners = {owner for folder in folders for owner in await self.objects.folders(folder)}
        for owner in sorted(owners):
            removed += await self.remove_expired(owner)
        return removed

    async def sweep_by_age(self) -> int:
        """Removes objects older than OLDEST_S, except on Google. Returns the number removed."""
        removed = 0
        for folder in () if self.objects.is_on_google else FOLDERS_BY_AGE:
            async for stored_object in self.objects.list_modified_before(
                folder, self.clock() - OLDEST_S
            ):
                removed += await self._remove(folder, [stored_object.key])
        return removed

    async def _make_room(self, owner: str) -> bool:
        """Removes an owner's expired files, unless none can have expired since the last removal.

        Concurrent calls share one removal. Returns whether any file was removed.
        """
        removal = self._removals.get(owner)
        if removal is None or self._is_due(removal):
            removal = self._removals[owner] = asyncio.create_task(self._remove_expired(owner))
            removal.add_done_callback(_look_at)
            if len(self._removals) > MAX_OWNERS:
                self._removals.popitem(last=False)
        self._removals.move_to_end(owner)
        return (await asyncio.shield(removal)).removed > 0

    def _is_due(self, removal: asyncio.Task[_Removal]) -> bool:
        if not removal.done():
            return False
        if removal.cancelled() or removal.exception() is not None:
            return True
        return self.clock() >= removal.result().next_s

    async def remove_expired(self, owner: str) -> int:
        """Removes one owner's expired files. Returns the number of objects removed."""
        return (await self._remove_expired(owner)).removed

    async def _remove_expired(self, owner: str) -> _Removal:
        now_s, removed = self.clock(), 0
        next_s = now_s + LOOK_AGAIN_S
        for folder in (BATCH_FILES, KEPT_FILES):
            files: dict[str, list[StoredObject]] = {}
            for stored_object in await self.objects.listing(f"{folder}/{owner}", 2 * MAX_FILES):
                files.setdefault(stored_object.key.rpartition("/")[0], []).append(stored_object)
            for parts in files.values():
                expires_s = await self._expires_s(parts)
                if expires_s > now_s:
                    next_s = min(next_s, expires_s)
                    continue
                # The document is deleted first, so that no caller finds an incomplete file.
                keys = sorted((part.key for part in parts), reverse=True)
                removed += await self._remove(folder, keys)
        for folder, is_over in (
            (LISTED, _is_listed_no_more),
            (RESERVED, _is_left_behind),
            (HELD, _is_left_behind),
        ):
            listed = await self.objects.listing(f"{folder}/{owner}", 4 * MAX_FILES)
            keys = [
                stored_object.key
                for stored_object in listed
                if is_over(stored_object.key.rpartition("/")[2], now_s)
            ]
            removed += await self._remove(folder, keys)
        return _Removal(removed, next_s)

    async def _expires_s(self, parts: Iterable[StoredObject]) -> float:
        """Returns when a file expires (Unix time)."""
        document = next((part.key for part in parts if part.key.endswith("/file.json")), None)
        if document is None:
            return max(part.modified_at_s for part in parts) + ABANDONED_S
        try:
            data = await self.objects.get(document, _DOCUMENT_MAX_BYTES)
            return _decoder.decode(data).expires_at_s
        except (BadInput, *MALFORMED):  # removed since then, or not ours
            return math.inf

    async def _remove(self, folder: str, keys: Iterable[str]) -> int:
        removed = 0
        for key in keys:
            await self.objects.delete(key)
            removed += 1
        REMOVED.labels(folder).inc(removed)
        return removed


class StorageReservation:
    """Space for one file being written, created by `Storage.reserve`."""

    def __init__(self, storage: Storage, quota: StorageQuota) -> None:
        self._storage = storage
        self._quota = quota
        self._keys: list[str] = []
        """Markers to delete: the current one, and those left by a canceled call."""
        self._size_bytes = 0
        self._renew_at_s = 0.0

    async def cover(self, size_bytes: int) -> None:
        """Makes sure there is space for a file that has `size_bytes` so far.

        Raises:
            StorageFull: the quota is used up.
        """
        if size_bytes > self._size_bytes:
            try:
                await self.take(max(size_bytes, self._size_bytes + STEP_BYTES))
            except StorageFull:
                await self.take(size_bytes)
        elif self._storage.clock() >= self._renew_at_s:
            await self.take(self._size_bytes)

    async def take(self, size_bytes: int) -> None:
        """Reserves `size_bytes`, replacing the earlier reservation.

        Raises:
            StorageFull: the quota is used up. The earlier reservation remains valid.
        """
        storage, now_s = self._storage, self._storage.clock()
        name = f"{int(now_s + RESERVED_S):010d}_{size_bytes}_{secrets.token_hex(8)}"
        key = f"{RESERVED}/{owner_of(self._quota.tenant)}/{name}"
        before = self._keys[-1] if self._keys else ""
        self._keys.append(key)
        try:
            await storage.objects.put(key, b"", _MARKER)
            self._check(await storage.use(self._quota.tenant, before), size_bytes)
        except PenstockError:
            await self._delete(key)
            raise
        self._size_bytes, self._renew_at_s = size_bytes, now_s + RENEW_S
        if before:
            await self._delete(before)

    async def end(self) -> None:
        """Releases the reservation. Written files are counted separately."""
        for key in list(self._keys):
            await self._delete(key)

    async def _delete(self, key: str) -> None:
        await self._storage.objects.delete(key)
        self._keys.remove(key)

    def _check(self, use: StorageUse, size_bytes: int) -> None:
        """Rejects amounts over the quota. `use` includes this reservation."""
        field, max_bytes = self._quota.field, self._quota.max_bytes
        if use.size_bytes > max_bytes:
            used_bytes = use.size_bytes - size_bytes
            raise StorageFull(
                f"{field}: you have {used_bytes} bytes stored, and {size_bytes} more would "
                f"exceed your maximum of {max_bytes}; {_WHAT_TO_DO}",
                field=field,
            )
        if use.files > MAX_FILES:
            raise StorageFull(
                f"{field}: you have {use.files - 1} files stored, which is the maximum "
                f"({MAX_FILES}); {_WHAT_TO_DO}",
                field=field,
            )


@asynccontextmanager
async def sweep(storage: Storage) -> AsyncIterator[None]:
    """Removes expired files periodically while the block runs."""
    sweeping = asyncio.create_task(_sweep_forever(storage))
    try:
        yield
    finally:
        sweeping.cancel()
        await asyncio.wait([sweeping])


async def _sweep_forever(storage: Storage) -> None:
    by_age_at_s = 0.0
    while True:
        try:
            removed = await storage.sweep()
            if storage.clock() >= by_age_at_s:
                by_age_at_s = storage.clock() + SWEEP_BY_AGE_EVERY_S
                removed += await storage.sweep_by_age()
            log.info("removed expired files", extra={"objects": removed})
        except PenstockError as error:
            log.warning("expired files were not removed", extra={"reason": error.message})
        except Exception:  # a bug must not keep files until a restart
            log.exception("expired files were not removed")
        await asyncio.sleep(SWEEP_EVERY_S)


def _look_at(task: asyncio.Task[Any]) -> None:
    """Retrieves an error that may no longer have an awaiter, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _is_listed_no_more(name: str, now_s: float) -> bool:
    """Returns whether a LISTED entry, whose name starts with a countdown, is older than KEEP_S."""
    match = _COUNTED_DOWN.fullmatch(name)
    return match is not None and LATEST_S - int(match[1]) + KEEP_S <= now_s


def _is_left_behind(name: str, now_s: float) -> bool:
    """Returns whether a reservation, whose name starts with its end time, has expired."""
    match = MARKER_NAME.fullmatch(name)
    return match is not None and int(match[1]) <= now_s
