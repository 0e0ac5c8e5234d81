"""`python -m tests.faults`: the full fault suite.

Prints every fault and the table, and fails on any flaw.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import get_args

from shared.process.loopback import exempt_loopback_from_proxies
from tests.faults.suite import run
from tests.faults.world import BrokerKind, RowsKind

FLAWS_SHOWN = 20


def main() -> int:
    """Runs the suite. Returns 0 if nothing was lost, duplicated or wrong."""
    exempt_loopback_from_proxies()
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--faults", type=int, default=66)
    parser.add_argument("--in-flight", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--broker", choices=get_args(BrokerKind), default="pubsub")
    parser.add_argument("--rows", choices=get_args(RowsKind), default="bigquery")
    parser.add_argument(
        "--broker-delay-ms",
        type=float,
        default=0.0,
        help="of each way between the broker and an API instance or a worker",
    )
    parser.add_argument(
        "--folder", type=Path, help="keeps state and logs here; default: a folder that goes"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = run(
            folder,
            requests=given.requests,
            faults_count=given.faults,
            in_flight=given.in_flight,
            seed=given.seed,
            say=lambda line: print(line, flush=True),
            broker=given.broker,
            rows=given.rows,
            broker_delay_s=given.broker_delay_ms / 1000,
        )
    print()
    for kind, count in sorted(found.faults.items()):
        print(f"  {kind:16} {count:6}")
    print()
    for name, count in found.table():
        print(f"  {name:16} {count:6}")
    print(f"\n  answers: {dict(found.tally.answered)}")
    print(f"  tries that failed: {dict(found.tally.tries)}")
    print(
        f"  longest wait for an answer: {found.tally.longest_s:.1f} s;"
        f" the suite took {found.took_s:.0f} s"
    )
    for flaw in found.flaws()[:FLAWS_SHOWN]:
        print(f"  {flaw}")
    return 1 if found.flaws() else 0


if __name__ == "__main__":
    sys.exit(main())
