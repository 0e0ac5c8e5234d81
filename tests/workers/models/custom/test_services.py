"""A class can't reach our services' ports."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shared.settings import Settings, read_settings
from tests.workers.models.custom.classes import compute, entry_of, output_of, write_class
from tests.workers.models.custom.started import StartedClass
from workers.models.custom.runner.confinement import abi_version
from workers.models.custom.services import service_ports

CONNECTS = """
import socket

class Predictor(BasePredictor):
    def predict(self, port: int) -> str:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=60).close()
        except OSError as error:
            return type(error).__name__
        return "connected"
"""


@pytest.fixture(autouse=True)
def _no_service_has_a_port() -> None:
    """In these tests, services do have ports."""


@pytest.mark.parametrize(
    ("given", "ports"),
    [
        ({}, [80, 6379]),
        (
            {"redis_url": "rediss://:word@10.0.0.1:6380/0", "records_url": "redis://h"},
            [80, 6379, 6380],
        ),
        ({"pubsub_endpoint": "127.0.0.1:8085", "redis_url": "redis://h:1"}, [1, 8085]),
        ({"pubsub_endpoint": "unix:///tmp/s", "redis_url": "unix:///tmp/r"}, []),
        ({"broker": "rabbitmq://u:p@h/v", "redis_url": "redis://h:1"}, [1, 80, 5672]),
        ({"broker": "rabbitmq://u:p@127.0.0.1/v", "redis_url": "redis://h:1"}, [1, 5672]),
        (
            {
                "pubsub_endpoint": "h:2",
                "redis_url": "redis://h:1",
                "bigquery_endpoint": "http://127.0.0.1:9050",
            },
            [1, 2, 80, 9050],
        ),
    ],
)
def test_ports_are_those_of_the_settings(given: dict[str, str], ports: list[int]) -> None:
    assert service_ports(read_settings(Settings, **given)) == ports


@pytest.mark.skipif(abi_version() < 4, reason="Landlock 4 restricts connections (Linux 6.7)")
def test_a_class_reaches_other_ports_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as ours,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        monkeypatch.setenv("PENSTOCK_REDIS_URL", f"redis://127.0.0.1:{ours.getsockname()[1]}/0")
        folder = write_class(tmp_path, CONNECTS)
        with StartedClass(entry_of(folder), folder) as model:
            found = [
                output_of(compute(model, {"port": one.getsockname()[1]})) for one in (ours, other)
            ]
    assert found == ["PermissionError", "connected"]
