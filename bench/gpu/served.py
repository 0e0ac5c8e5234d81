"""The whole stack on a GPU: texts/s and images/s of `penstock up`, and of the models alone.

Embedding models have random weights and MiniLM's tokenizer. No text is sent twice, so nothing is
cached. At first, one API and one worker handle the load, then several of each, which share the GPU.
Images are generated without compiling, both by the stack and by the model itself, in batches as
large as the worker's.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

from bench.gpu.card import seconds
from bench.gpu.company import drawn
from bench.gpu.images import image_entry, image_item
from bench.gpu.scale import Scale
from bench.gpu.texts import SHAPES, TINY_SHAPES, text_entry, write_bert
from bench.load.generator import LoadOrder, LoadReport, drive, percentiles
from bench.load.texts import Texts
from bench.pipeline import Part, Parts, say_nothing
from infra.local.ports import Ports
from infra.local.process import Process, answers, free_port
from infra.local.stack import Stack
from shared.models.catalog import Model
from shared.settings import environment_with
from workers.models.device import Device
from workers.models.image.model import ImageModel
from workers.runtime.template import MODEL_PROCESS_NAME, TEMPLATE_NAME

SERVED_TOKENS = 32_768
"""Tokens in a batch. Larger batches gain little on an H200."""
SERVED_SHAPES = ("MiniLM", "BERT-large")
START_LIMIT_S = 120.0
PER_REQUEST = 64
"""Number of texts in a request with many texts."""


def measure(scale: Scale, folder: Path) -> list[dict[str, Any]]:
    """Returns a row per model and load: texts/s, latencies, and each process's CPU per text."""
    rows = []
    for shape in SHAPES if scale.is_full_width else TINY_SHAPES:
        if scale.is_full_width and shape.name not in SERVED_SHAPES:
            continue
        source = write_bert(folder / shape.name, shape)
        entry = text_entry(shape, source, scale, SERVED_TOKENS)
        most = PER_REQUEST * max(*scale.in_flight, *scale.in_flight_many)
        # By default, four full batches are admitted.
        entry = entry.model_copy(update={"max_in_flight": most})
        room = {"PENSTOCK_MAX_IN_FLIGHT": str(most)}
        with tempfile.TemporaryDirectory() as name, _stack_of(Path(name), entry, room) as stack:
            texts = Texts(source, seed=1)
            narrow = _Served(Parts(stack), [stack.ports.api], entry.name, texts)
            narrow.send(scale.warm_up_texts, 1, 32)
            rows += [{"model": entry.name} | row for row in _rows(narrow, scale)]
            with _more_processes(stack, entry, scale.more_processes) as apis:
                wide = _Served(narrow.parts, [stack.ports.api, *apis], entry.name, texts)
                rows += [{"model": entry.name} | row for row in _rows(wide, scale)]
    return rows


def _rows(served: _Served, scale: Scale) -> list[dict[str, Any]]:
    loads = [(1, in_flight) for in_flight in scale.in_flight]
    loads += [(PER_REQUEST, in_flight) for in_flight in scale.in_flight_many]
    rows = []
    for per_request, in_flight in loads:
        if in_flight < len(served.apis):
            continue
        count = scale.served_texts if in_flight > 1 or per_request > 1 else scale.served_alone
        rows.append(served.send(count, per_request, in_flight))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


