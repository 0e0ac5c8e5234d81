"""Runs one client's checks against a service and parses the outcomes."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.limits import TEST_LIMIT_S, WAIT_LIMIT_S


@dataclass(frozen=True)
class Outcome:
    """A check's outcome: "passed", "failed" or "skipped", with the reason."""

    check: str
    outcome: str
    reason: str


@dataclass(frozen=True)
class Service:
    """The service under test.

    Args:
        url: without a path, for example http://127.0.0.1:8080.
        key: the API key that clients send.
        embedder: an embedding model with at least 64 dimensions.
        writer: a text model. Empty: the service does not have one.
        bigquery: URL of its embedded BigQuery. Empty if it uses Google's.
        pubsub: host and port of its embedded Pub/Sub. Empty if it uses Google's.
        expected: path of a JSON file with custom classes' outputs, for the class checks.
        audio: path of a JSON file with speech models' inputs and outputs, for the speech checks.
    """

    url: str
    key: str
    embedder: str
    painter: str
    writer: str = ""
    bigquery: str = ""
    pubsub: str = ""
    expected: str = ""
    audio: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """A script's environment variables: the ones that point it at this service, plus everything
        in our environment that does not configure Penstock or a client.
        """
        given = {name: value for name, value in os.environ.items() if not _is_ours(name)}
        return given | {
            "PENSTOCK_CLIENTS_URL": self.url,
            "PENSTOCK_CLIENTS_KEY": self.key,
            "PENSTOCK_CLIENTS_EMBEDDER": self.embedder,
            "PENSTOCK_CLIENTS_PAINTER": self.painter,
            "PENSTOCK_CLIENTS_WRITER": self.writer,
            "PENSTOCK_CLIENTS_BIGQUERY": self.bigquery,
            "PENSTOCK_CLIENTS_PUBSUB": self.pubsub,
            "PENSTOCK_CLIENTS_EXPECTED": self.expected,
            "PENSTOCK_CLIENTS_AUDIO": self.audio,
            "PENSTOCK_CLIENTS_LIMIT_S": str(WAIT_LIMIT_S),
        }


def run_checks(command: Sequence[str], service: Service) -> tuple[list[Outcome], float]:
    """The outcomes of all the checks in a script, and how many seconds the script took.

    If the script exits early, an additional outcome describes how it exited.
    """
    began_s = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=service.environment,
            capture_output=True,
            text=True,
            timeout=TEST_LIMIT_S,
            check=False,
        )
        printed, ending = done.stdout, done.stderr.strip()[-2000:]
        is_whole = done.returncode == 0
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode() if isinstance(error.stdout, bytes) else ""
        ending, is_whole = f"not over after {TEST_LIMIT_S:.0f} s", False
    found = [
        Outcome(**json.loads(line)) for line in printed.split("\n") if line.startswith('{"check"')
    ]
    if not is_whole or not found:
        found.append(Outcome("the script as a whole", "failed", ending or "no check ran"))
    return found, time.monotonic() - began_s


def _is_ours(name: str) -> bool:
    return (
        name.startswith(("PENSTOCK_", "OPENAI_", "REPLICATE_", "ANTHROPIC_", "MISTRAL_"))
        or name == "PYTHONPATH"
    )
