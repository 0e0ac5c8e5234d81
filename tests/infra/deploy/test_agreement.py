"""Terraform, Kubernetes, the embedded stack and the code agree on names, filters, ports, probes and
the table.

Settings are compared in test_settings.py, and permissions in test_rights.py.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.routing import APIRoute
from prometheus_client import REGISTRY

import api.dispatch.reply_inbox
import api.metrics
import shared.stores.cache
import shared.usage.writer
import workers.metrics
from api.routes import health
from infra import bigquery
from infra.local.provision_servers import provision
from infra.row_archive import archive as row_archive
from penstock_planning.deploy.platform_variables import INBOX_STRIDE
from pubsub_emulator import parse_filter
from shared.broker.transport import (
    SubscriptionSettings,
    batch_subscription_id,
    workers_subscription_id,
)
from shared.messages import Envelope, Reply, ReplyBody, encode_reply
from shared.models.catalog_file import read_catalog
from shared.tenants.plan import PRIORITIES, Priority
from tests.infra.deploy.manifests import Objects, of_kind, pod, settings_of
from tests.infra.deploy.manifests import workers as deployments
from tests.infra.deploy.terraform import PROJECT, Plan, api_container, api_settings
from tests.limits import WAIT_LIMIT_S
from workers.health import health_server

pytestmark = pytest.mark.slow

CATALOG = read_catalog(Path("models.yaml"))
EXPORTERS = (
    api.dispatch.reply_inbox,
    api.metrics,
    row_archive,
    shared.stores.cache,
    shared.usage.writer,
    workers.metrics,
)
"""Imported because importing these modules registers their metrics."""
FUNCTIONS_URL = "https://functions.example.com"


class RecordingAdmin:
    """Records the resources that it is asked to create."""

    def __init__(self) -> None:
        self.topics: set[str] = set()
        self.subscriptions: dict[str, SubscriptionSettings] = {}

    async def ensure_topic(self, topic_id: str) -> bool:
        self.topics.add(topic_id)
        return True

    async def ensure_subscription(
        self, subscription_id: str, settings: SubscriptionSettings
    ) -> bool:
        self.subscriptions[subscription_id] = settings
        return True

    async def delete_topic(self, topic_id: str) -> bool:
        raise AssertionError("provisioning deletes nothing")

    async def delete_subscription(self, subscription_id: str) -> bool:
        raise AssertionError("provisioning deletes nothing")

    async def subscription_exists(self, subscription_id: str) -> bool:
        return subscription_id in self.subscriptions

    async def missing_subscriptions(self, subscription_ids: list[str]) -> list[str]:
        return [name for name in subscription_ids if name not in self.subscriptions]


@pytest.fixture(scope="module")
def provisioned() -> RecordingAdmin:
    admin = RecordingAdmin()
    asyncio.run(provision(admin, CATALOG, inbox_pool=2, slots=2, functions_url=FUNCTIONS_URL))
    return admin


def _of_the_first_region(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Excludes other regions' inboxes, because the local stack is a single region."""
    numbers = ((one, re.match(r"inbox[.](\d+)", one["name"])) for one in found)
    return [one for one, number in numbers if number is None or int(number[1]) < INBOX_STRIDE]


def test_same_topics(plan: Plan, provisioned: RecordingAdmin) -> None:
    planned = _of_the_first_region(plan.of("google_pubsub_topic"))
    assert {topic["name"] for topic in planned} == provisioned.topics


def test_same_subscriptions(plan: Plan, provisioned: RecordingAdmin) -> None:
    planned = {
        found["name"]: (
            found["filter"] or "",
            found["ack_deadline_seconds"],
            float(found["message_retention_duration"].removesuffix("s")),
            found["expiration_policy"][0]["ttl"],
            bool(found["enable_message_ordering"]),
            len(found["push_config"]),
            *_backoff(found["retry_policy"]),
            *(policy["max_delivery_attempts"] for policy in found["dead_letter_policy"]),
        )
        for found in _of_the_first_region(plan.of("google_pubsub_subscription"))
    }
    assert planned == {
        name: _as_planned(settings) for name, settings in provisioned.subscriptions.items()
    }


