"""`gcloud pubsub` against the REST server, if gcloud is installed."""

import json
import os
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.limits import WAIT_LIMIT_S

Gcloud = Callable[..., Any]

pytestmark = [
    pytest.mark.skipif(shutil.which("gcloud") is None, reason="needs gcloud"),
]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    command = [sys.executable, "-m", "pubsub_emulator", "--port=0", "--rest-port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.stdout.readline().strip().removeprefix("Pub/Sub REST listening on ")
        process.terminate()


@pytest.fixture
def gcloud(endpoint: str, tmp_path: Path) -> Gcloud:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "CLOUDSDK_CONFIG": str(tmp_path / "gcloud"),
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_PUBSUB": f"{endpoint}/",
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_CORE_PROJECT": tmp_path.name.replace("_", "-"),
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
    }

    def run(words: str, *more: str) -> Any:
        done = subprocess.run(
            ["gcloud", "pubsub", *words.split(), *more, "--format=json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=WAIT_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout or "null")

    return run


def test_topics(gcloud: Gcloud) -> None:
    gcloud("topics create jobs --labels=a=b")
    gcloud("topics update jobs --update-labels=c=d --message-retention-duration=1h")
    jobs_topic = gcloud("topics describe jobs")
    assert jobs_topic["labels"] == {"a": "b", "c": "d"}
    assert jobs_topic["messageRetentionDuration"] == "3600s"
    assert [topic["name"] for topic in gcloud("topics list")] == [jobs_topic["name"]]
    gcloud("topics delete jobs")
    assert gcloud("topics list") == []


def test_messages(gcloud: Gcloud) -> None:
    gcloud("topics create jobs")
    gcloud("subscriptions create workers --topic=jobs --ack-deadline=20")
    published = gcloud("topics publish jobs --message=hello --attribute=k=v")
    (received,) = gcloud("subscriptions pull workers")
    assert received["message"]["messageId"] == published["messageIds"][0]
    assert received["message"]["attributes"] == {"k": "v"}
    ack_ids = f"--ack-ids={received['ackId']}"
    gcloud("subscriptions modify-message-ack-deadline workers --ack-deadline=0", ack_ids)
    (again,) = gcloud("subscriptions pull workers")
    assert again["message"]["data"] == received["message"]["data"]
    gcloud("subscriptions ack workers", f"--ack-ids={again['ackId']}")
    second = gcloud("topics publish jobs --message=second")
    (redelivered,) = gcloud("subscriptions pull workers --limit=5")
    assert redelivered["message"]["messageId"] == second["messageIds"][0]


def test_subscriptions(gcloud: Gcloud) -> None:
    gcloud("topics create jobs")
    gcloud("subscriptions create workers --topic=jobs")
    gcloud("subscriptions update workers --ack-deadline=60 --retain-acked-messages")
    subscription = gcloud("subscriptions describe workers")
    assert (subscription["ackDeadlineSeconds"], subscription["retainAckedMessages"]) == (60, True)
    assert len(gcloud("subscriptions list")) == 1
    assert gcloud("topics list-subscriptions jobs") == [subscription["name"]]
    gcloud("subscriptions delete workers")
    assert gcloud("subscriptions list") == []


def test_snapshots_and_seeks(gcloud: Gcloud) -> None:
    gcloud("topics create jobs")
    gcloud("subscriptions create workers --topic=jobs")
    gcloud("snapshots create monday --subscription=workers")
    gcloud("topics publish jobs --message=hello")
    assert len(gcloud("subscriptions pull workers --auto-ack")) == 1
    gcloud("subscriptions seek workers --snapshot=monday")
    assert len(gcloud("subscriptions pull workers")) == 1
    gcloud("subscriptions seek workers --time=2100-01-01T00:00:00Z")
    gcloud("topics publish jobs --message=second")
    (received,) = gcloud("subscriptions pull workers --limit=5")
    assert b64decode(received["message"]["data"]) == b"second"
    assert len(gcloud("snapshots list")) == 1
    gcloud("snapshots delete monday")


def test_policies(gcloud: Gcloud, tmp_path: Path) -> None:
    gcloud("topics create jobs")
    member = ("--member=user:a@example.com", "--role=roles/pubsub.viewer")
    gcloud("topics add-iam-policy-binding jobs", *member)
    (binding,) = gcloud("topics get-iam-policy jobs")["bindings"]
    assert binding == {"members": ["user:a@example.com"], "role": "roles/pubsub.viewer"}
    gcloud("topics remove-iam-policy-binding jobs", *member)
    assert "bindings" not in gcloud("topics get-iam-policy jobs")


def test_schemas(gcloud: Gcloud) -> None:
    definition = '{"type":"record","name":"User","fields":[{"name":"name","type":"string"}]}'
    gcloud("schemas validate-schema --type=avro", f"--definition={definition}")
    gcloud("schemas create user --type=avro", f"--definition={definition}")
    assert gcloud("schemas describe user")["definition"] == definition
    gcloud("schemas commit user --type=avro", f"--definition={definition}")
    assert len(gcloud("schemas list-revisions user")) == 2
    gcloud("topics create typed --schema=user --message-encoding=json")
    gcloud("topics publish typed", '--message={"name":"a"}')
    gcloud("schemas delete user")


def test_schemas_of_protocol_buffers(gcloud: Gcloud) -> None:
    definition = "syntax = 'proto3'; message Message { optional string key = 1; }"
    written = ("--type=protocol-buffer", f"--definition={definition}")
    gcloud("schemas create key", *written)
    message = ('--message={"key": "my-key"}', "--message-encoding=json")
    gcloud("schemas validate-message", *message, *written)
    assert gcloud("schemas describe key")["type"] == "PROTOCOL_BUFFER"