class _Served:
    """A stack, and the ports of the APIs that share its load."""

    def __init__(self, parts: Parts, apis: Sequence[int], model: str, texts: Texts) -> None:
        self.parts, self.apis = parts, apis
        self._model, self._texts = model, texts

    def send(self, count: int, per_request: int, in_flight: int) -> dict[str, Any]:
        """Sends `count` new texts and returns the row for the table.

        Raises:
            RuntimeError: not every request got a response.
        """
        bodies = self._bodies(count, per_request)
        orders = [
            LoadOrder(port, bodies[number :: len(self.apis)], in_flight // len(self.apis))
            for number, port in enumerate(self.apis)
        ]
        before = self.parts.cpu_s()
        with ThreadPoolExecutor(len(orders)) as threads:
            reports = list(threads.map(drive, orders))
        after = self.parts.cpu_s()
        statuses = [report.statuses() for report in reports]
        if any(status.keys() != {200} for status in statuses):
            raise RuntimeError(f"every request should succeed, not {statuses}")
        round_trips_ms = [one for report in reports for one in report.round_trip_ms]
        return {
            "apis": len(self.apis),
            "per_request": per_request,
            "in_flight": in_flight,
            "texts": count,
            "texts_per_s": count / max(report.wall_s for report in reports),
            "round_trip_ms": percentiles(round_trips_ms),
            "cpu_ms": {name: 1000 * (after[name] - before[name]) / count for name in after},
        }

    def _bodies(self, count: int, per_request: int) -> list[str]:
        texts = self._texts.mixed(count)
        return [
            msgspec.json.encode(
                {
                    "model": self._model,
                    "input": texts[first : first + per_request],
                    "encoding_format": "base64",
                }
            ).decode()
            for first in range(0, count, per_request)
        ]


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
                process = Process(
                    f"{module}-{number}",
                    [sys.executable, "-m", module],
                    stack.log_dir,
                    environment=environment_with({**stack.environment, **own}),
                )
                processes.append((started.enter_context(process), its_port))
            apis.append(port)
        for process, its_port in processes:
            process.wait_ready(partial(answers, its_port, "/readyz"), START_LIMIT_S)
        yield apis


IMAGES_LIMIT_S = 300.0


def measure_images(scale: Scale, folder: Path) -> dict[str, Any]:
    """Returns the images/s from a worker behind the API, and from its model by itself.

    `is_forked` is True if the model process is a fork of the template.
    """
    largest = max(scale.batches)
    entry = image_entry(folder, scale)
    entry = entry.model_copy(
        update={"image": entry.image.model_copy(update={"compile": "never"})}, deep=True
    )
    model = ImageModel(entry, folder, Device(scale.device, threads=1, memory_fraction=0.5))
    model.setup()
    batch = [image_item("text-to-image", seed, scale) for seed in range(largest)]
    drawn(model, batch)
    alone_s = seconds(scale.device, partial(drawn, model, batch))
    del model
    bodies = [_image_body(seed, scale) for seed in range(largest + scale.served_images)]
    with tempfile.TemporaryDirectory() as name, _stack_of(Path(name), entry) as stack:
        is_forked = _is_forked(stack.ports.health[0])
        _ask_images(stack, bodies[:largest], largest)
        report = _ask_images(stack, bodies[largest:], 2 * largest)
    return {
        "in_flight": 2 * largest,
        "alone_per_s": largest / alone_s,
        "served_per_s": report.rate,
        "round_trip_ms": report.round_trip(),
        "is_forked": is_forked,
    }


def _image_body(seed: int, scale: Scale) -> str:
    asked = {"prompt": f"a red circle, number {seed}", "seed": seed, "response_format": "b64_json"}
    return json.dumps(asked | {"size": f"{scale.side}x{scale.side}"})


@contextmanager
def _stack_of(
    folder: Path, entry: Model, settings: Mapping[str, str] | None = None
) -> Iterator[Stack]:
    catalog = folder / "models.yaml"
    catalog.write_text(
        yaml.safe_dump({"models": [entry.model_dump(mode="json", exclude_defaults=True)]}),
        encoding="utf-8",
    )
    own = {"PENSTOCK_MODELS_FILE": str(catalog), "PENSTOCK_PROCESSES": "1"}
    with Stack(
        folder, ports=Ports.free(1), settings=own | dict(settings or {}), say=say_nothing
    ) as stack:
        yield stack


def _is_forked(worker_port: int) -> bool:
    """Returns whether the model process is a fork that did not have to re-execute its program."""
    worker = Part(worker_port).pid
    children = psutil.Process(worker).children(recursive=True)
    model = next(one for one in children if one.name() == MODEL_PROCESS_NAME)
    template = next(one for one in children if one.name() == TEMPLATE_NAME)
    # A fork that re-executed its program no longer has the template's command line.
    return model.ppid() == template.pid and model.cmdline() == template.cmdline()


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
