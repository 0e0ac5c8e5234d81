"""What the code of a class can see of our processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
AS_NOBODY = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[1])
from workers.runtime.template import deny_inspection
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
