"""Google's own Pub/Sub emulator, if installed, for comparison with the embedded Pub/Sub."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.local.process import Process, free_port, listens

START_LIMIT_S = 30.0
SDK_ROOTS = (
    "/usr/lib/google-cloud-sdk",
    "/opt/google-cloud-sdk",
    "/google-cloud-sdk",
    "/usr/local/google-cloud-sdk",
    "/usr/local/share/google-cloud-sdk",
    "/opt/homebrew/share/google-cloud-sdk",
    "/snap/google-cloud-cli/current",
    "~/google-cloud-sdk",
)
"""Paths used by OS packages and installers. If none exists, `gcloud` on PATH is used to find it."""
JAR = "platform/pubsub-emulator/lib/cloud-pubsub-emulator-*.jar"


def find_emulator(jar: str | None = None) -> list[str] | None:
    """Returns the command that starts the emulator, without options.

    Args:
        jar: path of the emulator's JAR, if known.

    Returns:
        None if the emulator or Java is missing.
    """
    gcloud, java = shutil.which("gcloud"), shutil.which("java")
    roots = [Path(root).expanduser() for root in SDK_ROOTS]
    if gcloud:
        roots.append(Path(gcloud).resolve().parent.parent)
    jars = [jar] if jar else [str(path) for root in roots for path in sorted(root.glob(JAR))]
    return [java, "-Xmx512m", "-jar", jars[-1]] if java and jars else None


@contextmanager
def running_emulator(command: list[str], log_dir: Path) -> Iterator[str]:
    """Runs the emulator. Yields `host:port`.

    Raises:
        RuntimeError: the emulator did not start.
    """
    port = free_port()
    with Process(
        "google-pubsub-emulator", [*command, "--host=127.0.0.1", f"--port={port}"], log_dir
    ) as process:
        process.wait_ready(lambda: listens(port), START_LIMIT_S)
        yield f"127.0.0.1:{port}"
