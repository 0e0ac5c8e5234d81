"""A ledger is read as written, even if it is truncated."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_load.ledger import LedgerHead, LedgerLine, open_ledger, read_ledger
from shared.errors import ConfigurationError

HEAD = LedgerHead("load-1", "http://here", 1.5)
LINES = [
    LedgerLine("load-1-0", "acme", "mini", 1.0, 2.0, 3, status=200, tokens=7, cost_usd=1e-17),
    LedgerLine("load-1-1", "", "mini", 1.0, 2.0, 1, ending="lost"),
]


def written(path: Path) -> Path:
    with open_ledger(path, HEAD) as ledger:
        for line in LINES:
            ledger.write(line)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_ledger(written(tmp_path / "new" / "ledger.jsonl")) == (HEAD, LINES, 0)


def test_line_that_breaks_off_is_left_out_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger.jsonl")
    path.write_bytes(path.read_bytes()[:-5])
    assert read_ledger(path) == (HEAD, LINES[:1], 1)


def test_kept_ledger_is_not_written_over(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger.jsonl")
    with pytest.raises(ConfigurationError, match=r"ledger\.jsonl: File exists"):
        written(path)
    assert read_ledger(path).lines == LINES


@pytest.mark.parametrize(
    "content", [b"", b"no ledger\n", b'{"run": "a", "url": "", "began_at_s": 1}\n{"id": 3}\n']
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"not a ledger, or line \d is corrupt"):
        read_ledger(path)
