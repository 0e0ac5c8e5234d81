"""The runbook knows every alert that Terraform makes and no other, and names only metrics that are
exported.
"""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import REGISTRY

import api.batches.runner
import api.http.key_refresh
import api.idempotency.store
import api.metrics
import shared.stores.cache
import shared.stores.objects
import shared.stores.records
import shared.tracing.export
import shared.usage.writer
import workers.functions.dependencies
import workers.metrics
from shared.catalog import read_catalog
from tests.infra.deploy.terraform import Plan

RUNBOOK = Path("docs/operations.md").read_text(encoding="utf-8")
EXPORTERS = (
    *(
        api.batches.runner,
        api.http.key_refresh,
        api.idempotency.store,
        api.metrics,
        shared.stores.cache,
        shared.stores.objects,
        shared.stores.records,
        shared.tracing.export,
        shared.usage.writer,
    ),
    *(workers.functions.dependencies, workers.metrics),
)
"""Imported, because that registers their metrics."""


def part(title: str) -> str:
    """What stands under a heading of the runbook."""
    return RUNBOOK.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_alert_has_its_line(plan: Plan) -> None:
    made = {
        policy["display_name"].removeprefix("penstock: ")
        for policy in plan.of("google_monitoring_alert_policy")
    }
    for model in read_catalog(Path("models.yaml")).models:
        made = {title.replace(f"{model.name}:", "MODEL:") for title in made}
    explained = set(re.findall(r"^\| ([^|]+?) \|", part("What each alert means"), re.MULTILINE)) - {
        "alert",
        "---",
    }
    assert explained - {"Budget"} == made


def test_alerts_name_the_part_that_explains_them(plan: Plan) -> None:
    said = {
        policy["documentation"][0]["content"]
        for policy in plan.of("google_monitoring_alert_policy")
    }
    assert said == {'See docs/operations.md, "What each alert means".'}
    assert part("What each alert means")


def test_metrics_of_the_runbook_are_exported() -> None:
    exported = {metric.name for metric in REGISTRY.collect()}
    named = {name.removesuffix("_total") for name in re.findall(r"`(penstock_[a-z_]+)`", RUNBOOK)}
    assert named - {name.removesuffix("_total") for name in exported} == set()
