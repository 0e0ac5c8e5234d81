"""The whole stack on a GPU: texts/s and images/s of `penstock up`, and of the models alone.

Embedding models have random weights and MiniLM's tokenizer. No text is sent twice, so nothing is
cached. At first, one API and one worker handle the load, then several of each, which share the GPU.
Images are generated without compiling, both by the stack and by the model itself, in batches as
large as the worker's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from bench.gpu.card import seconds
from bench.gpu.company import drawn
from bench.gpu.images import image_entry, image_item, load_model
from bench.gpu.scale import Scale
from bench.gpu.texts import SHAPES, TINY_SHAPES, text_entry, write_bert
from bench.load.generator import LoadOrder, LoadReport, drive, embedding_bodies, percentiles
from bench.load.texts import Texts
from bench.pipeline import Parts, create_process, serving
from bench.report import Figure
from infra.local.process import Process, answers, free_port
from infra.local.stack import Stack
from shared.models.catalog import Model

SERVED_TOKENS = 32_768
"""Tokens in a batch. Larger batches gain little on an H200."""
SERVED_SHAPES = ("MiniLM", "BERT-large")
START_LIMIT_S = 120.0
PER_REQUEST = 64
"""Number of texts in a request with many texts."""


def measure(scale: Scale, folder: Path) -> Iterator[Figure]:
    """Yields texts/s, latencies, and each process's CPU time per text, by model and load."""
    for shape in SHAPES if scale.is_full_width else TINY_SHAPES:
        if scale.is_full_width and shape.name not in SERVED_SHAPES:
            continue
        source = write_bert(folder / shape.name, shape)
        entry = text_entry(shape, source, scale, SERVED_TOKENS)
        most = PER_REQUEST * max(*scale.in_flight, *scale.in_flight_many)
        # By default, four full batches are admitted.
        entry = entry.model_copy(update={"max_in_flight": most})
        room = {"PENSTOCK_MAX_IN_FLIGHT": str(most)}
        with _serve(entry, room) as stack:
            texts = Texts(source, seed=1)
            narrow = _Served(Parts(stack), [stack.ports.api], entry.name, texts)
            drive(narrow.orders(scale.warm_up_texts, 1, 32)[0])
            yield from narrow.measure(scale)
            with _more_processes(stack, entry, scale.more_processes) as apis:
                wide = _Served(narrow.parts, [stack.ports.api, *apis], entry.name, texts)
                yield from wide.measure(scale)


