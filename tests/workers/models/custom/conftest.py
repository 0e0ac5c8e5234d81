"""In these tests, services listen on Unix sockets, just as they do under `penstock up`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.workers.models.custom.classes import entry_of
from tests.workers.models.custom.started import OperatorsLog, StartClass, StartedClass
from workers.models.custom import printed


@pytest.fixture(autouse=True)
def _no_service_has_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks no ports, so that the class's process doesn't create a rule for each of the 65,535
    others.

    Creating the rules takes a third of its startup time. test_services.py and test_confinement.py
    have services with ports.
    """
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "unix:///run/redis.sock")
    monkeypatch.setenv("PENSTOCK_PUBSUB_ENDPOINT", "unix:///run/pubsub.sock")


@pytest.fixture
def start_class() -> Iterator[StartClass]:
    """Starts a folder's class, as a worker does, and stops it after the test."""
    classes: list[StartedClass] = []

    def start(folder: Path, **more: Any) -> StartedClass:
        classes.append(StartedClass(entry_of(folder, **more), folder))
        return classes[-1]

    yield start
    for started in classes:
        started.close()


@pytest.fixture
def operators_log(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OperatorsLog]:
    """Collects class output in the log of this test's workers."""
    path = tmp_path_factory.mktemp("log") / "stderr"
    with path.open("w", encoding="utf-8") as file, monkeypatch.context() as patch:
        patch.setattr(printed, "sys", SimpleNamespace(stderr=file))
        yield OperatorsLog(path)
