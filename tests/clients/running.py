"""Runs the checks of one client against a service, and reads what came of them."""

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
    """What came of one check: "passed", "failed" or "skipped", with the reason."""

    check: str
    outcome: str
    reason: str


@dataclass(frozen=True)
class Service:
    """Where the clients go.

    Args:
        url: without a path, as http://127.0.0.1:8080.
        key: what they send as API key.
        embedder: an embedding model with 64 dimensions at least.
        writer: a text model. Empty: it has none.
        bigquery: URL of its embedded BigQuery. Empty where it uses Google's.
        pubsub: host and port of its embedded Pub/Sub. Empty where it uses Google's.
        expected: path of a JSON file with what custom classes give, for checks of those.
        audio: path of a JSON file with what models of speech get and give, for checks of those.
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
        """The same for a script, above what every program needs, and nothing of ours besides."""
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
    """The outcomes of all checks of a script, and the seconds that it took.

    A script that ends early has an outcome more, which says how it ended.
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
