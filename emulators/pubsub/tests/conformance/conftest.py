"""Runs each test against the embedded server (in memory and in a directory) and Google's emulator.

Google's emulator is used only if it is installed.
"""

import itertools
import os
from collections.abc import Callable, Iterator

import pytest
from google.cloud import pubsub_v1

from tests.conformance.target import (
    EMBEDDED,
    EMBEDDED_KEPT,
    GOOGLE_EMULATOR,
    Target,
    embedded,
    google_emulator,
)

# The jar's path may be in the environment, which tests otherwise don't see.
_JAR = os.environ.get("PUBSUB_EMULATOR_JAR")
_numbers = itertools.count(1)


@pytest.fixture(
    scope="session",
    params=[
        EMBEDDED,
        EMBEDDED_KEPT,
        pytest.param(GOOGLE_EMULATOR, marks=pytest.mark.google_emulator),
    ],
)
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp(request.param)
    is_google = request.param == GOOGLE_EMULATOR
    with google_emulator(_JAR, folder) if is_google else embedded(request.param, folder) as target:
        yield target


@pytest.fixture
def project(target: Target) -> str:
    """Returns a project that no other test uses, so that tests can share a server."""
    return f"projects/conformance-{next(_numbers)}"


@pytest.fixture
def publisher(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pubsub_v1.PublisherClient]:
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", target.endpoint)
    options = pubsub_v1.types.PublisherOptions(enable_message_ordering=True)
    with pubsub_v1.PublisherClient(publisher_options=options) as client:
        yield client


@pytest.fixture
def subscriber(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pubsub_v1.SubscriberClient]:
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", target.endpoint)
    with pubsub_v1.SubscriberClient() as client:
        yield client


@pytest.fixture
def make_topic(publisher: pubsub_v1.PublisherClient, project: str) -> Callable[..., str]:
    def make(topic_id: str = "jobs", **fields: object) -> str:
        return str(
            publisher.create_topic(request={"name": f"{project}/topics/{topic_id}", **fields}).name
        )

    return make


@pytest.fixture
def make_subscription(subscriber: pubsub_v1.SubscriberClient, project: str) -> Callable[..., str]:
    def make(topic: str, subscription_id: str = "workers", **fields: object) -> str:
        request = {"name": f"{project}/subscriptions/{subscription_id}", "topic": topic, **fields}
        return str(subscriber.create_subscription(request=request).name)

    return make
