import asyncio
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import anyio
import pytest
from prometheus_client import REGISTRY

from api.inputs.storage import owner_of
from infra.local.process import free_port
from shared.errors import BadInput, ConfigurationError, InputTooLarge, Unavailable
from shared.models.blob import INLINE_LIMIT_BYTES, Blob
from shared.stores.objects import ObjectStore, object_key, store_if_large
from tests.limits import TEST_LIMIT_S, WAIT_LIMIT_S

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["file", "memory"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}/objects" if request.param == "file" else "memory://")


async def test_put_then_get(objects: ObjectStore) -> None:
    key = object_key("results", b"pixels", "image/png")
    await objects.put(key, b"pixels", "image/png")
    await objects.put(key, b"pixels", "image/png")
    assert await objects.get(key, max_bytes=6) == b"pixels"


async def test_a_large_input_is_digested_beside_the_event_loop(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def digested(folder: str, data: bytes, media_type: str) -> str:
        threads.append(threading.current_thread())
        return object_key(folder, data, media_type)

    monkeypatch.setattr("shared.stores.objects.object_key", digested)
    small, large = b"a" * INLINE_LIMIT_BYTES, b"a" * (INLINE_LIMIT_BYTES + 1)
    assert await store_if_large(Blob("audio/wav", data=small), objects) == Blob("audio/wav", small)
    stored = await store_if_large(Blob("audio/wav", data=large), objects)
    assert stored.object_key == object_key("inputs", large, "audio/wav")
    assert await objects.get(stored.object_key, len(large)) == large
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_get_of_larger_object_is_refused(objects: ObjectStore) -> None:
    await objects.put("a/b.png", b"pixels", "image/png")
    with pytest.raises(InputTooLarge, match="6 bytes, which exceeds the maximum of 5"):
        await objects.get("a/b.png", max_bytes=5)


async def test_get_of_nothing_names_the_key(objects: ObjectStore) -> None:
    with pytest.raises(BadInput, match=r"object 'a/none\.png' does not exist"):
        await objects.get("a/none.png", max_bytes=5)


@pytest.mark.parametrize(
    "key",
    [
        *(
            "",
            "/",
            "/etc/passwd",
            "../secret",
            "a/../../secret",
            "a/./b",
            "a//b",
            "a/",
            ".hidden",
            "a%2f..",
            "a\\b",
        ),
        *("a\0b", "a\n", "a b", "ü.png", "x" * 513),
    ],
)
async def test_keys_stay_inside(objects: ObjectStore, key: str) -> None:
    with pytest.raises(BadInput, match="valid object key"):
        await objects.put(key, b"x", "image/png")
    with pytest.raises(BadInput, match="valid object key"):
        await objects.get(key, max_bytes=5)


def test_object_key_names_content() -> None:
    key = object_key("inputs", b"pixels", "image/png")
    assert key.startswith("inputs/")
    assert key.endswith(".png")
    assert key == object_key("inputs", b"pixels", "image/png")
    assert key != object_key("inputs", b"others", "image/png")
    assert object_key("inputs", b"pixels", "text/odd").count(".") == 0


async def test_relative_folder_is_below_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await ObjectStore("file://var/objects").put("a/b.png", b"x", "image/png")
    assert (tmp_path / "var/objects/a/b.png").read_bytes() == b"x"


async def test_readers_never_see_half_an_object(tmp_path: Path) -> None:
    objects = ObjectStore(f"file://{tmp_path}")
    versions = [bytes([n]) * 200_000 for n in range(2)]
    await objects.put("a", versions[0], "image/png")
    seen: set[bytes] = set()

    async def read() -> None:
        for _ in range(50):
            seen.add(await objects.get("a", max_bytes=200_000))

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        for n in range(50):
            await objects.put("a", versions[n % 2], "image/png")
    assert seen <= set(versions)
    assert [name for name in os.listdir(tmp_path) if name != "a"] == []


async def test_failing_disk_is_unavailable(tmp_path: Path) -> None:
    objects = ObjectStore(f"file://{tmp_path}/objects")
    await objects.put("a/b.png", b"x", "image/png")
    with pytest.raises(Unavailable, match="directory"):
        await objects.put("a", b"x", "image/png")


async def test_bucket_out_of_reach_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    objects = ObjectStore("s3://bucket/prefix")
    with pytest.raises(Unavailable, match="object store failed"):
        await objects.put("a/b.png", b"x", "image/png")
    with pytest.raises(Unavailable, match="object store failed"):
        await objects.check()


async def test_missing_bucket_is_no_fault_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoBucket(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    with HTTPServer(("127.0.0.1", 0), NoBucket) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(Unavailable, match="object store failed"):
                await ObjectStore("s3://bucket/prefix").put("a/b.png", b"x", "image/png")
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that hang outlast the test."""
    monkeypatch.setattr("shared.stores.objects.TIMEOUT_S", 2 * TEST_LIMIT_S)


@pytest.mark.usefixtures("patient")
async def test_store_that_hangs_holds_up_nobody_else(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hangs")  # opening it blocks until a writer opens it
    objects = ObjectStore(f"file://{tmp_path}")
    asked = [asyncio.create_task(objects.get("hangs", max_bytes=5)) for _ in range(50)]
    for _ in range(10):
        assert await asyncio.to_thread(lambda: "done") == "done"
    assert not any(call.done() for call in asked), "nothing else waited for these"
    for call in asked:
        call.cancel()
    await asyncio.to_thread(_let_go, [tmp_path / "hangs"])
    await asyncio.wait(asked)


async def test_calls_of_a_store_that_hangs_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.stores.objects.TIMEOUT_S", 0.1)
    errors = REGISTRY.get_sample_value("penstock_objects_errors_total", {"operation": "get"}) or 0
    os.mkfifo(tmp_path / "hangs")  # opening it blocks until a writer opens it
    objects = ObjectStore(f"file://{tmp_path}")
    asked = [objects.get("hangs", max_bytes=5) for _ in range(50)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(one) for one in found} == {Unavailable}
    assert (
        REGISTRY.get_sample_value("penstock_objects_errors_total", {"operation": "get"})
        == errors + 50
    )
    with (tmp_path / "hangs").open("w"):
        pass  # releases the threads


@pytest.mark.usefixtures("patient")
async def test_owner_whose_calls_take_long_keeps_nobody_from_the_store(tmp_path: Path) -> None:
    (tmp_path / "files/kept/busy").mkdir(parents=True)
    os.mkfifo(tmp_path / "files/kept/busy/slow")  # opening it blocks until a writer opens it
    objects = ObjectStore(f"file://{tmp_path}")
    slow = [
        asyncio.create_task(objects.get("files/kept/busy/slow", max_bytes=5)) for _ in range(50)
    ]
    key = object_key("results", b"pixels", "image/png")
    await asyncio.sleep(0)
    try:
        await objects.put("files/kept/quiet/file", b"x", "image/png")
        assert await objects.get("files/kept/quiet/file", max_bytes=1) == b"x"
        await objects.put(key, b"pixels", "image/png")
        assert not any(one.done() for one in slow)
    finally:
        for one in slow:
            one.cancel()
        with (tmp_path / "files/kept/busy/slow").open("w"):
            pass  # releases the threads
    await asyncio.wait(slow)
    assert await objects.get("files/kept/quiet/file", max_bytes=1) == b"x"


@pytest.mark.usefixtures("patient")
async def test_owner_has_no_more_turns_by_using_several_folders(tmp_path: Path) -> None:
    """An upload writes a file, a reservation and a list entry, in three folders."""
    folders = ("batches/files", "files/kept", "files/of", "files/reserved")
    busy, quiet = owner_of("busy"), owner_of("quiet")
    objects = ObjectStore(f"file://{tmp_path}")
    slow = []
    for folder in folders:
        (tmp_path / folder / busy).mkdir(parents=True)
        os.mkfifo(tmp_path / folder / busy / "slow")  # opening it blocks until a writer opens it
        slow += [objects.get(f"{folder}/{busy}/slow", max_bytes=5) for _ in range(8)]
    asked = [asyncio.create_task(one) for one in slow]
    await asyncio.sleep(0)
    try:
        # A reservation and two list calls at once, as when an upload starts.
        keys = [f"{folder}/{quiet}/{place}" for place, folder in enumerate(folders)]
        async with asyncio.timeout(WAIT_LIMIT_S):
            await asyncio.gather(*(objects.put(key, b"x", "image/png") for key in keys))
        assert not any(one.done() for one in asked)
    finally:
        for one in asked:
            one.cancel()
        await asyncio.to_thread(_let_go, [tmp_path / folder / busy / "slow" for folder in folders])
    await asyncio.wait(asked)


def _let_go(pipes: Sequence[Path]) -> None:
    """Unblocks the calls waiting to read the pipes. Doesn't wait for pipes that have no readers."""
    for pipe in pipes:
        with suppress(OSError):
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


async def test_check_passes_on_an_empty_store(objects: ObjectStore) -> None:
    await objects.check()


@pytest.mark.parametrize("url", ["", "file://", "gs://", "var/objects", "http://host/x"])
def test_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="PENSTOCK_OBJECTS_URL"):
        ObjectStore(url)


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigurationError, match="PENSTOCK_OBJECTS_URL"):
        ObjectStore(f"file://{tmp_path}/file/objects")


