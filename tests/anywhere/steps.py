"""`python steps.py up`: starts `make up`, sends one request, and stops it again.

It runs in the clone with the clone's interpreter, and needs only the standard library.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SKIPPED = 77
READY_LIMIT_S = 600.0
STOP_LIMIT_S = 300.0
POLL_S = 0.2
PORTS = ("api", "pubsub", "bigquery", "redis", "functions", "metrics", "row-archive")
DIMENSIONS = 384
BODY = {"model": "all-MiniLM-L6-v2", "input": "a cat on a mat"}


def free_ports() -> dict[str, int]:
    """Free ports, by `penstock up` option. The 20 ports after `health` are probably free too."""
    with tempfile.TemporaryFile() as _:
        sockets = [socket.socket() for _ in (*PORTS, "health")]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        found = [one.getsockname()[1] for one in sockets]
        for one in sockets:
            one.close()
    return dict(zip((*PORTS, "health"), found, strict=True))


def ask(port: int) -> tuple[int, bytes]:
    """Sends one request. Returns status 0 if nothing is listening."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/embeddings", json.dumps(BODY), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


def run_up(log: Path) -> str:
    """Runs `make up` until one request has succeeded. Returns what went wrong, or ""."""
    ports = free_ports()
    arguments = " ".join(f"--{name}-port {port}" for name, port in ports.items())
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["make", "up", f"ARGS={arguments}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    until_s = time.monotonic() + READY_LIMIT_S
    status, body = 0, b""
    while status != 200 and process.poll() is None and time.monotonic() < until_s:
        time.sleep(POLL_S)
        status, body = ask(ports["api"])
    wrong = "" if status == 200 else f"no answer: status {status} {body[:300]!r}"
    if not wrong and len(json.loads(body)["data"][0]["embedding"]) != DIMENSIONS:
        wrong = "another embedding than expected"
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            wrong = wrong or f"it did not stop within {STOP_LIMIT_S:g} s of Ctrl-C"
    return wrong


def main() -> int:
    """Runs the step. Returns 1 and prints the log if it failed."""
    # A shell makes its background processes ignore Ctrl-C, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "up.log")
        wrong = run_up(log)
        if wrong:
            print(log.read_text(errors="replace")[-8000:])
            print(f"make up: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
