"""A class's working directory contains its files, and what the class writes there is private."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from workers.models.custom import scratch as module
from workers.models.custom.process import RunnerProcess
from workers.models.custom.scratch import Scratch

ROOT = Path(__file__).parents[4]


def test_files_are_there_and_what_is_written_is_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_COPIED_BYTES", 10)
    (tmp_path / "weights" / "large").mkdir(parents=True)
    (tmp_path / "weights" / "large" / "w.bin").write_bytes(b"w" * 11)
    (tmp_path / "predict.py").write_text("code")
    (tmp_path / "output.png").write_bytes(b"earlier")
    (tmp_path / ".git").mkdir()
    scratch = Scratch(tmp_path)
    working = scratch.path / "src"
    assert (working / "predict.py").read_text() == "code"
    assert (working / "weights" / "large" / "w.bin").read_bytes() == b"w" * 11
    assert (working / ".git").is_symlink()
    (working / "output.png").write_bytes(b"now")
    assert (tmp_path / "output.png").read_bytes() == b"earlier"
    (working / "weights" / "new.bin").write_bytes(b"n")
    (working / "closed").mkdir(mode=0o500)
    assert not (tmp_path / "weights" / "new.bin").exists()
    scratch.close()
    assert not scratch.path.exists()
    assert (tmp_path / "weights" / "large" / "w.bin").read_bytes() == b"w" * 11


def test_a_process_that_can_not_be_started_leaves_no_file_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="null byte"):
        RunnerProcess(tmp_path, environment={"A": "\0"})
    with pytest.raises(FileNotFoundError):
        RunnerProcess(tmp_path, python="/no/such/python")
    assert set(os.listdir("/proc/self/fd")) <= before


def test_folders_of_too_many_files_are_linked_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    for name in "abcde":
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text(name)
    scratch = Scratch(tmp_path)
    folders = [scratch.path / "src" / name for name in "abcde"]
    assert [(one / "f").read_text() for one in folders] == list("abcde")
    assert sum(one.is_symlink() for one in folders) == 3
    scratch.close()
    assert (tmp_path / "e" / "f").read_text() == "e"


MAKES_ONE = """
import sys, time
from pathlib import Path
from workers.models.custom.scratch import Scratch
print(Scratch(Path(sys.argv[1])).path, flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("temporary", "class"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(module, "LEFT_AFTER_S", 0.0)
    command = [sys.executable, "-c", MAKES_ONE, str(tmp_path / "class")]
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        Scratch(tmp_path / "class").close()
        assert left.is_dir(), "its process runs"
        process.kill()
    Scratch(tmp_path / "class").close()
    assert not left.exists()
    assert not list((tmp_path / "temporary").iterdir())
