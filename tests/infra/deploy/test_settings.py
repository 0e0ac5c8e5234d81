"""Every process gets the settings that it knows and requires, and no other setting is written."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from infra.local.ports import Ports
from infra.local.stack import REPLACED_BY, Stack
from infra.row_archive.archive import RowArchiveSettings
from shared.broker.transport import direct_id, inbox_topic_id
from shared.models.catalog_file import read_catalog
from shared.settings import ApiSettings, Settings, WorkerSettings
from tests.infra.deploy.manifests import Objects, settings_of, workers
from tests.infra.deploy.terraform import (
    INVOICES,
    PROJECT,
    REGIONS,
    Plan,
    api_settings,
    function_settings,
)
from tests.source_files import source_files
from workers.functions.settings import FunctionSettings

CATALOG = read_catalog(Path("models.yaml"))
WRITTEN_IN = ("*.tf", "*.yaml", "*.sh", "*.md", "*Dockerfile*", "infra/*.py")
ON_ONE_MACHINE = {
    "PENSTOCK_PUBSUB_ENDPOINT",
    "PENSTOCK_BIGQUERY_ENDPOINT",
    "PENSTOCK_BROKER",
}
"""Empty in the cloud, which uses Google's own endpoints."""
OF_TESTS = {"PENSTOCK_TEST_PATIENCE"}
OF_THE_STACK = {"PENSTOCK_RABBITMQ_SERVER"}
"""The program started by the stack on one machine. No process in a deployment reads it."""
OF_THE_EXAMPLES = {"PENSTOCK_URL", "PENSTOCK_API_KEY"}
"""Variables for the clients in examples/. No Penstock process reads them."""
OF_CLASSES = {"PENSTOCK_TRACEBACKS"}
"""Variables that a class's cog.yaml may set for its own runner."""
LEFT_ALONE: dict[type[Settings], set[str]] = {
    ApiSettings: {
        *("PENSTOCK_LOG_LEVEL", "PENSTOCK_MEMORY_CACHE_BYTES", "PENSTOCK_REQUEST_MAX_BYTES"),
        *("PENSTOCK_INBOX_LEASE_S", "PENSTOCK_IDEMPOTENCY_LEASE_S", "PENSTOCK_METRICS_HOST"),
        *("PENSTOCK_CORS_ORIGINS", "PENSTOCK_WEBHOOKS_PRIVATE"),
        # Inputs may be fetched from all public hosts.
        *("PENSTOCK_FETCH_HOSTS", "PENSTOCK_FETCH_NETWORKS"),
        *("PENSTOCK_FETCH_CA", "PENSTOCK_FETCH_LIMIT_S"),
        # TLS ends at the load balancer.
        *("PENSTOCK_TLS_CERT", "PENSTOCK_TLS_KEY"),
        *("PENSTOCK_HEAD_TIMEOUT_S", "PENSTOCK_MAX_CONNECTIONS", "PENSTOCK_BODIES_MAX_BYTES"),
        "PENSTOCK_BROKER_WAIT_S",
        *("PENSTOCK_FILES_MAX_BYTES", "PENSTOCK_BATCH_ITEMS_IN_FLIGHT"),
        "PENSTOCK_USAGE_QUERY_MAX_BYTES",
        *("PENSTOCK_PICTURE_PROCESSES", "PENSTOCK_PICTURE_BUDGET_BYTES"),
        # Only if there is a domain, or a pool that does not begin at 0.
        *("PENSTOCK_PUBLIC_URL", "PENSTOCK_INBOX_FIRST"),
    },
    WorkerSettings: {
        *("PENSTOCK_LOG_LEVEL", "PENSTOCK_MEMORY_CACHE_BYTES", "PENSTOCK_MAX_OUTSTANDING_BYTES"),
        *(
            "PENSTOCK_STARTUP_S",
            "PENSTOCK_ACK_DEADLINE_S",
            "PENSTOCK_MEMORY_BUDGET_BYTES",
            "PENSTOCK_THREADS",
            "PENSTOCK_SPOOL_MAX_BYTES",
        ),
        # Only if no node is a spot node.
        "PENSTOCK_SPOT",
        # Only if prefetched weights are mounted.
        "PENSTOCK_KERNELS_DIR",
        "PENSTOCK_WEIGHTS_DIR",
        # Classes do not get their worker's variables.
        "PENSTOCK_CLASS_VARIABLES",
        # The image sets it, because it contains the environments.
        "PENSTOCK_ENVIRONMENTS_DIR",
    },
}
"""Settings whose defaults are right for a deployment; a new setting must be listed here or set by
the deployment.
"""


