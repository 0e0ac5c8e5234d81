"""What an object store that is far away costs: a proxy (bench/distant_link.py) delays each way.

The store is a server of S3's API that others keep (moto), in an environment of its own. A custom
model takes 5 ms an item and returns a file that is too large for a message, so that the worker puts
it into the store before the reply. The caller then loads the file by its link, so the API gets it.
"""

from __future__ import annotations

import http.client
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import yaml

from bench.distant_link import distant
from bench.load.generator import LoadOrder, LoadReport, drive, percentiles
from bench.peers.environments import programs_of
from bench.pipeline import BROKER, say_nothing
from bench.report import Figure, Outcome
from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.process import Process, free_port, listens
from infra.local.stack import Stack
from infra.local.up import served_stack

NAME, BUCKET = "files", "bench"
DELAYS_MS = (0.0, 5.0, 30.0)
ITEM_S, OF_A_BATCH, FILE_BYTES = 0.005, 8, 100_000
ALONE, TOGETHER, IN_FLIGHT, WARM_UP = 40, 1500, 64, 64
READY_LIMIT_S, REQUEST_LIMIT_S = 60.0, 30.0
CREATED = 201
REQUIREMENTS = Path(__file__).parent / "object_server" / "requirements.txt"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
CLASS = f"""
import tempfile, time
from cog import BaseModel, BasePredictor, Path

class Seed(BaseModel):
    text: str

class Predictor(BasePredictor):
    def predict_batch(self, inputs: list[Seed]) -> list[Path]:
        time.sleep({ITEM_S} * len(inputs))
        return [self.file(one.text) for one in inputs]

    def file(self, text: str) -> Path:
        with tempfile.NamedTemporaryFile(suffix=".bin", delete=False) as file:
            file.write(text.encode().ljust({FILE_BYTES}))
        return Path(file.name)
"""


def run() -> Outcome:
    """Measures one stack at each distance."""
    figures, details = list[Figure](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _store(folder) as port:
            for delay_ms in DELAYS_MS:
                where = f"store {delay_ms:g} ms away"
                with distant(port, delay_ms, folder) as link:
                    seen = _measured(folder / f"{delay_ms:g}", link, where)
                details[where] = seen
                print(f"{where}: {seen}", flush=True)
                figures += (Figure(f"{where}: {key}", *value) for key, value in seen.items())
    return Outcome(figures, details)


@contextmanager
def _store(folder: Path) -> Iterator[int]:
    """The port of a store that has the bucket."""
    port = free_port()
    command = [str(programs_of(REQUIREMENTS) / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with Process("moto", command, folder) as server:
        server.wait_ready(lambda: listens(port), READY_LIMIT_S)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_LIMIT_S)
        connection.request("PUT", f"/{BUCKET}", headers={"Content-Length": "0"})
        if (status := connection.getresponse().status) != http.client.OK:
            raise RuntimeError(f"the bucket was not made: {status}")
        connection.close()
        yield port


def _measured(folder: Path, link: int, word: str) -> dict[str, tuple[float, str]]:
    """Figures and their units, by name, of a new stack whose store is at `link`."""
    source = folder / "class"
    source.mkdir(parents=True)
    (source / "predict.py").write_text(CLASS)
    batch = {"max_items": OF_A_BATCH}
    entry = {"name": NAME, "task": "custom", "source": f"local:{source}", "batch": batch}
    models_file = folder / "models.yaml"
    models_file.write_text(yaml.safe_dump({"models": [entry]}))
    refresh_interfaces(models_file, lambda line: None)
    os.environ |= CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{link}"}
    variables = {
        "PENSTOCK_MODELS_FILE": str(models_file),
        "PENSTOCK_PROCESSES": "1",
        "PENSTOCK_OBJECTS_URL": f"s3://{BUCKET}",
    }
    with served_stack(folder / "state", Ports.free(), variables, say_nothing, BROKER) as stack:
        _predict(stack, WARM_UP, IN_FLIGHT, f"{word}, first")
        alone = _predict(stack, ALONE, 1, f"{word}, alone")
        many = _predict(stack, TOGETHER, IN_FLIGHT, f"{word}, many")
        loads_ms = _load(stack, alone)
    model_s = TOGETHER * ITEM_S
    return {
        "prediction alone, p50": (alone.round_trip()["p50"], "ms"),
        "file loaded alone, p50": (percentiles(loads_ms)["p50"], "ms"),
        f"rate at {IN_FLIGHT} in flight": (TOGETHER / many.wall_s, "/s"),
        "model busy": (100 * model_s / many.wall_s, "%"),
        f"p50 at {IN_FLIGHT} in flight": (many.round_trip()["p50"], "ms"),
    }


def _predict(stack: Stack, count: int, in_flight: int, word: str) -> LoadReport:
    """Asks for predictions whose callers wait.

    Raises:
        RuntimeError: one did not succeed.
    """
    bodies = [
        msgspec.json.encode({"version": NAME, "input": {"text": f"{word} {number}"}}).decode()
        for number in range(count)
    ]
    order = LoadOrder(
        stack.ports.api,
        bodies,
        in_flight,
        path="/v1/predictions",
        headers={"prefer": "wait"},
        sample_every=1,
    )
    report = drive(order)
    answers = [json.loads(body) for _, body in report.samples]
    if bad := [one for one in answers if one["status"] != "succeeded"]:
        raise RuntimeError(f"{len(bad)} of {count} failed: {bad[0]['error']}")
    if report.statuses() != {CREATED: count}:
        raise RuntimeError(f"{count} predictions were expected, not {report.statuses()}")
    return report


def _load(stack: Stack, report: LoadReport) -> list[float]:
    """Loads the files of predictions by their links. Returns the time of each, in ms."""
    times_ms = list[float]()
    connection = http.client.HTTPConnection("127.0.0.1", stack.ports.api, timeout=REQUEST_LIMIT_S)
    for link in [urlsplit(json.loads(body)["output"]) for _, body in report.samples]:
        began_s = time.perf_counter()
        connection.request("GET", f"{link.path}?{link.query}")
        answer = connection.getresponse()
        data = answer.read()
        times_ms.append((time.perf_counter() - began_s) * 1000)
        if answer.status != http.client.OK or len(data) != FILE_BYTES:
            raise RuntimeError(f"a file of {FILE_BYTES} bytes was expected: {answer.status}")
    connection.close()
    return times_ms
