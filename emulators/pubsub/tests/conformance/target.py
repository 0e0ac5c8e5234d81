"""The two servers under test, and the features that Google's emulator lacks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.google_emulator import find_emulator, running_emulator
from tests.limits import START_LIMIT_S
from tests.process import Process, free_port, listens

EMBEDDED = "embedded"
EMBEDDED_KEPT = "embedded-kept"
GOOGLE_EMULATOR = "google-emulator"

# Differences found in emulator 0.8.20 by running these tests without the exceptions.
_LACKING = {
    "BASIC views": "shows definitions in lists too",
    "DetachSubscription": "answers UNIMPLEMENTED",
    "INVALID_ARGUMENT for delivery attempts": "refuses with OUT_OF_RANGE",
    "UpdateTopic": "knows no field of a topic but schema_settings",
    "attribute limits": "takes keys and values of any length",
    "expiration policy": "takes any time to live and never expires",
    "IAM": "answers UNIMPLEMENTED",
    "PROTOCOL_BUFFER": "answers UNIMPLEMENTED",
    "filters": "keeps the filter, does not check it and delivers everything (before gcloud 555)",
    "range of the ack deadline": "takes any ack deadline",
    "retry policy": "redelivers at once",
}


@dataclass(frozen=True)
class Target:
    """A running server."""

    name: str
    endpoint: str
    rest_host: str

    def requires(self, feature: str) -> None:
        """Skips the test if the server lacks the feature; the reason describes its behavior."""
        if self.name == GOOGLE_EMULATOR:
            pytest.skip(f"Google's emulator: {_LACKING[feature]}")


@contextmanager
def embedded(name: str, folder: Path) -> Iterator[Target]:
    """Run the embedded server in a separate process, in memory or with its data in the folder.

    Its log goes in the folder too.
    """
    port, rest_port = free_port(), free_port()
    command = [sys.executable, "-m", "pubsub_emulator", f"--port={port}"]
    command.append(f"--rest-port={rest_port}")
    if name == EMBEDDED_KEPT:
        command.append(f"--data-dir={folder / 'data'}")
    with Process(name, command, folder) as process:
        process.wait_ready(lambda: listens(port) and listens(rest_port), START_LIMIT_S)
        yield Target(name, f"127.0.0.1:{port}", f"127.0.0.1:{rest_port}")


@contextmanager
def google_emulator(given_jar: str | None, folder: Path) -> Iterator[Target]:
    """Runs Google's emulator. Skips if the jar or Java is not installed on this machine."""
    words = find_emulator(given_jar)
    if words is None:
        pytest.skip(
            "Google's emulator needs its jar (PUBSUB_EMULATOR_JAR or a Google Cloud SDK) and java"
        )
    with running_emulator(words, folder) as endpoint:
        yield Target(GOOGLE_EMULATOR, endpoint, endpoint)
