"""One worker with two models and room for one, compared with a worker of one model.

The models are MiniLM under three names: alone in its worker, or common and rare in another. Both
workers run all the time, one with load and the other idle, in turns, so that other load
on the machine weighs on both.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import uvloop
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.load.generator import LoadOrder, drive, embedding_bodies
from bench.load.texts import Texts
from bench.pipeline import MODEL, MODELS_FILE, SCRAPE_LIMIT_S, Part, Pipeline, running
from bench.report import Figure, Outcome
from infra.local.provision_servers import provision
from shared.catalog_file import read_catalog
from shared.pubsub.admin import PubSubAdmin
from workers.runtime.resident_models import weights_bytes
from workers.worker import ModelScheduler

COMMON, RARE = "common", "rare"
BACKEND = {"backend": "torch", "precision": "fp32"}
"""Said, for all three: each might be measured another way on a busy machine."""
RARE_SHARE = 0.1
IN_FLIGHT = 128
"""Requests in flight, enough that those for the rare model, which wait, are not all of them."""
LEAD_S, LEAD_LIMIT_S, LEAD_ANSWERS = 5.0, 10.0, 2 * IN_FLIGHT
"""Lead of each part, not counted: until requests for the rare model reach their steady number."""
ALONE_S = 15.0
BOTH_S = 40.0
LENGTHS = 3
"""Number of text lengths in the mix. A batch has texts of one length."""
ROUNDS = 3
LAYOUTS = (1, 2)
"""Model processes: the budget is that of each, so with two of them either model may have one."""
LIMIT_S = 120.0
MAX_PER_S = 1000
"""More than two cores embed."""


@dataclass(frozen=True)
class TimedAnswer:
    """One answered request: for which model, and milliseconds."""

    model: str
    round_trip_ms: float
    batch_wait_ms: float
    inference_ms: float


@dataclass(frozen=True)
class Switching:
    """The worker's metrics of model switching since its start."""

    loads: float
    seconds: float


def run() -> Outcome:
    """Measures each layout, one after the other."""
    figures, details = list[Figure](), {}
    for processes in LAYOUTS:
        rounds = _measure(processes)
        figures += _figures(f"{processes} process{'es' if processes > 1 else ''}", rounds)
        details[f"{processes} processes"] = rounds
    return Outcome(figures, {"rounds": details, "load_after": os.getloadavg()[0]})


def _measure(processes: int) -> list[dict[str, float]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pipeline = stack.enter_context(running(BACKEND, processes=processes, threads=1))
        models_file = _three_names(folder)
        uvloop.run(_provision(pipeline, models_file))
        api = stack.enter_context(pipeline.another_api(models_file=models_file))
        worker = stack.enter_context(
            pipeline.another_worker(
                models_file=models_file,
                model=f"{COMMON},{RARE}",
                memory_budget_bytes=weights_bytes(pipeline.model_folder),
            )
        )
        return [_round(pipeline, api.port, worker, processes) for _ in range(ROUNDS)]


def _three_names(folder: Path) -> Path:
    """The shipped model alone, and twice more under other names."""
    catalog = yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))
    alone = next(entry for entry in catalog["models"] if entry["name"] == MODEL) | BACKEND
    others = [alone | {"name": name, "aliases": []} for name in (COMMON, RARE)]
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"models": [alone, *others]}), encoding="utf-8")
    return path


async def _provision(pipeline: Pipeline, models_file: Path) -> None:
    settings = pipeline.stack.settings
    async with PubSubAdmin(settings.project, settings.pubsub_endpoint) as admin:
        await provision(admin, read_catalog(models_file), settings.inbox_pool, settings.reply_slots)


def _round(pipeline: Pipeline, api_port: int, worker: Part, processes: int) -> dict[str, float]:
    first, first_cpu_ms = _drive(api_port, pipeline.worker, pipeline.texts, 0.0, MODEL, ALONE_S)
    before, began_s = _switching(worker.port), time.perf_counter()
    both, both_cpu_ms = _drive(api_port, worker, pipeline.texts, RARE_SHARE, COMMON, BOTH_S)
    after, took_s = _switching(worker.port), time.perf_counter() - began_s
    second, second_cpu_ms = _drive(api_port, pipeline.worker, pipeline.texts, 0.0, MODEL, ALONE_S)
    alone = first + second
    load_s = (after.seconds - before.seconds) / max(1.0, after.loads - before.loads)
    alone_rate, both_rate = len(alone) / (2 * ALONE_S), len(both) / BOTH_S
    rare = [answer for answer in both if answer.model == RARE]
    common = [answer for answer in both if answer.model != RARE]
    batch_s = float(np.percentile([answer.inference_ms for answer in both], 99)) / 1000
    return {
        "ratio_percent": 100 * both_rate / alone_rate,
        "cpu_ratio_percent": 100 * statistics.mean([first_cpu_ms, second_cpu_ms]) / both_cpu_ms,
        "alone_rate": alone_rate,
        "both_rate": both_rate,
        "rare_percent": 100 * len(rare) / len(both),
        "rare_wait_p50_s": float(np.percentile([answer.batch_wait_ms for answer in rare], 50))
        / 1000,
        "rare_wait_p99_s": float(np.percentile([answer.batch_wait_ms for answer in rare], 99))
        / 1000,
        "common_p99_s": float(np.percentile([answer.round_trip_ms for answer in common], 99))
        / 1000,
        "load_s": load_s,
        "loads": after.loads - before.loads,
        "switching_percent": 100 * (after.seconds - before.seconds) / (took_s * processes),
        "bound_s": _bound_s(load_s, batch_s, processes),
    }


