"""A batch of 50,000 embeddings while all parts are killed, and interactive requests alongside.

The interactive requests are sent in rounds, with the runner paused and with the batch alongside.
So other load on the machine falls on both. Then the runner, the API, Redis and the worker are
killed, one after the other, and started again.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import openai
import psutil

from bench.load.generator import LoadOrder, LoadReport, drive, embedding_bodies
from bench.pipeline import MODEL, Pipeline, running
from bench.report import Figure, Outcome
from infra.local.process import answers, listens

LINES = 50_000
INTERACTIVE_PER_S = 10.0
INTERACTIVE_S = 12.0
ROUNDS = 5
SETTLE_S = 3.0
"""Before each round, and between two kills."""
LIMIT_S = 1800.0
READY_LIMIT_S = 240.0
MB = 1_000_000


def run() -> Outcome:
    """Runs the batch, and counts what its output file has."""
    with running() as pipeline, _weighed(pipeline) as weights:
        client: Any = openai.OpenAI(base_url=f"{pipeline.stack.api_url}/v1", api_key="any")
        began_s = time.monotonic()
        batch = _created(client, pipeline.texts.short(LINES))
        _until(client, batch, lambda state: state.status == "in_progress")
        validated_s = time.monotonic() - began_s
        rounds = [_round(pipeline) for _ in range(ROUNDS)]
        killed = [_kill(pipeline, name) for name in ("batches", "api", "redis", f"worker-{MODEL}")]
        done = _until(client, batch, lambda state: state.completed_at or state.failed_at)
        took_s = time.monotonic() - began_s
        lines = client.files.content(done.output_file_id).text.splitlines()
    ids = [json.loads(line)["custom_id"] for line in lines]
    p99 = [
        statistics.median(one.round_trip()["p99"] for one in reports)
        for reports in zip(*rounds, strict=True)
    ]
    failures = sum(len(report.failures) for reports in rounds for report in reports)
    return Outcome(
        [
            Figure("lines completed", done.request_counts.completed, "", ">=", LINES),
            Figure("lines failed", done.request_counts.failed, "", "<=", 0),
            Figure("lines of the output out of order", _out_of_order(ids), "", "<=", 0),
            Figure("until the file is validated", validated_s, "s"),
            Figure("whole batch, with four kills", took_s, "s"),
            Figure("API, largest resident", max(weights["api"]) / MB, "MB"),
            Figure("runner, largest resident", max(weights["batches"]) / MB, "MB"),
            Figure("interactive p99 alone, median of rounds", p99[0], "ms"),
            Figure("interactive p99 beside the batch, median of rounds", p99[1], "ms"),
            Figure("the second over the first", p99[1] / p99[0], "", "<=", 1.5),
            Figure("interactive requests that failed", failures, "", "<=", 0),
        ],
        {
            "alone_and_beside_ms": [
                [report.round_trip() for report in reports] for reports in rounds
            ],
            "killed": killed,
            "rss_mb_every_5_s": {
                name: [round(one / MB, 1) for one in values[::5]]
                for name, values in weights.items()
            },
        },
    )


def _out_of_order(ids: list[str]) -> int:
    expected = [f"c{number}" for number in range(LINES)]
    return sum(one != other for one, other in zip(ids, expected, strict=False)) + abs(
        len(ids) - LINES
    )


def _round(pipeline: Pipeline) -> tuple[LoadReport, LoadReport]:
    """The interactive requests without the batch, and then alongside it."""
    runner = pipeline.stack.processes["batches"]
    runner.pause()
    try:
        time.sleep(SETTLE_S)
        alone = _interactive(pipeline)
    finally:
        runner.resume()
    time.sleep(SETTLE_S)
    return alone, _interactive(pipeline)


def _interactive(pipeline: Pipeline) -> LoadReport:
    bodies = embedding_bodies(MODEL, pipeline.texts.mixed(int(INTERACTIVE_PER_S * INTERACTIVE_S)))
    return drive(LoadOrder(pipeline.api.port, bodies, in_flight=64, rate_per_s=INTERACTIVE_PER_S))


def _created(client: openai.OpenAI, texts: list[str]) -> Any:
    data = "".join(
        json.dumps(
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": "/v1/embeddings",
                "body": {"model": MODEL, "input": text, "encoding_format": "base64"},
            }
        )
        + "\n"
        for number, text in enumerate(texts)
    )
    file = client.files.create(file=("in.jsonl", data.encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )


def _until(client: openai.OpenAI, batch: Any, is_it: Callable[[Any], Any]) -> Any:
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        try:
            state = client.batches.retrieve(batch.id)
        except openai.APIError:
            state = None
        if state is not None and is_it(state):
            return state
        time.sleep(0.5)
    raise RuntimeError(f"the batch was not there within {LIMIT_S:g} s")


def _kill(pipeline: Pipeline, name: str) -> str:
    """Kills a part, and starts it again a moment later."""
    stack, ports = pipeline.stack, pipeline.stack.ports
    process = stack.processes[name]
    process.kill()
    time.sleep(1.0)
    process.start()
    ready = {
        "api": partial(answers, ports.api, "/readyz"),
        "redis": partial(listens, ports.redis),
        f"worker-{MODEL}": partial(answers, ports.health[0], "/readyz"),
    }
    process.wait_ready(ready.get(name, lambda: True), READY_LIMIT_S)
    time.sleep(SETTLE_S)
    return name


@contextmanager
def _weighed(pipeline: Pipeline) -> Iterator[dict[str, list[int]]]:
    """Resident bytes of the API and the runner, once a second while the block runs."""
    weights: dict[str, list[int]] = {"api": [], "batches": []}
    over = threading.Event()

    def weigh() -> None:
        while not over.wait(1.0):
            for name, values in weights.items():
                try:
                    pid = pipeline.stack.processes[name].pid
                    values.append(int(psutil.Process(pid).memory_info().rss))
                except psutil.Error:
                    continue

    thread = threading.Thread(target=weigh)
    thread.start()
    try:
        yield weights
    finally:
        over.set()
        thread.join()
