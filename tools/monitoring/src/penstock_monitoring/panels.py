"""The dashboards' contents: sections of panels with their PromQL, for Google and Grafana.

The `model` and `lane` labels come from the API. The collector adds `worker` to all pods of a model,
because their own metrics don't name their deployment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock_monitoring.objectives import OBJECTIVES, Bounds, Objective, budget_left, error_ratio
from shared.money.charge import SHARED

Unit = Literal["count", "per_second", "percent", "seconds", "usd"]

REPLICAS = "count by (worker) (penstock_worker_items_waiting)"
_FROM_CACHE = f'penstock_api_items_total{{cache=~"{"|".join(sorted(SHARED))}",status="succeeded"}}'
_ITEM_S = (
    "(sum by (worker, model) (rate(penstock_worker_inference_seconds_sum[1h]))"
    " - sum by (worker, model) (rate(penstock_worker_spare_seconds_total[1h])))"
    " / (sum by (worker, model) (rate(penstock_worker_batch_items_sum[1h])) > 0)"
)
SAVED_WORKERS = (
    f"sum by (worker) (({_ITEM_S})"
    f" * on (model) group_left () sum by (model) (rate({_FROM_CACHE}[5m])))"
)
"""PromQL: worker seconds saved by the cache per second."""


@dataclass(frozen=True)
class PanelQuery:
    """A PromQL query, and the name of its series: text that contains {{label}}."""

    promql: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A chart."""

    title: str
    unit: Unit
    """percent: the value is a fraction of 1."""
    queries: tuple[PanelQuery, ...]
    about: str = ""
    """A description, if the title is not sufficient."""


