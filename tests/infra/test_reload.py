"""`penstock up` while a custom model's sources change and its callers keep sending requests."""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.infra.running_up import Up, running_up, wait_until
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S

pytestmark = [
    pytest.mark.slow(about_s=60),
    pytest.mark.skipif(sys.platform != "linux", reason="finds the parts in /proc"),
]
CLASS = """
from cog import BasePredictor, Input


class Predictor(BasePredictor):
    def setup(self) -> None:
        SETUP

    def predict(self, text: str = Input(max_length=20)MORE) -> str:
        return f"VERSION {text}"
"""
CATALOG = """
models:
  - {name: mine, task: custom, source: "local:mine", deadline: {default_s: 60}}
"""


def source(version: str, *, more: str = "", setup: str = "pass") -> str:
    return CLASS.replace("VERSION", version).replace("MORE", more).replace("SETUP", setup)


class Callers:
    """Sends one prediction after another until it is stopped."""

    def __init__(self, url: str) -> None:
        self.outputs: list[str] = []
        self.failed: list[Any] = []
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Callers:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(START_LIMIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            status, found = predict(self._url, text="a")
            if status == 201 and found["status"] == "succeeded":
                self.outputs.append(found["output"])
            else:
                self.failed.append((status, found))

    def last_is(self, output: str) -> bool:
        return self.outputs[-1:] == [output]


def predict(url: str, **given: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{url}/v1/predictions",
        data=json.dumps({"version": "mine", "input": given}).encode(),
        headers={"content-type": "application/json", "prefer": "wait=60"},
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT_LIMIT_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One `penstock up` for all tests. Each test first writes the source that is served."""
    folder = tmp_path_factory.mktemp("reload")
    (folder / "mine").mkdir()
    change(folder, source("one"))
    (folder / "classes.yaml").write_text(CATALOG)
    settings = {"PENSTOCK_MODELS_FILE": str(folder / "classes.yaml")}
    with running_up(folder, settings) as running:
        yield running


def parts(up: Up) -> dict[str, int]:
    """The parts' process ids, keyed by the module or program they run."""
    found = {}
    for child in psutil.Process(up.process.pid).children():
        words = child.cmdline()
        found[words[2] if "-m" in words else Path(words[0].split(" ")[0]).name] = child.pid
    return found


def change(folder: Path, text: str) -> None:
    (folder / "mine" / "predict.py").write_text(text)


def test_a_changed_class_is_reloaded_and_its_callers_wait(up: Up) -> None:
    url = f"http://127.0.0.1:{up.ports.api}"
    before = parts(up)
    with Callers(url) as callers:
        wait_until(lambda: callers.last_is("one a"), WAIT_LIMIT_S)
        change(up.log_path.parent, source("two"))
        wait_until(lambda: callers.last_is("two a"), START_LIMIT_S)

        # A different interface: API and worker switch to it together.
        assert predict(url, text="a", loud=True)[0] == 422
        change(up.log_path.parent, source("three", more=", loud: bool = False"))
        wait_until(lambda: callers.last_is("three a"), START_LIMIT_S)
        status, found = predict(url, text="a", loud=True)
        assert (status, found["output"]) == (201, "three a")

        # Broken sources change nothing.
        change(up.log_path.parent, "def predict(:\n")
        wait_until(lambda: "mine is unchanged because " in up.said, START_LIMIT_S)
        assert "SyntaxError" in up.said or "invalid syntax" in up.said
        served = len(callers.outputs)
        wait_until(lambda: len(callers.outputs) > served + 3, WAIT_LIMIT_S)
        assert callers.last_is("three a")
    assert not callers.failed
    after = parts(up)
    assert {name for name in before if before[name] != after[name]} == {"workers"}


def test_a_class_that_can_t_be_set_up_waits_for_the_next_change(up: Up) -> None:
    url = f"http://127.0.0.1:{up.ports.api}"
    change(up.log_path.parent, source("two", setup="raise ValueError('no weights')"))
    wait_until(lambda: "restarts when its sources change" in up.said, START_LIMIT_S)
    assert "no weights" in up.said
    asked: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: asked.append(predict(url, text="a")))
    asking.start()
    change(up.log_path.parent, source("four"))
    asking.join(START_LIMIT_S)
    (found,) = asked
    assert (found[0], found[1]["output"]) == (201, "four a")
    assert up.process.poll() is None
