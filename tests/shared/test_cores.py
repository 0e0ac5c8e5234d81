import os
from pathlib import Path

import pytest

from shared.process.cores import usable_cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", None),
        ("50000 100000", 1),
        ("100000 100000", 1),
        ("99900000 100000", None),
        ("nonsense", None),
    ],
)
def test_quota_of_the_control_group_counts(tmp_path: Path, quota: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path / "cpu.max") == (cores or len(os.sched_getaffinity(0)))


def test_affinity_counts_where_there_is_no_quota(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores(tmp_path / "none") == 1
    finally:
        os.sched_setaffinity(0, before)
