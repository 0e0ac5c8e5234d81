"""The fault suite in its short form: every kind of fault once, while traffic runs; `make faults`
runs it in full.
"""

from pathlib import Path
from typing import get_args

import pytest

from tests.faults.schedule import faults, kinds
from tests.faults.suite import run
from tests.faults.world import BrokerKind
from tests.rabbitmq import needs_rabbitmq

FAULTS = 6
REQUESTS = 500
SEED = 16247
"""Its first faults are one of each kind; among them are a killed worker, a Pub/Sub that hangs, a
restarted API.
"""


@pytest.mark.parametrize("broker", get_args(BrokerKind))
def test_nothing_is_lost_doubled_or_wrong_while_parts_fail(
    broker: BrokerKind, tmp_path: Path
) -> None:
    if broker == "rabbitmq":
        needs_rabbitmq()
    found = run(
        tmp_path,
        requests=REQUESTS,
        faults_count=FAULTS,
        in_flight=24,
        seed=SEED,
        say=print,
        broker=broker,
    )
    assert found.flaws() == []
    assert found.faults.total() == FAULTS
    assert found.tally.ended == found.tally.sent >= REQUESTS


def test_every_kind_comes_before_any_comes_again() -> None:
    drawn = [(fault.kind, fault.target) for fault in faults(SEED, len(kinds()))]
    assert sorted(drawn) == sorted(kinds())
    assert {kind for kind, _ in drawn[:FAULTS]} == {kind for kind, _ in kinds()}
