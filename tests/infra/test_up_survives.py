"""`penstock up` while its parts are killed one after another and requests continue."""

import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pytest

from infra.local.redis_server import find_redis_server
from tests.infra.running_up import Up, running_up, wait_until
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S

pytestmark = [
    pytest.mark.slow(about_s=70),
    pytest.mark.skipif(sys.platform != "linux", reason="finds the parts in /proc"),
]
REDIS = find_redis_server().name
PARTS = {
    "redis": REDIS,
    "pubsub": "pubsub_emulator",
    "bigquery": "bigquery_emulator",
    "api": "api",
    "batches": "api.batch_runner",
    "functions": "functions_framework",
    "worker-mini": "workers",
    "row-archive": "infra.row_archive",
}
"""The parts, each with a word from its command."""
CLEAR_REFUSALS = {429, 503, 504}
CALLERS = 4
PAUSE_S = 0.05


def pid_of(up: Up, part: str) -> int:
    """A part's process id; the part is a child of `penstock up`."""
    word = PARTS[part]
    (found,) = [
        child.pid
        for child in psutil.Process(up.process.pid).children()
        # Redis appends its address to its name, with no space in between. Folders may contain
        # spaces.
        if any(Path(given).name.partition(" ")[0] == word for given in child.cmdline())
    ]
    return found


def said(up: Up, words: str) -> bool:
    """True if `penstock up` has printed these words."""
    return words in up.said


class Callers:
    """Callers that keep sending new texts until stopped. A caller whose connection breaks tries
    again.
    """

    def __init__(self, url: str) -> None:
        self.outcomes: Counter[int] = Counter()
        self.unclear: list[str] = []
        """Responses that no caller should get."""
        self.broken = 0
        """Connections that broke."""
        self._url = url
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(CALLERS)]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_LIMIT_S)
            assert not thread.is_alive(), "a request was never answered"

    def were_answered(self, count: int) -> bool:
        """True if this many requests have received their vector."""
        assert not self.unclear, self.unclear
        return self.outcomes[200] >= count

    def _ask(self, caller: int) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            self._ask_until_answered(f"text-{number}-of-caller-{caller}")
            time.sleep(PAUSE_S)

    def _ask_until_answered(self, text: str) -> None:
        deadline_s = time.monotonic() + WAIT_LIMIT_S
        while time.monotonic() < deadline_s:
            try:
                status, body = post(self._url, text)
            except OSError:
                with self._lock:
                    self.broken += 1
                time.sleep(PAUSE_S)
                continue
            clear = is_vector(body) if status == 200 else status in CLEAR_REFUSALS
            with self._lock:
                self.outcomes[status] += 1
                if not clear:
                    self.unclear.append(f"{status} {body[:500]!r}")
            return
        with self._lock:
            self.unclear.append(f"no answer to {text!r}")


def post(url: str, text: str) -> tuple[int, bytes]:
    """One request and its response: status and body."""
    request = urllib.request.Request(
        f"{url}/v1/embeddings",
        data=json.dumps({"model": "mini", "input": text}).encode(),
        headers={"Content-Type": "application/json", "Idempotency-Key": text},
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT_LIMIT_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read()


def is_vector(body: bytes) -> bool:
    (found,) = json.loads(body)["data"]
    return len(found["embedding"]) == 384


def test_every_part_comes_back_while_requests_go_on_and_ends_with_the_stack(
    tmp_path: Path, kept_choices: dict[str, str]
) -> None:
    own = {"PENSTOCK_ROWS_URL": f"file://{tmp_path}/rows", "PENSTOCK_ARCHIVE_EVERY_S": "1"}
    with running_up(tmp_path, kept_choices | own) as up:
        url = f"http://127.0.0.1:{up.ports.api}"
        with Callers(url) as callers:
            for part in PARTS:
                killed = pid_of(up, part)
                os.kill(killed, signal.SIGKILL)
                back = f"back    {part} · "
                wait_until(partial(said, up, back), START_LIMIT_S)
                assert pid_of(up, part) != killed
                answered = callers.outcomes[200]
                wait_until(partial(callers.were_answered, answered + 1), START_LIMIT_S)
        assert callers.unclear == []
        assert callers.outcomes[200] > 0
        for part in PARTS:
            assert f"died    {part} was killed by SIGKILL; " in up.said
        assert up.process.poll() is None
        # If it is killed, all of them die with it.
        parts = psutil.Process(up.process.pid).children(recursive=True)
        assert {REDIS, "penstock-model"} <= {one.name() for one in parts}, up.said
        up.process.kill()
        _, alive = psutil.wait_procs(parts, WAIT_LIMIT_S)
    for left in alive:
        left.kill()
    assert not alive, [one.cmdline() for one in alive]


def test_part_that_dies_too_often_ends_everything(tmp_path: Path, servers: dict[str, str]) -> None:
    never_again = "from infra.local import supervision; supervision.MAX_DEATHS = 0"
    program = ["-c", f"{never_again}; from infra.cli.main import main; main()"]
    with running_up(tmp_path, servers, program=program) as up:
        worker, batches = pid_of(up, "worker-mini"), pid_of(up, "batches")
        os.kill(batches, signal.SIGKILL)
        assert up.process.wait(START_LIMIT_S) == 1
        assert "penstock: batches was killed by SIGKILL; " in up.said
        assert "batches died 1 times within 600 s" in up.said
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
