"""The runbook covers exactly the alerts that Terraform creates, and mentions only exported
metrics.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

import api.batch_runner.runner
import api.http.auth
import api.idempotency.store
import api.metrics
import infra.row_archive.__main__
import shared.stores.cache
import shared.stores.objects
import shared.stores.prediction_store
import shared.stores.records_redis
import shared.tracing.export
import shared.usage.writer
import workers.functions.dependencies
import workers.functions.main
import workers.metrics
from penstock_monitoring.alerts import OF_FUNCTIONS, OFF_GOOGLE, ON_GOOGLE, RUNBOOK, alerts
from penstock_monitoring.objectives import DEFAULT_LEAST_BAD_EVENTS, DEFAULT_TARGETS, bounds_of
from shared.models.catalog_file import read_catalog
from tests.infra.deploy.terraform import Plan, plan_platform
from tests.infra.release.replay import DEPLOY_PAGE, KEYS, blocks

PAGES = {
    name: Path(f"docs/how-to/{name}.md").read_text(encoding="utf-8")
    for name in ("deploy", "operate", "troubleshoot")
}
EXPORTERS = (
    *(
        api.batch_runner.runner,
        api.http.auth,
        api.idempotency.store,
        api.metrics,
        infra.row_archive.__main__,
        shared.stores.cache,
        shared.stores.objects,
        shared.stores.prediction_store,
        shared.stores.records_redis,
        shared.tracing.export,
        shared.usage.writer,
    ),
    *(workers.functions.dependencies, workers.functions.main, workers.metrics),
)
"""Imported because importing these modules registers their metrics."""


INSTALLED = "bq|curl|docker|gcloud|git|gsutil|helm|jq|kubectl|make|openssl|terraform"
"""Programs that a reader may have to install first."""
ANCHORS = {
    re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
    for heading in re.findall(r"^#+ (.+)$", PAGES["troubleshoot"], re.MULTILINE)
}
"""The anchors that GitHub derives from the alert page's headings."""
BOUNDS = bounds_of(DEFAULT_TARGETS, DEFAULT_LEAST_BAD_EVENTS)


def part(title: str) -> str:
    """Returns the text under one of the alert page's headings."""
    return PAGES["troubleshoot"].partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_alert_has_its_line(plan: Plan) -> None:
    made = {
        policy["display_name"].removeprefix("penstock: ")
        for policy in plan.of("google_monitoring_alert_policy")
    }
    for model in read_catalog(Path("models.yaml")).models:
        made = {title.replace(f"{model.name}:", "MODEL:") for title in made}
    explained = re.findall(r"^### (.+)$", part("What each alert means"), re.MULTILINE)
    off_google = {alert.title for alert in OFF_GOOGLE} - {"Dead letters"}  # several there
    on_google = {alert.title for alert in ON_GOOGLE}
    assert on_google <= made
    # The alert about exported keys exists only if keys are in Redis.
    assert sorted(explained) == sorted(made | {"Budget", "Keys: the export fails"} | off_google)


def test_alerts_name_the_part_that_explains_them(plan: Plan) -> None:
    for policy in plan.of("google_monitoring_alert_policy"):
        (documentation,) = policy["documentation"]
        said = documentation["content"].removeprefix("What it means and what to do: ")
        document, _, anchor = said.partition("#")
        assert (document, anchor in ANCHORS) == (RUNBOOK, True), said
        assert documentation["links"] == []


def test_alerts_off_google_name_a_part_too() -> None:
    for alert in (*alerts(BOUNDS), *OFF_GOOGLE, *OF_FUNCTIONS):
        assert alert.anchor in ANCHORS, alert.title


@pytest.mark.slow
def test_alerts_link_to_the_runbook_where_it_can_be_read(tmp_path: Path) -> None:
    url = "https://example.com/penstock/docs/troubleshoot.md"
    plan = plan_platform(tmp_path, alerts={"runbook_url": url})
    links = [
        link
        for policy in plan.of("google_monitoring_alert_policy")
        for link in policy["documentation"][0]["links"]
    ]
    assert {link["url"].partition("#")[0] for link in links} == {url}
    assert len(links) == len(plan.of("google_monitoring_alert_policy"))
    assert {link["url"].partition("#")[2] for link in links} <= ANCHORS


def test_metrics_of_the_runbook_are_exported() -> None:
    exported = {metric.name for metric in REGISTRY.collect()}
    pages = "".join(PAGES.values())
    named = {name.removesuffix("_total") for name in re.findall(r"`(penstock_[a-z_]+)`", pages)}
    assert named
    assert named - {name.removesuffix("_total") for name in exported} == set()


def test_programs_of_a_first_deploy_are_named_before_it() -> None:
    text = "".join([*blocks(DEPLOY_PAGE, "First deploy"), *blocks(KEYS, "The first key")])
    scripts = set(re.findall(r"[\w./-]+\.sh", text))
    assert scripts
    text += "".join(Path(name).read_text(encoding="utf-8") for name in scripts)
    used = set(re.findall(rf"(?:^|[|;&(!]) *({INSTALLED}) ", text, re.MULTILINE))
    asked = re.search(
        r"^On your machine, you need (.+?)\. ", PAGES["deploy"], re.MULTILINE | re.DOTALL
    )
    assert asked is not None
    assert used - set(re.findall(r"\w+", asked[1].lower())) == set()
    assert {"gcloud", "kubectl", "terraform", "jq"} <= used