class _Served:
    """A stack, and the ports of the APIs that share its load."""

    def __init__(self, parts: Parts, apis: Sequence[int], model: str, texts: Texts) -> None:
        self.parts, self.apis = parts, apis
        self._model, self._texts = model, texts

    def measure(self, scale: Scale) -> Iterator[Figure]:
        loads = [(1, in_flight) for in_flight in scale.in_flight]
        loads += [(PER_REQUEST, in_flight) for in_flight in scale.in_flight_many]
        for per_request, in_flight in loads:
            if in_flight >= len(self.apis):
                is_alone = in_flight == per_request == 1
                count = scale.served_alone if is_alone else scale.served_texts
                yield from self._send(count, per_request, in_flight)

    def orders(self, count: int, per_request: int, in_flight: int) -> list[LoadOrder]:
        """Returns an order for each API, with `count` new texts in all."""
        texts = self._texts.mixed(count)
        inputs = [texts[first : first + per_request] for first in range(0, count, per_request)]
        bodies = embedding_bodies(self._model, inputs)
        return [
            LoadOrder(port, bodies[number :: len(self.apis)], in_flight // len(self.apis))
            for number, port in enumerate(self.apis)
        ]

    def _send(self, count: int, per_request: int, in_flight: int) -> Iterator[Figure]:
        orders = self.orders(count, per_request, in_flight)
        with ThreadPoolExecutor(len(orders)) as threads:
            reports, spent_s = self.parts.spend(lambda: list(threads.map(drive, orders)))
        statuses = [report.statuses() for report in reports]
        if any(status.keys() != {200} for status in statuses):
            raise RuntimeError(f"every request should succeed, not {statuses}")
        label = (
            f"served {self._model}, {len(self.apis)} APIs and workers, "
            f"{per_request} a request, {in_flight} in flight"
        )
        yield Figure(label, count / max(report.wall_s for report in reports), "texts/s")
        round_trips_ms = [one for report in reports for one in report.round_trip_ms]
        for name, value_ms in percentiles(round_trips_ms).items():
            yield Figure(f"{label}, {name}", value_ms, "ms")
        if len(self.apis) == 1:  # the CPU time is of the first processes only
            for name, cpu_s in spent_s.items():
                yield Figure(f"{label}, CPU per text, {name}", 1000 * cpu_s / count, "ms")


@contextmanager
def _more_processes(stack: Stack, entry: Model, count: int) -> Iterator[list[int]]:
    """Starts `count` more APIs and workers at once. Yields the APIs' ports."""
    with ExitStack() as started:
        processes, apis = list[tuple[Process, int]](), list[int]()
        for number in range(count):
            port, health = free_port(), free_port()
            api = {"PENSTOCK_METRICS_PORT": "0", "PENSTOCK_PORT": str(port)}
            worker = {"PENSTOCK_MODEL": entry.name, "PENSTOCK_HEALTH_PORT": str(health)}
            for module, own, its_port in (("api", api, port), ("workers", worker, health)):
                process = create_process(stack, f"{module}-{number}", module, own)
                processes.append((started.enter_context(process), its_port))
            apis.append(port)
        for process, its_port in processes:
            process.wait_ready(partial(answers, its_port, "/readyz"), START_LIMIT_S)
        yield apis


IMAGES_LIMIT_S = 300.0


def measure_images(scale: Scale, folder: Path) -> Iterator[Figure]:
    """Yields the images/s from a worker behind the API, and from its model by itself."""
    largest = max(scale.batches)
    entry = image_entry(folder, scale, compile="never")
    model = load_model(entry, folder, scale, memory_fraction=0.5)
    batch = [image_item("text-to-image", seed, scale) for seed in range(largest)]
    drawn(model, batch)
    alone_s = seconds(scale.device, partial(drawn, model, batch))
    del model
    bodies = [_image_body(seed, scale) for seed in range(largest + scale.served_images)]
    with _serve(entry) as stack:
        _ask_images(stack, bodies[:largest], largest)
        report = _ask_images(stack, bodies[largest:], 2 * largest)
    label = f"served images, {2 * largest} in flight"
    yield Figure(f"{label}, the model alone", largest / alone_s, "images/s")
    yield Figure(f"{label}, through the stack", report.rate, "images/s")
    yield Figure(f"{label}, p50", report.round_trip()["p50"], "ms")


def _image_body(seed: int, scale: Scale) -> str:
    asked = {"prompt": f"a red circle, number {seed}", "seed": seed, "response_format": "b64_json"}
    return json.dumps(asked | {"size": f"{scale.side}x{scale.side}"})


def _serve(
    entry: Model, settings: Mapping[str, str] | None = None
) -> AbstractContextManager[Stack]:
    """Returns the stack with one model and one model process."""
    models = [entry.model_dump(mode="json", exclude_defaults=True)]
    return serving(models, {"PENSTOCK_PROCESSES": "1", **(settings or {})})


def _ask_images(stack: Stack, bodies: list[str], in_flight: int) -> LoadReport:
    report = drive(
        LoadOrder(
            stack.ports.api,
            bodies,
            in_flight,
            path="/v1/images/generations",
            headers={"x-penstock-deadline-ms": str(int(IMAGES_LIMIT_S * 1000))},
            limit_s=IMAGES_LIMIT_S,
        )
    )
    if report.statuses() != {200: len(bodies)}:
        raise RuntimeError(f"{len(bodies)} images were expected, not {report.statuses()}")
    return report
