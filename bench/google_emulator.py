"""Google's own Pub/Sub emulator, where it is installed: what the embedded Pub/Sub is compared with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.local.process import Process, free_port, listens

START_LIMIT_S = 30.0
_SDK = Path("/usr/lib/google-cloud-sdk")
"""The folder of the Debian and RPM packages. Elsewhere it is found by `gcloud` on PATH."""


def find_emulator() -> list[str] | None:
    """The command that starts the emulator, without options. None if it or Java is missing."""
    gcloud, java = shutil.which("gcloud"), shutil.which("java")
    sdks = [Path(gcloud).resolve().parent.parent, _SDK] if gcloud else [_SDK]
    jars = [jar for sdk in sdks for jar in sorted(sdk.glob("platform/pubsub-emulator/lib/cloud-pubsub-emulator*.jar"))]
    return [java, "-jar", str(jars[-1])] if java and jars else None


@contextmanager
def running_emulator(command: list[str], log_dir: Path) -> Iterator[str]:
    """Runs it. Yields `host:port`.

    Raises:
        Unavailable: it did not start.
    """
    port = free_port()
    with Process("google-pubsub-emulator", [*command, "--host=127.0.0.1", f"--port={port}"], log_dir) as process:
        process.wait_ready(lambda: listens(port), START_LIMIT_S)
        yield f"127.0.0.1:{port}"
