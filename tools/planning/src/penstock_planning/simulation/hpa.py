"""The HorizontalPodAutoscaler's algorithm, for external metrics with AverageValue.

Source: kubernetes/kubernetes, pkg/controller/podautoscaler: horizontal.go
(computeReplicasForMetrics, normalizeDesiredReplicasWithBehaviors) and replica_calculator.go
(GetExternalPerPodMetricReplicas); kubernetes.io, "Horizontal Pod Autoscaling".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from penstock_planning.simulation.rules import Behavior, ScalingRules

SYNC_S = 15.0
"""--horizontal-pod-autoscaler-sync-period of kube-controller-manager."""

Reading = tuple[float | None, float]
"""A metric's total over all pods (None if it could not be read), and its target per pod."""


class HorizontalPodAutoscaler:
    """A HorizontalPodAutoscaler. It does no I/O: callers pass in the time and the metrics.

    Args:
        behavior: limits on how fast replicas change.
    """

    def __init__(self, min_replicas: int, max_replicas: int, behavior: Behavior) -> None:
        self._min_replicas = min_replicas
        self._max_replicas = max_replicas
        self._behavior = behavior
        self._recommended: deque[tuple[float, int]] = deque()
        self._added: deque[tuple[float, int]] = deque()
        self._removed: deque[tuple[float, int]] = deque()

    def compute_desired(self, now_s: float, replicas: int, readings: Sequence[Reading]) -> int:
        """Returns the number of replicas desired from now on."""
        if not self._recommended:
            self._recommended.append((now_s, replicas))
        if replicas == 0:
            return 0  # disabled: only KEDA scales from zero
        if not self._min_replicas <= replicas <= self._max_replicas:
            wanted = min(max(replicas, self._min_replicas), self._max_replicas)
        else:
            proposed = self._propose(replicas, readings)
            if proposed is None:
                return replicas
            wanted = self._apply_limits(now_s, replicas, self._stabilize(now_s, replicas, proposed))
        self._record(now_s, wanted - replicas)
        return wanted

    def _propose(self, replicas: int, readings: Sequence[Reading]) -> int | None:
        """Returns the highest number that any metric proposes, or None if no metric has a value."""
        wanted = [
            self._compute_wanted(replicas, value, target)
            for value, target in readings
            if value is not None
        ]
        if not wanted:
            return None
        highest = max(wanted)
        # The missing metric might have called for more replicas.
        return None if len(wanted) < len(readings) and highest < replicas else highest

    def _compute_wanted(self, replicas: int, value: float, target: float) -> int:
        # The metrics API has a resolution of one thousandth.
        usage, target = math.floor(value * 1000), math.floor(target * 1000)
        ratio = usage / (target * replicas)
        lower = 1 - self._behavior.scaleDown.tolerance
        upper = 1 + self._behavior.scaleUp.tolerance
        return replicas if lower <= ratio <= upper else math.ceil(usage / target)

    def _stabilize(self, now_s: float, replicas: int, proposed: int) -> int:
        up_s = self._behavior.scaleUp.stabilizationWindowSeconds
        down_s = self._behavior.scaleDown.stabilizationWindowSeconds
        while self._recommended and self._recommended[0][0] < now_s - max(up_s, down_s):
            self._recommended.popleft()
        lowest = highest = proposed
        for at_s, count in self._recommended:
            if at_s > now_s - up_s:
                lowest = min(lowest, count)
            if at_s > now_s - down_s:
                highest = max(highest, count)
        self._recommended.append((now_s, proposed))
        return min(max(replicas, lowest), highest)

    def _apply_limits(self, now_s: float, replicas: int, wanted: int) -> int:
        if wanted > replicas:
            limit = max(replicas, self._limit(now_s, replicas, self._behavior.scaleUp, up=True))
            return min(wanted, self._max_replicas, limit)
        if wanted < replicas:
            limit = min(replicas, self._limit(now_s, replicas, self._behavior.scaleDown, up=False))
            return max(wanted, self._min_replicas, limit)
        return wanted

    def _limit(self, now_s: float, replicas: int, rules: ScalingRules, *, up: bool) -> int:
        if rules.selectPolicy == "Disabled":
            return replicas
        limits = []
        for policy in rules.policies:
            since_s = now_s - policy.periodSeconds
            added = sum(count for at_s, count in self._added if at_s > since_s)
            removed = sum(count for at_s, count in self._removed if at_s > since_s)
            before = replicas - added + removed
            change = policy.value if policy.type == "Pods" else before * policy.value / 100
            limits.append(math.ceil(before + change) if up else int(before - change))
        is_largest_change = rules.selectPolicy == "Max"
        return max(limits) if up == is_largest_change else min(limits)

    def _record(self, now_s: float, change: int) -> None:
        if change > 0:
            self._added.append((now_s, change))
        elif change < 0:
            self._removed.append((now_s, -change))
        periods = (*self._behavior.scaleUp.policies, *self._behavior.scaleDown.policies)
        longest_s = max(policy.periodSeconds for policy in periods)
        for events in (self._added, self._removed):
            while events and events[0][0] < now_s - longest_s:
                events.popleft()
