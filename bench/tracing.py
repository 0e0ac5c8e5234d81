"""The cost of tracing: throughput and CPU with 128 in flight, by the share of traces that is kept.

Three APIs share one broker and one worker: without tracing, with the default ratio, and with all
traces kept. They get the same load in turn. A worker follows the flag in the message, so for the
first API it does what a worker without tracing does. Texts are short, so that the model hides as
little as possible.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from bench.pipeline import Part, Pipeline, another, running
from bench.report import Figure, Outcome
from infra.local.process import free_port
from shared.tracing.setup import DEFAULT_RATIO

IN_FLIGHT = 128
TEXTS = 500
ROUNDS = 30
"""Many and short, so that whatever else the machine does weighs on all three."""
OFF, DEFAULT, ALL = "off", f"ratio {DEFAULT_RATIO:g}", "ratio 1"
VARIABLES: Mapping[str, Mapping[str, str]] = {
    OFF: {"OTEL_SDK_DISABLED": "true"},
    DEFAULT: {},
    ALL: {"OTEL_TRACES_SAMPLER_ARG": "1"},
}
TRACED = ("API", "worker, I/O")
MIN_PERCENT = 98.0
"""Minimum throughput at the default ratio, in percent of that without tracing. The added CPU may be
the rest.

Throughput follows whatever else the machine does. CPU time does so less.
"""


def run() -> Outcome:
    """Measures the three in turn, each time in another order."""
    with ExitStack() as opened:
        url = opened.enter_context(_collector())
        opened.enter_context(_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": url}))
        pipeline = opened.enter_context(running())
        apis = {
            name: opened.enter_context(_api(pipeline, f"api-{name}", variables))
            for name, variables in VARIABLES.items()
        }
        for api in apis.values():
            pipeline.ask(pipeline.texts.short(TEXTS), 32, cache="miss", port=api.port)
        rounds = [_round(pipeline, apis, number) for number in range(ROUNDS)]
    figures = [Figure("throughput without tracing", _median(rounds, OFF, "rate"), "/s")]
    for name in (DEFAULT, ALL):
        shares = [100 * one[name]["rate"] / one[OFF]["rate"] for one in rounds]
        added_ms = sum(_mean(rounds, name, part) - _mean(rounds, OFF, part) for part in TRACED)
        is_default = name == DEFAULT
        figures += [
            Figure(
                f"throughput with {name}, of that",
                statistics.median(shares),
                "%",
                *((">=", MIN_PERCENT) if is_default else ()),
            ),
            Figure(
                f"added CPU with {name}, of all parts' CPU",
                100 * added_ms / _mean(rounds, OFF, "all parts"),
                "%",
                *(("<=", 100 - MIN_PERCENT) if is_default else ()),
            ),
        ]
    for part in (*TRACED, "all parts"):
        figures += [
            Figure(f"CPU per request, {part}, {name}", _mean(rounds, name, part), "ms")
            for name in VARIABLES
        ]
    return Outcome(figures, {"rounds": rounds})


def _round(pipeline: Pipeline, apis: Mapping[str, Part], number: int) -> dict[str, Any]:
    names = list(apis)
    first = number % len(names)
    return {name: _measured(pipeline, apis[name]) for name in (*names[first:], *names[:first])}


def _measured(pipeline: Pipeline, api: Part) -> dict[str, float]:
    texts = pipeline.texts.short(TEXTS)
    before = _cpu_s(pipeline, api)
    report = pipeline.ask(texts, IN_FLIGHT, cache="miss", port=api.port)
    after = _cpu_s(pipeline, api)
    costs = {part: 1000 * (after[part] - before[part]) / TEXTS for part in after}
    return {"rate": report.rate, **{part: costs[part] for part in TRACED}} | {
        "all parts": sum(costs.values())
    }


def _cpu_s(pipeline: Pipeline, api: Part) -> dict[str, float]:
    """CPU seconds so far, by part. The API is the one that is asked, not the stack's own."""
    return pipeline.cpu_s() | {"API": api.cpu_s()}


def _median(rounds: list[dict[str, Any]], name: str, value: str) -> float:
    return float(statistics.median(one[name][value] for one in rounds))


def _mean(rounds: list[dict[str, Any]], name: str, value: str) -> float:
    """Returns the mean of CPU times, which the system counts in steps of 10 ms."""
    return float(statistics.mean(one[name][value] for one in rounds))


@contextmanager
def _api(pipeline: Pipeline, name: str, variables: Mapping[str, str]) -> Iterator[Part]:
    port = free_port()
    environment = {"PENSTOCK_METRICS_PORT": "0", "PENSTOCK_PORT": str(port), **variables}
    with another(pipeline.stack, name.replace(" ", "-"), "api", port, environment) as part:
        yield part


@contextmanager
def _collector() -> Iterator[str]:
    """Takes everything and reads nothing of it. Yields its URL."""

    class Take(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Answers an export."""
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *words: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Take) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets the environment that the stack's processes inherit."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
