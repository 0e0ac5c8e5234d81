"""The algorithm, checked against the examples in Kubernetes' documentation and source."""

from __future__ import annotations

from itertools import pairwise

import pytest

from penstock_planning.simulation.hpa import HorizontalPodAutoscaler
from penstock_planning.simulation.rules import Behavior

FAST = {
    "stabilizationWindowSeconds": 0,
    "policies": [{"type": "Percent", "value": 1000, "periodSeconds": 15}],
}


def hpa(most: int = 1000, **behavior: object) -> HorizontalPodAutoscaler:
    rules = {"scaleUp": FAST, "scaleDown": FAST} | behavior
    return HorizontalPodAutoscaler(1, most, Behavior.model_validate(rules))


def test_replicas_are_the_total_over_the_target_rounded_up() -> None:
    assert hpa().compute_desired(0, 3, [(10.0, 2.0)]) == 5
    assert hpa().compute_desired(0, 3, [(10.1, 2.0)]) == 6


@pytest.mark.parametrize(("value", "wanted"), [(11.0, 10), (11.1, 12), (9.0, 10), (8.9, 9)])
def test_a_ratio_within_a_tenth_changes_nothing(value: float, wanted: int) -> None:
    assert hpa().compute_desired(0, 10, [(value, 1.0)]) == wanted


def test_of_several_metrics_the_highest_proposal_counts() -> None:
    assert hpa().compute_desired(0, 3, [(4.0, 1.0), (9.0, 1.0), (1.0, 1.0)]) == 9


def test_a_missing_metric_forbids_scaling_down_but_not_up() -> None:
    assert hpa().compute_desired(0, 5, [(None, 1.0), (1.0, 1.0)]) == 5
    assert hpa().compute_desired(0, 5, [(None, 1.0), (9.0, 1.0)]) == 9
    assert hpa().compute_desired(0, 5, [(None, 1.0)]) == 5


def test_zero_replicas_disable_it() -> None:
    assert hpa().compute_desired(0, 0, [(9.0, 1.0)]) == 0


def test_bounds_hold() -> None:
    assert hpa(most=7).compute_desired(0, 3, [(90.0, 1.0)]) == 7
    assert hpa(most=7).compute_desired(0, 9, [(1.0, 1.0)]) == 7


def test_scaling_down_by_four_pods_or_a_tenth_takes_the_larger_change() -> None:
    # kubernetes.io: of 80 replicas, 8 are removed in the first minute; 10% of 72 is 7.2, so 8 more
    # are removed; at 40 or fewer, four pods are removed at a time.
    policies = [
        {"type": "Pods", "value": 4, "periodSeconds": 60},
        {"type": "Percent", "value": 10, "periodSeconds": 60},
    ]
    down = {"stabilizationWindowSeconds": 0, "policies": policies}
    autoscaler, replicas, seen = hpa(scaleDown=down), 80, [80]
    for minute in range(9):
        replicas = autoscaler.compute_desired(minute * 60.0, replicas, [(10.0, 1.0)])
        seen.append(replicas)
    assert seen[:3] == [80, 72, 64]
    assert [before - after for before, after in pairwise(seen[5:])] == [5, 4, 4, 4]
    # No more are removed within the same minute.
    assert autoscaler.compute_desired(8 * 60 + 15.0, replicas, [(10.0, 1.0)]) == replicas


def test_least_change_policy_takes_the_smaller_one() -> None:
    policies = [
        {"type": "Pods", "value": 4, "periodSeconds": 60},
        {"type": "Percent", "value": 10, "periodSeconds": 60},
    ]
    down = {"stabilizationWindowSeconds": 0, "policies": policies, "selectPolicy": "Min"}
    assert hpa(scaleDown=down).compute_desired(0, 80, [(10.0, 1.0)]) == 76
    disabled = down | {"selectPolicy": "Disabled"}
    assert hpa(scaleDown=disabled).compute_desired(0, 80, [(10.0, 1.0)]) == 80


def test_default_scaling_up_doubles_or_adds_four() -> None:
    up = Behavior().scaleUp.model_dump()
    assert hpa(scaleUp=up).compute_desired(0, 2, [(900.0, 1.0)]) == 6
    autoscaler = hpa(scaleUp=up)
    assert autoscaler.compute_desired(0, 10, [(900.0, 1.0)]) == 20
    assert autoscaler.compute_desired(10, 20, [(900.0, 1.0)]) == 20, "within the same period"
    assert autoscaler.compute_desired(15, 20, [(900.0, 1.0)]) == 40


def test_stabilization_keeps_the_highest_recommendation_of_the_window() -> None:
    down = FAST | {"stabilizationWindowSeconds": 300}
    autoscaler = hpa(scaleDown=down)
    assert autoscaler.compute_desired(0, 10, [(10.0, 1.0)]) == 10
    assert autoscaler.compute_desired(60, 10, [(5.0, 1.0)]) == 10
    assert autoscaler.compute_desired(299, 10, [(2.0, 1.0)]) == 10
    assert autoscaler.compute_desired(301, 10, [(2.0, 1.0)]) == 5, (
        "only what was asked for 5 minutes"
    )
    assert autoscaler.compute_desired(361, 5, [(2.0, 1.0)]) == 2


def test_stabilization_of_scaling_up_keeps_the_lowest() -> None:
    autoscaler = hpa(scaleUp=FAST | {"stabilizationWindowSeconds": 60})
    assert autoscaler.compute_desired(0, 10, [(10.0, 1.0)]) == 10
    assert autoscaler.compute_desired(15, 10, [(30.0, 1.0)]) == 10
    assert autoscaler.compute_desired(61, 10, [(40.0, 1.0)]) == 30
