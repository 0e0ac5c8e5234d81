"""What each way to run a class does, and what it costs."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.class_runners.cog_worker import CogWorker
from bench.class_runners.figures import Measured, measure
from bench.class_runners.outcome import ClassRunner
from bench.class_runners.penstock_runner import PenstockRunner
from bench.class_runners.probes import PROBES, Probe
from infra.text_table import table
from workers.models.custom.checking import inspect_folder

PROBE_LIMIT_S = 60.0


def create(kind: str, folder: Path, concurrency: int = 1) -> ClassRunner:
    """Creates one of the ways to run the class in predict.py."""
    if kind == "penstock":
        return PenstockRunner(folder, inspect_folder(folder).interface)
    return CogWorker(
        folder,
        "predict.py:Predictor",
        python=sys.executable,
        environment={},
        concurrency=concurrency,
        is_wrapped=kind == "wrapped-worker",
    )


def write_class(folder: str, source: str, concurrency: int = 1) -> None:
    """Writes predict.py, and cog.yaml if predictions may run at once."""
    Path(folder, "predict.py").write_text(source, encoding="utf-8")
    if concurrency > 1:
        settings = f"predict: predict.py:Predictor\nconcurrency: {{max: {concurrency}}}\n"
        Path(folder, "cog.yaml").write_text(settings, encoding="utf-8")


async def run_probe(kind: str, probe: Probe) -> str:
    """Returns what is wrong, or an empty text."""
    with tempfile.TemporaryDirectory(prefix="class-") as folder:
        write_class(folder, probe.source, probe.concurrency)
        runner = create(kind, Path(folder), probe.concurrency)
        try:
            failure = await runner.start()
            return await asyncio.wait_for(probe.check(runner, failure), PROBE_LIMIT_S)
        except Exception as error:
            # A probe of a runner that does something else than asked may fail in any way.
            return f"{type(error).__name__}: {error}"
        finally:
            await runner.stop()


async def fill(kinds: Sequence[str], only: str = "", *, with_figures: bool = True) -> None:
    """Prints the rows of all ways."""
    rows = []
    for probe in PROBES:
        if only in probe.name:
            wrong = [await run_probe(kind, probe) for kind in kinds]
            rows.append([probe.name, *("fails" if one else "right" for one in wrong)])
            for kind, words in zip(kinds, wrong, strict=True):
                if words:
                    print(f"{kind}: {probe.name}: {words}", flush=True)
    print(table(["behavior", *kinds], rows), flush=True)
    if not with_figures:
        return
    print(f"load before: {os.getloadavg()[0]:.2f}")
    figures = [await measure_kind(kind) for kind in kinds]
    print(f"load after: {os.getloadavg()[0]:.2f}")
    names = [f"{one.name} ({one.unit})" for one in figures[0]]
    values = zip(*([f"{one.value:.2f}" for one in every] for every in figures), strict=True)
    print(
        table(["figure", *kinds], [[name, *row] for name, row in zip(names, values, strict=True)])
    )


async def measure_kind(kind: str) -> list[Measured]:
    """Measures one way to run a class."""
    with tempfile.TemporaryDirectory(prefix="class-") as folder:

        async def start(source: str) -> tuple[ClassRunner, float]:
            write_class(folder, source)
            runner = create(kind, Path(folder))
            began_s = time.monotonic()
            if failure := await runner.start():
                raise RuntimeError(f"{kind}: {failure}")
            return runner, time.monotonic() - began_s

        return await measure(start)
