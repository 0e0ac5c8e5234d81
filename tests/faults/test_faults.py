"""The fault suite's short version: every kind of fault once, while traffic runs; `make faults` runs
it in full.
"""

from pathlib import Path

import pytest

from tests.faults.schedule import faults, kinds
from tests.faults.suite import run
from tests.faults.world import BrokerKind, RowsKind
from tests.rabbitmq import needs_rabbitmq

pytestmark = pytest.mark.slow(about_s=60)

FAULTS = 7
REQUESTS = 500
PAUSE_S = 0.5
"""Leaves some cores for other tests. If anything hangs, all callers will soon be waiting for it."""
SEED = 752
"""With this seed, the first faults are one of each kind, including a killed API, a hung Pub/Sub,
and a restarted worker.
"""
SEED_WITH_ARCHIVE = 16480
"""Same as SEED, but with a killed row archive and a hung BigQuery."""


FAR_S = 0.025
"""Delay in each direction between the parts and a distant broker."""


@pytest.mark.parametrize(
    ("broker", "rows", "seed", "broker_delay_s"),
    [
        ("pubsub", "bigquery", SEED, 0.0),
        ("pubsub", "bigquery", SEED, FAR_S),
        ("rabbitmq", "bigquery", SEED, 0.0),
        ("pubsub", "objects", SEED_WITH_ARCHIVE, 0.0),
    ],
)
def test_nothing_is_lost_doubled_or_wrong_while_parts_fail(
    broker: BrokerKind, rows: RowsKind, seed: int, broker_delay_s: float, tmp_path: Path
) -> None:
    if broker == "rabbitmq":
        needs_rabbitmq()
    found = run(
        tmp_path,
        requests=REQUESTS,
        faults_count=FAULTS,
        in_flight=24,
        seed=seed,
        say=print,
        broker=broker,
        rows=rows,
        broker_delay_s=broker_delay_s,
        pause_s=PAUSE_S,
    )
    assert found.flaws() == []
    assert found.faults.total() == FAULTS
    assert found.tally.ended == found.tally.sent >= REQUESTS


def test_every_kind_comes_before_any_comes_again() -> None:
    drawn = [(fault.kind, fault.target) for fault in faults(SEED, len(kinds()))]
    assert sorted(drawn) == sorted(kinds())
    assert {kind for kind, _ in drawn[:FAULTS]} == {kind for kind, _ in kinds()}
