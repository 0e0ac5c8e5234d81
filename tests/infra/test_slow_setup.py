"""`penstock up` with classes whose `setup` takes a long time, never finishes, or fails."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.local.ports import Ports
from tests.infra.running_up import Up, running_up, wait_until
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S

pytestmark = [
    pytest.mark.slow(about_s=260),
    pytest.mark.skipif(sys.platform != "linux", reason="custom classes run on Linux"),
]
SETUP_S = 200
"""Longer than the default `startup_s`."""
CLASS = """
import time
from cog import BasePredictor

class Predictor(BasePredictor):
    calls = 0

    def setup(self) -> None:
        SETUP

    def predict(self, text: str) -> str:
        self.calls += 1
        return f"NAME {text} {self.calls}"
"""
SETUPS = {
    "quick": "pass",
    "slow": f"""
        for second in range({SETUP_S}):
            print(f"loading {{second}} of {SETUP_S}", flush=True)
            time.sleep(1)
    """,
    "endless": "print('waiting for a server', flush=True); time.sleep(100_000)",
    "broken": "raise OSError('the bucket is not there yet')",
}
MORE = {"quick": {"processes": 1}, "slow": {"startup_s": 300}, "endless": {"startup_s": 20}}


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    entries = []
    for name, setup in SETUPS.items():
        (tmp_path / name).mkdir()
        code = CLASS.replace("SETUP", setup.strip()).replace("NAME", name)
        (tmp_path / name / "predict.py").write_text(code)
        deadline = {"default_s": 60}
        source = f"local:{tmp_path / name}"
        entry = {"name": name, "task": "custom", "source": source, "deadline": deadline}
        entries.append(entry | MORE.get(name, {}))
    (tmp_path / "classes.yaml").write_text(json.dumps({"models": entries}))
    models_file = str(tmp_path / "classes.yaml")
    settings = {"PENSTOCK_MODELS_FILE": models_file, "PENSTOCK_PROCESSES": "2"}
    with running_up(tmp_path, settings, ports=Ports.free(workers=len(SETUPS))) as running:
        yield running


def predict(up: Up, name: str) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{up.ports.api}/v1/predictions",
        data=json.dumps({"version": name, "input": {"text": "a"}}).encode(),
        headers={"content-type": "application/json", "prefer": "wait=60"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_LIMIT_S) as response:
        return json.load(response)["output"]


def status_of(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}{path}", timeout=WAIT_LIMIT_S
        ) as found:
            return int(found.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def unready_port(up: Up) -> int:
    """The health port of the first worker, in catalog order, that is not ready."""
    first = up.ports.health[0]
    return next(port for port in range(first, first + 100) if status_of(port, "/readyz") == 503)


def test_slow_endless_and_failing_setups_hold_up_nobody(up: Up) -> None:
    assert "Penstock is up, without slow, endless, broken." in up.said
    calls = [predict(up, "quick") for _ in range(4)]
    assert calls == [f"quick a {number}" for number in (1, 2, 3, 4)], "it has one process"
    # The probes in the manifests and Compose's health check use these endpoints.
    slow_port = unready_port(up)
    assert status_of(slow_port, "/livez") == 200
    assert "last log line: loading " in up.said
    wait_until(lambda: "ready   worker-slow · warm" in up.said, SETUP_S + START_LIMIT_S)
    assert predict(up, "slow") == "slow a 1"
    assert status_of(slow_port, "/readyz") == 200
    assert "setup took longer than 20 s" in up.said
    assert "waiting for a server" in up.said
    for name, reason in (
        ("endless", "setup took longer than 20 s"),
        ("broken", "the bucket is not there yet"),
    ):
        deaths = up.said.split(f"died    worker-{name} ")[1:]
        pauses = [one.partition("restarts in ")[2].partition(" s")[0] for one in deaths]
        assert pauses[:3] == ["2", "4", "8"], up.said
        assert all(reason in one for one in deaths[:3])
    assert predict(up, "quick") == "quick a 5"
    assert up.process.poll() is None
