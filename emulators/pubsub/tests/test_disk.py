"""A data directory's file: full, slow, shrinking, in use, or in the wrong format."""

import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest

from pubsub_emulator.errors import ServerUnavailable
from pubsub_emulator.protos import message_class
from pubsub_emulator.server import PubsubServer, serve
from pubsub_emulator.state.timers import Timers
from pubsub_emulator.state.topic import Topic
from pubsub_emulator.storage import reserve
from pubsub_emulator.storage.changes import Changes
from pubsub_emulator.storage.commit_thread import CommitThread
from pubsub_emulator.storage.database import (
    FILE_NAME,
    Database,
    WriteFailed,
    opened_database,
)
from pubsub_emulator.storage.durable import DurableJournal
from pubsub_emulator.storage.integrity import LastCommit
from pubsub_emulator.storage.reserve import Reserve
from tests.kept_server import KeptServer
from tests.limits import WAIT_LIMIT_S
from tests.wire import Wire, connect, until
from tests.world import KeptWorld, topic_path

TOPIC, SUBSCRIPTION = "projects/p/topics/jobs", "projects/p/subscriptions/one"
MIB = 1024**2


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process's files by prlimit")
@pytest.mark.anyio
async def test_full_disk_refuses_and_loses_nothing_and_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    server = KeptServer(tmp_path)
    process = psutil.Process(server.start())
    answered: list[str] = []
    try:
        async with connect(server.endpoint) as wire:
            await wire.topic(TOPIC)
            await wire.subscription(SUBSCRIPTION, TOPIC)
            process.rlimit(psutil.RLIMIT_FSIZE, (2 * MIB, psutil.RLIM_INFINITY))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await publish_for_ever(wire, answered)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "can't store anything new in its data directory" in str(refused.value.details())
            assert len(answered) > 10
            # Messages acked while nothing can be written must not be redelivered either.
            leased = (await wire.pull(SUBSCRIPTION, 3)).received_messages
            await wire.ack(SUBSCRIPTION, leased)
            process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
            answered += await published_at_last(wire, "x" * 50_000)
    finally:
        server.kill()
    try:
        server.start()
        async with connect(server.endpoint) as wire:
            again: list[str] = []
            while len(again) < len(answered) - len(leased):
                again += [
                    received.message.message_id
                    for received in (await wire.pull(SUBSCRIPTION)).received_messages
                ]
            assert again == answered[len(leased) :]
    finally:
        server.kill()


@pytest.mark.anyio
async def test_publish_that_would_take_the_room_of_acks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = shutil.disk_usage(tmp_path)
    async with serve(data_dir=tmp_path) as server, connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: used._replace(free=MIB))
        await wire.publish(TOPIC, "x" * MIB)
        with pytest.raises(grpc.aio.AioRpcError, match="nearly full") as refused:
            await wire.publish(TOPIC, "x" * 6 * MIB)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        monkeypatch.undo()
        await published_at_last(wire, "x" * 6 * MIB)


@pytest.mark.parametrize("left_bytes", [0, reserve.RESERVE_BYTES])
def test_reserve_that_a_kill_left_empty_or_a_copy_with_holes_is_filled(
    tmp_path: Path, left_bytes: int
) -> None:
    path = tmp_path / reserve.FILE_NAME
    with path.open("wb") as file:
        file.truncate(left_bytes)
    assert Reserve(tmp_path).take()
    assert path.stat().st_size == reserve.RESERVE_BYTES
    assert path.stat().st_blocks * 512 >= reserve.RESERVE_BYTES


def test_log_that_is_not_written_back_needs_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: used._replace(free=MIB))
    log_reserve = Reserve(tmp_path)
    assert log_reserve.covers(MIB)
    with (tmp_path / f"{FILE_NAME}-wal").open("wb") as log:
        log.truncate(5 * MIB)
        assert log_reserve.covers(MIB)
        log.truncate(8 * MIB)
        assert not log_reserve.covers(MIB)


def test_disk_with_ample_room_is_looked_at_again_after_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = shutil.disk_usage(tmp_path)
    now_s, free_bytes = 100.0, reserve.AMPLE_BYTES + 100 * MIB
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: used._replace(free=free_bytes))
    disk_reserve = Reserve(tmp_path)
    assert disk_reserve.covers(MIB)
    free_bytes = 0
    assert disk_reserve.covers(10 * MIB)
    now_s += 2 * reserve.AMPLE_S
    assert not disk_reserve.covers(10 * MIB)
    # With little space left, each commit checks the disk.
    free_bytes = reserve.AMPLE_BYTES
    assert disk_reserve.covers(10 * MIB)
    free_bytes = 0
    assert not disk_reserve.covers(10 * MIB)


