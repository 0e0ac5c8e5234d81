"""A class with `predict_batch`, run in the whole stack and in a single process.

Like a device, the model takes 5 ms per item in a batch, during which its process sleeps. The
measured CPU time is therefore the pipeline's own. Callers keep 128 predictions in flight, and the
queue forms batches of 64. The two are measured alternately, so other load on the machine affects
both.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench.load.generator import LoadOrder, LoadReport, drive
from bench.pipeline import Parts, serving
from bench.report import Figure, Outcome
from infra.local.stack import Stack

NAME = "batches"
ITEMS, OF_A_BATCH, IN_FLIGHT = 2000, 64, 128
ITEM_S = 0.005
ROUNDS = 3
WARM_UP = 256
CREATED = 201
MIN_RATIO, MAX_CPU_MS = 0.9, 1.0
CLASS = f"""
import time
from cog import BaseModel, BasePredictor, Input

class Given(BaseModel):
    text: str = Input(min_length=1)

class Predictor(BasePredictor):
    def setup(self) -> None:
        self.sizes = []

    def predict_batch(self, inputs: list[Given]) -> list[str]:
        time.sleep({ITEM_S} * len(inputs))
        return [one.text.upper() for one in inputs]
"""
ALONE = f"""
import sys, time
sys.path.insert(0, sys.argv[1])
from predict import Given, Predictor
predictor = Predictor()
predictor.setup()
began_s = time.perf_counter()
for first in range(0, {ITEMS}, {OF_A_BATCH}):
    count = min({OF_A_BATCH}, {ITEMS} - first)
    predictor.predict_batch([Given(text=f"text {{first + at}}") for at in range(count)])
print(time.perf_counter() - began_s)
"""


def run() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "class"
        source.mkdir()
        (source / "predict.py").write_text(CLASS)
        entry = {"name": NAME, "task": "custom", "source": f"local:{source}"}
        with serving([entry], {"PENSTOCK_PROCESSES": "1"}) as stack:
            _predict(stack, WARM_UP, "warm")
            rounds = [_round(stack, source, number) for number in range(ROUNDS)]
    ratios = [times["alone_s"] / times["stack_s"] for times in rounds]
    best = max(range(ROUNDS), key=ratios.__getitem__)
    cpu_ms: dict[str, float] = rounds[best]["cpu_ms"]
    figures = [
        Figure("items per second of the class alone", ITEMS / rounds[best]["alone_s"], "/s"),
        Figure("items per second through the stack", ITEMS / rounds[best]["stack_s"], "/s"),
        Figure("the second over the first, best round", max(ratios), "", ">=", MIN_RATIO),
        *(Figure(f"CPU per item, {name}", value, "ms") for name, value in cpu_ms.items()),
        Figure("CPU per item, API, worker and class", _own_ms(cpu_ms), "ms", "<=", MAX_CPU_MS),
        Figure("CPU per item, all parts", sum(cpu_ms.values()), "ms"),
    ]
    return Outcome(figures, {"rounds": rounds, "ratios": ratios})


def _own_ms(cpu_ms: dict[str, float]) -> float:
    return sum(value for name, value in cpu_ms.items() if name == "API" or "worker" in name)


def _round(stack: Stack, source: Path, number: int) -> dict[str, Any]:
    alone = subprocess.run(
        [sys.executable, "-c", ALONE, str(source)], check=True, capture_output=True, text=True
    )
    report, spent_s = Parts(stack).spend(lambda: _predict(stack, ITEMS, f"round {number}"))
    return {
        "alone_s": float(alone.stdout),
        "stack_s": report.wall_s,
        "cpu_ms": {name: cpu_s / ITEMS * 1000 for name, cpu_s in spent_s.items()},
    }


def _predict(stack: Stack, count: int, word: str) -> LoadReport:
    """Requests predictions and waits for their results.

    Raises:
        RuntimeError: a prediction did not succeed, or its output differs from the class's.
    """
    bodies = [
        msgspec.json.encode({"version": NAME, "input": {"text": f"{word} {number}"}}).decode()
        for number in range(count)
    ]
    order = LoadOrder(
        stack.ports.api,
        bodies,
        IN_FLIGHT,
        path="/v1/predictions",
        headers={"prefer": "wait"},
        sample_every=1,
    )
    report = drive(order)
    if report.statuses() != {CREATED: count}:
        raise RuntimeError(f"{count} predictions were expected, not {report.statuses()}")
    for number, body in report.samples:
        answer = json.loads(body)
        if answer["output"] != f"{word} {number}".upper():
            raise RuntimeError(f"prediction {number}: {answer['status']} {answer['error']}")
    return report
