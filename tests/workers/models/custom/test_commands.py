"""Commands that a class runs: commands from its packages, and Python itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workers.models.custom.classes import compute, entry_of, output_of, write_class
from tests.workers.models.custom.started import StartedClass
from tests.workers.models.custom.wheels import make_wheel
from workers.models.custom import class_process
from workers.models.custom.environments import python_for

RUNS = """
import subprocess

class Predictor(BasePredictor):
    def predict(self, command: List[str]) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
"""
SAYS_WHERE = "import sys; print(sys.prefix)"


def outputs(folder: Path, *commands: list[str]) -> list[Any]:
    with StartedClass(entry_of(folder), folder) as model:
        return [output_of(compute(model, {"command": command})) for command in commands]


def test_python_is_that_of_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    for name in ("python", "python3"):
        other = tmp_path / "other" / name
        other.write_text("#!/bin/sh\necho another\n")
        other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'other'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "class").mkdir()
    folder = write_class(tmp_path / "class", RUNS)
    (folder / "entry.py").write_text(SAYS_WHERE)
    found = outputs(
        folder,
        ["python", "-c", SAYS_WHERE],
        ["python3", "-c", SAYS_WHERE],
        ["python", "entry.py"],
        ["sh", "-c", "exec python entry.py"],
    )
    assert found == [sys.prefix] * 4


def test_commands_in_a_folder_below_tmp_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class has a private `/tmp`. Folders in PATH that are below `/tmp` remain available
    there.
    """
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "answer").write_text("#!/bin/sh\necho 42\n")
    (programs / "answer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "class").mkdir()
    assert outputs(write_class(tmp_path / "class", RUNS), ["answer"]) == ["42"]


def test_tmp_itself_in_path_shows_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "other").touch()
    (tmp_path / "link").symlink_to("/tmp")
    folder = write_class(tmp_path / "class", RUNS)
    look = ["sh", "-c", f"test -e {tmp_path}/other && echo seen || echo hidden"]
    usual = outputs(folder, look)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", os.pathsep.join([path, "/tmp/.", "/tmp/", f"{tmp_path}/link"]))
    assert outputs(folder, look) == usual


def test_python_behind_a_link_below_tmp_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Path(sys.prefix).resolve().is_relative_to("/tmp"):
        pytest.skip("the packages of this environment are below /tmp, where a link is not enough")
    programs, environment = tmp_path / "programs", tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    programs.mkdir()
    (programs / "python").symlink_to(Path(sys.executable).resolve())
    (environment / "bin" / "python").symlink_to(programs / "python")
    (environment / "lib").symlink_to(Path(sys.prefix) / "lib")
    (environment / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    python = environment / "bin" / "python"
    monkeypatch.setattr(class_process, "python_for", lambda folder: str(python))
    (tmp_path / "class").mkdir()
    folder = write_class(tmp_path / "class", RUNS)
    assert outputs(folder, ["python", "-c", SAYS_WHERE]) == [str(environment)]


@pytest.mark.slow(about_s=8)
def test_scripts_of_its_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ENVIRONMENTS_DIR", str(tmp_path / "environments"))
    body = "import sys\n\ndef main():\n    print(sys.prefix, version, *sys.argv[1:])\n"
    make_wheel(tmp_path / "wheels", "told", "1.5", body, scripts={"tell-it": "main"})
    (tmp_path / "class").mkdir()
    folder = write_class(tmp_path / "class", RUNS)
    (folder / "requirements.txt").write_text(f"--find-links {tmp_path}/wheels\ntold==1.5\n")
    prefix = str(Path(python_for(folder)).parents[1])
    found = outputs(folder, ["tell-it", "now"], ["python", "-c", SAYS_WHERE])
    assert found == [f"{prefix} 1.5 now", prefix]
