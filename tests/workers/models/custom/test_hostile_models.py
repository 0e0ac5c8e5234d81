"""Classes that hold up their model process, in its steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ModelFailed
from tests.workers.models.custom.classes import (
    compute,
    entry_of,
    output_of,
    prepared,
    write_class,
)
from tests.workers.models.custom.hostile import (
    DISK_BYTES,
    FILLED,
    MEMORY_BYTES,
    hostile_class,
)
from workers.models.base import PreparedFile
from workers.models.custom import limits, process
from workers.models.custom.model import CustomModel

pytestmark = pytest.mark.slow(about_s=20)
LOADED = "from workers.models.custom.runner.main import main\n"
WITHOUT_NAMESPACE = """
from workers.models.custom.runner import confinement
confinement.take_private_tmp = lambda *paths: False
"""
READS_NOTHING = """
class Runner(BaseRunner):
    @concurrent(max=4)
    async def run(self, mode: str, file: Path | None = None) -> str:
        while mode == "block":
            try:
                time.sleep(600)
            except BaseException:
                pass
        return f"{mode} {file.stat().st_size if file else 0}"
"""


def model_of(folder: Path, body: str) -> Iterator[CustomModel]:
    model = CustomModel(entry_of(write_class(folder, body)), folder, "cpu", 1)
    model.setup()
    yield model
    model.close()


@pytest.fixture
def reads_nothing(tmp_path: Path) -> Iterator[CustomModel]:
    yield from model_of(tmp_path, READS_NOTHING)


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[CustomModel]:
    yield from model_of(tmp_path, hostile_class([]))


def test_one_that_reads_nothing_holds_up_no_step(reads_nothing: CustomModel) -> None:
    file = PreparedFile(["file"], "large", bytes(20 * 2**20))
    model = reads_nothing
    model.admit(0, prepared({"mode": "block"}))
    model.step()
    model.admit(1, prepared({"mode": "read", "file": None}, [file]))
    for _ in range(5):
        assert not model.step().results
    model.drop(0)
    ended: dict[int, Any] = {}
    while 1 not in ended:
        ended |= model.step().results
    assert ended[1].output == f"read {20 * 2**20}"


def test_what_prints_without_end_holds_up_no_step(hostile: CustomModel) -> None:
    hostile.admit(0, prepared({"mode": "print_on"}))
    for _ in range(20):
        assert not hostile.step().results
    hostile.drop(0)
    assert output_of(compute(hostile, {"mode": "behave"})) == "well"


def test_what_leaks_is_restarted_between_two_predictions(tmp_path: Path) -> None:
    folder = write_class(tmp_path, hostile_class([]))
    entry = entry_of(folder, resources={"memory_bytes": MEMORY_BYTES})
    model = CustomModel(entry, folder, "cpu", 1)
    model.setup()
    try:
        for _ in range(6):  # with 300 MiB each, which is above the limit at the third
            compute(model, {"mode": "leak_less"})  # one that is looked at in time fails
            assert output_of(compute(model, {"mode": "behave"})) == "well"
    finally:
        model.close()


def test_files_that_predictions_left_are_removed_between_two(tmp_path: Path) -> None:
    """600 MiB together, which is twice the bound, and none of them fails."""
    folder = write_class(tmp_path, hostile_class([]))
    entry = entry_of(folder, resources={"disk_bytes": DISK_BYTES})
    model = CustomModel(entry, folder, "cpu", 1)
    model.setup()
    try:
        outputs = [output_of(compute(model, {"mode": "leave_files"})) for _ in range(30)]
    finally:
        model.close()
    assert outputs == ["left"] * 30
    assert model.take_restart_s() > 0


@pytest.mark.parametrize("mode", ["fill_disk", "fill_tmp_by_open_files", "fill_what_is_removed"])
def test_disk_is_bounded_without_a_namespace_of_mounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Then it shares /tmp, and the files count that it was seen to write there."""
    program = process._PROGRAM.replace(LOADED, LOADED + WITHOUT_NAMESPACE)
    monkeypatch.setattr(process, "_PROGRAM", program)
    folder = write_class(tmp_path, hostile_class([]).replace("/tmp", str(tmp_path)))
    model = CustomModel(entry_of(folder, resources={"disk_bytes": DISK_BYTES}), folder, "cpu", 1)
    model.setup()
    try:
        failed = compute(model, {"mode": mode}).results[0]
        assert isinstance(failed, ModelFailed)
        assert failed.message.startswith(FILLED)
        assert output_of(compute(model, {"mode": "behave"})) == "well"
    finally:
        model.close()
        for path in tmp_path.glob("*.bin"):
            path.unlink()


def test_processes_are_bounded(hostile: CustomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROCESSES", 20)
    found = compute(hostile, {"mode": "fork_on"}).results[0]
    assert isinstance(found, ModelFailed)
    assert "processes; at most 20 are allowed" in found.message
    assert output_of(compute(hostile, {"mode": "behave"})) == "well"