async def test_first_of_two_creations_stays(objects: ObjectStore) -> None:
    made = await asyncio.gather(
        *(objects.create("a/b.json", bytes([65 + n]), "application/json") for n in range(8))
    )
    assert made.count(True) == 1
    assert await objects.get("a/b.json", max_bytes=1) == bytes([65 + made.index(True)])


async def test_listing_is_in_order_and_bounded(objects: ObjectStore) -> None:
    for name in ("b/2", "a/1", "b/1/x", "bb/1"):
        await objects.put(name, b"xyz", "image/png")
    assert [(one.key, one.size_bytes) for one in await objects.listing("b", 10)] == [
        ("b/1/x", 3),
        ("b/2", 3),
    ]
    assert [one.key for one in await objects.listing("b", 1)] == ["b/1/x"]
    assert await objects.listing("none", 10) == []
    assert await objects.folders("b") == ["1"]


async def test_range_is_part_of_an_object(objects: ObjectStore) -> None:
    await objects.put("a/b", b"0123456789", "image/png")
    assert await objects.get_range("a/b", 3, 4) == b"3456"
    assert await objects.get_range("a/b", 9, 1) == b"9"
    assert await objects.get_range("a/b", 10, 0) == b""
    with pytest.raises(BadInput, match="object 'a/none' does not exist"):
        await objects.get_range("a/none", 0, 1)


