"""A class's memory limit if its entry does not specify one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.models.custom import limits
from workers.models.custom.limits import DiskUse, memory_of, usual_memory_bytes

GIB = 1024**3


@pytest.mark.parametrize(
    ("group", "machine_kib", "expected_bytes"),
    [
        ("max\n", 10 * GIB // 1024, 8 * GIB),
        (f"{5 * GIB}\n", 10 * GIB // 1024, 4 * GIB),
        (None, 10 * GIB // 1024, 8 * GIB),
        (f"{5 * GIB}\n", None, 4 * GIB),
        (None, None, 0),
    ],
)
def test_it_is_a_part_of_what_there_is(
    tmp_path: Path, group: str | None, machine_kib: int | None, expected_bytes: int
) -> None:
    if group is not None:
        (tmp_path / "memory.max").write_text(group)
    if machine_kib is not None:
        (tmp_path / "meminfo").write_text(f"MemTotal:  {machine_kib} kB\nMemFree: 1 kB\n")
    assert usual_memory_bytes(tmp_path / "memory.max", tmp_path) == expected_bytes


def test_a_process_that_has_ended_takes_no_memory() -> None:
    """Its parent has not reaped it yet. The limit watcher must keep running."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    try:
        assert memory_of(child) == 0
    finally:
        os.waitpid(child, 0)
    assert memory_of(os.getpid()) > 2**20


MIB = 2**20


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A scratch folder containing one file that doesn't count toward any limit."""
    folder = tmp_path / "scratch"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "copy.bin").write_bytes(bytes(8 * MIB))
    return folder


def written(disk: DiskUse, *family: int) -> bool:
    """True if more than the limit has been written to disk."""
    return "it wrote more than the maximum of 4194304 bytes to disk" in disk.count(set(family))


def test_files_on_disk_are_counted_once_and_without_holes(scratch: Path) -> None:
    disk = DiskUse(scratch, 4 * MIB)
    (scratch / "a").write_bytes(bytes(3 * MIB))
    with open(scratch / "hole", "wb") as file:
        file.truncate(100 * MIB)
    for number in range(9):
        os.link(scratch / "a", scratch / f"again-{number}")
    (scratch / "elsewhere").symlink_to("/usr")
    assert not written(disk)
    (scratch / "src" / "deep" / "deeper").mkdir(parents=True)
    (scratch / "src" / "deep" / "deeper" / "b").write_bytes(bytes(2 * MIB))
    assert written(disk)
    (scratch / "src" / "deep" / "deeper" / "b").unlink()
    assert not written(disk)


def test_a_file_counts_that_was_removed_and_is_open(scratch: Path) -> None:
    disk = DiskUse(scratch, 4 * MIB)
    with open(scratch / "a", "wb") as file:
        (scratch / "a").unlink()
        file.write(bytes(5 * MIB))
        file.flush()
        assert not written(disk)
        assert written(disk, os.getpid())
    assert not written(disk, os.getpid())


def test_a_file_elsewhere_counts_that_was_seen_to_be_written(scratch: Path) -> None:
    """As in a shared /tmp, a file counts until it is removed. Files that are only read do not
    count.
    """
    disk = DiskUse(scratch, 4 * MIB)
    other, read = scratch.parent / "other", scratch.parent / "read"
    read.write_bytes(bytes(5 * MIB))
    with open(other, "wb") as file, open(read, "rb"):
        file.write(bytes(5 * MIB))
        file.flush()
        assert written(disk, os.getpid())
    assert written(disk)
    other.unlink()
    assert not written(disk)


def test_half_of_the_room_is_of_what_was_free_at_first(scratch: Path) -> None:
    disk = DiskUse(scratch, 4 * MIB)
    (scratch / "weights").write_bytes(bytes(2 * MIB))
    assert not disk.is_half_full()
    (scratch / "left").write_bytes(bytes(MIB // 2))
    disk.count(set())
    assert not disk.is_half_full()
    (scratch / "more").write_bytes(bytes(MIB))
    disk.count(set())
    assert disk.is_half_full()


def test_what_was_written_since_the_last_count_is_half_of_the_room(scratch: Path) -> None:
    disk = DiskUse(scratch, 200 * MIB)
    assert not disk.is_half_full()
    with open(scratch / "left", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 160 * MIB)
    assert disk.is_half_full()


def test_a_folder_that_cant_be_read_is_named(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskUse(scratch, 4 * MIB)
    deep = "d" * 250
    place = os.open(scratch, os.O_RDONLY)
    for _ in range(20):  # a path too long for the system
        os.mkdir(deep, dir_fd=place)
        below = os.open(deep, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)
    assert disk.count(set()) == "it has an unreadable folder: File name too long"


def test_many_new_files_are_counted_at_once(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count no matter how long the last count took, because the disk has fewer free files."""
    monkeypatch.setattr(limits, "MAX_ENTRIES", 1000)
    disk = DiskUse(scratch, 4 * MIB)
    if not os.statvfs(scratch).f_favail:
        pytest.skip("this file system does not count free files")
    disk.count(set())
    assert not disk.has_lost_much()
    for number in range(1001):
        (scratch / str(number)).touch()
    assert disk.has_lost_much()


def test_files_from_before_the_start_count(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ENTRIES", 1000)
    for number in range(600):
        (scratch / str(number)).touch()
    disk = DiskUse(scratch, 4 * MIB)
    if not os.statvfs(scratch).f_favail:
        pytest.skip("this file system does not count free files")
    assert not disk.has_lost_much()
    for number in range(600, 1050):
        (scratch / str(number)).touch()
    assert disk.has_lost_much()
    assert disk.count(set()) == "it has more than the maximum of 1000 files"


def test_files_are_bounded_by_their_number(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ENTRIES", 8)
    disk = DiskUse(scratch, 4 * MIB)
    for number in range(5):
        (scratch / str(number)).touch()
    assert disk.count(set()) == ""
    for number in range(5, 10):
        (scratch / str(number)).touch()
    assert disk.count(set()) == "it has more than the maximum of 8 files"
