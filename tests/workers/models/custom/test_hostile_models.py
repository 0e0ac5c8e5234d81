"""Classes that block others or use too much, and the predictions served after them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import ModelFailed
from tests.anywhere.launcher import SKIPPED
from tests.limits import WAIT_LIMIT_S
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
from tests.workers.models.custom.started import StartClass, StartedClass
from workers.models.base import PreparedFile
from workers.models.custom.class_process import ClassProcess

pytestmark = pytest.mark.slow(about_s=20)
ROOT = Path(__file__).parents[4]
LAUNCHER = ROOT / "tests" / "anywhere" / "launcher.py"
FILLS_DISK = """
import sys
from pathlib import Path
from tests.workers.models.custom.classes import compute, entry_of, output_of
from tests.workers.models.custom.started import StartedClass

folder, mode, disk_bytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with StartedClass(entry_of(folder, resources={"disk_bytes": disk_bytes}), folder) as model:
    print(compute(model, {"mode": mode}).results[0].message)
    print(output_of(compute(model, {"mode": "behave"})))
"""
READS_NOTHING = """
class Runner(BaseRunner):
    @concurrent(max=4)
    async def run(self, mode: str, file: Path | None = None) -> str:
        print(mode)
        while mode == "block":
            try:
                time.sleep(600)
            except BaseException:
                pass
        return f"{mode} {file.stat().st_size if file else 0}"
"""


@pytest.fixture
def hostile(tmp_path: Path, start_class: StartClass) -> StartedClass:
    return start_class(write_class(tmp_path, hostile_class([])))


def test_one_that_reads_nothing_holds_up_no_other(tmp_path: Path, start_class: StartClass) -> None:
    model = start_class(write_class(tmp_path, READS_NOTHING))
    file = PreparedFile(["file"], "large", bytes(20 * 2**20))
    model.admit(0, prepared({"mode": "block"}))
    assert model.wait_for_logs(0).text == "block\n"
    model.admit(1, prepared({"mode": "read", "file": None}, [file]))
    model.drop(0)
    assert output_of(model.steps_until(1), 1) == f"read {20 * 2**20}"


def test_one_that_prints_without_end_can_be_canceled(hostile: StartedClass) -> None:
    hostile.admit(1, prepared({"mode": "print_on"}))
    hostile.wait_for_logs(1)
    hostile.drop(1)
    assert output_of(compute(hostile, {"mode": "behave"})) == "well"


def test_what_leaks_is_restarted_between_two_predictions(
    tmp_path: Path, start_class: StartClass
) -> None:
    folder = write_class(tmp_path, hostile_class([]))
    model = start_class(folder, resources={"memory_bytes": MEMORY_BYTES})
    for _ in range(6):  # 300 MiB each, which exceeds the limit at the third
        compute(model, {"mode": "leak_less"})  # a leak that is noticed in time fails
        assert output_of(compute(model, {"mode": "behave"})) == "well"


async def test_one_that_is_killed_for_what_has_ended_is_renewed_first(tmp_path: Path) -> None:
    """A thread watches the limits, so the process may be killed right before the next
    prediction.
    """
    folder = write_class(tmp_path, hostile_class([]))
    process = ClassProcess(
        entry_of(folder), folder, "cpu", 1, make_no_room, lambda frame: None, lambda: None
    )
    await process.start(WAIT_LIMIT_S)
    try:
        assert not await process.renew_if_used_up()
        process.runner.kill_at_fault("it takes 888 MiB of memory")
        assert process.is_ready, "its end is not noticed yet"
        assert await process.renew_if_used_up()
        assert not process.is_ready
    finally:
        await process.end("the test is over")


async def make_no_room() -> bool:
    return False


def test_files_that_predictions_left_are_removed_between_two(
    tmp_path: Path, start_class: StartClass
) -> None:
    """The files total 600 MiB, twice the limit, yet no prediction fails."""
    folder = write_class(tmp_path, hostile_class([]))
    model = start_class(folder, resources={"disk_bytes": DISK_BYTES})
    before = output_of(compute(model, {"mode": "name_itself"}))
    outputs = [output_of(compute(model, {"mode": "leave_files"})) for _ in range(30)]
    assert outputs == ["left"] * 30
    assert output_of(compute(model, {"mode": "name_itself"})) != before, "it was set up again"


@pytest.mark.parametrize("mode", ["fill_disk", "fill_tmp_by_open_files", "fill_what_is_removed"])
def test_disk_is_bounded_without_a_namespace_of_mounts(tmp_path: Path, mode: str) -> None:
    """Without mount namespaces, the class shares /tmp, and files it was seen writing there
    count.
    """
    folder = write_class(tmp_path, hostile_class([]).replace("/tmp", str(tmp_path)))
    options = json.dumps({"refuses": ["namespaces"]})
    command = [sys.executable, str(LAUNCHER), options, sys.executable, "-c", FILLS_DISK]
    done = subprocess.run(
        [*command, str(folder), mode, str(DISK_BYTES)],
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
        cwd=ROOT,
    )
    for path in tmp_path.glob("*.bin"):
        path.unlink()
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip())
    error, output = done.stdout.splitlines()
    assert error.startswith(FILLED), done.stderr
    assert output == "well"


def test_processes_are_bounded(hostile: StartedClass) -> None:
    found = compute(hostile, {"mode": "fork_on"}).results[0]
    assert isinstance(found, ModelFailed)
    assert "processes, which exceeds the maximum of 512" in found.message
    assert output_of(compute(hostile, {"mode": "behave"})) == "well"