async def test_deleting_twice_is_harmless(objects: ObjectStore) -> None:
    await objects.put("a/b", b"x", "image/png")
    await objects.delete("a/b")
    await objects.delete("a/b")
    with pytest.raises(BadInput):
        await objects.get("a/b", max_bytes=1)


async def test_pieces_become_one_object(objects: ObjectStore) -> None:
    pieces = [os.urandom(700_000) for _ in range(30)]
    async with objects.writer("a/large", "application/jsonl") as writer:
        for piece in pieces:
            await writer.write(piece)
        assert await objects.listing("a", 10) == []
    assert writer.size_bytes == 30 * 700_000
    assert await objects.get("a/large", max_bytes=writer.size_bytes) == b"".join(pieces)


async def test_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    objects = ObjectStore(f"file://{tmp_path}")

    async def fail() -> None:
        async with objects.writer("a/large", "application/jsonl") as writer:
            for _ in range(20):
                await writer.write(bytes(1_000_000))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    assert [name for _, _, names in os.walk(tmp_path) for name in names] == []


async def test_renamed_object_takes_the_place_of_another(objects: ObjectStore) -> None:
    await objects.put("a/new", b"new", "text/plain")
    await objects.put("a/old", b"old", "text/plain")
    await objects.rename("a/new", "a/old")
    assert await objects.get("a/old", max_bytes=3) == b"new"
    with pytest.raises(BadInput):
        await objects.get("a/new", max_bytes=3)
    with pytest.raises(BadInput, match="not a valid object key"):
        await objects.rename("a/old", "../old")