def _backoff(policy: list[dict[str, str]]) -> tuple[float, ...]:
    return tuple(
        float(p[f"{end}_backoff"].removesuffix("s"))
        for p in policy
        for end in ("minimum", "maximum")
    )


def _as_planned(settings: SubscriptionSettings) -> tuple[Any, ...]:
    backoff = () if settings.retry_min_s is None else (settings.retry_min_s, settings.retry_max_s)
    attempts = (settings.max_delivery_attempts,) if settings.dead_letter_topic_id else ()
    assert settings.expires_after_s == 0
    facts = (
        settings.filter,
        settings.ack_deadline_s,
        settings.retention_s,
        "",
        settings.is_ordered,
    )
    return (*facts, 1 if settings.push_endpoint else 0, *backoff, *attempts)


@pytest.mark.parametrize("priority", PRIORITIES)
def test_each_job_has_one_priority(plan: Plan, priority: Priority) -> None:
    filters = {
        found["name"]: parse_filter(found["filter"] or "")
        for found in plan.of("google_pubsub_subscription")
    }
    for model in CATALOG.models:
        envelope = job_envelope(model.name, priority)
        ids = (workers_subscription_id(model.name), batch_subscription_id(model.name))
        taken = [
            name
            for name in ids
            if (chosen := filters[name]) and chosen.matches(envelope.to_attributes())
        ]
        assert taken == [ids[priority == "batch"]]


def job_envelope(model: str, priority: Priority) -> Envelope:
    return Envelope(
        request_id="req_1",
        part=0,
        model=model,
        tenant="t",
        priority=priority,
        received_at_s=1.0,
        published_at_s=1.0,
        deadline_s=2.0,
    )


def test_filtered_attribute_is_on_every_reply(plan: Plan) -> None:
    _, attributes = encode_reply(Reply("req_1", 0, "1", ReplyBody([])))
    filters = {
        found["filter"] for found in plan.of("google_pubsub_subscription") if found["filter"]
    }
    assert f'attributes.slot = "{attributes["slot"]}"' in filters


def test_api_answers_probes_on_its_port(plan: Plan) -> None:
    container = api_container(plan, "europe-west4")
    port = int(api_settings(plan, "europe-west4")["PENSTOCK_PORT"] or 0)
    paths = {route.path for route in health.router.routes if isinstance(route, APIRoute)}
    assert container["ports"][0]["container_port"] == port
    for probe in ("startup_probe", "liveness_probe"):
        asked = container[probe][0]["http_get"][0]
        assert (asked["port"], asked["path"] in paths) == (port, True)


def test_api_is_scraped_where_it_answers(plan: Plan) -> None:
    (config,) = [
        yaml.safe_load(version["secret_data"])
        for version in plan.of("google_secret_manager_secret_version")
        if "RunMonitoring" in (version["secret_data"] or "")
    ]
    (endpoint,) = config["spec"]["endpoints"]
    assert str(endpoint["port"]) == api_settings(plan, "europe-west4")["PENSTOCK_METRICS_PORT"]
    # Callers can reach the one port that the container declares, and no others.
    assert endpoint["port"] not in {
        port["container_port"] for port in api_container(plan, "europe-west4")["ports"]
    }
    with (
        api.metrics.serve_metrics("127.0.0.1", 0) as port,
        urllib.request.urlopen(
            f"http://127.0.0.1:{port}{endpoint['path']}", timeout=WAIT_LIMIT_S
        ) as answer,
    ):
        assert b"penstock_api_requests" in answer.read()


def test_worker_answers_probes_and_scrapes(objects: Objects) -> None:
    (monitoring,) = of_kind(objects, "PodMonitoring").values()
    with running_loop() as loop, health_server("127.0.0.1", 0, loop, lambda: True) as bound:
        for deployment in deployments(objects).values():
            container = pod(deployment)["containers"][0]
            (port,) = container["ports"]
            assert (
                str(port["containerPort"])
                == settings_of(objects, deployment)["PENSTOCK_HEALTH_PORT"]
            )
            probes = [
                container[f"{kind}Probe"]["httpGet"]
                for kind in ("startup", "readiness", "liveness")
            ]
            for asked in [*probes, *monitoring["spec"]["endpoints"]]:
                assert asked["port"] == port["name"]
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{bound}{asked['path']}", timeout=WAIT_LIMIT_S
                ) as answer:
                    assert answer.status == 200


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


