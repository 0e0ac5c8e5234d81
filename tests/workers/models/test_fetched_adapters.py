"""Adapter files that callers specify by URL, on the worker's disk: copied once, and limited per
tenant.
"""

import os
import time
from pathlib import Path

import pytest

from shared.errors import BadInput
from shared.models.image_entry import AdapterUrls
from shared.stores.objects import ObjectStore, object_key
from workers.models.image.resident_adapters import ABANDONED_S, FetchedAdapters

pytestmark = [pytest.mark.slow, pytest.mark.anyio]  # imports torch and diffusers
KIB = 1024


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}/objects")


def kept_in(folder: Path, objects: ObjectStore, files: int = 3) -> FetchedAdapters:
    urls = AdapterUrls(
        allowed=("https://a.example/",), max_bytes=100 * KIB, disk_bytes=files * 100 * KIB
    )
    return FetchedAdapters(urls, folder, objects)


async def stored(objects: ObjectStore, number: int, size_bytes: int = 100 * KIB) -> str:
    data = bytes([number]) * size_bytes
    key = object_key("inputs", data, "application/octet-stream")
    await objects.put(key, data, "application/octet-stream")
    return key


async def test_a_file_is_copied_once(tmp_path: Path, objects: ObjectStore) -> None:
    fetched, key = kept_in(tmp_path / "kept", objects), await stored(objects, 1)
    file = fetched.find("sha256:1", key, "acme")
    assert file.read_bytes() == bytes([1]) * 100 * KIB
    await objects.delete(key)
    assert fetched.find("sha256:1", key, "acme") == file
    with pytest.raises(BadInput):
        fetched.find("sha256:1", key, "globex")
    assert [one.name for one in (tmp_path / "kept").glob("*/*")] == ["1.safetensors"]


async def test_the_tenant_with_the_most_makes_room(tmp_path: Path, objects: ObjectStore) -> None:
    fetched = kept_in(tmp_path / "kept", objects)
    keys = [await stored(objects, number) for number in range(5)]
    order = [("globex", 0), ("acme", 1), ("acme", 2), ("acme", 3), ("acme", 4)]
    for age, (owner, number) in enumerate(order):
        file = fetched.find(f"sha256:{number}", keys[number], owner)
        used_s = time.time() - 100 + age
        os.utime(file, (used_s, used_s))
    left = sorted(f"{one.parent.name}/{one.stem}" for one in (tmp_path / "kept").glob("*/*"))
    assert left == ["acme/3", "acme/4", "globex/0"]


async def test_a_file_that_is_too_large_takes_no_room(tmp_path: Path, objects: ObjectStore) -> None:
    fetched = kept_in(tmp_path / "kept", objects)
    key = await stored(objects, 1, 100 * KIB + 1)
    with pytest.raises(BadInput, match="exceeds the maximum"):
        fetched.find("sha256:1", key, "acme")
    assert not list((tmp_path / "kept").glob("*/*"))


async def test_copies_that_broke_off_are_removed(tmp_path: Path, objects: ObjectStore) -> None:
    fetched, key = kept_in(tmp_path / "kept", objects), await stored(objects, 1)
    (tmp_path / "kept" / "acme").mkdir(parents=True)
    left = tmp_path / "kept" / "acme" / ".broken"
    left.write_bytes(b"half")
    old_s = time.time() - ABANDONED_S - 60
    os.utime(left, (old_s, old_s))
    fetched.find("sha256:1", key, "acme")
    assert not left.exists()
