"""Callers that hang up at random moments, on all tasks: the short version."""

from pathlib import Path

import pytest

from tests.faults.hang_ups import FAR_S, requests_of, run
from tests.faults.world import BrokerKind
from tests.rabbitmq import needs_rabbitmq

pytestmark = pytest.mark.slow(about_s=60)

HANG_UPS = 60
LIMIT_S = 10.0
"""Allows for a slow, busy machine. Jobs that were not canceled kept running for 20 to 35 s."""


@pytest.mark.parametrize(("broker", "delay_s"), [("pubsub", FAR_S), ("rabbitmq", 0.0)])
def test_each_abandoned_job_ends_soon_and_costs_what_was_delivered(
    broker: BrokerKind, delay_s: float, tmp_path: Path
) -> None:
    if broker == "rabbitmq":
        needs_rabbitmq()
    found = run(tmp_path, hang_ups=HANG_UPS, broker=broker, broker_delay_s=delay_s, say=print)
    assert found.flaws(LIMIT_S) == []
    assert len(found.left) >= HANG_UPS
    assert {call.kind for call in found.left.values()} == set(requests_of(0))
    assert found.ends_s(), "some jobs had begun"
