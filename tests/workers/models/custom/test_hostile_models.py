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
from tests.workers.models.custom.hostile import MEMORY_BYTES, hostile_class
from workers.models.base import PreparedFile
from workers.models.custom import limits
from workers.models.custom.model import CustomModel

pytestmark = pytest.mark.slow(about_s=20)
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


def test_processes_are_bounded(hostile: CustomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROCESSES", 20)
    found = compute(hostile, {"mode": "fork_on"}).results[0]
    assert isinstance(found, ModelFailed)
    assert "processes; at most 20 are allowed" in found.message
    assert output_of(compute(hostile, {"mode": "behave"})) == "well"
