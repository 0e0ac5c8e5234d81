"""Classes in each form through the whole pipeline, called with Replicate's clients for Python and
Node. Results must equal the output of calling the class directly.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

import pytest
import yaml

from infra.local.ports import Ports
from infra.local.stack import Stack
from tests.clients.clients import client_of
from tests.clients.environments import command_of, is_ready, module_of
from tests.clients.running import Service, run_checks
from tests.keys import key_for, keys_url
from tests.workers.models.custom.forms import FORMS, write_expected, write_forms

pytestmark = pytest.mark.slow(about_s=180)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A stack that serves all classes with one worker."""
    folder = tmp_path_factory.mktemp("stack")
    models = folder / "models.yaml"
    entries = write_forms(folder / "classes")
    workers = [{"name": "classes", "models": [entry["name"] for entry in entries]}]
    models.write_text(yaml.safe_dump({"models": entries, "workers": workers}))
    settings = {
        "PENSTOCK_KEYS_URL": keys_url(folder, default="default"),
        "PENSTOCK_MODELS_FILE": str(models),
        "PENSTOCK_PROCESSES": "1",
    }
    with Stack(folder, ports=Ports.free(1), settings=settings) as stack:
        yield Service(
            stack.api_url,
            key_for("default"),
            embedder="",
            painter="",
            expected=str(write_expected(folder / "expected")),
        )


@pytest.mark.parametrize("name", ["replicate", "replicate-node"])
def test_each_form_by_replicates_clients(service: Service, name: str) -> None:
    client = client_of(name).with_classes
    if client.language == "python":
        command = [sys.executable, *module_of(client)]
    elif shutil.which("node") is None or not is_ready(client):
        pytest.skip("replicate-node is not installed: `make clients` does it")
    else:
        command = command_of(client)
    outcomes, _ = run_checks(command, service)
    assert [one for one in outcomes if one.outcome != "passed"] == []
    assert len(outcomes) > 3 * len(FORMS)
