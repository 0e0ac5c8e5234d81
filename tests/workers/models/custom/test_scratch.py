"""The working directory of a class: its files are there, and what it writes is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.models.custom import scratch as module
from workers.models.custom.scratch import make_scratch, remove_scratch


def test_files_are_there_and_what_is_written_is_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_COPIED_BYTES", 10)
    (tmp_path / "weights" / "large").mkdir(parents=True)
    (tmp_path / "weights" / "large" / "w.bin").write_bytes(b"w" * 11)
    (tmp_path / "predict.py").write_text("code")
    (tmp_path / "output.png").write_bytes(b"earlier")
    (tmp_path / ".git").mkdir()
    scratch = make_scratch(tmp_path)
    working = scratch / "src"
    assert (working / "predict.py").read_text() == "code"
    assert (working / "weights" / "large" / "w.bin").read_bytes() == b"w" * 11
    assert (working / ".git").is_symlink()
    (working / "output.png").write_bytes(b"now")
    assert (tmp_path / "output.png").read_bytes() == b"earlier"
    (working / "weights" / "new.bin").write_bytes(b"n")
    (working / "closed").mkdir(mode=0o500)
    assert not (tmp_path / "weights" / "new.bin").exists()
    remove_scratch(scratch)
    assert not scratch.exists()
    assert (tmp_path / "weights" / "large" / "w.bin").read_bytes() == b"w" * 11


def test_folders_of_too_many_files_are_linked_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    for name in "abcde":
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text(name)
    scratch = make_scratch(tmp_path)
    folders = [scratch / "src" / name for name in "abcde"]
    assert [(one / "f").read_text() for one in folders] == list("abcde")
    assert sum(one.is_symlink() for one in folders) == 3
    remove_scratch(scratch)
    assert (tmp_path / "e" / "f").read_text() == "e"
