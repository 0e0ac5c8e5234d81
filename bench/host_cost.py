"""CPU time per text around an embedding model, in requests with one text and with 64 texts.

The model's network has no layers, so it takes next to no time. Tokenizing is measured separately,
on the same texts, and subtracted from the worker's I/O process. Rows go to the object store, the
default on Google Cloud. The load generator and the broker share the cores. The result is the median
of the rounds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.gpu.texts import Shape, write_bert
from bench.load.generator import LoadOrder, drive, embedding_bodies
from bench.pipeline import MODEL, Pipeline, running
from bench.report import Figure, Outcome
from shared.models.tasks.embedding import TextInput
from workers.models.embedding.tokenization import TextPreparer

NETWORK = Shape("no layers", width=384, layers=0, heads=12)
LOADS = {1: 128, 64: 24}
"""Requests in flight, by texts per request."""
TEXTS = {1: 3000, 64: 12800}
"""Texts per round."""
ROUNDS = 5
IO_PROCESS, TOKENIZING = "worker, I/O", "tokenizing"
COUNTED = ("API", IO_PROCESS, "Redis")


def run() -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        network = write_bert(Path(name) / "network", NETWORK)
        changes = {
            "source": f"local:{network}",
            "backend": "torch",
            "precision": "fp32",
            "text": {"max_input_tokens": 512},
        }
        settings = {"PENSTOCK_ROWS_URL": f"file://{name}/rows"}
        with running(changes, is_alone=True, settings=settings) as pipeline:
            preparer = TextPreparer(network)
            rounds = {
                texts: [_measure_round(pipeline, preparer, texts) for _ in range(ROUNDS)]
                for texts in LOADS
            }
    figures = [
        figure for texts, costs_us in rounds.items() for figure in _figures_of(texts, costs_us)
    ]
    return Outcome(figures, {str(texts): costs_us for texts, costs_us in rounds.items()})


def _measure_round(pipeline: Pipeline, preparer: TextPreparer, texts: int) -> dict[str, float]:
    """Returns each component's CPU time in µs per text.

    Raises:
        RuntimeError: not every request succeeded.
    """
    drawn = pipeline.texts.short(TEXTS[texts])
    inputs = [drawn[first : first + texts] for first in range(0, len(drawn), texts)]
    bodies = embedding_bodies(MODEL, inputs)
    order = LoadOrder(pipeline.api.port, bodies, LOADS[texts])
    report, taken_s = pipeline.spend(lambda: drive(order))
    if report.statuses() != {200: len(bodies)}:
        raise RuntimeError(f"every request should succeed, not {report.statuses()}")
    taken_s[TOKENIZING] = _tokenize(preparer, inputs)
    taken_s[IO_PROCESS] -= taken_s[TOKENIZING]
    return {name: 1e6 * seconds / len(drawn) for name, seconds in taken_s.items()}


def _tokenize(preparer: TextPreparer, inputs: Sequence[Sequence[str]]) -> float:
    """Returns the CPU seconds, in all threads, to tokenize each request's texts together."""
    began_s = time.process_time()
    for some in inputs:
        preparer.prepare([TextInput(text) for text in some])
    return time.process_time() - began_s


def _figures_of(texts: int, rounds: Sequence[Mapping[str, float]]) -> list[Figure]:
    together = statistics.median(sum(costs_us[name] for name in COUNTED) for costs_us in rounds)
    middle = {name: statistics.median(costs_us[name] for costs_us in rounds) for name in rounds[0]}
    by_name = {name: middle[name] for name in (*COUNTED, "worker, model", TOKENIZING)}
    return [
        Figure(f"CPU per text, {texts} per request, {name}", value, "us")
        for name, value in ({"together": together} | by_name).items()
    ]
