"""The two servers that the same tests run against, and what the one from Google does not do."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.local.process import Process, free_port, listens
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S

EMBEDDED = "embedded"
EMBEDDED_KEPT = "embedded-kept"
GOOGLE_EMULATOR = "google-emulator"

_JAR_FOLDER = "platform/pubsub-emulator/lib"
_SDK_ROOTS = (
    "/usr/lib/google-cloud-sdk",
    "/opt/google-cloud-sdk",
    "/google-cloud-sdk",
    "/usr/local/google-cloud-sdk",
    "/usr/local/share/google-cloud-sdk",
    "/opt/homebrew/share/google-cloud-sdk",
    "/snap/google-cloud-cli/current",
    "~/google-cloud-sdk",
)
# What emulator 0.8.20 does otherwise, seen by running these tests against it without the exceptions.
_LACKING = {
    "DetachSubscription": "answers UNIMPLEMENTED",
    "INVALID_ARGUMENT for delivery attempts": "refuses with OUT_OF_RANGE",
    "UpdateTopic": "knows no field of a topic but schema_settings",
    "attribute limits": "takes keys and values of any length",
    "expiration policy": "takes any time to live and never expires",
    "filters": "keeps the filter, does not check it and delivers everything (before gcloud 555)",
    "range of the ack deadline": "takes any ack deadline",
    "retry policy": "redelivers at once",
}


@dataclass(frozen=True)
class Target:
    """A running server."""

    name: str
    endpoint: str

    def requires(self, feature: str) -> None:
        """Skip the test when this server lacks the feature, with what it does instead."""
        if self.name == GOOGLE_EMULATOR:
            pytest.skip(f"Google's emulator: {_LACKING[feature]}")


@contextmanager
def embedded(name: str, folder: Path) -> Iterator[Target]:
    """Run the embedded server in a process of its own, in memory or kept in the folder, where its log goes too."""
    port = free_port()
    command = [sys.executable, "-m", "infra.emulators.pubsub", f"--port={port}"]
    if name == EMBEDDED_KEPT:
        command.append(f"--data-dir={folder / 'data'}")
    with _running(name, command, port, folder):
        yield Target(name, f"127.0.0.1:{port}")


@contextmanager
def google_emulator(given_jar: str | None, folder: Path) -> Iterator[Target]:
    """Run Google's emulator; skips when this machine has no jar or no java."""
    jar, java, port = _find_jar(given_jar), shutil.which("java"), free_port()
    if jar is None or java is None:
        pytest.skip("Google's emulator needs its jar (PUBSUB_EMULATOR_JAR or a Google Cloud SDK) and java")
    command = [java, "-Xmx512m", "-jar", str(jar), "--host=127.0.0.1", f"--port={port}"]
    with _running(GOOGLE_EMULATOR, command, port, folder):
        yield Target(GOOGLE_EMULATOR, f"127.0.0.1:{port}")


@contextmanager
def _running(name: str, command: list[str], port: int, folder: Path) -> Iterator[None]:
    with Process(name, command, folder) as process:
        process.wait_ready(lambda: listens(port), START_LIMIT_S)
        yield


def _find_jar(given: str | None) -> Path | None:
    if given:
        return Path(given)
    jars = [jar for root in _sdk_roots() for jar in sorted((root / _JAR_FOLDER).glob("cloud-pubsub-emulator-*.jar"))]
    return jars[-1] if jars else None


def _sdk_roots() -> Iterator[Path]:
    for root in _SDK_ROOTS:
        if (path := Path(root).expanduser()).is_dir():
            yield path
            return
    gcloud = shutil.which("gcloud")
    if gcloud is not None:
        command = [gcloud, "info", "--format=value(installation.sdk_root)"]
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=WAIT_LIMIT_S, check=False
        ).stdout.strip()
        if found:
            yield Path(found)
