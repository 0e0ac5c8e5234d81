"""A flow of three models on one worker that has all of them, and on three workers with one each.

Each model takes STEP_S for an item, as a device does: its process sleeps. Runs arrive at random at
the same rate on both. A worker has one model process, which stands for a GPU. What it does not
compute in the time from the first arrival to the last answer is idle.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import yaml
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from bench.load.generator import LoadOrder, LoadReport, drive, percentiles
from bench.pipeline import say_nothing
from bench.report import Figure, Outcome
from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.stack import Stack

STEPS = ("read", "think", "say")
FLOW = "three-steps"
STEP_S = 0.2
RATE_PER_S = 1.0
"""Runs: 0.6 of what one worker can do."""
SEND_S = 60.0
WARM_UP = 8
IN_FLIGHT = 64
CREATED = 201
ROWS_LIMIT_S = 60.0
CLASS = f"""
import time
from cog import BasePredictor

class Predictor(BasePredictor):
    def predict(self, text: str) -> str:
        time.sleep({STEP_S})
        return text + "."
"""


def run() -> Outcome:
    """Measures both, one after the other."""
    shared, apart = _measure(is_shared=True), _measure(is_shared=False)
    figures = []
    for name, one in (("one shared worker", shared), ("three workers", apart)):
        figures += [
            Figure(f"{name}: GPU-seconds idle per run", one["idle_s"] / one["runs"], "s"),
            Figure(f"{name}: share of GPU time that is idle", one["idle_s"] / one["gpu_s"], ""),
            Figure(f"{name}: p50 of a run", one["p50"], "ms"),
            Figure(f"{name}: p95 of a run", one["p95"], "ms"),
        ]
    ratio = (apart["idle_s"] / apart["runs"]) / (shared["idle_s"] / shared["runs"])
    figures.append(Figure("idle of three workers over that of one", ratio, "", ">=", 3.0))
    return Outcome(figures, {"shared": shared, "apart": apart})


def _measure(*, is_shared: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "PENSTOCK_MODELS_FILE": str(_catalog(Path(folder), is_shared=is_shared)),
            "PENSTOCK_PROCESSES": "1",
        }
        ports = Ports.free(1 if is_shared else len(STEPS))
        state_dir = Path(folder) / "state"
        stack = Stack(state_dir, ports=ports, settings=settings, say=say_nothing)
        with stack:
            _runs(stack, "warm", WARM_UP, 0.0)
            report = _runs(stack, "run", round(RATE_PER_S * SEND_S * 2), RATE_PER_S)
            runs = len(report.exchanges)
            busy_s = _busy_s(stack, (runs + WARM_UP) * len(STEPS)) - WARM_UP * len(STEPS) * STEP_S
    gpu_s = report.wall_s * (1 if is_shared else len(STEPS))
    waits_ms = percentiles([one.round_trip_ms for one in report.exchanges])
    return {
        "runs": runs,
        "wall_s": report.wall_s,
        "gpu_s": gpu_s,
        "busy_s": busy_s,
        "idle_s": gpu_s - busy_s,
        **waits_ms,
    }


def _catalog(folder: Path, *, is_shared: bool) -> Path:
    models = []
    for name in STEPS:
        (folder / name).mkdir()
        (folder / name / "predict.py").write_text(CLASS)
        models.append({"name": name, "task": "custom", "source": f"local:{folder / name}"})
    steps, text = [], "$input.text"
    for name in STEPS:
        steps.append({"id": name, "model": name, "input": {"text": text}})
        text = f"${name}"
    flow = {"name": FLOW, "input": {"text": "string"}, "steps": steps, "output": {"text": text}}
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"models": models}))
    refresh_interfaces(path, say_nothing)
    workers = {"workers": [{"name": "together", "models": list(STEPS)}]} if is_shared else {}
    path.write_text(yaml.safe_dump({"models": models, "flows": [flow], **workers}))
    return path


def _runs(stack: Stack, word: str, count: int, rate_per_s: float) -> LoadReport:
    """Asks for runs whose callers wait.

    Raises:
        RuntimeError: one did not succeed.
    """
    bodies = [
        msgspec.json.encode({"version": FLOW, "input": {"text": f"{word} {number}"}}).decode()
        for number in range(count)
    ]
    order = LoadOrder(
        stack.ports.api,
        bodies,
        IN_FLIGHT,
        path="/v1/predictions",
        headers={"prefer": "wait"},
        rate_per_s=rate_per_s,
        send_s=SEND_S,
        sample_every=1,
    )
    report = drive(order)
    if set(report.statuses()) != {CREATED}:
        raise RuntimeError(f"runs were expected, not {report.statuses()}")
    for number, body in report.samples:
        answer = json.loads(body)
        if answer["output"] != {"text": f"{word} {number}{'.' * len(STEPS)}"}:
            raise RuntimeError(f"run {number}: {answer['status']} {answer['error']}")
    return report


def _busy_s(stack: Stack, items: int) -> float:
    """Seconds of a device that all items took, by their rows.

    Raises:
        RuntimeError: rows are missing.
    """
    settings, until_s = stack.settings, time.monotonic() + ROWS_LIMIT_S
    client = bigquery.Client(
        project=settings.project,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": settings.bigquery_endpoint},
    )
    sql = (
        "SELECT COUNT(*), SUM(inference_ms / 1000 / batch_size) "
        f"FROM `{settings.dataset}.rows_deduplicated` "
        f"WHERE received_at > TIMESTAMP '2020-01-01' AND flow = '{FLOW}'"
    )
    while True:
        ((count, seconds),) = (tuple(row.values()) for row in client.query_and_wait(sql))
        if count >= items:
            client.close()
            return float(seconds)
        if time.monotonic() > until_s:
            raise RuntimeError(f"{count} rows of {items}")
        time.sleep(0.5)