@pytest.mark.parametrize("name", bigquery.tables())
def test_same_table(plan: Plan, name: str) -> None:
    (rows,) = [table for table in plan.of("google_bigquery_table") if table["table_id"] == name]
    options = bigquery.table_options(name)
    assert json.loads(rows["schema"]) == bigquery.schema(name)
    assert rows["clustering"] == options["clustering"]["fields"]
    assert rows["require_partition_filter"] is options["requirePartitionFilter"]
    (partitioning,) = rows["time_partitioning"]
    wanted = options["timePartitioning"]
    assert (partitioning["type"], partitioning["field"]) == (wanted["type"], wanted["field"])
    # Without an expiration, the provider reports this only after an apply.
    assert partitioning.get("expiration_ms") == (int(wanted.get("expirationMs", 0)) or None)


def test_same_views(plan: Plan) -> None:
    planned = {
        table["table_id"]: table["view"][0]["query"]
        for table in plan.of("google_bigquery_table")
        if table["view"]
    }
    assert planned == bigquery.views(PROJECT, "penstock")


def test_rights_are_given_to_the_accounts_of_the_pods(plan: Plan, objects: Objects) -> None:
    accounts = {
        f"ns/{found['metadata']['namespace']}/sa/{name}"
        for name, found in of_kind(objects, "ServiceAccount").items()
    }
    pulling = {
        found["member"].partition("/subject/")[2]
        for found in plan.of("google_pubsub_subscription_iam_member")
        if found["member"].startswith("principal://")
    }
    # The program that drains nodes talks only to the cluster.
    assert pulling == accounts - {"ns/penstock/sa/gpu-nodes"}
    of_workers = {pod(found)["serviceAccountName"] for found in deployments(objects).values()}
    assert of_workers == of_kind(objects, "ServiceAccount").keys() - {"gpu-nodes"}


def test_pods_find_the_pools(plan: Plan, objects: Objects) -> None:
    pools = [
        (pool["node_config"][0]["labels"]["penstock.dev/gpu"], _sharing(pool))
        for pool in plan.of("google_container_node_pool")
        if pool["name"] != "general"
    ]
    for deployment in deployments(objects).values():
        chosen = pod(deployment)["nodeSelector"]
        share = int(chosen.get("cloud.google.com/gke-max-shared-clients-per-gpu", 1))
        assert (chosen["penstock.dev/gpu"], share) in pools


def _sharing(pool: Mapping[str, Any]) -> int:
    sharing = pool["node_config"][0]["guest_accelerator"][0]["gpu_sharing_config"]
    return sharing[0]["max_shared_clients_per_gpu"] if sharing else 1


def test_queries_ask_for_metrics_that_are_exported(plan: Plan, objects: Objects) -> None:
    names = {
        sample for metric in REGISTRY.collect() for sample in _samples(metric.name, metric.type)
    }
    queries = [
        *(
            trigger["metadata"]["query"]
            for o in of_kind(objects, "ScaledObject").values()
            for trigger in o["spec"]["triggers"]
        ),
        *(
            asked["query"]
            for policy in plan.of("google_monitoring_alert_policy")
            for asked in policy["conditions"][0]["condition_prometheus_query_language"]
        ),
        plan.of("google_monitoring_dashboard")[0]["dashboard_json"],
    ]
    asked = {name for query in queries for name in re.findall(r"\bpenstock_[a-z_]+", query)}
    assert asked - names == set()
    assert {"penstock_api_items_in_flight", "penstock_worker_inference_seconds_sum"} <= asked


def _samples(name: str, kind: str) -> list[str]:
    return [name] + [
        f"{name}_{suffix}"
        for suffix in {"counter": ["total"], "histogram": ["sum", "count", "bucket"]}.get(kind, [])
    ]
