"""The Python chosen by `make setup`, and what `penstock doctor` reports about it."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from infra.local import doctor
from infra.python_build import is_optimized

ROOT = Path(__file__).parents[2]
DOCKER = "'--enable-loadable-sqlite-extensions' '--enable-optimizations' '--with-lto'"
DEBIAN = "'--enable-shared' '--prefix=/usr' '--libdir=/usr/lib/x86_64-linux-gnu'"
PYENV = "'--prefix=/home/ann/.pyenv/versions/3.11.7' '--enable-shared' 'LDFLAGS=-L/usr/lib'"
HOMEMADE = "'--prefix=/usr/local'"


def chosen(tmp_path: Path, pythons: dict[str, bool]) -> str:
    """The choice among these programs in PATH, each marked as suitable or not."""
    folders = list(dict.fromkeys(str(tmp_path / Path(path).parent) for path in pythons))
    for path, suits in pythons.items():
        program = tmp_path / path
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\nexit {int(not suits)}\n")
        program.chmod(0o755)
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(f"/bin/{tool}" if tool == "bash" else f"/usr/bin/{tool}")
    said = subprocess.run(
        [tmp_path / "bash", ROOT / "infra/find_python.sh"],
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": os.pathsep.join([*folders, str(tmp_path)])},
    )
    return said.stdout.strip().removeprefix(f"{tmp_path}/")


@pytest.mark.parametrize(
    ("pythons", "choice"),
    [
        ({"a/python3.11": False, "b/python3.11": True, "b/python3.12": True}, "b/python3.11"),
        ({"a/python3.12": True, "a/python3.13": True}, "a/python3.12"),
        ({"a/python3.11": False, "b/python3.13": True}, "b/python3.13"),
        ({"a/python3": False, "b/python3.11": False, "b/python3.12": False}, "b/python3.11"),
        ({"a/python3": False}, "a/python3"),
        ({}, "python3"),
    ],
)
def test_the_first_that_was_built_well_is_taken(
    tmp_path: Path, pythons: dict[str, bool], choice: str
) -> None:
    assert chosen(tmp_path, pythons) == choice


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(DOCKER, True), (DEBIAN, True), (None, True), (PYENV, False), (HOMEMADE, False), ("", False)],
)
def test_how_it_was_built_is_known(
    monkeypatch: pytest.MonkeyPatch, arguments: str | None, expected: bool
) -> None:
    monkeypatch.setitem(sysconfig.get_config_vars(), "CONFIG_ARGS", arguments)
    assert is_optimized() is expected
    said = next(finding for finding in doctor.examine() if finding.what == "Python")
    assert ("--enable-optimizations" not in said.facts) is expected
    assert not said.fix


def test_the_python_of_these_tests_is_judged_by_itself() -> None:
    judged = subprocess.run([sys.executable, ROOT / "infra/python_build.py"], check=False)
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    assert (judged.returncode == 0) == (is_optimized() and has_headers)
