"""The checks of attacks hold on a real stack: a tenant wastes at most what its plan lets it buy."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.attacks import ATTACKS, measure

pytestmark = [pytest.mark.anyio, pytest.mark.slow(about_s=60)]
SECONDS = 3.0
NAMES = ("cuts", "fetches")


async def test_work_for_nothing_is_bounded_by_the_plan(tmp_path: Path) -> None:
    """How long the quiet tenant waits is for the benchmark: here other work decides it."""
    chosen = [attack for attack in ATTACKS if attack.name in NAMES]
    figures, details = await measure(tmp_path, chosen, SECONDS)
    bounded = [one for one in figures if one.bound and "p99" not in one.name]
    assert len([one for one in bounded if "for nothing" in one.name]) == len(NAMES)
    assert not [one for one in bounded if not one.is_met]
    assert not sum(one["quiet_refused"] for one in details)