@dataclass(frozen=True)
class Section:
    """A row of charts."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Terms:
    """The differences between the two dashboards."""

    bounds: Bounds
    by_worker_usd: str
    """PromQL that `worker` appends to a vector to convert workers to dollars per hour."""


def sections(terms: Terms) -> tuple[Section, ...]:
    """Returns all panels, in display order."""
    return (
        Section("Objectives", _objectives(terms.bounds)),
        Section("Traffic", _TRAFFIC),
        Section("Queue and batches", _QUEUE),
        Section("GPUs", _GPUS),
        Section("Cost", _cost(terms.by_worker_usd)),
        Section("Tenants and stores", _TENANTS),
    )


def _objectives(bounds: Bounds) -> tuple[Panel, ...]:
    def burn_rate(objective: Objective) -> str:
        return f"{error_ratio(objective, '1h', 'model')} / {bounds.budgets[objective.name]}"

    return (
        Panel(
            "Error budget left, of 28 days",
            "percent",
            tuple(
                PanelQuery(budget_left(objective, bounds, "all"), objective.title)
                for objective in OBJECTIVES
            ),
            "Below 0 the objective is missed.",
        ),
        Panel(
            "Error budget left, by model",
            "percent",
            tuple(
                PanelQuery(
                    budget_left(objective, bounds, "model"), f"{objective.title} {{{{model}}}}"
                )
                for objective in OBJECTIVES
            ),
        ),
        Panel(
            "Burn rate over an hour, by model",
            "count",
            tuple(
                PanelQuery(burn_rate(objective), f"{objective.title} {{{{model}}}}")
                for objective in OBJECTIVES
            ),
            "1 uses up the budget in 28 days. Above 14.4 the on-call engineer is paged at once.",
        ),
    )


_TRAFFIC = (
    Panel(
        "Requests, by status",
        "per_second",
        (PanelQuery("sum by (status) (rate(penstock_api_requests_total[1m]))", "{{status}}"),),
    ),
    Panel(
        "p99 of requests, by route",
        "seconds",
        (
            PanelQuery(
                "histogram_quantile(0.99,"
                " sum by (le, route) (rate(penstock_api_request_seconds_bucket[5m])))",
                "{{route}}",
            ),
        ),
    ),
    Panel(
        "Items late or refused, by model",
        "per_second",
        (
            PanelQuery(
                'sum by (model, end) (rate(penstock_slo_items_total{end=~"late|refused"}[5m]))',
                "{{model}} {{end}}",
            ),
        ),
        "Interactive items whose callers left the default deadline.",
    ),
)
_QUEUE = (
    Panel(
        "Wait for a batch, by model",
        "seconds",
        tuple(
            PanelQuery(
                f"histogram_quantile({quantile},"
                " sum by (le, model) (rate(penstock_worker_wait_seconds_bucket[5m])))",
                f"{name} {{{{model}}}}",
            )
            for quantile, name in (("0.5", "p50"), ("0.95", "p95"))
        ),
    ),
    Panel(
        "Items that wait for a worker, by model and priority",
        "count",
        (
            PanelQuery("sum by (model, lane) (penstock_api_items_in_flight)", "{{model}} {{lane}}"),
            PanelQuery("sum by (model) (penstock_api_jobs_held)", "{{model}} jobs held in the API"),
        ),
    ),
    Panel(
        "Items in a batch, by worker",
        "count",
        (
            PanelQuery(
                "sum by (worker) (rate(penstock_worker_items_at_a_time_sum[5m]))"
                " / sum by (worker) (rate(penstock_worker_items_at_a_time_count[5m]))",
                "{{worker}}",
            ),
        ),
    ),
    Panel(
        "Fill of batches, by worker",
        "percent",
        (
            PanelQuery(
                "sum by (worker) (rate(penstock_worker_real_work_total[5m]))"
                " / sum by (worker) (rate(penstock_worker_padded_work_total[5m]))",
                "{{worker}}",
            ),
        ),
        "Share of the computed tokens or pixel-steps that is not padding.",
    ),
)
_GPUS = (
    Panel("Replicas, by worker", "count", (PanelQuery(REPLICAS, "{{worker}}"),)),
    Panel(
        "Busy part of the workers",
        "percent",
        (
            PanelQuery(
                f"sum by (worker) (penstock_worker_busy_ratio) / {REPLICAS}",
                "{{worker}}",
            ),
        ),
        "The autoscaler's input. Spare parts of steps do not count as busy.",
    ),
    Panel(
        "Spare part of the seconds in the model",
        "percent",
        (
            PanelQuery(
                "sum by (worker) (rate(penstock_worker_spare_seconds_total[5m]))"
                " / sum by (worker) (rate(penstock_worker_inference_seconds_sum[5m]))",
                "{{worker}}",
            ),
        ),
        "For models whose items join between steps: time that more items could have used for free.",
    ),
    Panel(
        "Seconds in the model per second, by worker",
        "count",
        (
            PanelQuery(
                "sum by (worker) (rate(penstock_worker_inference_seconds_sum[5m]))", "{{worker}}"
            ),
        ),
        "Divide by the share of a GPU to get GPU seconds.",
    ),
)


def _cost(by_worker_usd: str) -> tuple[Panel, ...]:
    items_per_h = "(sum by (worker) (rate(penstock_worker_batch_items_sum[1h])) > 0) * 3600"
    return (
        Panel(
            "Workers' cost per hour",
            "usd",
            (PanelQuery(f"{REPLICAS}{by_worker_usd}", "{{worker}}"),),
            "Running replicas, at the price of their share of a GPU machine.",
        ),
        Panel(
            "Cost of 1000 computed items",
            "usd",
            (PanelQuery(f"1000 * {REPLICAS}{by_worker_usd} / ({items_per_h})", "{{worker}}"),),
            "Includes the cost of workers that wait.",
        ),
        Panel(
            "Items from the cache, by model",
            "percent",
            (
                PanelQuery(
                    f"sum by (model) (rate({_FROM_CACHE}[5m]))"
                    ' / sum by (model) (rate(penstock_api_items_total{status="succeeded"}[5m]))',
                    "{{model}}",
                ),
            ),
            "Includes items that joined an equal item in flight.",
        ),
        Panel(
            "Saved by the cache per hour",
            "usd",
            (PanelQuery(f"({SAVED_WORKERS}){by_worker_usd}", "{{worker}}"),),
            "Average cost of the worker time saved, less its spare part.",
        ),
    )


_TENANTS = (
    Panel(
        "Tenants with waiting items, by model and priority",
        "count",
        (PanelQuery("max by (model, lane) (penstock_api_tenants)", "{{model}} {{lane}}"),),
    ),
    Panel(
        "Part of the largest tenant, by model and priority",
        "percent",
        (
            PanelQuery(
                "clamp_max(max by (model, lane) (penstock_api_largest_tenant_items)"
                " / (sum by (model, lane) (penstock_api_items_in_flight) > 0), 1)",
                "{{model}} {{lane}}",
            ),
        ),
        "Share of the items that wait for a worker.",
    ),
    Panel(
        "Rows that BigQuery does not have yet",
        "count",
        (PanelQuery("sum(penstock_rows_pending)", "rows"),),
    ),
    Panel(
        "Redis within reach",
        "count",
        (
            PanelQuery("min(penstock_cache_redis_up)", "cache"),
            PanelQuery("min(penstock_records_redis_up)", "records"),
        ),
    ),
)