def _bound_s(load_s: float, batch_s: float, processes: int) -> float:
    """The model scheduler's bound for the oldest job, and the time to run the queue behind it.

    That is the rare model's share of the traffic in this time, and a batch that is not full for
    each kind of length.
    """
    scheduler = ModelScheduler(2, processes)
    scheduler.update_load_times({0: load_s, 1: load_s})
    return (1 + RARE_SHARE) * (scheduler.switch_wait_s + batch_s + load_s) + LENGTHS * batch_s


def _switching(port: int) -> Switching:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{port}/metrics", timeout=SCRAPE_LIMIT_S
    ) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    values = {sample.name: sample.value for family in families for sample in family.samples}
    return Switching(
        values["penstock_worker_model_loads_total"], values["penstock_worker_switch_seconds_total"]
    )


def _drive(
    port: int, worker: Part, texts: Texts, rare_share: float, model: str, seconds: float
) -> tuple[list[TimedAnswer], float]:
    """Keeps IN_FLIGHT requests open.

    Returns the answers that came within `seconds` after the lead-in, and the CPU milliseconds that
    each request cost the model processes of `worker`: on a busy machine that says more than rates
    do.
    """
    mix, send_s = random.Random(1), LEAD_LIMIT_S + seconds
    drawn = islice(_endless(texts), int(send_s * MAX_PER_S))
    asked = [(RARE if mix.random() < rare_share else model, text) for text in drawn]
    bodies = [embedding_bodies(name, [text])[0] for name, text in asked]
    before_s = worker.children_cpu_s()
    report = drive(LoadOrder(port, bodies, IN_FLIGHT, send_s=send_s, limit_s=LIMIT_S))
    if report.failures or report.sent == len(bodies):
        raise RuntimeError(f"{len(bodies)} texts are too few, or failed: {report.failures}")
    lead_s = max(LEAD_S, report.exchanges[LEAD_ANSWERS].ended_s)
    if lead_s > LEAD_LIMIT_S:
        raise RuntimeError(f"the first {LEAD_ANSWERS} answers took {lead_s:.0f} s")
    answers = [
        TimedAnswer(asked[one.number][0], one.round_trip_ms, one.batch_ms, one.inference_ms)
        for one in report.exchanges
        if lead_s < one.ended_s <= lead_s + seconds
    ]
    return answers, 1000 * (worker.children_cpu_s() - before_s) / report.sent


def _endless(texts: Texts) -> Iterator[str]:
    while True:
        yield from texts.mixed(50)  # few, so that every stretch of a drive has the mix


def _figures(layout: str, rounds: list[dict[str, float]]) -> Iterator[Figure]:
    middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    yield Figure(f"{layout}: two models over one", middle["ratio_percent"], "%", ">=", 90.0)
    yield Figure(
        f"{layout}: the same per CPU second of the models", middle["cpu_ratio_percent"], "%"
    )
    yield Figure(f"{layout}: one model", middle["alone_rate"], "texts/s")
    yield Figure(f"{layout}: two models", middle["both_rate"], "texts/s")
    yield Figure(f"{layout}: requests for the rare model", middle["rare_percent"], "%")
    yield Figure(f"{layout}: rare model's wait, p50", middle["rare_wait_p50_s"], "s")
    yield Figure(
        f"{layout}: rare model's wait, p99", middle["rare_wait_p99_s"], "s", "<=", middle["bound_s"]
    )
    yield Figure(f"{layout}: common model's round trip, p99", middle["common_p99_s"], "s")
    yield Figure(f"{layout}: one switch", 1000 * middle["load_s"], "ms")
    yield Figure(f"{layout}: time in switching", middle["switching_percent"], "%")
