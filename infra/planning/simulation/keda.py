"""KEDA's part: reads the triggers, scales from and to zero, and replaces metrics that fail.

Source: kedacore/keda, pkg/scalers/prometheus_scaler.go (ExecutePromQuery),
pkg/fallback/fallback.go (GetMetricsWithFallback, doFallback),
pkg/scaling/scale_handler.go (getScalerState), pkg/scaling/executor/scale_scaledobjects.go
(RequestScale). As of 2.19: older ones apply no fallback in their own loop, so they stay at zero.
"""

from __future__ import annotations

import math

from infra.planning.simulation.hpa import HorizontalPodAutoscaler, Reading
from infra.planning.simulation.metrics_table import KNOWN
from infra.planning.simulation.promql import PromQuery
from infra.planning.simulation.rules import AutoscalerRules, Trigger
from infra.planning.simulation.timeseries import TimeSeries
from shared.errors import ConfigurationError


class QueryFailed(Exception):
    """A trigger could not be read."""


class Autoscaler:
    """KEDA and the HPA that it makes, for the workers of one model in one region.

    Args:
        rules: the ScaledObject.
        series: the series that queries see.

    Raises:
        ConfigurationError: a query can't be evaluated, or has an unknown metric.
    """

    def __init__(self, rules: AutoscalerRules, series: TimeSeries) -> None:
        self.rules = rules
        self.series = series
        self._triggers = [(trigger, PromQuery(trigger.query)) for trigger in rules.triggers]
        for trigger, query in self._triggers:
            if unknown := query.metrics - KNOWN:
                raise ConfigurationError(
                    f"trigger {trigger.name}: no metric {', '.join(sorted(unknown))} in the "
                    "simulation; infra/planning/simulation/metrics_table.py needs a row for it",
                    field=trigger.name,
                )
        self._failures = dict.fromkeys(range(len(self._triggers)), 0)
        # An HPA has at least one replica. KEDA scales to zero by itself.
        least = max(1, rules.minReplicaCount)
        self._hpa = HorizontalPodAutoscaler(least, rules.maxReplicaCount, rules.behavior)
        self._active_s = -math.inf
        self.is_endpoint_up = True
        """True if queries are answered at all."""

    @property
    def looks_back_s(self) -> float:
        """The lookback of its queries in seconds."""
        return max((query.looks_back_s for _, query in self._triggers), default=0.0)

    def poll(self, now_s: float, replicas: int) -> int:
        """KEDA's own loop, each `pollingInterval`: from zero and to zero."""
        if self.is_endpoint_up and 0 < self.rules.minReplicaCount <= replicas:
            return replicas  # whatever the values are, nothing follows from them
        is_active = is_error = False
        for number, (trigger, _) in enumerate(self._triggers):
            value, is_fallback = self._read(number, now_s, replicas)
            is_error = is_error or value is None
            is_active = is_active or is_fallback
            if value is not None and value > trigger.activationThreshold:
                is_active = True
        least = self.rules.minReplicaCount
        if is_active:
            self._active_s = now_s
            return max(1, least) if replicas == 0 else replicas
        fallback = self.rules.fallback
        if is_error and (fallback is None or fallback.replicas):
            return replicas
        if replicas > 0 and least == 0:
            is_over = now_s - self._active_s > self.rules.cooldownPeriod
            return 0 if is_over else replicas
        return max(replicas, least)

    def sync(self, now_s: float, replicas: int) -> int:
        """The HPA's loop, each 15 s. It asks KEDA for the metrics, which reads them then."""
        if replicas == 0:
            return 0
        readings: list[Reading] = []
        for number, (trigger, _) in enumerate(self._triggers):
            value, _ = self._read(number, now_s, replicas)
            readings.append((value, trigger.threshold))
        return self._hpa.desired(now_s, replicas, readings)

    def _read(self, number: int, now_s: float, replicas: int) -> tuple[float | None, bool]:
        """A trigger's value, and whether it is of the fallback. None: it failed."""
        trigger, query = self._triggers[number]
        try:
            value = self._queried(trigger, query, now_s)
        except QueryFailed:
            self._failures[number] += 1
            fallback = self.rules.fallback
            if fallback is None or self._failures[number] <= fallback.failureThreshold:
                return None, False
            kept = {
                "static": fallback.replicas,
                "currentReplicas": replicas,
                "currentReplicasIfHigher": max(replicas, fallback.replicas),
                "currentReplicasIfLower": min(replicas, fallback.replicas),
            }[fallback.behavior]
            return kept * trigger.threshold, True
        self._failures[number] = 0
        return value, False

    def _queried(self, trigger: Trigger, query: PromQuery, now_s: float) -> float:
        if not self.is_endpoint_up:
            raise QueryFailed
        value = query.value(self.series, now_s)
        if isinstance(value, dict):
            if len(value) > 1:
                raise QueryFailed
            value = next(iter(value.values()), math.nan)
        if not math.isfinite(value):
            if trigger.ignoreNullValues:
                return 0.0
            raise QueryFailed
        return value
