"""The Compose file's services as plain processes: their commands and settings work together.

No container runs here. Host names become ports on this machine, and volumes become folders.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.local.process import Process, answers, free_port, listens
from tests.infra.deploy.dockerfiles import image
from tests.infra.deploy.test_compose import FOLDER, filled, variables
from tests.infra.running_up import MINI, SMALLEST, catalog
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S
from workers.models.custom.checking import inspect_folder, write_interface

pytestmark = pytest.mark.slow(about_s=25)

ROOT = Path(__file__).parents[2]
PROGRAMS = {"penstock": [sys.executable, "-m", "infra.cli.main"], "python": [sys.executable]}
OF_IMAGES = {"API_IMAGE": "api", "FUNCTIONS_IMAGE": "functions", "SERVERS_IMAGE": "servers"} | {
    "WORKER_IMAGE": "worker"
}


class Machine:
    """The services, keyed by name, each as a process that has not been started yet."""

    def __init__(self, folder: Path, redis_url: str, models_file: Path, model: str) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("pubsub", "bigquery", "functions", "api")}
        self.health_port = free_port()
        given = variables("images.env", "example.env") | {"MODELS": model}
        text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
        self._services: dict[str, Any] = filled(yaml.safe_load(text), given)["services"]
        self._images = {given[name]: dockerfile for name, dockerfile in OF_IMAGES.items()}
        self._places = {
            "redis://redis:6379/0": redis_url,
            "pubsub:8085": f"127.0.0.1:{self.ports['pubsub']}",
            "bigquery:9050": f"127.0.0.1:{self.ports['bigquery']}",
            "functions:8080": f"127.0.0.1:{self.ports['functions']}",
            "/etc/penstock/models.yaml": str(models_file),
            "/var/lib/penstock": str(folder / "lib"),
            "/var/cache/penstock": str(folder / "cache"),
            "0.0.0.0": "127.0.0.1",
        }
        (folder / "lib/keys").mkdir(parents=True)

    def command(self, name: str) -> list[str]:
        service = self._services[name]
        built = image(self._images[service["image"]])
        words = service.get("entrypoint", built.entry_point) + service.get("command", [])
        port = str(self.ports.get(name, ""))
        here = [port if word in ("8080", "8085", "9050") else self._here(word) for word in words]
        return [*PROGRAMS[here[0]], *here[1:]]

    def health_check(self, name: str) -> dict[str, Any]:
        """A service's health check, with its command adapted to this machine."""
        found = dict(self._services[name]["healthcheck"])
        _, *words = found.pop("test")
        words = [word.replace(":8081", f":{self.health_port}") for word in words]
        return found | {"command": [*PROGRAMS[words[0]], *words[1:]]}

    def environment(self, name: str, **more: str) -> dict[str, str]:
        """A service's variables, taken from its image, from the file, and from `more`."""
        service = self._services[name]
        built = image(self._images[service["image"]]).environment
        kept = {
            variable: value
            for variable, value in built.items()
            if variable.startswith(("PENSTOCK_", "FUNCTION_", "HF_"))
        }
        given = kept | service.get("environment", {})
        own = {"PENSTOCK_SPOOL_DIR": str(self.folder / f"spool-{name}"), "PYTHONPATH": str(ROOT)}
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
        return clean | {key: self._here(value) for key, value in given.items()} | own | more

    def process(self, name: str, **more: str) -> Process:
        environment = self.environment(name, **more)
        return Process(name, self.command(name), self.folder, environment=environment)

    def run(self, name: str, *words: str) -> str:
        """Runs a service that exits on its own and returns its output."""
        done = subprocess.run(
            [*self.command(name), *words],
            env=self.environment(name),
            capture_output=True,
            text=True,
            timeout=WAIT_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _here(self, value: str) -> str:
        for there, here in self._places.items():
            value = value.replace(there, here)
        return value


def ask(url: str, headers: Mapping[str, str]) -> int:
    request = urllib.request.Request(
        f"{url}/v1/embeddings",
        data=json.dumps({"model": "mini", "input": "a cat"}).encode(),
        headers={"Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT_LIMIT_S) as response:
            assert len(json.load(response)["data"][0]["embedding"]) == 384
            return int(response.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


@pytest.fixture
def machine(tmp_path: Path, redis_url: str) -> Machine:
    return Machine(tmp_path, redis_url, catalog(tmp_path, MINI), "mini")


def test_commands_and_settings_work_together(machine: Machine) -> None:
    signing = {"PENSTOCK_SECRET": "s" * 32, "PENSTOCK_WEBHOOK_SECRETS": f"whsec_{'A' * 43}="}
    api_port, functions_port = machine.ports["api"], machine.ports["functions"]
    machine.run("keys", "init")
    key = machine.run("keys", "create", "--tenant", "default", "--name", "first").strip()
    with ExitStack() as running:
        for name in ("pubsub", "bigquery"):
            server = running.enter_context(machine.process(name))
            port = machine.ports[name]
            server.wait_ready(partial(listens, port), START_LIMIT_S)
        machine.run("provision")
        worker = running.enter_context(
            machine.process("worker-cpu", PENSTOCK_HEALTH_PORT=str(machine.health_port), **SMALLEST)
        )
        functions = running.enter_context(machine.process("functions", **signing))
        api = running.enter_context(
            machine.process(
                "api", **signing, PENSTOCK_PORT=str(api_port), PENSTOCK_METRICS_PORT="0"
            )
        )
        batches = running.enter_context(
            machine.process("batches", **signing, PENSTOCK_METRICS_PORT="0")
        )
        functions.wait_ready(lambda: answers(functions_port, "/"), START_LIMIT_S)
        api.wait_ready(lambda: answers(api_port, "/readyz"), START_LIMIT_S)
        worker.wait_ready(lambda: answers(machine.health_port, "/readyz"), START_LIMIT_S)
        url = f"http://127.0.0.1:{api_port}"
        assert ask(url, {"Authorization": f"Bearer {key}"}) == 200
        assert ask(url, {}) == 401
        assert batches.is_running


SETUP_S = 200
SLOW = f"""
import time
from cog import BasePredictor

class Predictor(BasePredictor):
    def setup(self) -> None:
        time.sleep({SETUP_S})

    def predict(self, text: str) -> str:
        return text[::-1]
"""


@pytest.fixture
def machine_of_class(tmp_path: Path, redis_url: str) -> Machine:
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "predict.py").write_text(SLOW)
    write_interface(folder, inspect_folder(folder).interface)
    entry = {"name": "slow", "task": "custom", "source": f"local:{folder}", "startup_s": 300}
    models_file = tmp_path / "models.yaml"
    models_file.write_text(json.dumps({"models": [entry]}))
    return Machine(tmp_path, redis_url, models_file, "slow")


@pytest.mark.slow(about_s=230)
@pytest.mark.skipif(sys.platform != "linux", reason="custom classes run on Linux")
def test_a_worker_stays_healthy_while_its_class_takes_200_s_to_set_up(
    machine_of_class: Machine,
) -> None:
    """Docker counts a failure only after `start_period` or after the first successful check."""
    machine = machine_of_class
    check = machine.health_check("worker-cpu")
    failures, has_succeeded, began_s = 0, False, time.monotonic()
    with ExitStack() as running:
        for name in ("pubsub", "bigquery"):
            server = running.enter_context(machine.process(name))
            server.wait_ready(partial(listens, machine.ports[name]), START_LIMIT_S)
        machine.run("provision")
        worker = running.enter_context(
            machine.process("worker-cpu", PENSTOCK_HEALTH_PORT=str(machine.health_port), **SMALLEST)
        )
        while not answers(machine.health_port, "/readyz"):
            assert worker.is_running, worker.last_words()
            assert time.monotonic() - began_s < SETUP_S + START_LIMIT_S
            is_right = subprocess.run(check["command"], capture_output=True).returncode == 0
            has_succeeded |= is_right
            is_late = time.monotonic() - began_s > seconds(check, "start_period")
            failures = failures + 1 if not is_right and (has_succeeded or is_late) else 0
            assert failures < check["retries"], "Docker calls the worker unhealthy"
            time.sleep(seconds(check, "interval"))
        assert has_succeeded
        assert time.monotonic() - began_s > SETUP_S
        assert worker.is_running


def seconds(check: dict[str, Any], field: str) -> float:
    """A health check's duration. All are in seconds."""
    return float(str(check[field]).removesuffix("s"))