def variables(kind: type[Settings]) -> set[str]:
    return {f"PENSTOCK_{name.upper()}" for name in kind.model_fields}


def test_api_knows_what_terraform_sets(plan: Plan) -> None:
    assert set(api_settings(plan, "europe-west4")) <= variables(ApiSettings)


def test_api_of_a_second_region_knows_what_terraform_sets(plan: Plan) -> None:
    assert set(api_settings(plan, "europe-west1")) <= variables(ApiSettings)


def test_regions_lease_inboxes_of_their_own(plan: Plan) -> None:
    leased = []
    for region in REGIONS:
        settings = api_settings(plan, region)
        first = int(settings.get("PENSTOCK_INBOX_FIRST") or 0)
        numbers = range(first, first + int(settings["PENSTOCK_INBOX_POOL"] or 0))
        for number in map(str, numbers):
            leased += [inbox_topic_id(number), direct_id(number)]
    assert sorted(leased) == sorted(
        found["name"]
        for found in plan.of("google_pubsub_topic")
        if found["name"].startswith("inbox.")
    )


def test_api_accepts_what_terraform_sets(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in api_settings(plan, "europe-west4").items():
        monkeypatch.setenv(name, value or "redis://10.64.32.2:6379/0")
    settings = ApiSettings()
    assert (settings.project, settings.region, settings.reply_slots) == (PROJECT, "europe-west4", 2)


def test_runner_of_batches_knows_and_accepts_what_terraform_sets(
    plan_with_batches: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pool,) = plan_with_batches.of("google_cloud_run_v2_worker_pool")
    (container,) = pool["template"][0]["containers"]
    assert (container["command"], container["args"]) == (["penstock"], ["batches"])
    given = {env["name"]: env.get("value") for env in container["env"]}
    assert set(given) <= variables(ApiSettings)
    for name, value in given.items():
        monkeypatch.setenv(name, value or "redis://10.64.32.2:6379/0")
    settings = ApiSettings()
    assert (settings.inbox_pool, settings.metrics_port) == (4, 0)
    assert settings.objects_url.startswith("gs://")


def test_row_archive_knows_and_accepts_what_terraform_sets(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    (service,) = (
        one
        for one in plan.of("google_cloud_run_v2_service")
        if one["name"] == "penstock-row-archive"
    )
    archive, metrics = service["template"][0]["containers"]
    assert [*archive["command"], *archive["args"]] == ["python", "-m", "infra.row_archive"]
    given = {env["name"]: env.get("value") for env in archive["env"]}
    assert set(given) <= variables(RowArchiveSettings)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = RowArchiveSettings()
    assert settings.rows_url == api_settings(plan, "europe-west4")["PENSTOCK_ROWS_URL"]
    # BigQuery allows 1,500 load jobs per table per day, and clearing a backlog needs some of them.
    assert 86_400 / settings.archive_every_s < 1_000
    # The sidecar scrapes this port, and Cloud Run probes it.
    assert archive["ports"][0]["container_port"] == settings.health_port == 9464
    assert settings.health_host == "0.0.0.0"
    assert metrics["name"] == "metrics"


def test_workers_know_and_accept_what_kubernetes_sets(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = set()
    for deployment in workers(objects).values():
        given = {
            name: v
            for name, v in settings_of(objects, deployment).items()
            if name.startswith("PENSTOCK_")
        }
        assert set(given) <= variables(WorkerSettings)
        with monkeypatch.context() as environment:
            for name, value in given.items():
                environment.setenv(name, value)
            served.update(WorkerSettings().model_names)
    assert served == {model.name for model in CATALOG.models}


FUNCTIONS = {
    "penstock-dead-letters": "dead_letter",
    "penstock-reports": "reports",
    "penstock-webhooks": "webhook",
}


@pytest.mark.parametrize(("service", "target"), FUNCTIONS.items())
def test_functions_know_and_accept_what_terraform_sets(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, service: str, target: str
) -> None:
    given = function_settings(plan, service)
    assert given.pop("FUNCTION_TARGET") == target
    source = Path(str(given.pop("FUNCTION_SOURCE")))
    assert f"async def {target}(request: Request)" in source.read_text()
    assert set(given) <= variables(FunctionSettings)
    for name, value in given.items():
        monkeypatch.setenv(name, value or "redis://10.64.32.2:6379/0")
    settings = FunctionSettings()
    assert (settings.project, settings.push_checked_by, settings.webhooks_private) == (
        PROJECT,
        "cloud-run",
        False,
    )
    assert settings.push_account == f"{service}-push@{PROJECT}.iam.gserviceaccount.com"


def invoice_settings(given: dict[str, str | None]) -> dict[str, str | None]:
    return {name: v for name, v in given.items() if name.startswith("PENSTOCK_INVOICE_")}


def test_api_and_reports_have_the_same_invoice_terms(plan: Plan) -> None:
    terms = {f"PENSTOCK_INVOICE_{name.upper()}": str(value) for name, value in INVOICES.items()}
    for region in REGIONS:
        assert invoice_settings(api_settings(plan, region)) == terms
    for service in FUNCTIONS:
        wanted = terms if service == "penstock-reports" else {}
        assert invoice_settings(function_settings(plan, service)) == wanted


def test_invoice_terms_that_are_not_set_have_their_defaults(plan_with_batches: Plan) -> None:
    assert invoice_settings(api_settings(plan_with_batches, "europe-west4")) == {}


def test_api_is_given_all_that_it_must_be(plan: Plan) -> None:
    given = set(api_settings(plan, "europe-west4"))
    assert given | LEFT_ALONE[ApiSettings] | ON_ONE_MACHINE == variables(ApiSettings)
    assert given & (LEFT_ALONE[ApiSettings] | ON_ONE_MACHINE) == set()


def test_workers_are_given_all_that_they_must_be(objects: Objects) -> None:
    deployments = workers(objects)
    assert deployments
    for deployment in deployments.values():
        given = {name for name in settings_of(objects, deployment) if name.startswith("PENSTOCK_")}
        assert given | LEFT_ALONE[WorkerSettings] | ON_ONE_MACHINE == variables(WorkerSettings)
        assert given & (LEFT_ALONE[WorkerSettings] | ON_ONE_MACHINE) == set()


def test_no_setting_is_misspelt_anywhere() -> None:
    known = (
        variables(ApiSettings)
        | variables(WorkerSettings)
        | variables(FunctionSettings)
        | variables(RowArchiveSettings)
        | OF_TESTS
        | OF_THE_STACK
        | OF_THE_EXAMPLES
        | OF_CLASSES
    )
    files = [file for file in source_files() if any(fnmatch(str(file), one) for one in WRITTEN_IN)]
    written: set[str] = set()
    for file in files:
        for name, family in re.findall(
            r"\b(PENSTOCK_[A-Z0-9_]*[A-Z0-9])(_\*)?", file.read_text("utf-8")
        ):
            assert any(one.startswith(name) for one in known) if family else name in known, (
                f"{file}: {name}"
            )
            written.add(name)
    assert "PENSTOCK_PROJECT" in written


def test_calls_are_made_for_their_function(plan: Plan) -> None:
    services = {
        found["name"]: found["custom_audiences"] for found in plan.of("google_cloud_run_v2_service")
    }
    made_for = {
        token["audience"]
        for found in plan.of("google_pubsub_subscription")
        for push in found["push_config"]
        for token in push["oidc_token"]
    } | {
        token["audience"]
        for found in plan.of("google_cloud_scheduler_job")
        for target in found["http_target"]
        for token in target["oidc_token"]
    }
    assert made_for == set(FUNCTIONS)
    for service in FUNCTIONS:
        assert services[service] == [function_settings(plan, service)["PENSTOCK_PUSH_AUDIENCE"]]


def test_cloud_sets_what_the_stack_sets(plan: Plan, objects: Objects, tmp_path: Path) -> None:
    ports = Ports(8080, 8085, 9050, 6379, range(8091, 8093))
    local = set(Stack(tmp_path, ports=ports).environment) - {
        REPLACED_BY["pubsub"],
        REPLACED_BY["bigquery"],
    }
    assert local <= set(api_settings(plan, "europe-west4"))
    for deployment in workers(objects).values():
        assert local - {"PENSTOCK_PORT", "PENSTOCK_METRICS_PORT"} <= set(
            settings_of(objects, deployment)
        )


def test_shared_settings_are_the_same_on_both_sides(plan: Plan, objects: Objects) -> None:
    of_api = api_settings(plan, "europe-west4")
    for deployment in workers(objects).values():
        of_worker = settings_of(objects, deployment)
        for name in (
            "PENSTOCK_PROJECT",
            "PENSTOCK_REGION",
            "PENSTOCK_DATASET",
            "PENSTOCK_OBJECTS_URL",
            "PENSTOCK_ROWS_URL",
        ):
            assert of_worker[name] == of_api[name]
