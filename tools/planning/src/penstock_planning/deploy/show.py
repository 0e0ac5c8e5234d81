"""`penstock deploy plan`: prints a plan as text for people or as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from infra.kubernetes.placement import can_overflow
from infra.text_table import table
from penstock_planning.deploy.costs import Cost, totals, without_price
from penstock_planning.deploy.plan import DeployPlan
from penstock_planning.deploy.sizing import Pool, Site, Workers

_CHANGE_HEADS = ("file", "setting", "now", "set to")


def text(plan: DeployPlan) -> str:
    return "\n\n".join(_sections(plan))


def _sections(plan: DeployPlan) -> Iterator[str]:
    yield _add_heading("Models", _models(plan))
    yield _add_heading(
        "Nodes (mean, peak and maximum; max is Terraform's limit for each pool)", _nodes(plan)
    )
    yield _add_heading("API on Cloud Run", _api(plan))
    yield _add_heading("Pub/Sub", _pubsub(plan))
    if plan.changes:
        rows = [
            (change.where, change.setting, change.now, change.needed) for change in plan.changes
        ]
        yield _add_heading(
            "Set before applying (counts, quotas and costs below assume it)",
            _table(_CHANGE_HEADS, rows),
        )
    rows_of_quotas = [
        (quota.name, quota.place, _number(quota.needed), quota.default, quota.note)
        for quota in plan.quotas
    ]
    yield _add_heading(
        "Quotas to request, for the maximum that the autoscaler requests",
        _table(("quota", "of", "needed", "default", ""), rows_of_quotas),
    )
    yield _add_heading(
        "Monthly cost in US dollars: at the mean, and with peak machines all month",
        _costs(plan),
    )
    if plan.notes:
        yield _add_heading("Notes", "\n".join(f"  - {note}" for note in plan.notes))
    rows_of_sources = [
        (name, str(source.dated or "undated"), str(source.seen), source.url)
        for name, source in plan.sources.items()
    ]
    yield _add_heading("Prices", _table(("source", "dated", "seen", "where"), rows_of_sources))


def _add_heading(head: str, body: str) -> str:
    return f"{head}\n{body}"


def _table(heads: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    return table(heads, rows)


def _models(plan: DeployPlan) -> str:
    heads = (
        "model",
        "region",
        "peak/s",
        "hits",
        "s/item",
        "batch",
        "answer s",
        "held",
        "processes",
        "pods",
        "most",
        "GPU class",
    )
    rows = [
        (
            workers.model.name,
            workers.region,
            _number(workers.requests_peak_per_s),
            f"{workers.rate.hit_share:.0%}",
            _number(workers.service_s) if workers.rate.item_s else "-",
            workers.batch,
            _number(workers.answer_s) if workers.processes_peak else "-",
            workers.held_jobs,
            f"{workers.processes_mean}-{workers.processes_peak}",
            f"{workers.pods_mean}-{workers.pods_peak}",
            workers.pods_most,
            "none"
            if workers.model.gpu.type == "none"
            else f"{workers.model.gpu.type}, {workers.model.gpu.count}/{workers.model.gpu.share}",
        )
        for workers in _workers(plan)
    ]
    measured = dict.fromkeys(
        _format_measured(workers) for workers in _workers(plan) if workers.rate.item_s is not None
    )
    shared = dict.fromkeys(
        _format_shared(workers) for workers in _workers(plan) if workers.group.is_shared
    )
    return "\n".join([table(heads, rows), *shared, *measured])


def _format_shared(workers: Workers) -> str:
    names = ", ".join(model.name for model in workers.group.models)
    return f"  {names}: the same processes and pods, workers {workers.group.name!r}"


def _format_measured(workers: Workers) -> str:
    rate = workers.rate
    shared = "" if workers.model.gpu.type == "none" else f", {rate.measured_share} to a GPU"
    return f"  {workers.model.name}: {rate.item_s:g} s per item{shared}: {rate.measured}"


def _workers(plan: DeployPlan) -> list[Workers]:
    return [workers for site in plan.sites for workers in site.workers]


def _nodes(plan: DeployPlan) -> str:
    rows: list[tuple[Any, ...]] = []
    for site in plan.sites:
        for pool in site.pools:
            rows += _pool_rows(plan, site, pool)
        general = plan.platform.nodes.general
        rows.append(
            (
                site.region,
                "general",
                general.machine_type,
                f"{site.general_mean}-{site.general_peak}",
                site.general_most,
                general.max,
            )
        )
    return table(("region", "pool", "machine", "nodes", "most", "max"), rows)


def _pool_rows(plan: DeployPlan, site: Site, pool: Pool) -> Iterator[tuple[Any, ...]]:
    """Yields the preferred places first, then the places used when those are out of stock."""
    nodes = plan.platform.nodes
    variables = plan.platform.regions[site.region]
    max_gpus = plan.platform.regions[site.region].max_gpus or nodes.max_gpus
    counts, highest = f"{pool.nodes_mean}-{pool.nodes_peak}", pool.nodes_most
    bound: object = "ComputeClass" if nodes.compute_classes else max_gpus
    instead = f"0-{pool.nodes_peak}, when out of stock"
    if pool.gpu.provisioning == "flex-start":
        yield (
            site.region,
            pool.name,
            pool.machine.machine_type,
            f"{counts}, once there is capacity",
            highest,
            bound,
        )
        return
    if pool.gpu.type in variables.reservations:
        yield (
            site.region,
            f"{pool.name}-reserved",
            pool.machine.machine_type,
            "what is reserved",
            "",
            bound,
        )
    if nodes.spot:
        yield site.region, f"{pool.name}-spot", pool.machine.machine_type, counts, highest, bound
    if pool.node.on_demand:
        yield (
            site.region,
            pool.name,
            pool.machine.machine_type,
            instead if nodes.spot else counts,
            highest,
            bound,
        )
    overflow = plan.platform.overflow_in(site.region)
    if can_overflow(pool.gpu) and overflow not in (None, pool.gpu.type):
        yield (
            site.region,
            f"{pool.name}-on-{overflow}",
            f"with {overflow}",
            instead,
            highest,
            bound,
        )


def _api(plan: DeployPlan) -> str:
    api = plan.platform.api
    heads = ("region", "instances", "min", "max", "concurrency", "CPU", "memory")
    values = (api.min_instances, api.max_instances, api.concurrency, f"{api.cpu:g}", api.memory)
    rows = [(site.region, f"{site.api_mean}-{site.api_peak}", *values) for site in plan.sites]
    return table(heads, rows)


def _pubsub(plan: DeployPlan) -> str:
    inboxes = plan.platform.inboxes
    count = inboxes.per_region * len(plan.sites)
    return (
        f"  {len(plan.topics)} topics, {len(plan.subscriptions)} subscriptions; of these "
        f"{count} inboxes with a direct subscription and {inboxes.made_slots} slots each: "
        f"{count * inboxes.subscriptions} subscriptions"
    )


def _costs(plan: DeployPlan) -> str:
    heads = ("item", "place", "amount", "unit", "mean", "peak", "source")
    rows = [
        (
            cost.item,
            cost.place,
            _amount(cost),
            cost.unit,
            _usd(cost.mean_usd),
            _usd(cost.peak_usd),
            _origin(cost),
        )
        for cost in plan.costs
    ]
    mean, peak = totals(plan.costs)
    missing = list(without_price(plan.costs))
    rows.append(
        (
            "total of rows with a price",
            "",
            "",
            "",
            _usd(mean),
            _usd(peak),
            f"{len(missing)} rows have no price",
        )
    )
    lines = [table(heads, rows)]
    if plan.platform.nodes.spot and plan.on_demand_usd is not None:
        lines.append(
            f"  with on-demand GPU nodes instead: {_usd(plan.on_demand_usd[0])} - "
            f"{_usd(plan.on_demand_usd[1])}"
        )
    lines.append(
        "  not in the table: persistence and backups of Memorystore, operations on large inputs "
        "and results, functions, logs, metrics, secrets, image registry, traffic between regions, "
        "tax"
    )
    return "\n".join(lines)


def _origin(cost: Cost) -> str:
    return (
        cost.source or cost.lacks or (f"no price {cost.price_key}" if cost.mean_usd is None else "")
    )


def _amount(cost: Cost) -> str:
    if cost.mean is None or cost.peak is None:
        return "-"
    return (
        _number(cost.mean)
        if cost.mean == cost.peak
        else f"{_number(cost.mean)}-{_number(cost.peak)}"
    )


def _usd(value: float | None) -> str:
    return "no price" if value is None else f"{value:,.2f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def plan_as_json(plan: DeployPlan) -> str:
    """Returns the plan with all its names and figures. `tfvars` contains the changed variables."""
    document = {
        "models": [_model_document(workers) for workers in _workers(plan)],
        "regions": [_site_document(site) for site in plan.sites],
        "topics": plan.topics,
        "subscriptions": plan.subscriptions,
        "gpu_pools": list(dict.fromkeys(name for names in plan.pools.values() for name in names)),
        "changes": [vars(change) for change in plan.changes],
        "tfvars": plan.platform.model_dump(mode="json"),
        "quotas": [vars(quota) for quota in plan.quotas],
        "costs": [vars(cost) for cost in plan.costs],
        "total_usd": dict(zip(("mean", "peak"), totals(plan.costs), strict=True)),
        "without_price": [cost.price_key for cost in without_price(plan.costs)],
        "notes": plan.notes,
        "sources": {name: source.model_dump(mode="json") for name, source in plan.sources.items()},
    }
    return json.dumps(document, indent=2)


def _model_document(workers: Workers) -> dict[str, Any]:
    others = ("group", "model", "rate")
    figures = {name: value for name, value in vars(workers).items() if name not in others}
    return (
        {
            "model": workers.model.name,
            "workers": workers.group.name,
            "gpu": workers.model.gpu.model_dump(),
        }
        | figures
        | {"rate": workers.rate.model_dump()}
    )


def _site_document(site: Site) -> dict[str, Any]:
    pools = [
        {
            "pool": pool.name,
            "machine_type": pool.machine.machine_type,
            "nodes_mean": pool.nodes_mean,
            "nodes_peak": pool.nodes_peak,
            "nodes_most": pool.nodes_most,
        }
        for pool in site.pools
    ]
    figures = {
        name: value for name, value in vars(site).items() if name not in ("workers", "pools")
    }
    return figures | {"pools": pools}
