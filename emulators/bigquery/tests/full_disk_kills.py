"""`python -m tests.full_disk_kills FOLDER KILLS`: SIGKILLs a server whose disk is sometimes full.

The run takes place in a mount namespace (`unshare --map-root-user --mount`), where it can mount a
small disk.
"""

import random
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from google.cloud import bigquery

from tests.connecting import connected, rows_of
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S
from tests.process import Process, free_port, listens
from tests.test_process import process

ANSWERED_BEFORE_A_KILL = 20
DISK_MIB = 24
SMALL_BYTES, LARGE_BYTES = 200, 200_000
OK, FULL = 200, 503


@dataclass
class Ledger:
    """The server's responses."""

    answered: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    problem: str = ""
    full_starts: int = 0
    """Number of successful starts on a full disk."""
    told: list[str] = field(default_factory=list)
    """Error messages from failed starts."""


class Disk:
    """An in-memory disk. A full disk is given space by growing it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._mib = folder, DISK_MIB
        self._mount(f"size={DISK_MIB}m")

    def grow(self) -> None:
        self._mib += DISK_MIB
        self._mount(f"remount,size={self._mib}m")

    def _mount(self, options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self._folder)]
        subprocess.run(command, check=True)


def insert(url: str, first: int, size: int, ledger: Ledger, is_enough: threading.Event) -> None:
    """Inserts rows until the server dies. With a large `size`, some rows are rejected first."""
    before = len(ledger.refused)
    with httpx.Client(timeout=WAIT_LIMIT_S) as http:
        for number in range(first, first + 100_000):
            # DuckDB would compress repetitive text, and the disk would not fill up.
            text = random.Random(number).randbytes(size // 2).hex()
            rows = {"rows": [{"json": {"id": number, "text": text}}]}
            try:
                response = http.post(url, json=rows)
            except httpx.TransportError:
                return
            if response.status_code == FULL:
                ledger.refused.add(number)
            elif response.status_code == OK and "insertErrors" not in response.json():
                ledger.answered.add(number)
            else:
                ledger.problem = response.text
            is_filled = size < LARGE_BYTES or len(ledger.refused) > before
            if ledger.problem or (number - first >= ANSWERED_BEFORE_A_KILL and is_filled):
                is_enough.set()


def kill_while_inserting(running: Process, url: str, kill: int, size: int, ledger: Ledger) -> None:
    is_enough = threading.Event()
    arguments = (url, kill * 100_000, size, ledger, is_enough)
    inserting = threading.Thread(target=insert, args=arguments)
    inserting.start()
    try:
        assert is_enough.wait(WAIT_LIMIT_S), (kill, len(ledger.answered), len(ledger.refused))
    finally:
        running.kill()
        inserting.join(WAIT_LIMIT_S)
    assert not ledger.problem, ledger.problem


def start_on_a_full_disk(running: Process, port: int, ledger: Ledger) -> None:
    """Starts the server, or checks that it reports in one line why it can't start."""
    log_chars = len(running.log_path.read_text())
    running.start()
    running.wait_ready(lambda: listens(port) or not running.is_running, START_LIMIT_S)
    if running.is_running:
        ledger.full_starts += 1
        return
    (line,) = running.log_path.read_text()[log_chars:].splitlines()
    assert line.startswith("bigquery-emulator: cannot open"), line
    ledger.told.append(line)


def check(endpoint: str, ledger: Ledger, when: object) -> None:
    """Checks that each confirmed row exists exactly once and that no rejected row exists."""
    with connected(endpoint, "p") as client:
        ids = [row[0] for row in rows_of(client, "SELECT id FROM d.t")]
    lost = ledger.answered - set(ids)
    assert not lost, (when, len(lost), sorted(lost)[:5])
    assert len(ids) == len(set(ids)), (when, "twice")
    refused_rows = ledger.refused & set(ids)
    assert not refused_rows, (when, "refused and kept", sorted(refused_rows)[:5])


def create_table(endpoint: str) -> None:
    with connected(endpoint, "p") as client:
        client.create_dataset("d")
        types = {"id": "INT64", "text": "STRING"}
        schema = [bigquery.SchemaField(name, kind) for name, kind in types.items()]
        client.create_table(bigquery.Table("p.d.t", schema))


def main(folder: Path, kills: int) -> str:
    port, ledger = free_port(), Ledger()
    disk = Disk(folder)
    endpoint = f"http://127.0.0.1:{port}"
    url = f"{endpoint}/bigquery/v2/projects/p/datasets/d/tables/t/insertAll"
    with process(port, folder.parent, folder / "data") as running:
        running.wait_ready(lambda: listens(port), START_LIMIT_S)
        create_table(endpoint)
        for kill in range(kills):
            # The disk is full at every third kill.
            is_full = kill % 3 == 2
            kill_while_inserting(
                running, url, kill, LARGE_BYTES if is_full else SMALL_BYTES, ledger
            )
            if is_full:
                start_on_a_full_disk(running, port, ledger)
                disk.grow()
            if not running.is_running:
                running.start()
                running.wait_ready(lambda: listens(port), START_LIMIT_S)
            check(endpoint, ledger, kill)
    assert ledger.refused, "the disk was never full"
    return (
        f"{kills} kills, {len(ledger.answered)} answered, {len(ledger.refused)} refused, none lost;"
        f" {ledger.full_starts} starts on a full disk, {ledger.told}"
    )


if __name__ == "__main__":
    sys.stdout.write(main(Path(sys.argv[1]), int(sys.argv[2])) + "\n")
