"""The memory that a class may take where its entry does not say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.models.custom.limits import usual_memory_bytes

GIB = 1024**3


@pytest.mark.parametrize(
    ("group", "machine_kib", "expected_bytes"),
    [
        ("max\n", 10 * GIB // 1024, 8 * GIB),
        (f"{5 * GIB}\n", 10 * GIB // 1024, 4 * GIB),
        (None, 10 * GIB // 1024, 8 * GIB),
        (f"{5 * GIB}\n", None, 4 * GIB),
        (None, None, 0),
    ],
)
def test_it_is_a_part_of_what_there_is(
    tmp_path: Path, group: str | None, machine_kib: int | None, expected_bytes: int
) -> None:
    if group is not None:
        (tmp_path / "memory.max").write_text(group)
    if machine_kib is not None:
        (tmp_path / "meminfo").write_text(f"MemTotal:  {machine_kib} kB\nMemFree: 1 kB\n")
    assert usual_memory_bytes(tmp_path / "memory.max", tmp_path) == expected_bytes
