"""Threads are listed while some of them exit."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from shared.process.process_tree import list_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def ending_threads() -> Iterator[None]:
    stop = threading.Event()

    def start_threads() -> None:
        while not stop.is_set():
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    starter = threading.Thread(target=start_threads)
    starter.start()
    yield
    stop.set()
    starter.join()


def test_thread_that_ends_while_threads_are_listed_is_left_out(ending_threads: None) -> None:
    for _ in range(500):
        assert list_threads(os.getpid())
