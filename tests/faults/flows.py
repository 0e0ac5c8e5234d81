"""Runs of a three-step flow over a hundred items, while each process is killed once.

Each item must appear in the result once and have one row, and the rows must add up to the cost in
the response. To run it in full: `python -m tests.faults.flows`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from tests.faults.streams import PAUSE_S, Kill, kill_in_turn
from tests.faults.world import APIS, WORKERS, BrokerKind, World
from tests.flows.models import CHECK, JOIN, SPLIT, STRING
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S
from workers.models.custom.checking import inspect_folder, write_interface

FLOW = "spell"
TURNS = (WORKERS[0], APIS[0], "redis", WORKERS[1], "broker", APIS[1])
"""The processes to kill, in this order: all except the one that stores rows."""
DEADLINE_S = 2 * START_LIMIT_S
"""A run's deadline. On a busy machine, one run may outlast several kills."""
RUN_LIMIT_S = DEADLINE_S + WAIT_LIMIT_S
_HEAD = """
import time
from cog import BaseModel, BasePredictor


"""
CLASSES = {
    SPLIT.name: f"""{_HEAD}class Predictor(BasePredictor):
    def predict(self, text: str) -> list[str]:
        return text.split()
""",
    CHECK.name: f"""{_HEAD}class Predictor(BasePredictor):
    def predict(self, word: str) -> str:
        time.sleep(0.05)
        return word.upper()
""",
    JOIN.name: f"""{_HEAD}class Predictor(BasePredictor):
    def predict(self, words: list[str]) -> str:
        return " ".join(words)
""",
}


def write_models(folder: Path) -> str:
    """Writes the classes. Returns a catalog that serves them, and the flow."""
    entries = []
    for name, text in CLASSES.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "predict.py").write_text(text)
        write_interface(folder / name, inspect_folder(folder / name).interface)
        entries.append(
            {
                "name": name,
                "task": "custom",
                "source": f"local:{folder / name}",
                "cache": {"ttl_s": 0},
                "deadline": {"default_s": DEADLINE_S, "longest_s": DEADLINE_S},
                "price": {"per_item_usd": 0.25},
            }
        )
    flow = {
        "name": FLOW,
        "input": {"text": STRING},
        "deadline": {"default_s": DEADLINE_S, "longest_s": DEADLINE_S},
        "steps": [
            {"id": "words", "model": SPLIT.name, "input": {"text": "$input.text"}},
            {"id": "check", "model": CHECK.name, "for_each": "$words", "input": {"word": "$item"}},
            {"id": "joined", "model": JOIN.name, "input": {"words": "$check"}},
        ],
        "output": {"text": "$joined", "words": "$check"},
    }
    return json.dumps({"models": entries, "flows": [flow]})


@dataclass
class FlowRun:
    """A run as its caller received it."""

    number: int
    prediction: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The rows that count."""

    def words(self, items: int) -> list[str]:
        return [f"w{self.number}x{item}" for item in range(items)]

    def flaw(self, items: int) -> str:
        """The run's flaw. Empty if there is none."""
        shown, words = self.prediction, [one.upper() for one in self.words(items)]
        if shown.get("status") != "succeeded":
            return f"{shown.get('status')}: {shown.get('error')}"
        if shown["output"] != {"text": " ".join(words), "words": words}:
            return "the output has not each item once"
        steps = Counter(row["step"] for row in self.rows)
        if steps != {"words": 1, "check": items, "joined": 1}:
            return f"rows: {dict(steps)}"
        charged_usd = sum(row["cost_usd"] for row in self.rows)
        if charged_usd != shown["metrics"]["cost_usd"] or charged_usd != 0.25 * (items + 2):
            return f"rows charge {charged_usd}, the answer {shown['metrics']['cost_usd']}"
        return ""


@dataclass
class FlowFindings:
    """The results of all runs."""

    runs: list[FlowRun]
    kills: list[Kill]
    items: int

    def flaws(self) -> list[str]:
        return [f"run {one.number}: {flaw}" for one in self.runs if (flaw := one.flaw(self.items))]


