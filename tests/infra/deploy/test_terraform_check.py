"""infra/terraform/check.sh uses the real providers if it can, or else the given stand-in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.limits import WAIT_LIMIT_S

CHECK = Path("infra/terraform/check.sh")
FOLDERS = sum(
    len(list(CHECK.parent.glob(pattern)))
    for pattern in ("modules/*/", "platform/", "workloads/", "examples/*/")
)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Writes a `terraform` that records its arguments; without a registry, `init` fails."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program(folder / "terraform", f'[ "$1" != init ] || [ -e {tmp_path}/registry ]')
    program(folder / "stand-in", "true")
    return folder


def program(file: Path, then: str) -> None:
    file.write_text(f'#!/bin/sh\necho "$@" >> {file.parent.parent}/{file.name}.calls\n{then}\n')
    file.chmod(0o755)


def check(programs: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{programs}:{os.environ['PATH']}"
    given = {name: value for name, value in os.environ.items() if name != "TFOFFLINE"}
    return subprocess.run(
        [CHECK],
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
        env=given | environment | {"PATH": path},
    )


def calls(programs: Path, name: str, verb: str) -> int:
    file = programs.parent / f"{name}.calls"
    lines = file.read_text().splitlines() if file.exists() else []
    return sum(verb in line.split() for line in lines)


def test_real_providers_are_taken_where_a_registry_is_reached(programs: Path) -> None:
    (programs.parent / "registry").touch()
    done = check(programs, TFOFFLINE=str(programs / "stand-in"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert calls(programs, "terraform", "validate") == FOLDERS
    assert 0 < calls(programs, "terraform", "test") < FOLDERS
    assert calls(programs, "stand-in", "validate") == 0


def test_stand_in_that_is_named_is_taken_and_said(programs: Path) -> None:
    done = check(programs, TFOFFLINE=str(programs / "stand-in"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stand-in that TFOFFLINE names was taken" in done.stdout
    validated, tested = (calls(programs, "stand-in", verb) for verb in ("validate", "test"))
    assert validated + tested == FOLDERS
    assert calls(programs, "terraform", "validate") == 0


def test_without_either_it_says_what_was_not_checked(programs: Path) -> None:
    done = check(programs)
    assert done.returncode == 0
    assert "was not validated or tested" in done.stdout


def test_stand_in_that_is_not_there_fails(programs: Path) -> None:
    done = check(programs, TFOFFLINE=str(programs / "nothing"))
    assert done.returncode == 1
    assert "names no program" in done.stderr


def test_failing_folder_fails_the_check(programs: Path) -> None:
    program(programs / "stand-in", '[ "$3" != platform/ ]')
    done = check(programs, TFOFFLINE=str(programs / "stand-in"))
    assert done.returncode == 1
    assert "platform/ failed" in done.stdout
