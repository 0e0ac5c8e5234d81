"""Processes that a process started, directly or not, exit when it does, no matter how it exits.

tests/infra/test_up_survives.py tests this for a whole stack.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.limits import WAIT_LIMIT_S

pytestmark = [
    pytest.mark.slow(about_s=10),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]

ROOT = Path(__file__).parents[2]
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""
STARTER = """
import os, subprocess, sys
from pathlib import Path
from infra.local.process import Process
from infra.local.redis_server import RedisServer
code = (
    "import subprocess, sys, time;"
    "subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True);"
    "time.sleep(600)"
)
folder = Path(sys.argv[2])
with (
    Process("parent", [sys.executable, "-c", code, sys.argv[1]], folder),
    RedisServer(folder, folder) as redis,  # it overwrites its environment
):
    print("started", redis.pid, flush=True)
    sys.stdin.read()
"""
CONFTEST = """
import os
from infra.local.reaper import child_marks

def pytest_configure():
    os.environ.update(child_marks())
"""
TESTS = """
import subprocess, sys, time
from pathlib import Path
from infra.local.process import Process

def test_starts_processes(tmp_path):
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleep, start_new_session=True)
    with Process("sleeps", sleep, tmp_path):
        Path("started").touch()
        time.sleep(600)
"""


def descendants(label: str) -> list[psutil.Process]:
    """The processes that have `label` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LABEL") == label and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(autouse=True)
def _hears_hangups() -> Iterator[None]:
    """Makes programs heed SIGHUP, which nohup and everything started under it ignore."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@contextmanager
def labeled(command: Sequence[str], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A program, and the label of its children. Any children that remain are killed at the end."""
    label = uuid.uuid4().hex
    given = {"LABEL": label, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    try:
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | given,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ) as process,
        ):
            try:
                yield process, label
            finally:
                process.kill()
    finally:
        for left in descendants(label):
            left.kill()


def wait_gone(label: str) -> None:
    _, alive = psutil.wait_procs(descendants(label), WAIT_LIMIT_S)
    assert not alive, [one.cmdline() for one in alive]
    assert not descendants(label)


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    while not path.exists():
        assert process.poll() is None, (path.parent / "log").read_text()
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_deaf_and_detached_processes_end_with_the_one_above(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", STARTER, DEAF, str(tmp_path)]
    with labeled(command, tmp_path) as (process, label):
        log = tmp_path / "log"
        wait_for(tmp_path / "parent.log", process)
        while "deaf" not in (tmp_path / "parent.log").read_text() or "\n" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        server = psutil.Process(int(log.read_text().split()[1]))
        process.send_signal(number)
        process.wait(WAIT_LIMIT_S)
        wait_gone(label)
        server.wait(WAIT_LIMIT_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("options", [("-n", "0"), ("-n", "1")], ids=["alone", "with a worker"])
def test_what_tests_started_ends_with_the_run(
    tmp_path: Path, number: signal.Signals, options: Sequence[str]
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", *options, str(tmp_path)]
    with labeled(command, tmp_path) as (process, label):
        wait_for(tmp_path / "started", process)
        process.send_signal(number)
        process.wait(WAIT_LIMIT_S)
        wait_gone(label)
