"""One stack with classes that use two numpy versions, a misbehaving class, and its neighbor."""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.stack import Stack
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S
from tests.workers.models.custom.classes import write_class
from tests.workers.models.custom.hostile import DISK_BYTES, ENDINGS, MEMORY_BYTES, hostile_class

pytestmark = pytest.mark.slow(about_s=120)
NUMPY = """
import numpy


class Predictor(BasePredictor):
    def predict(self, side: int) -> dict:
        return {"version": numpy.__version__, "sum": float(numpy.eye(side).sum())}
"""
VERSIONS = {"older": "2.1.3", "newer": "2.3.5"}
"""Versions with wheels for Python 3.11 to 3.13."""
NEIGHBOR = """
class Predictor(BasePredictor):
    def predict(self, number: int) -> int:
        return number + 1
"""
CATALOG = """
models:
  - {{name: older, task: custom, source: "local:{folder}/older"}}
  - {{name: newer, task: custom, source: "local:{folder}/newer"}}
  - {{name: neighbor, task: custom, source: "local:{folder}/neighbor", price: {{per_item_usd: 1}}}}
  - name: hostile
    task: custom
    source: local:{folder}/hostile
    resources: {{memory_bytes: {memory_bytes}, disk_bytes: {disk_bytes}}}
"""
SECRET = "told-nobody"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("classes")
    for name, number in VERSIONS.items():
        (folder / name).mkdir()
        (folder / name / "requirements.txt").write_text(f"numpy=={number}\n")
        write_class(folder / name, NUMPY)
    for name, body in (("neighbor", NEIGHBOR), ("hostile", hostile_class([str(folder / "state")]))):
        (folder / name).mkdir()
        write_class(folder / name, body)
    models_file = folder / "models.yaml"
    models_file.write_text(
        CATALOG.format(folder=folder, memory_bytes=MEMORY_BYTES, disk_bytes=DISK_BYTES)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_ENVIRONMENTS_DIR", str(folder / "environments"))
        if "UV_CACHE_DIR" not in os.environ:
            patch.setenv("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv"))
        refresh_interfaces(models_file, print)
        settings = {
            "PENSTOCK_MODELS_FILE": str(models_file),
            "PENSTOCK_ENVIRONMENTS_DIR": str(folder / "environments"),
            "PENSTOCK_SECRET": SECRET,
            "PENSTOCK_PROCESSES": "1",
        }
        with Stack(folder / "state", ports=Ports.free(4), settings=settings) as running:
            yield running


def predict(stack: Stack, model: str, **given: Any) -> Any:
    request = urllib.request.Request(
        f"{stack.api_url}/v1/predictions",
        data=json.dumps({"version": model, "input": given}).encode(),
        headers={"content-type": "application/json", "prefer": "wait=60"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_LIMIT_S) as response:
        return json.load(response)


def test_two_versions_of_numpy_in_one_stack(stack: Stack) -> None:
    for name, number in VERSIONS.items():
        found = predict(stack, name, side=3)
        assert found["output"] == {"version": number, "sum": 3.0}, found


def test_neighbors_are_served_while_a_class_does_what_none_should(stack: Stack) -> None:
    answers: list[Any] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answers.append(predict(stack, "neighbor", number=len(answers)))

    asking = threading.Thread(target=ask)
    asking.start()
    pids = {name: process.pid for name, process in stack.processes.items()}
    try:
        for mode, (status, told) in ENDINGS.items():
            found = predict(stack, "hostile", mode=mode)
            shown = found["output"] if status == "succeeded" else found["error"]
            assert found["status"] == status, found
            assert shown == told or (isinstance(told, str) and str(shown).startswith(told)), found
            assert SECRET not in json.dumps(found)
    finally:
        is_over.set()
        asking.join(START_LIMIT_S)
    assert len(answers) > len(ENDINGS)
    assert [one["output"] for one in answers] == list(range(1, len(answers) + 1))
    assert {name: process.pid for name, process in stack.processes.items()} == pids
    assert all(process.is_running for process in stack.processes.values())
