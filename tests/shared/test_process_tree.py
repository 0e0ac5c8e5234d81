"""Threads are listed while some of them exit."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from shared.process.process_tree import list_threads
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_START_THREADS = """
import threading
print(flush=True)
while True:
    threads = [threading.Thread(target=int) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.fixture
def ending_threads() -> Iterator[int]:
    """Yields the ID of a process whose threads are constantly exiting.

    It isn't the test process, which may have hundreds of threads, all listed each time.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _START_THREADS], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_thread_that_ends_while_threads_are_listed_is_left_out(ending_threads: int) -> None:
    listed = most = 0
    until_s = time.monotonic() + WAIT_LIMIT_S
    while listed < 2_000 or not most:
        most = max(most, len(list_threads(ending_threads)))
        listed += 1
        assert time.monotonic() < until_s
    assert most <= 4  # the main thread isn't listed
