"""The per-tenant limit on open batches holds no matter how many instances create them at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.batches import admissions
from api.batches.files import BatchFile, BatchFiles
from api.batches.names import ADMISSIONS, new_file_id, owner_of
from api.batches.service import MAX_OPEN, Batches, NewBatch
from api.batches.store import BatchStore
from api.inputs.storage import Storage
from shared.errors import Overloaded, Unavailable
from shared.stores.objects import ObjectStore
from shared.tenants.plan import Caller

pytestmark = pytest.mark.anyio
CALLER = Caller(tenant="acme")
OWNER = owner_of("acme")


class Slow(ObjectStore):
    """A store whose responses arrive in any order."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(url)
        self._drawn = random.Random(seed)

    async def _work(self, key: str, call: Callable[[], Any]) -> Any:
        for _ in range(self._drawn.randrange(6)):
            await asyncio.sleep(0)
        found = call()
        for _ in range(self._drawn.randrange(6)):
            await asyncio.sleep(0)
        return found


class Forgetful(Slow):
    """A store that writes, but sometimes reports that the object already existed, as after a lost
    response.
    """

    async def create(self, key: str, data: bytes, media_type: str) -> bool:
        is_new = await super().create(key, data, media_type)
        return is_new and self._drawn.random() < 0.7


async def _file(objects: ObjectStore) -> BatchFile:
    file = BatchFile(
        id=new_file_id(1.0),
        tenant="acme",
        filename="in.jsonl",
        purpose="batch",
        size_bytes=1,
        created_at_s=1.0,
        expires_at_s=1e12,
    )
    await BatchFiles(objects, Storage(objects)).add(file)
    return file


async def _created(instances: list[Batches], file: BatchFile, many: int) -> list[str]:
    """Tries to create `many` batches at once, across all instances, and returns their ids."""

    async def create(number: int) -> str:
        asked = NewBatch("/v1/embeddings", file.id)
        try:
            made = await instances[number % len(instances)].create(CALLER, asked)
        except Overloaded:
            return ""
        return made.created.id

    return [one for one in await asyncio.gather(*map(create, range(many))) if one]


def _instances(objects: ObjectStore, many: int) -> list[Batches]:
    return [
        Batches(BatchStore(objects), BatchFiles(objects, Storage(objects)), {"/v1/embeddings"})
        for _ in range(many)
    ]


async def test_no_more_batches_are_open_than_the_bound(tmp_path: Path) -> None:
    """Uses a folder, so the operating system provides the conditional put."""
    objects = ObjectStore(f"file://{tmp_path}")
    instances, file = _instances(objects, 3), await _file(objects)
    store = BatchStore(objects)
    made = await _created(instances, file, MAX_OPEN + 15)
    assert len(made) == len(set(made)) == MAX_OPEN
    assert {one.id for one in await store.open(OWNER)} == set(made), "refused ones leave nothing"
    for batch_id in made[:7]:
        await store.close(OWNER, batch_id)
    assert len(await _created(instances, file, 15)) == 7


@pytest.mark.parametrize("kind", [Slow, Forgetful])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_bound_holds_in_any_order_of_answers(kind: type[Slow], seed: int) -> None:
    asyncio.run(_check_bound(kind("memory://", seed), random.Random(seed)))


async def _check_bound(objects: Slow, drawn: random.Random) -> None:
    stores = [BatchStore(objects) for _ in range(3)]
    most, open_ids = 4, set[str]()
    for turn in range(4):
        ids = [f"batch_{turn}_{number}" for number in range(9)]
        kept = await asyncio.gather(
            *(_admitted(stores[number % 3], one, most) for number, one in enumerate(ids))
        )
        new = {one for one, is_kept in zip(ids, kept, strict=True) if is_kept}
        assert len(new) == most - len(open_ids), "as many as there is room for, and no more"
        open_ids |= new
        for one in drawn.sample(sorted(open_ids), drawn.randrange(most + 1)):
            await stores[0].close(OWNER, one)
            open_ids.discard(one)


async def _admitted(store: BatchStore, batch_id: str, most: int) -> bool:
    async def mark() -> None:
        await ObjectStore.create(
            store._objects, f"batches/open/{OWNER}/{batch_id}/open", b"{}", "application/json"
        )

    return await store._admissions.admit(OWNER, batch_id, most, mark)


async def test_creation_that_broke_off_takes_no_room(tmp_path: Path) -> None:
    """A marker without an admission is not an open batch."""
    objects = ObjectStore(f"file://{tmp_path}")
    (instance,), file = _instances(objects, 1), await _file(objects)
    assert len(await _created([instance], file, 1)) == 1
    for number in range(MAX_OPEN):
        key = f"batches/open/{OWNER}/batch_{number:032x}/open"
        await objects.create(key, b"{}", "application/json")
    assert len(await _created([instance], file, MAX_OPEN)) == MAX_OPEN - 1


async def test_old_admissions_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admissions, "KEPT", 3)
    objects = ObjectStore(f"file://{tmp_path}")
    (instance,), file = _instances(objects, 1), await _file(objects)
    assert len(await _created([instance], file, 10)) == 10
    assert len(await objects.listing(f"{ADMISSIONS}/{OWNER}", 100)) == 3


async def test_admission_waits_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other instances always take the next place first."""
    monkeypatch.setattr(admissions, "MAX_S", 0.05)
    objects = ObjectStore(f"file://{tmp_path}")
    (instance,), file = _instances(objects, 1), await _file(objects)

    async def never(key: str, data: bytes, media_type: str) -> bool:
        return False

    monkeypatch.setattr(objects, "create", never)
    with pytest.raises(Overloaded, match="at once"):
        await instance.create(CALLER, NewBatch("/v1/embeddings", file.id))


async def test_store_that_is_away_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = ObjectStore(f"file://{tmp_path}")
    (instance,), file = _instances(objects, 1), await _file(objects)

    async def away(folder: str, limit: int) -> list[Any]:
        raise Unavailable

    monkeypatch.setattr(objects, "listing", away)
    with pytest.raises(Unavailable):
        await instance.create(CALLER, NewBatch("/v1/embeddings", file.id))
