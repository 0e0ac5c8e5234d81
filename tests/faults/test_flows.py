"""A three-step flow over a hundred items, while each process is killed once."""

from pathlib import Path

import pytest

from tests.faults.flows import TURNS, run
from tests.faults.world import BrokerKind
from tests.rabbitmq import needs_rabbitmq

pytestmark = pytest.mark.slow(about_s=120)

IN_FLIGHT, EVERY_S = 2, 6.0


@pytest.mark.parametrize("broker", ["pubsub", "rabbitmq"])
def test_each_item_counts_once_whoever_dies(tmp_path: Path, broker: BrokerKind) -> None:
    if broker == "rabbitmq":
        needs_rabbitmq()
    findings = run(
        tmp_path, broker=broker, items=100, in_flight=IN_FLIGHT, every_s=EVERY_S, say=print
    )
    assert findings.flaws() == []
    assert [one.target for one in findings.kills] == list(TURNS)
    # Some were in progress at each kill. How many others start depends on the machine.
    assert len(findings.runs) >= IN_FLIGHT
