"""The services of these tests are reached by Unix sockets, as those of `penstock up`."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_service_has_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps no port from a class, so that its process makes no rule for each of 65,535 others.

    That takes a third of its start. test_services.py and test_confinement.py have services with
    ports.
    """
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "unix:///run/redis.sock")
    monkeypatch.setenv("PENSTOCK_PUBSUB_ENDPOINT", "unix:///run/pubsub.sock")
