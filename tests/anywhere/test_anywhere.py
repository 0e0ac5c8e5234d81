"""The README's commands run in a folder with spaces, behind a proxy, and as a different user."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.anywhere.__main__ import main
from tests.anywhere.launcher import SKIPPED
from tests.limits import TEST_LIMIT_S, WAIT_LIMIT_S

pytestmark = pytest.mark.slow(about_s=200)

ROOT = Path(__file__).parents[2]
LAUNCHER = Path(__file__).with_name("launcher.py")


def launched(
    options: Mapping[str, object], *command: str, timeout_s: float = WAIT_LIMIT_S
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(LAUNCHER), json.dumps(options), *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip())
    return done


@pytest.mark.timeout(2 * TEST_LIMIT_S)  # downloads and installs everything while other tests run
def test_setup_and_demo_on_a_company_laptop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["laptop", "--do", "demo"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        ({"umask": 0o077}, "import os; print(oct(os.umask(0)))", "0o77"),
        ({"open_files": 99}, "import resource as r; print(r.getrlimit(r.RLIMIT_NOFILE))", "99"),
        ({"refuses": ["ipv6"]}, "import socket as s; s.socket(s.AF_INET6)", "not supported"),
        ({"refuses": ["namespaces"]}, "import os; os.execvp('unshare', ['unshare', '-U'])", "perm"),
        ({"shared_memory_mb": 0}, "import os; print(os.path.exists('/dev/shm'))", "False"),
        ({"shared_memory_mb": 1}, "import os; print(os.statvfs('/dev/shm').f_blocks)", "256"),
        ({"read_only": "/var/tmp"}, "open('/var/tmp/of-a-test', 'w')", "Read-only file system"),
        ({"ports": [8080]}, "import socket as s; s.create_server(('127.0.0.1', 8080))", "in use"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_restriction_holds(options: dict[str, object], code: str, expected: str) -> None:
    done = launched(options, sys.executable, "-c", code)
    assert expected in done.stdout + done.stderr


def test_custom_classes_are_served_without_landlock_and_namespaces() -> None:
    """Landlock and namespaces are missing in gVisor, for example, or in an old kernel."""
    places = [
        f"tests/workers/models/custom/test_{name}.py" for name in ("confinement", "scratch", "view")
    ]
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    options = {"refuses": ["namespaces", "landlock", "ipv6"]}
    done = launched(options, *pytest_command, *places, timeout_s=TEST_LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this system has no Landlock" in done.stdout
