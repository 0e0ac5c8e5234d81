"""Catalogs, rates and plans used by the `penstock deploy plan` tests."""

from __future__ import annotations

from typing import Any

from infra.kubernetes.deployment import read_gpu_types
from penstock_planning.deploy.plan import DeployPlan, make_plan
from penstock_planning.deploy.platform_variables import Platform
from penstock_planning.deploy.prices import Prices
from penstock_planning.deploy.rates import DemandRates, ModelRate
from shared.models.catalog import Catalog, Model

NO_PRICES = Prices(sources={}, prices={})


def entry(name: str = "texts", **given: Any) -> Model:
    """Returns an embedding model with its own GPU."""
    fields: dict[str, Any] = {
        "name": name,
        "task": "embedding",
        "source": "hf:a/b",
        "dimensions": 384,
        "batch": {"max_tokens": 2048, "max_items": 16},
        "gpu": {"type": "l4", "share": 1},
        "replicas": {"min": 0, "max": 1000},
    }
    return Model.model_validate(fields | given)


def rate(mean: float = 10.0, **given: Any) -> ModelRate:
    """Returns a rate whose seconds count as measured."""
    fields: dict[str, Any] = {"mean_per_s": mean, "seconds_per_item": 0.01, "measured": "a test"}
    return ModelRate.model_validate(fields | given)


def plan_of(
    *models: Model,
    rates: dict[str, ModelRate],
    platform: Platform | None = None,
    prices: Prices = NO_PRICES,
    buffer: int = 0,
    **given: Any,
) -> DeployPlan:
    """Returns a plan for these models without a buffer, so that counts depend only on the rates."""
    demand = DemandRates(models=rates, **given)
    return make_plan(
        Catalog(models), demand, platform or Platform(), prices, read_gpu_types(), buffer
    )
