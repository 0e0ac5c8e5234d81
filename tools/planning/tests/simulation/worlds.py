"""Small scenarios."""

from __future__ import annotations

from typing import Any

from penstock_planning.simulation.scenario import Scenario, scenario_of

ENTRY: dict[str, Any] = {
    "name": "model",
    "task": "embedding",
    "source": "hf:example/model",
    "dimensions": 8,
    "batch": {"max_tokens": 64, "max_items": 1},
    "deadline": {"default_s": 60, "longest_s": 300},
    "gpu": {"type": "l4", "share": 1},
    "replicas": {"min": 2, "max": 50},
}


def scenario(
    *, entry: dict[str, Any] | None = None, load: dict[str, Any] | None = None, **fields: Any
) -> Scenario:
    """Returns a scenario with one model under a constant load, unless overridden."""
    given_load = {
        "arrivals": [{"kind": "constant", "per_s": 2.0}],
        "seconds_per_item": 1.0,
        "measured": "made up",
        "start_replicas": 4,
    } | (load or {})
    base = {
        "duration_s": 600,
        "settle_s": 0,
        "catalog": [ENTRY | (entry or {})],
        "models": {"model": given_load},
    }
    return scenario_of(base | fields)
