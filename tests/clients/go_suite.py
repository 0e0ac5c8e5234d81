"""`python -m tests.clients.go_suite`: the integration tests of Google's Go client for Pub/Sub.

The tests are Google's, as packaged by Debian in golang-google-cloud-dev, and are built with the
system's Go. They run against the embedded Pub/Sub, and also against Google's emulator if it is
installed. Fails if the embedded Pub/Sub fails a test that needs only a server.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from infra.local.process import Process, free_port, listens
from infra.text_table import table
from shared.process.loopback import exempt_loopback_from_proxies
from tests.google_emulator import find_emulator, running_emulator

GOPATH = Path("/usr/share/gocode")
PACKAGE = "cloud.google.com/go/pubsub"
CACHE = Path("var/clients/pubsub-go").absolute()
BUILD_LIMIT_S = 600.0
RUN_LIMIT_S = 300.0
START_LIMIT_S = 60.0
NEED_GOOGLE = {
    "CreateTopic_KMS": "a key of Cloud KMS",
    "MessageStoragePolicy_ProjectLevel": "a project with a policy of regions",
    "MessageStoragePolicy_TopicLevel": "a project with a policy of regions",
    "PublicTopic": "a public topic of Google's",
    "UpdateSubscription": "an attribute that the service leaves in push configs that are gone",
    "UpdateSubscription_ExpirationPolicy": "the same attribute",
    "UpdateTopicLabels": "a project with a policy of regions",
}
"""Tests that only Google's servers can pass, and the feature they need."""
_RESULT = re.compile(r"^--- (PASS|FAIL|SKIP): TestIntegration_(\w+) \(([\d.]+)s\)", re.M)
Results = dict[str, tuple[str, float]]
"""Outcome and duration in seconds, keyed by test."""


def main() -> int:
    """Runs the tests.

    Returns 0 if the embedded server passes every test it can, or if Go is not installed.
    """
    exempt_loopback_from_proxies()
    source = GOPATH / "src" / PACKAGE
    if shutil.which("go") is None or not (source / "integration_test.go").is_file():
        print("skipped: it needs Debian's packages golang-go and golang-google-cloud-dev")
        return 0
    with tempfile.TemporaryDirectory(prefix="penstock-go-") as made:
        program, key = _build(), _made_up_key(Path(made))
        port = free_port()
        command = [sys.executable, "-m", "pubsub_emulator", "--port", str(port)]
        with Process("pubsub", command, Path(made)) as process:
            process.wait_ready(partial(listens, port), START_LIMIT_S)
            ours = _run(program, source, key, f"127.0.0.1:{port}")
        theirs: Results = {}
        if emulator := find_emulator():
            with running_emulator(emulator, Path(made)) as host:
                theirs = _run(program, source, key, host)
    print(table(("test", "embedded", "s", "Google's emulator", "s"), _rows(ours, theirs)))
    failed = sorted(
        name for name, (outcome, _) in ours.items() if outcome == "FAIL" and name not in NEED_GOOGLE
    )
    print(f"failed: {', '.join(failed) or 'none'}")
    for name, reason in NEED_GOOGLE.items():
        print(f"  {name} needs {reason}")
    return 1 if failed or not ours else 0


def _build() -> Path:
    """Builds the test program. Go reuses earlier build results."""
    program = CACHE / "pubsub.test"
    CACHE.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "GO111MODULE": "off",
        "GOPATH": f"{CACHE / 'gopath'}:{GOPATH}",
        "GOCACHE": str(CACHE / "cache"),
    }
    command = ["go", "test", "-c", "-o", str(program), PACKAGE]
    subprocess.run(command, env=environment, check=True, timeout=BUILD_LIMIT_S)
    return program


def _made_up_key(folder: Path) -> Path:
    """A fake service account; without one, the tests are skipped."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    path = folder / "account.json"
    account = {
        "type": "service_account",
        "project_id": "penstock-go",
        "private_key": pem.decode(),
        "client_email": "nobody@penstock-go.iam.gserviceaccount.com",
        "token_uri": "http://127.0.0.1:1/token",
    }
    path.write_text(json.dumps(account))
    return path


def _run(program: Path, source: Path, key: Path, host: str) -> Results:
    environment = os.environ | {
        "PUBSUB_EMULATOR_HOST": host,
        "GCLOUD_TESTS_GOLANG_PROJECT_ID": "penstock-go",
        "GCLOUD_TESTS_GOLANG_KEY": str(key),
    }
    options = ["-test.v", "-test.run=Integration", f"-test.timeout={RUN_LIMIT_S:.0f}s"]
    done = subprocess.run(
        [str(program), *options],
        cwd=source,  # it reads files from this folder
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S + 30,
        check=False,
    )
    return {name: (outcome, float(took)) for outcome, name, took in _RESULT.findall(done.stdout)}


def _rows(ours: Results, theirs: Results) -> list[tuple[object, ...]]:
    names = sorted({*ours, *theirs})
    nothing = ("", 0.0)
    return [(name, *ours.get(name, nothing), *theirs.get(name, nothing)) for name in names]


if __name__ == "__main__":
    sys.exit(main())
