"""The stack as `penstock up` runs it; tests/end_to_end tests the traffic through it."""

import re
import signal
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infra.local.ports import Ports
from infra.local.process import listens
from infra.local.stack import Stack, load_secrets
from shared.errors import ConfigurationError, Unavailable
from shared.process.cores import usable_cores
from tests.infra.running_up import CATALOG, MINI, Up, catalog, running_up, wait_until
from tests.infra.test_running_stack import penstock
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S
from tests.tls import make_certificate
from tests.workers.optimize.tiny_bert import ENTRY, make_tiny_bert

pytestmark = pytest.mark.slow(about_s=60)


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
            ConfigurationError,
            match=rf"port {ports.bigquery} \(bigquery\) is already in use; stop the programs",
        ):
            stack.__enter__()
    assert stack.processes == {}
    assert not [line for line in said if "ready" in line]


def test_secrets_stay_the_same_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    assert load_secrets(tmp_path) == load_secrets(tmp_path)
    (tmp_path / "secrets.json").write_text("")
    with pytest.raises(ConfigurationError, match=r"secrets\.json is damaged; delete it"):
        load_secrets(tmp_path)


def test_every_model_needs_a_health_port(tmp_path: Path) -> None:
    stack = Stack(tmp_path, ports=Ports.free(workers=1), say=lambda line: None)
    with pytest.raises(
        ConfigurationError, match="2 workers need 2 health ports, but only 1 of the 1 starting at"
    ):
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
        Unavailable, match=r"(?s)worker-mini exited with code .*no_such_package"
    ) as caught:
        stack.__enter__()
    assert str(stack.log_dir / "worker-mini.log") in caught.value.message
    assert list(stack.processes) == ["worker-mini", "api", "batches", "functions"]
    assert not [port for port in all_ports(ports) if listens(port)]


def test_first_start_makes_graphs_that_lack_and_gives_every_worker_all_cores(
    tmp_path: Path, servers: dict[str, str]
) -> None:
    """One stack is used to test both, because each start measures the models it serves."""
    folder, artifacts_dir, models_file = (
        tmp_path / "model",
        tmp_path / "artifacts",
        tmp_path / "models.yaml",
    )
    folder.mkdir()
    make_tiny_bert(folder)
    entry = ENTRY.format(folder=folder, tolerance=0.9999)
    graphs, torch_alone = "    backend: onnx\n", "    backend: torch\n    precision: fp32\n"
    other = entry.partition("models:\n")[2].replace("name: tiny", "name: other")
    models_file.write_text(f"{entry}{graphs}{other}{torch_alone}")
    # With one thread each, only the number of processes is left to choose.
    own = {
        "PENSTOCK_MODELS_FILE": str(models_file),
        "PENSTOCK_ARTIFACTS_DIR": str(artifacts_dir),
        "PENSTOCK_THREADS": "1",
    }
    said: list[str] = []
    ports = Ports.free(workers=2)
    with Stack(tmp_path / "state", ports=ports, settings=servers | own, say=said.append):
        assert list(artifacts_dir.glob("tiny/*/fp32.onnx"))
        backends = [reported_backend(port) for port in ports.health]
    assert [line for line in said if "tiny: checking for optimized graphs" in line]
    assert [backend["backend"] for backend in backends] == ["onnx", "torch"]
    assert {backend["processes"] for backend in backends} == {str(min(4, usable_cores()))}


def reported_backend(port: int) -> dict[str, str]:
    """The backend's labels, as reported by a worker."""
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=WAIT_LIMIT_S) as answer:
        found = text_string_to_metric_families(answer.read().decode())
    ((backend,),) = (one.samples for one in found if one.name == "penstock_worker_backend_info")
    return dict(backend.labels)


@pytest.fixture
def up(tmp_path: Path, kept_choices: dict[str, str]) -> Iterator[Up]:
    with running_up(tmp_path, kept_choices) as started:
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
    folder = up.log_path.parent
    made = penstock(folder, "keys", "create", "--tenant", "acme", "--name", "production")
    assert made.stdout.startswith("pk_live_"), made.stderr
    report = penstock(folder, "report", "usage", "--from", "2026-11-01")
    assert (report.returncode, "day" in report.stdout) == (0, True), report.stderr
    assert penstock(folder, "doctor").returncode == 0
    assert penstock(folder, "kill", "worker").stdout.startswith("killed worker-mini, process ")
    wait_until(lambda: "back    worker-mini" in up.said, START_LIMIT_S)
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(START_LIMIT_S) == 0
    assert not [port for port in all_ports(up.ports) if listens(port)]


BROKEN = """\
  - name: broken
    task: embedding
    source: package:no_such_package/model
    dimensions: 384
    batch: {max_tokens: 2048}
"""


def test_up_serves_the_others_if_a_model_cannot_start_or_a_port_is_taken(
    tmp_path: Path, servers: dict[str, str]
) -> None:
    ports = Ports.free(workers=1)
    with (
        socket.create_server(("127.0.0.1", ports.health[0])),
        running_up(
            tmp_path, servers, models=CATALOG.format(source=MINI) + BROKEN, ports=ports
        ) as up,
    ):
        assert "Penstock is up, without broken." in up.said
        assert "down    worker-broken exited with code 2; the end of" in up.said
        assert "no_such_package" in up.said
        assert "ready   worker-mini" in up.said
        assert "it said nothing" not in up.said
        request = urllib.request.Request(
            f"http://127.0.0.1:{up.ports.api}/v1/embeddings",
            data=b'{"model": "mini", "input": "a cat"}',
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_LIMIT_S) as response:
            assert response.status == 200
        assert up.process.poll() is None


@pytest.mark.parametrize(
    ("entry", "options"), [("    startup_s: 0.01\n", []), ("", ["--startup-s", "0.01"])]
)
def test_startup_limit_comes_from_the_entry_or_the_command(
    entry: str, options: list[str], tmp_path: Path, servers: dict[str, str]
) -> None:
    models = CATALOG.format(source=MINI) + entry
    with running_up(tmp_path, servers, options, models=models) as up:
        assert "Penstock is up, without mini." in up.said
        assert re.search(r"^  console +http://127\.0\.0\.1:\d+/console ", up.said, re.MULTILINE)
        assert "the model process was not ready within 0.01 s" in up.said


def test_up_outside_loopback_asks_for_keys_and_speaks_tls(
    tmp_path: Path, servers: dict[str, str]
) -> None:
    made = make_certificate(tmp_path)
    options = ["--host", "0.0.0.0", "--tls-cert", str(made.cert), "--tls-key", str(made.key)]
    with running_up(tmp_path, servers, options) as up:
        assert "pk_live_" not in up.said, "a key would stay in a log"
        assert "penstock keys create --tenant default --name first" in up.said
        url = f"https://127.0.0.1:{up.ports.api}/v1/models"
        assert f"curl {url.removesuffix('models')}embeddings -k -H 'Authorization" in up.said
        trusting = ssl.create_default_context(cafile=str(made.cert))
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url, timeout=WAIT_LIMIT_S, context=trusting)
        assert refused.value.code == 401
        refused.value.close()


def test_up_outside_loopback_with_half_a_certificate_is_refused(tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    with running_up(tmp_path, {}, ["--host", "0.0.0.0", "--tls-cert", str(made.cert)]) as up:
        assert up.process.wait(WAIT_LIMIT_S) == 1
        assert "PENSTOCK_TLS_CERT and PENSTOCK_TLS_KEY must be set together" in up.said
