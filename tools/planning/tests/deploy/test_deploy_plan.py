"""`penstock deploy plan` as users run it: what it prints, which settings it asks for, and what it
rejects.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock_planning.deploy.plan import DeployPlan
from penstock_planning.deploy.platform_variables import Platform
from penstock_planning.deploy.prices import read_prices
from penstock_planning.deploy.show import text
from shared.errors import ConfigurationError
from tests.infra.test_cli import penstock
from tests.penstock_command import penstock as run_penstock
from tools.planning.tests.deploy.planning import entry, plan_of, rate

EXAMPLE = "tools/planning/rates.example.yaml"
MINILM = "all-MiniLM-L6-v2"


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run_penstock("deploy", "plan", *words) == 1
    return capsys.readouterr().err


def test_the_example_is_planned_by_the_command() -> None:
    reported = penstock("deploy", "plan", "--rates", EXAMPLE)
    assert (reported.returncode, reported.stderr) == (0, "")
    for words in (
        "an example, not measured",
        "l4-x4-spot",
        "NVIDIA_L4_GPUS",
        "Memorystore of the cache",
        "0 rows have no price",
    ):
        assert words in reported.stdout


def test_rates_can_be_words(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rate", f"{MINILM}=5:50", "--seconds", f"{MINILM}=0.002", "--json"]
    assert run_penstock("deploy", "plan", *words) == 0
    plan = json.loads(capsys.readouterr().out)
    by_name = {model["model"]: model for model in plan["models"]}
    assert (by_name[MINILM]["requests_mean_per_s"], by_name[MINILM]["requests_peak_per_s"]) == (
        5,
        50,
    )
    assert by_name[MINILM]["rate"]["measured"] == "given on the command line"
    assert by_name["stable-diffusion-tiny"]["pods_peak"] == 0


def test_distance_to_the_broker_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rate", f"{MINILM}=50", "--seconds", f"{MINILM}=0.0005"]
    held = {}
    for seconds in ("0.05", "0.2"):
        assert run_penstock("deploy", "plan", *words, "--broker-round-trip", seconds, "--json") == 0
        plan = json.loads(capsys.readouterr().out)
        (held[seconds],) = (
            model["held_jobs"] for model in plan["models"] if model["model"] == MINILM
        )
        assert any(f"{seconds} s from the broker and back" in note for note in plan["notes"])
    assert held["0.2"] > held["0.05"]


def test_regions_can_be_words(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--rate",
        f"{MINILM}=5",
        "--seconds",
        f"{MINILM}=0.002",
        "--region",
        "us-central1",
        "europe-west4",
        "--json",
    ]
    assert run_penstock("deploy", "plan", *words) == 0
    regions = json.loads(capsys.readouterr().out)["tfvars"]["regions"]
    # Terraform's default region keeps its index.
    assert {name: region["index"] for name, region in regions.items()} == {
        "us-central1": 1,
        "europe-west4": 0,
    }


def test_a_machine_without_a_price_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_penstock("deploy", "plan", "--rates", EXAMPLE, "--region", "asia-south1") == 0
    lines = capsys.readouterr().out.splitlines()
    (nodes,) = (line for line in lines if line.startswith("  GPU nodes l4-x1"))
    assert nodes.endswith("no price machine/g2-standard-8/spot")


def test_variables_that_size_nothing_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {
        "project_id": "mine",
        "api": {"image": "there", "max_instances": 2},
        "labels": {"a": "b"},
    }
    file = tmp_path / "x.tfvars.json"
    file.write_text(json.dumps(document))
    assert run_penstock("deploy", "plan", "--rates", EXAMPLE, "--tfvars", str(file), "--json") == 0
    variables = json.loads(capsys.readouterr().out)["tfvars"]
    assert (variables["project_id"], variables["api"]["image"], variables["labels"]) == (
        "mine",
        "there",
        {"a": "b"},
    )


def test_too_small_settings_are_raised_and_told() -> None:
    platform = Platform.model_validate({"nodes": {"general": {"max": 2}}})
    models = [entry(), entry("slow", gpu={"type": "none"}, replicas={"max": 3})]
    demand = {"texts": rate(4000), "slow": rate(100, seconds_per_item=0.05)}
    plan = plan_of(*models, rates=demand, platform=platform)
    reported = {change.setting: (change.now, change.needed) for change in plan.changes}
    site = plan.sites[0]
    assert reported == {
        "api.max_instances": (4, site.api_peak),
        "inboxes.per_region": (8, 2 * site.api_peak),
        "nodes.general.max": (2, site.general_most),
        "nodes.max_gpus": (8, site.pools[0].nodes_most),
        "slow: replicas.max": (3, site.workers[1].pods_most),
    }
    wanted = plan.platform
    assert (wanted.api.max_instances, wanted.inboxes.per_region) == (
        site.api_peak,
        2 * site.api_peak,
    )
    assert len(plan.subscriptions) == 2 * 3 + 2 * site.api_peak * 9


def test_runners_of_batches_have_inboxes_too() -> None:
    platform = Platform.model_validate(
        {"api": {"max_instances": 20}, "batches": {"instances": 1}, "inboxes": {"per_region": 40}}
    )
    plan = plan_of(entry(), rates={"texts": rate(1)}, platform=platform)
    assert {change.setting: change.needed for change in plan.changes}["inboxes.per_region"] == 42


def test_more_instances_than_a_region_has_inboxes() -> None:
    platform = Platform.model_validate({"api": {"max_instances": 501}})
    with pytest.raises(ConfigurationError, match="501 instances per region need 1002 inboxes"):
        plan_of(entry(), rates={"texts": rate(1)}, platform=platform)


def test_slots_go_down_before_a_project_runs_out_of_subscriptions() -> None:
    platform = Platform.model_validate({"inboxes": {"per_region": 200, "slots": 80}})
    plan = plan_of(entry(), rates={"texts": rate(1)}, platform=platform)
    (change,) = plan.changes
    assert (change.setting, change.needed) == ("inboxes.slots", 44)
    assert len(plan.subscriptions) == 3 + 9000


def test_slots_of_the_old_revision_count_until_they_are_gone() -> None:
    inboxes = {"per_region": 8, "slots": 2, "kept_slots": 4}
    platform = Platform.model_validate({"inboxes": inboxes})
    plan = plan_of(entry(), rates={"texts": rate(1)}, platform=platform)
    assert "inbox.7.slot.3" in plan.subscriptions
    assert len(plan.subscriptions) == 3 + 8 * 5
    inboxes |= {"per_region": 200, "kept_slots": 80}
    platform = Platform.model_validate({"inboxes": inboxes})
    plan = plan_of(entry(), rates={"texts": rate(1)}, platform=platform)
    assert {change.setting: change.needed for change in plan.changes} == {"inboxes.kept_slots": 44}


def test_quotas_hold_the_peak_and_what_chance_adds() -> None:
    platform = Platform.model_validate({"nodes": {"overflow": "a100"}, "domain": "api.example.com"})
    plan = plan_of(entry(), rates={"texts": rate(10, peak_per_s=1000)}, platform=platform)
    needed = {(quota.name, quota.place): quota.needed for quota in plan.quotas}
    # 10 Erlangs: 15 workers. Allowing for 4 standard deviations above 90,000 arrivals, with all
    # workers busy at 0.9 utilization, requires 17 workers.
    (pool,) = plan.sites[0].pools
    assert (pool.nodes_peak, pool.nodes_most) == (15, 17)
    for gpus in ("NVIDIA_L4_GPUS", "PREEMPTIBLE_NVIDIA_L4_GPUS", "NVIDIA_A100_GPUS"):
        assert needed[gpus, "europe-west4"] == 17
    assert needed["GPUS_ALL_REGIONS", "project"] == 17
    assert needed["vCPUs of Compute Engine", "europe-west4"] == 17 * 8 + 4
    assert needed["Pub/Sub subscriptions", "project"] == len(plan.subscriptions)
    assert needed["static addresses", "global"] == 1


def test_flex_start_and_reservations_are_planned() -> None:
    platform = Platform.model_validate(
        {
            "nodes": {"overflow": "a100"},
            "regions": {
                "europe-west4": {"reservations": {"l4": {"name": "r", "zone": "europe-west4-a"}}}
            },
        }
    )
    waiting = entry("slow", gpu={"type": "h100", "share": 1, "provisioning": "flex-start"})
    plan = plan_of(entry(), waiting, rates={"texts": rate(), "slow": rate()}, platform=platform)
    assert plan.pools["europe-west4"] == (
        *("l4-x1-reserved", "l4-x1", "l4-x1-spot", "l4-x1-on-a100"),
        "h100-x1-flex",
    )
    needed = {quota.name: quota.needed for quota in plan.quotas}
    assert "NVIDIA_H100_GPUS" not in needed
    assert needed["PREEMPTIBLE_NVIDIA_H100_GPUS"] == plan.sites[0].pools[1].nodes_most
    assert "machine/a3-highgpu-1g/flex-start" in {cost.price_key for cost in plan.costs}
    report = text(plan)
    assert "once there is capacity" in report
    assert "h100-x1-flex-spot" not in report


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "models: {none: {mean_per_s: 1, seconds_per_item: 1, measured: x}}",
            "models.none: not in the catalog",
        ),
        (
            f"models: {{{MINILM}: {{mean_per_s: -1}}}}",
            f"models.{MINILM}.mean_per_s: Input should be greater than or",
        ),
        (
            f"models: {{{MINILM}: {{mean_per_s: .inf}}}}",
            f"models.{MINILM}.mean_per_s: Input should be a finite number",
        ),
        (
            f"models: {{{MINILM}: {{mean_per_s: 1}}}}",
            f"models.{MINILM}: seconds_per_item is required: worker seconds",
        ),
        (
            f"models: {{{MINILM}: {{mean_per_s: 1, seconds_per_item: 1}}}}",
            f"models.{MINILM}: measured is required",
        ),
        (
            f"models: {{{MINILM}: {{mean_per_s: 2, peak_per_s: 1}}}}",
            f"models.{MINILM}: peak_per_s must be at least mean_per_s",
        ),
        (
            f"models: {{{MINILM}: {{mean_per_s: 1, hits: 1}}}}",
            f"models.{MINILM}.hits: unknown field; accepted here: hit_share, "
            "host_seconds_per_item, input_bytes, items",
        ),
        (
            f"models: {{{MINILM}: {{mean_per_s: 0}}}}\nregions: {{a: 0.5}}",
            "the regions' shares",
        ),
        (
            f"models: {{{MINILM}: {{mean_per_s: 0}}}}\ntarget_utilization: 0.8",
            "target_utilization: unknown field; accepted here: api_requests_per_s, broker",
        ),
        (
            f"models: {{{MINILM}: {{mean_per_s: 1, seconds_per_work: 2, measured: x}}}}",
            f"models.{MINILM}: work_per_item is required",
        ),
        (
            f"models: {{{MINILM}: {{mean_per_s: 0, work_per_item: 2}}}}",
            f"models.{MINILM}.work_per_item: must not be set because the model has no `work`",
        ),
        ("models: {}", "models: Dictionary should have at least 1 item"),
        ("", "file: Input should be"),
    ],
)
def test_wrong_rates_are_refused_with_field_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "rates.yaml"
    file.write_text(text)
    assert said in refusal(capsys, "--rates", str(file))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", MINILM], f"'{MINILM}' must have the form --rate MODEL=MEAN[:PEAK]"),
        (["--rate", f"{MINILM}=1:2:3"], "must have the form --rate"),
        (["--rate", f"{MINILM}=1"], "seconds_per_item is required: worker seconds"),
        (["--rate", f"{MINILM}=1", "--rate", f"{MINILM}=2"], "already has a rate"),
        (["--rate", f"{MINILM}=1", "--seconds", "other=1"], "no --rate for 'other'"),
        (["--rates", EXAMPLE, "--seconds", f"{MINILM}=1"], "--seconds: requires --rate"),
        (["--rates", EXAMPLE, "--buffer", "-1"], "--buffer: must be at least 0"),
        (["--rates", EXAMPLE, "--broker-round-trip", "9"], "must be from 0 to 5 seconds, got 9"),
        (["--rates", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["--rates", EXAMPLE, "--prices", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["--rates", EXAMPLE, "--tfvars", "nowhere.json"], "nowhere.json: No such file"),
        (["--rates", EXAMPLE, "--tfvars", "models.yaml"], "models.yaml: not valid JSON"),
        (
            ["--rates", EXAMPLE, "--region", *(f"r{n}" for n in range(17))],
            "must be at most 16 regions, got 17",
        ),
    ],
)
def test_wrong_words_are_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert said in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"api": {"concurrency": 0}}, "api.concurrency: Input should be greater"),
        ({"nodes": {"overflow": "v100"}}, "nodes.overflow: Input should be 'l4', 'a100'"),
        ({"nodes": {"overflow": "h100"}}, "nodes.overflow: h100 is not sold on demand"),
        (
            {"nodes": {"overflow": "a100"}, "regions": {"europe-west1": {}}},
            "regions.europe-west1: no zone has the overflow type a100",
        ),
        (
            {
                "regions": {
                    "europe-west4": {
                        "reservations": {"a100": {"name": "r", "zone": "europe-west4-c"}}
                    }
                }
            },
            "regions.europe-west4.reservations.a100: europe-west4-c is not a zone",
        ),
        ({"regions": {"me-central1": {}}}, "regions.me-central1: no zone has l4 (infra/kubernetes"),
        (
            {"regions": {"europe-west1": {"zones": ["europe-west1-d"]}}},
            "regions.europe-west1: no zone has l4, of europe-west1-d",
        ),
        (
            {"nodes": {"general": {"machine_type": "custom"}}},
            "nodes.general.machine_type: must end in its number of vCPUs",
        ),
        ({"regions": {"a": {}, "b": {}}}, "every region must have a different index"),
        (
            {"node": {"max_gpus": 9}},
            "node: unknown field; accepted here: alert_tokens, alerts, analysts, api, ",
        ),
        (
            {"nodes": {"max_gpu": 9}},
            "nodes.max_gpu: unknown field; accepted here: binary_authorization",
        ),
        ({"api": {"cpus": 4}}, "api.cpus: unknown field; accepted here: concurrency, cpu, "),
        (
            {"nodes": {"general": {"type": "e2"}}},
            "nodes.general.type: unknown field; accepted here: machine_type, max, min",
        ),
        (
            {"regions": {"europe-west4": {"maxgpus": 1}}},
            "regions.europe-west4.maxgpus: unknown field; accepted here: drained, index, max_gpus",
        ),
        ({"batches": {"memory": "much"}}, "batches.memory: String should match"),
        ({"batches": {"memory": "1.2.3Gi"}}, "batches.memory: String should match"),
    ],
)
def test_wrong_variables_are_refused_with_field_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, object], said: str
) -> None:
    file = tmp_path / "x.tfvars.json"
    file.write_text(json.dumps(given))
    assert said in refusal(capsys, "--rates", EXAMPLE, "--tfvars", str(file))


def test_canary_is_planned_beside_a_model_that_may_get_everything_back() -> None:
    alone = plan_of(entry(), rates={"texts": rate(200)})
    canary = {"revision": "next", "share": 0.1, "replicas": {"min": 1, "max": 100}}
    both = plan_of(entry(canary=canary), rates={"texts": rate(200)})
    sizes = {
        workers.model.name: workers.pods_peak for site in both.sites for workers in site.workers
    }
    assert sizes["texts"] == alone.sites[0].workers[0].pods_peak
    assert 1 <= sizes["texts.canary"] < sizes["texts"]
    assert {"jobs.texts.canary", "jobs.texts.canary.dead"} == set(both.topics) - set(alone.topics)


def test_gpus_of_a_worker_multiply_quotas_and_prices() -> None:
    def plan(count: int) -> DeployPlan:
        model = entry(
            task="text",
            dimensions=None,
            engine="vllm",
            batch={"max_tokens": 4096, "max_items": 4},
            gpu={"type": "a100", "count": count},
        )
        rates = {"texts": rate(10, seconds_per_item=0.5)}
        return plan_of(model, rates=rates, prices=read_prices())

    def quota(plan: DeployPlan, name: str) -> float:
        return next(quota.needed for quota in plan.quotas if quota.name == name)

    alone, four = plan(1), plan(4)
    (pool,), (single,) = four.sites[0].pools, alone.sites[0].pools
    assert pool.machine.machine_type == "a2-highgpu-4g"
    assert pool.nodes_most == single.nodes_most
    for name in ("GPUS_ALL_REGIONS", "NVIDIA_A100_GPUS", "PREEMPTIBLE_NVIDIA_A100_GPUS"):
        assert quota(four, name) == 4 * quota(alone, name) == 4 * single.nodes_most
    assert quota(four, "instances") == quota(alone, "instances")
    usd = [
        next(cost.mean_usd for cost in plan.costs if cost.item.startswith("GPU nodes"))
        for plan in (alone, four)
    ]
    assert usd[0] is not None
    assert usd[1] == pytest.approx(4 * usd[0])
    assert alone.on_demand_usd is not None
    assert four.on_demand_usd is not None
    assert four.on_demand_usd[0] == pytest.approx(4 * alone.on_demand_usd[0])
