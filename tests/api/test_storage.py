"""Tenants' stored objects, counted and removed, in a folder and with a clock that the test sets."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from api.errors import StorageFull
from api.inputs import storage as module
from api.inputs.files import Files
from api.inputs.storage import (
    KEEP_S,
    LISTED,
    LOOK_AGAIN_S,
    RESERVED,
    RESERVED_S,
    Storage,
    StorageQuota,
    StorageReservation,
    StorageUse,
    owner_of,
)
from shared.stores.held_bytes import HELD
from shared.stores.objects import ObjectStore, StoredObject
from tests.clock import Clock
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
BOUND = 100_000


@pytest.fixture
def clock() -> Clock:
    return Clock(time.time())


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}/objects")


@pytest.fixture
def storage(objects: ObjectStore, clock: Clock) -> Storage:
    return Storage(objects, clock)


def quota(tenant: str = "alice", max_bytes: int = BOUND) -> StorageQuota:
    return StorageQuota(tenant, max_bytes, "file")


def keys_in(tmp_path: Path) -> set[str]:
    folder = tmp_path / "objects"
    return {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}


@pytest.mark.parametrize("size_bytes", [1_000, 7_000, 30_000, 60_000])
async def test_uploads_at_the_same_time_never_exceed_the_bound(
    objects: ObjectStore, size_bytes: int
) -> None:
    held_bytes = most_bytes = 0

    async def upload(instance: Storage, number: int) -> bool:
        nonlocal held_bytes, most_bytes
        try:
            async with instance.reserve(quota(), size_bytes):
                held_bytes += size_bytes
                most_bytes = max(most_bytes, held_bytes)
                key = f"files/kept/{owner_of('alice')}/file_{number}/data"
                await objects.put(key, bytes(size_bytes), "text/plain")
                held_bytes -= size_bytes
                return True
        except StorageFull:
            return False

    instances = [Storage(objects) for _ in range(3)]
    uploads = [upload(instances[number % 3], number) for number in range(24)]
    admitted = sum(await asyncio.gather(*uploads))
    used = await instances[0].use("alice")
    assert used.size_bytes == admitted * size_bytes <= BOUND
    assert most_bytes <= BOUND
    assert used.files == admitted, "no reservation is left"
    while await upload(instances[0], 100 + admitted):
        admitted += 1
    assert admitted == BOUND // size_bytes, "one after another they fill it"


async def test_room_of_an_instance_that_died_comes_back(
    storage: Storage, objects: ObjectStore, clock: Clock
) -> None:
    dead = storage.reserve(quota(), 90_000)
    await dead.__aenter__()
    restarted = Storage(objects, clock)
    with pytest.raises(StorageFull, match="you have 90000 bytes stored"):
        async with restarted.reserve(quota(), 20_000):
            raise AssertionError("there is no room")
    clock.now_s += RESERVED_S
    async with restarted.reserve(quota(), 20_000):
        assert (await restarted.use("alice")).size_bytes == 20_000
    await restarted.sweep()
    assert await objects.listing("files/reserved", 10) == []


class StuckStore(ObjectStore):
    """An object store whose listings get stuck while `is_stuck` is true."""

    is_stuck = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.has_waiter = asyncio.Event()

    async def listing(self, folder: str, limit: int, after: str = "") -> list[StoredObject]:
        if self.is_stuck:
            self.has_waiter.set()
            await asyncio.Event().wait()
        return await super().listing(folder, limit, after)


async def test_a_canceled_upload_leaves_no_reservation(tmp_path: Path) -> None:
    objects = StuckStore(f"file://{tmp_path}")
    storage = Storage(objects)

    async def upload() -> None:
        async with storage.reserve(quota(), None) as growing:
            await growing.cover(1)
            objects.is_stuck = True
            await growing.cover(50_000)

    uploading = asyncio.create_task(upload())
    async with asyncio.timeout(WAIT_LIMIT_S):
        await objects.has_waiter.wait()
    uploading.cancel()
    await asyncio.wait([uploading])
    objects.is_stuck = False
    assert await objects.listing(RESERVED, 10) == []


async def test_a_long_upload_keeps_its_room(storage: Storage, clock: Clock) -> None:
    async with storage.reserve(quota(), 90_000) as reservation:
        for written_bytes in range(0, 90_000, 10_000):
            clock.now_s += RESERVED_S / 2
            await reservation.cover(written_bytes)
            assert (await storage.use("alice")).size_bytes == 90_000
    assert (await storage.use("alice")).size_bytes == 0


async def test_an_upload_of_unknown_size_gets_what_is_left(storage: Storage) -> None:
    async with storage.reserve(quota(), 50_000), storage.reserve(quota(), None) as growing:
        for size_bytes in (1, 10_000, 49_999, 50_000):
            await growing.cover(size_bytes)
            assert (await storage.use("alice")).size_bytes == 50_000 + size_bytes
        with pytest.raises(StorageFull, match=f"would exceed your maximum of {BOUND}"):
            await growing.cover(50_001)


async def test_files_have_a_bound_in_number(
    storage: Storage, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 2)
    files = Files(objects, storage)
    for _ in range(2):
        await files.add(quota(), b"a", name="a", content_type="")
    with pytest.raises(StorageFull, match="you have 2 files stored"):
        await files.add(quota(), b"a", name="a", content_type="")
    await files.add(quota("bob"), b"a", name="a", content_type="")


async def test_expired_files_make_room_at_once(
    storage: Storage, objects: ObjectStore, clock: Clock
) -> None:
    files = Files(objects, storage)
    await files.add(quota(), bytes(90_000), name="a", content_type="", keep_s=60)
    clock.now_s += 61
    second = await files.add(quota(), bytes(90_000), name="a", content_type="")
    assert [one.id for one in await files.newest("alice")] == [second.id]


class CountingStore(ObjectStore):
    """An object store that counts the calls it receives."""

    listed = 0
    read = 0

    async def listing(self, folder: str, limit: int, after: str = "") -> list[StoredObject]:
        self.listed += 1
        return await super().listing(folder, limit, after)

    async def get(self, key: str, max_bytes: int) -> bytes:
        self.read += 1
        return await super().get(key, max_bytes)


async def test_uploads_of_a_tenant_at_the_same_time_share_their_counts(tmp_path: Path) -> None:
    objects = CountingStore(f"file://{tmp_path}")
    storage = Storage(objects)
    reservations = [StorageReservation(storage, quota()) for _ in range(32)]
    await asyncio.gather(*(one.take(1) for one in reservations))
    # Each count lists four folders. On a busy machine, several counts start before the others have
    # made their reservations.
    assert objects.listed < 32, f"{objects.listed} listings for 32 uploads"
    assert await storage.use("alice") == StorageUse(32, 32)


async def test_refused_uploads_do_not_read_again_what_has_not_expired(
    tmp_path: Path, clock: Clock
) -> None:
    objects = CountingStore(f"file://{tmp_path}")
    storage = Storage(objects, clock)
    files = Files(objects, storage)
    for number in range(8):
        keep_s = LOOK_AGAIN_S / 2 if number == 7 else KEEP_S
        await files.add(quota(), bytes(10_000), name="a", content_type="", keep_s=keep_s)

    async def upload() -> bool:
        try:
            async with storage.reserve(quota(), 25_000):
                return True
        except StorageFull:
            return False

    for _ in range(4):
        assert not any(await asyncio.gather(*(upload() for _ in range(4))))
    assert objects.read == 8, "each document is read once for 16 refusals"
    clock.now_s += LOOK_AGAIN_S / 2 + 1
    assert await upload(), "what has expired since makes room at once"


async def test_a_sweep_removes_what_expired_and_nothing_else(
    storage: Storage, objects: ObjectStore, clock: Clock, tmp_path: Path
) -> None:
    files = Files(objects, storage)
    await files.add(quota(), b"short", name="a", content_type="", keep_s=60)
    kept = await files.add(quota("bob"), b"long", name="a", content_type="")
    owner = owner_of("carol")
    for name, document in (("over", b'{"expires_at_s":1}'), ("there", b'{"expires_at_s":9e9}')):
        await objects.put(f"batches/files/{owner}/{name}/data", b"{}", "application/jsonl")
        await objects.put(f"batches/files/{owner}/{name}/file.json", document, "application/json")
    await objects.put(f"batches/files/{owner}/broken/data", b"{}", "application/jsonl")
    clock.now_s += 61
    assert await storage.sweep() == 4
    left = keys_in(tmp_path)
    assert {key for key in left if "file_" not in key and "/of/" not in key} == {
        f"batches/files/{owner}/there/data",
        f"batches/files/{owner}/there/file.json",
        f"batches/files/{owner}/broken/data",  # an upload may be about to write its document
    }
    assert await files.read(await files.find("bob", kept.id)) == b"long"
    clock.now_s += max(module.ABANDONED_S, KEEP_S)
    await storage.sweep()
    assert keys_in(tmp_path) == {
        f"batches/files/{owner}/there/data",
        f"batches/files/{owner}/there/file.json",
    }


async def test_foreign_objects_hold_up_nothing(
    storage: Storage, objects: ObjectStore, clock: Clock
) -> None:
    files, owner = Files(objects, storage), owner_of("alice")
    await files.add(quota(), b"short", name="a", content_type="", keep_s=60)
    for folder in (RESERVED, HELD, LISTED):
        for name in ("notes.txt", "1_notes.txt"):
            await objects.put(f"{folder}/{owner}/{name}", b"a", "text/plain")
    clock.now_s += 61
    async with storage.reserve(quota(), 10):
        pass
    await storage.sweep()
    assert (await storage.use("alice")).files == 0


async def test_old_objects_go_by_their_folder(
    storage: Storage, objects: ObjectStore, clock: Clock, tmp_path: Path
) -> None:
    for folder in module.FOLDERS_BY_AGE:
        for name, older_s in (("old", 60.0), ("young", -60.0)):
            key = f"{folder}/00/{name}"
            await objects.put(key, b"a", "text/plain")
            at_s = clock.now_s - module.OLDEST_S - older_s
            os.utime(tmp_path / "objects" / key, (at_s, at_s))
    assert await storage.sweep_by_age() == len(module.FOLDERS_BY_AGE)
    assert keys_in(tmp_path) == {f"{folder}/00/young" for folder in module.FOLDERS_BY_AGE}


async def test_a_runner_sweeps(storage: Storage, objects: ObjectStore, clock: Clock) -> None:
    await Files(objects, storage).add(quota(), b"a", name="a", content_type="", keep_s=60)
    clock.now_s += 61
    async with module.sweep(storage):
        async with asyncio.timeout(WAIT_LIMIT_S):
            while (await storage.use("alice")).files:
                pass
