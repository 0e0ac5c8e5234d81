"""Rows on disk while BigQuery is out of reach: segments of JSON lines, in a directory that processes may share."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import Counter

log = logging.getLogger(__name__)

SPOOLED = Counter("penstock_rows_spooled_total", "Rows that went to disk because BigQuery was out of reach")
REJECTED = Counter("penstock_rows_rejected_total", "Rows that BigQuery refused for good; kept in rejected.jsonl")

Fields = dict[str, Any]
"""One row by column."""


class Spool:
    """Segments of rows (JSON lines) in a directory; a lock on a segment keeps two processes from sending it twice."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._written = 0
        self.rows = 0

    def open(self) -> None:
        """Makes the directory and counts what an earlier process left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._count()

    def add(self, rows: Sequence[Fields]) -> None:
        """Writes `rows` as one segment, on disk before it returns."""
        if not rows:
            return
        with self._lock:
            self._written += 1
            self.rows += len(rows)
            path = self._folder / f"{time.time_ns()}-{os.getpid()}-{self._written}.segment"
        part = path.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
        SPOOLED.inc(len(rows))

    def segments(self) -> Iterator[list[Fields]]:
        """Yields the rows of each segment that nobody else holds, oldest first; each is removed once dealt with."""
        for path in sorted(self._folder.glob("*.segment")):
            try:
                file = path.open("r", encoding="utf-8")
            except FileNotFoundError:
                continue
            with file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                if path.exists():
                    yield [json.loads(line) for line in file]
                    path.unlink()
        self._count()

    def reject(self, refused: Sequence[tuple[Fields, str]]) -> None:
        """Keeps what BigQuery refused for good, with the reason, for a person to look at."""
        if not refused:
            return
        REJECTED.inc(len(refused))
        log.error("rows rejected", extra={"rows": len(refused), "reason": refused[0][1]})
        with (self._folder / "rejected.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"reason": reason, "row": row}) + "\n" for row, reason in refused)

    def _count(self) -> None:
        self.rows = 0
        for path in self._folder.glob("*.segment"):
            try:
                with path.open("rb") as file:
                    self.rows += sum(1 for _ in file)
            except FileNotFoundError:  # sent by another process meanwhile
                continue
