"""KEDA's part: scaling to and from zero, fallbacks, and what counts as a failure."""

from __future__ import annotations

import pytest

from penstock_planning.simulation.replicas import Autoscaler
from penstock_planning.simulation.rules import AutoscalerRules
from penstock_planning.simulation.timeseries import TimeSeries

IN_FLIGHT = "penstock_api_items_in_flight"
STILL = {
    "stabilizationWindowSeconds": 0,
    "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
}


def autoscaler(series: TimeSeries, **fields: object) -> Autoscaler:
    trigger = {"name": "items", "query": f"sum({IN_FLIGHT})", "threshold": 2}
    base_rules = {"triggers": [trigger], "behavior": {"scaleUp": STILL, "scaleDown": STILL}}
    return Autoscaler(AutoscalerRules.model_validate(base_rules | fields), series)


def gauge(value: float, at_s: float = 0.0) -> TimeSeries:
    series = TimeSeries()
    series.append(IN_FLIGHT, (), at_s, value)
    return series


def test_a_value_above_the_activation_leaves_zero() -> None:
    assert autoscaler(gauge(0.0)).poll(1, 0) == 0
    assert autoscaler(gauge(1.0)).poll(1, 0) == 1
    assert autoscaler(gauge(1.0), minReplicaCount=3).poll(1, 0) == 3


def test_zero_is_reached_after_the_cooldown() -> None:
    series = gauge(1.0)
    scaler = autoscaler(series, cooldownPeriod=300)
    assert scaler.poll(0, 1) == 1
    series.append(IN_FLIGHT, (), 5.0, 0.0)
    assert scaler.poll(299, 1) == 1
    assert scaler.poll(301, 1) == 0


def test_the_hpa_leaves_zero_alone() -> None:
    assert autoscaler(gauge(50.0)).sync(1, 0) == 0
    assert autoscaler(gauge(8.0)).sync(1, 2) == 4


@pytest.mark.parametrize(
    ("behavior", "replicas", "kept"),
    [
        ("static", 40, 20),
        ("currentReplicas", 40, 40),
        ("currentReplicasIfHigher", 40, 40),
        ("currentReplicasIfHigher", 2, 3),
        ("currentReplicasIfLower", 2, 2),
    ],
)
def test_fallback_comes_after_more_failures_than_its_threshold(
    behavior: str, replicas: int, kept: int
) -> None:
    down = STILL | {"policies": [{"type": "Percent", "value": 50, "periodSeconds": 15}]}
    fallback = {"failureThreshold": 3, "replicas": 3, "behavior": behavior}
    scaler = autoscaler(
        gauge(5.0), fallback=fallback, behavior={"scaleUp": STILL, "scaleDown": down}
    )
    scaler.is_endpoint_up = False
    for turn in range(3):
        assert scaler.sync(turn * 15, replicas) == replicas
    # The static value is reached in steps.
    assert scaler.sync(45, replicas) == kept


def test_keda_counts_failures_of_its_own_polls_too() -> None:
    fallback = {"failureThreshold": 3, "replicas": 9}
    scaler = autoscaler(gauge(5.0), fallback=fallback)
    scaler.is_endpoint_up = False
    for turn in range(3):
        scaler.poll(turn * 5, 5)
    assert scaler.sync(15, 5) == 9


def test_a_model_at_zero_gets_one_worker_when_the_fallback_begins() -> None:
    fallback = {"failureThreshold": 6, "replicas": 1, "behavior": "currentReplicasIfHigher"}
    scaler = autoscaler(gauge(0.0), fallback=fallback)
    scaler.is_endpoint_up = False
    assert [scaler.poll(turn * 5, 0) for turn in range(7)] == [0] * 6 + [1]
    assert scaler.poll(35, 1) == 1
    assert scaler.sync(45, 1) == 1


def test_a_good_reading_ends_the_fallback() -> None:
    scaler = autoscaler(gauge(10.0), fallback={"failureThreshold": 0, "replicas": 9})
    scaler.is_endpoint_up = False
    assert scaler.sync(0, 5) == 9
    scaler.is_endpoint_up = True
    assert scaler.sync(15, 5) == 5


def test_without_a_fallback_failures_change_nothing() -> None:
    scaler = autoscaler(gauge(5.0))
    scaler.is_endpoint_up = False
    assert [scaler.sync(turn * 15, 40) for turn in range(9)] == [40] * 9
    assert [scaler.poll(200 + turn * 5, 40) for turn in range(99)] == [40] * 99


def test_nothing_found_is_zero_or_a_failure() -> None:
    assert autoscaler(TimeSeries()).sync(0, 8) == 1
    trigger = {
        "name": "items",
        "query": f"sum({IN_FLIGHT})",
        "threshold": 2,
        "ignoreNullValues": "false",
    }
    assert autoscaler(TimeSeries(), triggers=[trigger]).sync(0, 8) == 8


def test_a_query_with_several_values_fails() -> None:
    series = gauge(5.0)
    series.append(IN_FLIGHT, (("location", "here"),), 0.0, 5.0)
    trigger = {"name": "items", "query": IN_FLIGHT, "threshold": 2}
    assert autoscaler(series, triggers=[trigger]).sync(0, 40) == 40
