"""One plan with two regions, and its rendered output, which most tests only read."""

from __future__ import annotations

import pytest

from tests.infra.deploy.manifests import Objects, render
from tests.infra.deploy.terraform import INVOICES, REGIONS, Plan, plan_platform


@pytest.fixture(scope="session")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    functions = {
        name: {"image": "registry.example.com/functions@sha256:0"}
        for name in ("dead_letters", "reports", "webhooks")
    }
    return plan_platform(
        tmp_path_factory.mktemp("plan"), regions=REGIONS, functions=functions, invoices=INVOICES
    )


@pytest.fixture(scope="session")
def plan_with_batches(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """One region with a batch runner."""
    return plan_platform(
        tmp_path_factory.mktemp("batches"),
        batches={"instances": 1},
        inboxes={"per_region": 4, "slots": 2},
    )


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return render(tmp_path_factory.mktemp("objects"))
