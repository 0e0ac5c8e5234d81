"""What the code of a class can see of our processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.models.custom.runner.landlock import abi_version

ROOT = Path(__file__).parents[4]
AS_NOBODY = """
import ctypes, encodings.ascii, os, sys
sys.path.insert(0, sys.argv[1])
from shared.inspection import deny_inspection
if os.geteuid() == 0:
    os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # a change of the user hides a process by itself
"""
SHOWN = AS_NOBODY + "print('ready', flush=True); sys.stdin.read()"
HIDDEN = AS_NOBODY + "deny_inspection(); print('ready', flush=True); sys.stdin.read()"
READER = AS_NOBODY + "print(open(f'/proc/{sys.argv[2]}/environ').read())"


@pytest.mark.parametrize(("code", "found"), [(SHOWN, "told"), (HIDDEN, "PermissionError")])
def test_a_process_of_the_same_user_cant_read_the_environment(code: str, found: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", code, str(ROOT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"KEY": "told"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        command = [sys.executable, "-c", READER, str(ROOT), str(process.pid)]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        process.kill()
    assert found in asked.stdout + asked.stderr


CONFINED = """
import ctypes, encodings.ascii, os, sys
sys.path.insert(0, sys.argv[1])
from workers.models.custom.runner.confinement import confine
scratch, outside = sys.argv[2:4]
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as after the start of a program
for one in confine(scratch, [sys.prefix]):
    print("missing:", one)
for place in (scratch, "/tmp", outside):
    try:
        with open(f"{place}/told", "w") as file:
            file.write("x")
        print("wrote", place)
    except OSError as error:
        print("refused", place)
print(open("/proc/self/status").read() + open("/proc/self/limits").read())
"""


@pytest.mark.skipif(not abi_version(), reason="this system has no Landlock")
def test_a_user_without_rights_is_confined_as_well(tmp_path: Path) -> None:
    scratch, outside = tmp_path / "scratch", Path("/var/tmp")
    scratch.mkdir()
    scratch.chmod(0o777)
    for parent in [one for one in tmp_path.parents if one != Path("/")][:-1]:
        parent.chmod(parent.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)
    command = [sys.executable, "-c", CONFINED, str(ROOT), str(scratch), str(outside)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"wrote {scratch}" in lines, done.stdout
    assert "wrote /tmp" in lines
    assert f"refused {outside}" in lines
    assert "CapEff:\t0000000000000000" in lines
    assert any(line.startswith("Max core file size        0 ") for line in lines)
    if not any("namespace" in line for line in lines):
        assert (scratch / "tmp" / "told").read_text() == "x", "its /tmp is its own"