@pytest.mark.anyio
async def test_thread_of_commits_does_one_after_another_and_tells_what_failed() -> None:
    done: list[int] = []

    def fail() -> None:
        raise WriteFailed("disk is full")

    with CommitThread() as thread:
        futures = [thread.do(partial(done.append, number)) for number in range(3)]
        failed = thread.do(fail)
        last = thread.do(lambda: list(done))
        with pytest.raises(WriteFailed, match="disk is full"):
            await failed
        assert await last == [0, 1, 2]
        assert all(future.done() for future in futures)
        # Nobody is waiting for this commit anymore, so it must not block the next one.
        thread.do(partial(done.append, 3)).cancel()
        assert await thread.do(lambda: list(done)) == [0, 1, 2, 3]
        thread.do(partial(done.append, 4))
    assert done == [0, 1, 2, 3, 4]


@pytest.mark.anyio
async def test_commits_go_on_when_the_directory_was_removed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    async with serve(data_dir=folder) as server, connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        shutil.rmtree(folder)
        await wire.publish(TOPIC, "a")
        assert len((await wire.pull(SUBSCRIPTION)).received_messages) == 1


@pytest.mark.parametrize("story", ["full_disk", "ten_kills"])
def test_disk_that_gets_full_loses_nothing_and_starts_and_has_room_again(
    story: str, tmp_path: Path
) -> None:
    unshare = ["unshare", "--map-root-user", "--mount"]
    probe = [*unshare, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("this machine lets no test mount a disk of its own")
    command = [*unshare, sys.executable, "-m", f"tests.{story}", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_LIMIT_S, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr


@contextmanager
def connected(folder: Path) -> Iterator[sqlite3.Connection]:
    """A connection to the server's file, opened the way its database opens it."""
    with opened_database(folder, fsync=False):
        pass
    path = folder / FILE_NAME
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as opened:
        yield opened


class FullDatabase(Database):
    """The real database, on a disk that is full while `is_full` is set."""

    is_full = False

    def write(self, changes: Changes) -> None:
        if self.is_full:
            raise WriteFailed("database or disk is full")
        super().write(changes)


@pytest.mark.anyio
async def test_failed_commit_takes_back_what_is_published_and_nothing_else(tmp_path: Path) -> None:
    with connected(tmp_path) as connection:
        database = FullDatabase(connection, LastCommit(tmp_path), Reserve(tmp_path))
        world = KeptWorld(database)
        world.topic()
        world.topic("dead")
        policy = {"dead_letter_topic": topic_path("dead"), "max_delivery_attempts": 5}
        world.subscription(dead_letter_policy=policy)
        world.subscription("morgue", "dead")
        world.publish("poison", "acked")
        async with world.journal.running(world.broker.registry.withdraw):
            await world.journal.committed()
            database.is_full = True
            poison, acked = world.pull()
            world.ack([acked])
            for _ in range(5):
                world.nack([poison])
                poison = next(iter(world.pull()), poison)
            world.publish("refused")
            with pytest.raises(ServerUnavailable, match="database or disk is full"):
                await world.journal.committed()
            assert not is_admitted(world.journal)
            assert world.pull_data() == []
            database.is_full = False
            await until(lambda: is_admitted(world.journal))
        world.crash()
        assert world.pull_data() == []
        assert world.pull_data("morgue") == ["poison"]


class FullWithReserve(FullDatabase):
    """A disk that is full except for the reserve, which is just enough for acks."""

    is_out_of_room = False

    def make_room(self) -> None:
        self.is_full = False

    def take_reserve(self) -> None:
        if self.is_out_of_room:
            raise WriteFailed("no space is left for 8 MiB")


@pytest.mark.anyio
async def test_acks_that_are_confirmed_are_written_into_the_reserve_of_a_full_disk(
    tmp_path: Path,
) -> None:
    with connected(tmp_path) as connection:
        database = FullWithReserve(connection, LastCommit(tmp_path), Reserve(tmp_path))
        world = KeptWorld(database)
        world.topic()
        world.subscription(enable_exactly_once_delivery=True)
        world.publish("a", "b", "c", "d")
        async with world.journal.running(world.broker.registry.withdraw):
            await world.journal.committed()
            pulled = world.pull()
            database.is_full = database.is_out_of_room = True
            # The first commit finds the disk full; the others arrive while there is no room for a
            # reserve.
            for ack in pulled[:3]:
                world.ack([ack])
                await world.journal.acks_committed()
                assert not is_admitted(world.journal)
            database.is_out_of_room = False
            await until(lambda: is_admitted(world.journal))
            world.crash()
        assert world.pull_data() == ["d"]


@pytest.mark.anyio
async def test_acks_that_a_full_disk_has_no_room_for_are_not_confirmed(tmp_path: Path) -> None:
    with connected(tmp_path) as connection:
        database = FullDatabase(connection, LastCommit(tmp_path), Reserve(tmp_path))
        world = KeptWorld(database)
        world.topic()
        world.subscription(enable_exactly_once_delivery=True)
        world.publish("a")
        async with world.journal.running(world.broker.registry.withdraw):
            await world.journal.committed()
            database.is_full = True
            world.ack(world.pull())
            for _ in range(2):
                with pytest.raises(ServerUnavailable, match="database or disk is full"):
                    await world.journal.acks_committed()
            database.is_full = False
            await world.journal.acks_committed()


class SlowDatabase(Database):
    """The real database, on a disk that responds only when the test allows it."""

    def __init__(
        self, connection: sqlite3.Connection, folder: Path, answers: threading.Event
    ) -> None:
        super().__init__(connection, LastCommit(folder), Reserve(folder))
        self._answers = answers

    def write(self, changes: Changes) -> None:
        assert self._answers.wait(WAIT_LIMIT_S)
        super().write(changes)


@pytest.mark.anyio
async def test_disk_that_does_not_answer_refuses_in_time_and_what_waits_is_written_when_it_does(
    tmp_path: Path,
) -> None:
    answers = threading.Event()
    with connected(tmp_path) as connection:
        journal = DurableJournal(SlowDatabase(connection, tmp_path, answers), commit_limit_s=0.05)
        async with journal.running(lambda sequences: None):
            journal.save(
                Topic(message_class("Topic")(name=TOPIC), Timers(time.time), journal, holder=1)
            )
            with pytest.raises(
                ServerUnavailable, match=r"writing to disk took longer than 0\.05 s"
            ):
                await journal.committed()
            with pytest.raises(ServerUnavailable):
                journal.admit()
            answers.set()
            await until(lambda: is_admitted(journal))
        database = Database(connection, LastCommit(tmp_path), Reserve(tmp_path))
        assert [path for path, *_ in database.resources()] == [TOPIC]


def is_admitted(journal: DurableJournal) -> bool:
    try:
        journal.admit()
    except ServerUnavailable:
        return False
    return True


async def publish_for_ever(wire: Wire, answered: list[str]) -> None:
    while True:
        answered += await wire.publish(TOPIC, "x" * 50_000)


async def published_at_last(wire: Wire, data: str) -> list[str]:
    deadline_s = time.monotonic() + WAIT_LIMIT_S
    while True:
        try:
            return await wire.publish(TOPIC, data)
        except grpc.aio.AioRpcError:
            assert time.monotonic() < deadline_s


@pytest.mark.anyio
async def test_file_shrinks_when_everything_is_acked(tmp_path: Path) -> None:
    async with serve(data_dir=tmp_path) as server, connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        for _ in range(4):
            await wire.publish(TOPIC, *["x" * 100_000] * 50)
        assert held_bytes(tmp_path) > 15 * MIB
        await ack_all(wire, server)
        await until(lambda: held_bytes(tmp_path) < 8 * MIB)


@pytest.mark.anyio
async def test_file_does_not_grow_with_traffic_that_is_acked(tmp_path: Path) -> None:
    async with serve(data_dir=tmp_path) as server, connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        for _ in range(40):
            await wire.publish(TOPIC, *["x" * 10_000] * 100)
            await ack_all(wire, server)
        assert held_bytes(tmp_path) < 25 * MIB


async def ack_all(wire: Wire, server: PubsubServer) -> None:
    while server.broker.registry.subscriptions[SUBSCRIPTION].backlog.oldest is not None:
        await wire.ack(SUBSCRIPTION, (await wire.pull(SUBSCRIPTION, 1000)).received_messages)


def held_bytes(data_dir: Path) -> int:
    files = (path for path in data_dir.iterdir() if path.name != reserve.FILE_NAME)
    return sum(path.stat().st_size for path in files)


@pytest.mark.anyio
async def test_directory_of_a_running_server_is_refused(tmp_path: Path) -> None:
    async with serve(data_dir=tmp_path):
        with pytest.raises(OSError, match="is another server using it"):
            async with serve(data_dir=tmp_path):
                pass


@pytest.mark.anyio
async def test_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(
        "not a database, but more than a hundred bytes of something else. " * 20
    )
    with pytest.raises(OSError, match="file is not a database"):
        async with serve(data_dir=tmp_path):
            pass


@pytest.mark.anyio
async def test_file_of_another_version_is_refused(tmp_path: Path) -> None:
    with opened_database(tmp_path, fsync=False):
        pass
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(OSError, match="its version is 99, but this server requires version 2"):
        async with serve(data_dir=tmp_path):
            pass


@pytest.mark.anyio
async def test_directory_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        async with serve(data_dir=tmp_path / "file"):
            pass


@pytest.mark.anyio
async def test_fsync_keeps_the_same(tmp_path: Path) -> None:
    async with serve(data_dir=tmp_path, fsync=True) as server, connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        await wire.publish(TOPIC, "a")
    async with serve(data_dir=tmp_path, fsync=True) as server, connect(server.endpoint) as wire:
        assert [
            received.message.data for received in (await wire.pull(SUBSCRIPTION)).received_messages
        ] == [b"a"]


def test_more_than_the_disk_keeps_up_with_is_refused(kept: KeptWorld) -> None:
    kept.subscription()
    for _ in range(7):
        kept.broker.journal.admit()
        kept.publish("x" * 10_000_000)
    with pytest.raises(
        ServerUnavailable, match=r"70001\d+ bytes are waiting to be written to disk"
    ):
        kept.broker.journal.admit()
    kept.flush()
    kept.broker.journal.admit()
