"""Changes to a class that restart its worker; tests/infra/test_reload.py tests this end to end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from infra.local.interfaces import LocalClass, refresh_interfaces
from infra.local.process import Process
from infra.local.reload import LOOK_EVERY_S, SETTLED_S, Reloader
from infra.local.supervision import SupervisedPart, Supervisor
from tests.infra.running_up import wait_until
from tests.limits import WAIT_LIMIT_S

SLEEPS = "import time; time.sleep(600)"
READS_AGAIN = """
import signal, time
signal.signal(signal.SIGHUP, lambda number, frame: print("read again", flush=True))
print("up", flush=True)
while True:
    time.sleep(600)
"""
CLASS = """
from cog import BasePredictor

class Predictor(BasePredictor):
    def predict(self, text: str) -> str:
        return text
"""


class World:
    """A worker and an API that only sleep, and a clock that only the test moves."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self.file = folder / "mine" / "predict.py"
        self.now_s = 0.0
        self.reported: list[tuple[str, str]] = []
        self.worker = running.enter_context(
            Process("worker-mine", [sys.executable, "-c", SLEEPS], folder)
        )
        self.api = running.enter_context(
            Process("api", [sys.executable, "-c", READS_AGAIN], folder)
        )
        self.supervisor = Supervisor(
            [SupervisedPart(self.worker, lambda: True, 60.0)], self._report, lambda: self.now_s
        )
        self.reloader = Reloader(
            [LocalClass("mine", str(folder / "mine"))],
            {"mine": "worker-mine"},
            {"worker-mine": self.worker, "api": self.api, "batches": self.api},
            self.supervisor,
            self._report,
            lambda: self.now_s,
        )
        running.callback(self.reloader.close)

    def _report(self, word: str, facts: str) -> None:
        self.reported.append((word, facts))

    def look(self) -> list[str]:
        """Checks once, at a later time. Returns the messages reported so far."""
        self.now_s += max(LOOK_EVERY_S, SETTLED_S)
        self.reloader.look()
        assert self.supervisor.look() is None
        return [word for word, _ in self.reported]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "predict.py").write_text(CLASS)
    with ExitStack() as running:
        yield World(tmp_path, running)


def test_a_change_restarts_the_worker_and_has_the_catalog_read_again(world: World) -> None:
    first = world.worker.pid
    wait_until(lambda: "up" in world.api.log_path.read_text(), WAIT_LIMIT_S)
    for _ in range(3):
        assert world.look() == []
    world.file.write_text(CLASS.replace("text: str", "text: str, more: int = 1"))
    wait_until(lambda: world.look()[-1:] == ["back"], WAIT_LIMIT_S)
    assert world.worker.pid != first
    assert "more" in (world.file.parent / "penstock.schema.json").read_text()
    wait_until(lambda: "read again" in world.api.log_path.read_text(), WAIT_LIMIT_S)


def test_a_class_added_since_the_start_is_not_watched(world: World, tmp_path: Path) -> None:
    classes = [LocalClass("new", str(tmp_path)), LocalClass("mine", str(world.file.parent))]
    told = list[str]()
    reloader = Reloader(
        classes,
        {"mine": "worker-mine"},
        {},
        world.supervisor,
        lambda word, facts: told.append(word),
    )
    reloader.look()
    reloader.close()
    assert told == []


def test_sources_that_can_t_be_served_restart_nothing(world: World) -> None:
    first = world.worker.pid
    world.file.write_text("def predict(:\n")
    wait_until(lambda: world.look() == ["kept"], WAIT_LIMIT_S)
    assert "mine is unchanged because its new sources can't be served" in world.reported[0][1]
    assert "invalid syntax" in world.reported[0][1]
    assert world.worker.pid == first


def test_files_that_decide_nothing_are_not_looked_at(world: World) -> None:
    (world.file.parent / "weights.bin").write_bytes(b"w")
    (world.file.parent / ".git").mkdir()
    (world.file.parent / ".git" / "hook.py").write_text("x")
    os.utime(world.file.parent)
    for _ in range(3):
        assert world.look() == []


def test_a_class_that_takes_long_to_inspect_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.local.interfaces.QUIET_S", 0.0)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "predict.py").write_text(CLASS)
    (folder / "cog.yaml").write_text("image: somewhere\n")
    (tmp_path / "models.yaml").write_text(
        f"models: [{{name: mine, task: custom, source: 'local:{folder}'}}]"
    )
    said: list[str] = []
    refresh_interfaces(tmp_path / "models.yaml", said.append)
    assert said == [
        "mine: inspecting its class and installing its packages",
        "mine: note: cog.yaml: image has no effect here",
    ]
