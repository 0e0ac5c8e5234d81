"""Service-level objectives, and the PromQL for their error ratios and burn rates.

Windows and burn rates follow chapter 5 of the SRE workbook ("Alerting on SLOs", table 5-8 and
"Multiwindow, Multi-Burn-Rate Alerts", https://sre.google/workbook/alerting-on-slos/). A burn rate
of 1 uses up PERIOD's budget in exactly PERIOD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

PERIOD = "28d"
"""An error budget's period: four full weeks, so that each has the same number of weekends."""
DEFAULT_TARGETS = {"availability": 0.999, "deadlines": 0.99}
"""Share of events that must be good. Same values as in Terraform's `slos` variable."""
DEFAULT_LEAST_BAD_EVENTS = 10
DEFAULT_WORKER_HOUR_USD = 0.853624271
"""On-demand price of a g2-standard-8 with one L4 in us-central1 (infra/terraform/prices.yaml)."""
Scope: TypeAlias = Literal["model", "all"]
"""Each model separately, or all models together, a total without a label."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
_NO_PROBES = 'route!~"/health|/healthz|/livez|/readyz"'


@dataclass(frozen=True)
class Objective:
    """A required share of good events.

    Status 504 does not count against availability, because the caller may have chosen the deadline
    that passed. 429 is not an event at all: within a plan's limits, `deadlines` counts it as
    `refused`.
    """

    name: Literal["availability", "deadlines"]
    title: str
    metric: str
    """Counter of events, by model."""
    valid: str
    """Matchers for all events that count. If empty, all events count."""
    bad: str
    """Matchers for events that use up the budget."""


AVAILABILITY = Objective(
    "availability",
    "Availability",
    "penstock_api_requests_total",
    f'{_NO_PROBES},status=~"[235]..",status!="504"',
    f'{_NO_PROBES},status=~"5..",status!="504"',
)
DEADLINES = Objective(
    "deadlines",
    "Deadlines",
    "penstock_slo_items_total",
    "",
    'end=~"late|refused"',
)
OBJECTIVES = (AVAILABILITY, DEADLINES)


@dataclass(frozen=True)
class BurnRate:
    """An alert condition: the budget burns at this rate in both a long window and a short one.

    The short window resolves the alert soon after the errors stop.
    """

    rate: float
    long: str
    short: str


FAST = (BurnRate(14.4, "1h", "5m"), BurnRate(6, "6h", "30m"))
"""Requires action now: 2% of a 30-day budget in an hour, or 5% in six hours."""
SLOW = (BurnRate(3, "1d", "2h"), BurnRate(1, "3d", "6h"))
"""Requires action this week: 10% of the budget in one day or in three days."""


@dataclass(frozen=True)
class Bounds:
    """The numbers in a query, or the placeholders that Terraform or Grafana replaces."""

    budgets: Mapping[str, str]
    """Share of events that may be bad, keyed by objective."""
    least_bad_events: str
    """Minimum number of bad events in the long window before an alert fires."""


def bounds_of(targets: Mapping[str, float], least_bad_events: int) -> Bounds:
    """Returns the bounds for targets such as DEFAULT_TARGETS."""
    budgets = {name: f"{1 - target:.9g}" for name, target in targets.items()}
    return Bounds(budgets, str(least_bad_events))


def valid_events(objective: Objective, window: str, scope: Scope) -> str:
    """Returns PromQL for the number of events that count within a window."""
    return _increase(objective.metric, objective.valid, window, scope)


def bad_events(objective: Objective, window: str, scope: Scope) -> str:
    """Returns PromQL for the number of bad events within a window."""
    return _increase(objective.metric, objective.bad, window, scope)


def _increase(metric: str, matchers: str, window: str, scope: Scope) -> str:
    if scope == "model":
        # Some requests fail before their model is known. They count only toward the total for all
        # models.
        matchers = ",".join(filter(None, [matchers, 'model!=""']))
        return f"sum by (model) (increase({metric}{{{matchers}}}[{window}]))"
    return f"sum(increase({metric}{f'{{{matchers}}}' if matchers else ''}[{window}]))"


def error_ratio(objective: Objective, window: str, scope: Scope) -> str:
    """Returns PromQL for the share of bad events in a window.

    There is no series until the first bad event.
    """
    bad = bad_events(objective, window, scope)
    return f"{bad} / {valid_events(objective, window, scope)}"


def budget_left(objective: Objective, bounds: Bounds, scope: Scope) -> str:
    """Returns PromQL for the remaining share of PERIOD's budget. Negative: overspent."""
    bad, valid = bad_events(objective, PERIOD, scope), valid_events(objective, PERIOD, scope)
    return f"1 - ({bad} or 0 * {valid}) / {valid} / {bounds.budgets[objective.name]}"


def burns(objective: Objective, rates: tuple[BurnRate, ...], bounds: Bounds) -> str:
    """Returns PromQL for models whose budget burns at one of the rates. The total has no label.

    A few events prove little: one bad event out of 20 would be a burn rate of 50. So a minimum
    number of bad events is also required. Requiring a minimum number of total events instead would
    silence alerts for a small service that is down.
    """
    return " or ".join(_burns(objective, rate, bounds, scope) for scope in SCOPES for rate in rates)


def _burns(objective: Objective, rate: BurnRate, bounds: Bounds, scope: Scope) -> str:
    limit = f"{rate.rate:g} * {bounds.budgets[objective.name]}"
    return (
        f"({error_ratio(objective, rate.long, scope)} > {limit}"
        f" and {error_ratio(objective, rate.short, scope)} > {limit}"
        f" and {bad_events(objective, rate.long, scope)} >= {bounds.least_bad_events})"
    )
