"""Truncated, overwritten or replaced data directories: damage is reported, dropped or rejected."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from pubsub_emulator.storage import integrity
from pubsub_emulator.storage.data_dir import durable_broker
from pubsub_emulator.storage.database import FILE_NAME, opened_database
from tests.world import KeptWorld, kept_world, subscription_path

LOG = FILE_NAME + "-wal"
COMMITS = 50


def filled(folder: Path) -> None:
    """A directory as SIGKILL leaves it: with a log that was not written back."""
    live = folder / "live"
    with kept_world(live) as world:
        world.topic()
        world.subscription()
        world.flush()
        for number in range(COMMITS):
            world.publish(f"message {number}")
            world.flush()
        for path in live.iterdir():
            shutil.copy(path, folder)
    shutil.rmtree(live)


def left_in(folder: Path) -> list[str]:
    with opened_database(folder, fsync=False) as database:
        world = KeptWorld(database)
        return (
            [message.data for message in world.pull()]
            if world.broker.registry.subscriptions
            else []
        )


def test_whole_directory_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    assert len(left_in(tmp_path)) == COMMITS
    assert caplog.text == ""


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.9])
def test_log_that_was_cut_is_told_with_the_number_of_commits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: float
) -> None:
    filled(tmp_path)
    log = tmp_path / LOG
    size_bytes = log.stat().st_size
    with log.open("r+b") as file:
        file.truncate(int(size_bytes * kept))
    lost = COMMITS - len(left_in(tmp_path))
    assert lost > 0
    # The first commit created the topic and the subscription.
    assert f"lacks the last {lost + (kept == 0)} commits" in caplog.text
    caplog.clear()
    with kept_world(tmp_path) as world:
        world.topic("another")
        world.flush()
    left_in(tmp_path)
    assert caplog.text == "", "it is reported once"


def test_log_that_was_overwritten_or_removed_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    log = tmp_path / LOG
    with log.open("r+b") as file:
        file.seek(log.stat().st_size // 2)
        file.write(b"overwritten" * 100)
    assert 0 < len(left_in(tmp_path)) < COMMITS
    assert "lacks the last" in caplog.text
    caplog.clear()
    (tmp_path / FILE_NAME).unlink()
    log.unlink(missing_ok=True)
    with opened_database(tmp_path, fsync=False):
        assert "lacks the last" in caplog.text


def test_damaged_message_is_dropped_by_name_and_the_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
        (sequence,) = connection.execute("SELECT min(sequence) FROM message").fetchone()
        connection.execute(
            "UPDATE message SET data = CAST(data || 'x' AS BLOB) WHERE sequence = ?", (sequence,)
        )
    assert left_in(tmp_path) == [f"message {number}" for number in range(1, COMMITS)]
    assert f"1 damaged messages were dropped (ids {sequence})" in caplog.text
    caplog.clear()
    left_in(tmp_path)
    assert caplog.text == "", "it is gone"


def test_damaged_resource_is_refused_by_name(tmp_path: Path) -> None:
    filled(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
        connection.execute("UPDATE resource SET proto = x'00' WHERE path LIKE '%/subscriptions/%'")
    with pytest.raises(OSError, match=f"{subscription_path('workers')} in it is corrupt"):
        left_in(tmp_path)


@pytest.mark.anyio
async def test_damaged_file_is_refused_in_one_line(tmp_path: Path) -> None:
    filled(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path = tmp_path / FILE_NAME
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 3 * 4096))
    with pytest.raises(OSError, match=FILE_NAME) as refused:
        async with durable_broker(tmp_path, lambda: 1_800_000_000.0, 2**30, fsync=False):
            pass
    assert "\n" not in str(refused.value)


def test_directory_of_the_version_before_is_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
        for table, column in (("message", "data"), ("resource", "proto")):
            connection.execute(
                f"UPDATE {table} SET {column} = substr({column}, 1, length({column}) - 4)"
            )
        connection.execute("DROP TABLE last_commit")
        connection.execute("PRAGMA user_version = 1")
    (tmp_path / integrity.FILE_NAME).unlink()
    assert len(left_in(tmp_path)) == COMMITS
    assert len(left_in(tmp_path)) == COMMITS
    assert caplog.text == ""