class FlowCallers:
    """Callers that create runs and wait for them to finish, no matter which processes die."""

    def __init__(self, world: World, *, items: int, in_flight: int) -> None:
        self._urls = [world.url(api) for api in APIS]
        self._items = items
        self._in_flight = in_flight
        self._asked = 0
        self.runs: list[FlowRun] = []

    async def run(self, goes_on: Callable[[], bool]) -> None:
        """Creates runs for as long as `goes_on` returns true, and returns when all have
        finished.
        """
        timeout = aiohttp.ClientTimeout(total=20.0)
        async with (
            aiohttp.ClientSession(timeout=timeout) as self._http,
            asyncio.TaskGroup() as callers,
        ):
            for _ in range(self._in_flight):
                callers.create_task(self._call(goes_on))

    async def _call(self, goes_on: Callable[[], bool]) -> None:
        while True:
            run = FlowRun(len(self.runs))
            self.runs.append(run)
            given = {"text": " ".join(run.words(self._items))}
            headers = {"idempotency-key": str(uuid4())}
            body = {"version": FLOW, "input": given}
            async with asyncio.timeout(RUN_LIMIT_S):
                shown = await self._insist("POST", "/v1/predictions", json=body, headers=headers)
                while shown["status"] not in ("succeeded", "failed", "canceled"):
                    await asyncio.sleep(PAUSE_S)
                    shown = await self._insist("GET", f"/v1/predictions/{shown['id']}")
            run.prediction = shown
            if not goes_on():
                return

    async def _insist(self, method: str, path: str, **given: Any) -> Any:
        while True:
            self._asked += 1
            url = self._urls[self._asked % len(self._urls)]
            try:
                async with self._http.request(method, url + path, **given) as answer:
                    if answer.status < 300:
                        return await answer.json()
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(PAUSE_S)


def run(
    folder: Path,
    *,
    broker: BrokerKind,
    items: int,
    in_flight: int,
    every_s: float,
    say: Callable[[str], None],
) -> FlowFindings:
    """Creates runs until each process has been killed once.

    Args:
        folder: receives the state and logs of all parts.
        broker: the embedded Pub/Sub, or a RabbitMQ on this machine.
        items: number of items in each run's second step.
        say: called with a line for each kill.
    """
    served = (",".join(CLASSES), write_models(folder / "models"))
    with World(folder, served=served, broker=broker) as world:
        callers = FlowCallers(world, items=items, in_flight=in_flight)
        kills = asyncio.run(_call_while_killing(callers, world, every_s, say))
        _read_rows(world, callers.runs, items)
    return FlowFindings(callers.runs, kills, items)


async def _call_while_killing(
    callers: FlowCallers, world: World, every_s: float, say: Callable[[str], None]
) -> list[Kill]:
    killing = asyncio.create_task(kill_in_turn(world, len(TURNS), every_s, say, TURNS))
    await callers.run(lambda: not killing.done())
    return await killing


def _read_rows(world: World, runs: list[FlowRun], items: int) -> None:
    """Reads the rows that count, until all expected rows exist."""
    settings, until_s = world.settings, time.monotonic() + START_LIMIT_S
    client = bigquery.Client(
        project=settings.project,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": settings.bigquery_endpoint},
    )
    sql = (
        f"SELECT request_id, step, cost_usd FROM `{settings.dataset}.rows_deduplicated` "
        f"WHERE received_at > TIMESTAMP '2020-01-01' AND flow = '{FLOW}'"
    )
    while True:
        rows = [dict(row.items()) for row in client.query_and_wait(sql)]
        if len(rows) >= len(runs) * (items + 2) or time.monotonic() > until_s:
            break
        time.sleep(PAUSE_S)
    client.close()
    for one in runs:
        one.rows = [row for row in rows if row["request_id"] == one.prediction.get("id")]


def main() -> int:
    """Runs the suite. Returns 0 if nothing was lost or duplicated."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.flows")
    parser.add_argument("--broker", choices=("pubsub", "rabbitmq"), default="pubsub")
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--in-flight", type=int, default=2)
    parser.add_argument("--every-s", type=float, default=6.0)
    parser.add_argument("--folder", type=Path, help="keeps state and logs here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-flows-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        findings = run(
            folder,
            broker=options.broker,
            items=options.items,
            in_flight=options.in_flight,
            every_s=options.every_s,
            say=lambda line: print(line, flush=True),
        )
    print(f"{len(findings.runs)} runs, {len(findings.kills)} kills")
    for flaw in findings.flaws():
        print(f"  {flaw}")
    return 1 if findings.flaws() else 0


if __name__ == "__main__":
    sys.exit(main())
