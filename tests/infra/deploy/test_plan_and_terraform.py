"""The counts from `penstock deploy plan` match the resources in Terraform's own plan, given the
variables that the command prints.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from infra.kubernetes.deployment import read_gpu_types
from penstock_planning.deploy import costs, platform_variables, show
from penstock_planning.deploy.gpu_prices import gpu_prices
from penstock_planning.deploy.plan import DeployPlan
from penstock_planning.deploy.platform_variables import Platform
from penstock_planning.deploy.prices import read_prices
from penstock_planning.deploy.topology import gpu_pools, redis
from penstock_planning.deploy.volumes import HOURS
from penstock_planning.entry import Entry
from penstock_planning.profiles import with_served_batches
from shared.models.catalog_file import read_catalog
from tests.infra.deploy.terraform import REGIONS, Plan, plan_platform
from tools.planning.tests.deploy.planning import plan_of, rate

pytestmark = pytest.mark.slow

CATALOG = with_served_batches(read_catalog(Path("models.yaml")))
IMAGE = "registry.example.com/api@sha256:0"
PLATFORM = Path("infra/terraform/platform/variables.tf")
OPTIONS = Path("infra/terraform/modules/options/variables.tf")
CLUSTER = Path("infra/terraform/modules/cluster/variables.tf")
VARIABLES: list[type[Entry]] = [
    platform_variables.ApiVariable,
    platform_variables.BatchesVariable,
    platform_variables.CacheVariable,
    platform_variables.FunctionsVariable,
    platform_variables.Inboxes,
    platform_variables.Nodes,
    platform_variables.ObjectsDays,
    platform_variables.RecordsVariable,
    platform_variables.Region,
    platform_variables.RowsVariable,
]


def test_two_regions_are_those_of_terraform(plan: Plan) -> None:
    given = {
        "api": {"max_instances": 1},
        "functions": {"dead_letters": {"image": "any"}, "webhooks": {"image": "any"}},
        "inboxes": {"per_region": 2, "slots": 2},
        "regions": REGIONS,
    }
    ours = plan_of(
        *CATALOG.models,
        rates={"all-MiniLM-L6-v2": rate(1)},
        platform=Platform.model_validate(given),
    )
    assert ours.changes == ()
    agree(ours, plan)


# Two Terraform runs: about 5 s on an otherwise idle machine.
def test_variables_with_the_changes_are_taken_by_terraform(tmp_path: Path) -> None:
    given = {
        "api": {"image": IMAGE, "cpu": 4, "memory": "2Gi"},
        "inboxes": {"per_region": 8, "slots": 1},
        "nodes": {"overflow": "a100", "max_gpus": 2, "spot": False},
        "regions": {
            "europe-west4": {
                "max_gpus": 1,
                "reservations": {"l4": {"name": "serving", "zone": "europe-west4-a"}},
            }
        },
    }
    asked = {"all-MiniLM-L6-v2": rate(2000, seconds_per_item=0.002)}
    ours = plan_of(*CATALOG.models, rates=asked, platform=Platform.model_validate(given))
    assert {change.setting for change in ours.changes} == {
        "api.max_instances",
        "inboxes.per_region",
        "regions.europe-west4.max_gpus",
        "all-MiniLM-L6-v2: replicas.max",
    }
    made = plan_platform(tmp_path, **json.loads(show.plan_as_json(ours))["tfvars"])
    agree(ours, made)
    (service,) = (
        one for one in made.of("google_cloud_run_v2_service") if one["name"] == "penstock-api"
    )
    limits = [
        container["resources"][0]["limits"] for container in service["template"][0]["containers"]
    ]
    assert [float(limit["cpu"]) for limit in limits] == [4, costs.SIDECAR_CPU]
    assert limits[1]["memory"] == f"{costs.SIDECAR_GIB * 1024:g}Mi"


def test_model_split_between_gpus_gets_machines_that_have_them(tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    models.write_text(
        "models: [{name: tiny, task: text, engine: vllm, source: 'hf:a/b',"
        " batch: {max_tokens: 4096}, gpu: {type: l4, count: 4}}]"
    )
    catalog = read_catalog(models)
    given = {"nodes": {"overflow": "a100"}, "api": {"image": IMAGE}}
    rates = {"tiny": rate(1, seconds_per_item=0.5, tokens_per_item=512)}
    platform, prices = Platform.model_validate(given), read_prices()
    ours = plan_of(*catalog.models, rates=rates, platform=platform, prices=prices)
    assert ours.pools == {"europe-west4": ("l4-x1-4gpus", "l4-x1-4gpus-spot")}
    variables = json.loads(show.plan_as_json(ours))["tfvars"]
    made = plan_platform(tmp_path, **variables | {"models_file": str(models)})
    agree(ours, made)
    assert ours.on_demand_usd is not None
    nodes = sum(pool.nodes_peak for pool in ours.sites[0].pools)
    hour_usd = ours.on_demand_usd[1] / nodes / HOURS
    (dashboard,) = made.of("google_monitoring_dashboard")
    assert f"vector({hour_usd:.6f}), 'worker', 'tiny'" in dashboard["dashboard_json"]
    reported = [
        price.usd_per_hour
        for price in gpu_prices(prices, read_gpu_types())
        if (price.gpu_type, price.spot, price.region) == ("l4", False, "europe-west4")
        and price.has_several_gpus
    ]
    assert hour_usd == pytest.approx(4 * reported[-1])


def agree(ours: DeployPlan, made: Plan) -> None:
    assert sorted(ours.topics) == sorted(topic["name"] for topic in made.of("google_pubsub_topic"))
    assert sorted(ours.subscriptions) == sorted(
        one["name"] for one in made.of("google_pubsub_subscription")
    )
    pools = {
        (pool["location"], pool["name"]): pool for pool in made.of("google_container_node_pool")
    }
    regions = [site.region for site in ours.sites]
    assert set(pools) == {
        (region, name) for region in regions for name in [*ours.pools[region], "general"]
    }
    for pool in (pool for site in ours.sites for pool in site.pools):
        own = pools[pool.region, pool.name]
        config = own["node_config"][0]
        assert (config["machine_type"], config["disk_size_gb"], config["disk_type"]) == (
            pool.machine.machine_type,
            pool.machine.disk_gb,
            pool.node.disk_type,
        )
        assert config["guest_accelerator"][0]["count"] == pool.gpu.count
        assert set(own["node_locations"]) == set(pool.node.zones_in(pool.region))
        assert own["autoscaling"][0]["total_max_node_count"] >= pool.nodes_peak
    stores = made.of("google_memorystore_instance")
    instances = [(one["location"], one["node_type"], 1 + one["replica_count"]) for one in stores]
    assert sorted(instances) == sorted(
        (one.region, one.node_type, one.nodes) for one in redis(ours.platform)
    )
    services = [
        one for one in made.of("google_cloud_run_v2_service") if one["name"] == "penstock-api"
    ]
    assert sorted(service["location"] for service in services) == sorted(regions)
    for service in services:
        scaling = service["template"][0]["scaling"][0]
        assert scaling["max_instance_count"] >= max(site.api_peak for site in ours.sites)


def test_compute_classes_leave_no_pool_to_terraform() -> None:
    platform = Platform.model_validate({"nodes": {"compute_classes": True}})
    assert gpu_pools(CATALOG.models, platform, "europe-west4", read_gpu_types()) == []


def test_disk_is_that_of_terraform() -> None:
    sizes = re.findall(
        r"disk_size_gb += (\d+)", Path("infra/terraform/modules/cluster/nodes.tf").read_text()
    )
    assert [int(size) for size in sizes] == [costs.GENERAL_DISK_GIB]


def test_row_archive_days_match_terraform() -> None:
    stage = Path("infra/terraform/platform/row_archive.tf").read_text()
    assert re.findall(r"expirationMs\) / 86400000 \+ (\d+)", stage) == [
        str(costs.ARCHIVE_DAYS_MORE)
    ]
    assert re.findall(r"soft_delete_days += (\d+)", stage) == [str(costs.ARCHIVE_DELETED_DAYS)]
    assert re.findall(r'limits   = \{ cpu = "(\d+)"', stage) == [str(costs.ARCHIVE_CPU)]


@pytest.mark.parametrize(
    ("variable", "model", "file"),
    [
        ("api", platform_variables.ApiVariable, OPTIONS),
        ("cache", platform_variables.CacheVariable, OPTIONS),
        ("inboxes", platform_variables.Inboxes, OPTIONS),
        ("nodes", platform_variables.Nodes, OPTIONS),
        ("objects_days", platform_variables.ObjectsDays, OPTIONS),
        ("records", platform_variables.RecordsVariable, OPTIONS),
        ("rows", platform_variables.RowsVariable, OPTIONS),
        ("general_nodes", platform_variables.GeneralNodes, CLUSTER),
    ],
)
def test_defaults_are_those_of_terraform(variable: str, model: Any, file: Path) -> None:
    block = _option(variable) if file == OPTIONS else _block(variable, file)
    defaults = {}
    for name, value in re.findall(
        r"^ +(\w+) += optional\(\w+, ([^)]+)\)", block, flags=re.MULTILINE
    ):
        defaults[name] = json.loads(value)
    own = model().model_dump()
    shared = defaults.keys() & own.keys()
    assert len(shared) >= 2
    assert {name: own[name] for name in shared} == {name: defaults[name] for name in shared}


@pytest.mark.parametrize(
    ("given", "misspelled"),
    [
        ({"slos": {"availability": 0.99}}, {"slo": {}}),
        ({"api": {"timeout_s": 400}}, {"api": {"timeout": 400}}),
        ({"cache": {"backup_days": 7}}, {"cache": {"backup": 7}}),
        ({"functions": {"reports": {"image": "a:1"}}}, {"functions": {"report": {}}}),
        ({"inboxes": {"kept_slots": 8}}, {"inboxes": {"kept": 8}}),
        ({"nodes": {"min_version": "1.35"}}, {"nodes": {"version": "1.35"}}),
        ({"regions": {"a": {"drained": True}}}, {"regions": {"a": {"drain": True}}}),
        ({"rows": {"every_s": 90}}, {"rows": {"every": 90}}),
    ],
)
def test_variables_are_accepted_by_their_names_in_terraform(
    given: dict[str, Any], misspelled: dict[str, Any]
) -> None:
    Platform.model_validate(given)
    with pytest.raises(ValidationError, match="accepted here"):
        Platform.model_validate(misspelled)


@pytest.mark.parametrize("model", [Platform, *VARIABLES])
def test_fields_are_options_of_terraform(model: type[Entry]) -> None:
    assert model.model_fields.keys() <= model.list_keys()


@pytest.mark.parametrize("variable", ["dataset_location", "storage_location"])
def test_single_defaults_are_those_of_terraform(variable: str) -> None:
    found = re.search(r"^ +default += (.+)$", _block(variable, PLATFORM), flags=re.MULTILINE)
    assert found is not None
    assert getattr(Platform(), variable) == json.loads(found[1])


def test_bound_of_the_slots_is_that_of_terraform() -> None:
    assert (
        f"length(var.options.regions) <= {platform_variables.MAX_REPLY_SUBSCRIPTIONS}"
        in OPTIONS.read_text()
    )


def test_inboxes_are_numbered_as_by_terraform() -> None:
    stage = Path("infra/terraform/platform/inboxes.tf").read_text()
    assert re.search(rf"^ +inbox_stride += {platform_variables.INBOX_STRIDE}$", stage, re.MULTILINE)


def _block(variable: str, file: Path) -> str:
    found = re.search(
        rf'^variable "{variable}" {{\n(.*?)^}}', file.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert found is not None
    return found[1]


def _option(variable: str) -> str:
    """The type of an object variable in the `options` module."""
    found = re.search(
        rf"^    {variable} = optional\((.*?)^    }}\)",
        OPTIONS.read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert found is not None
    return found[1]
