"""The evaluator, checked against values from Prometheus' documentation and tests."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_planning.simulation.promql import PromQuery, increase
from penstock_planning.simulation.timeseries import TimeSeries
from shared.errors import ConfigurationError

NOW_S = 1000.0


@pytest.fixture
def series() -> TimeSeries:
    """Returns a counter that grows by 7 every 10 s in two pods, and a gauge in two regions."""
    stored = TimeSeries()
    for number in range(101):
        for pod, per_sample in (("a", 7.0), ("b", 1.0)):
            labels = (("pod", pod), ("worker", "w"))
            stored.append("counter_total", labels, number * 10.0, number * per_sample)
    for region, value in (("here", 3.0), ("there", 5.0)):
        stored.append("gauge", (("location", region),), NOW_S, value)
    return stored


@pytest.mark.parametrize(
    ("query", "value"),
    [
        ("1 + 2 * 3 ^ 2", 19.0),
        ("sum(gauge)", {(): 8.0}),
        ('sum(gauge{location="here"})', {(): 3.0}),
        ('sum(gauge{location=~"he.*", location!="x"})', {(): 3.0}),
        ('sum(gauge{location="nowhere"})', {}),
        ('sum(gauge{location="nowhere"}) or vector(0)', {(): 0.0}),
        ("sum(gauge) or vector(0)", {(): 8.0}),
        ("max(gauge) - min(gauge)", {(): 2.0}),
        ("count(gauge) / avg(gauge)", {(): 0.5}),
        (
            "sum by (location) (gauge)",
            {(("location", "here"),): 3.0, (("location", "there"),): 5.0},
        ),
        ("sum without (location) (gauge)", {(): 8.0}),
        ("gauge > 4", {(("location", "there"),): 5.0}),
        ("sum(gauge > bool 4)", {(): 1.0}),
        ("-sum(gauge)", {(): -8.0}),
        ("clamp_max(sum(gauge), 4)", {(): 4.0}),
        ("clamp(sum(gauge), 9, 12)", {(): 9.0}),
        ("clamp(sum(gauge), 12, 9)", {}),
        ("ceil(sum(gauge) / 3)", {(): 3.0}),
        ("sum(gauge) / (sum(gauge) > 100)", {}),
        ("scalar(sum(gauge)) * 2", 16.0),
        ("sum(rate(counter_total[5m]))", {(): pytest.approx(0.8)}),
        (
            'increase(counter_total{pod="b"}[100s])',
            {(("pod", "b"), ("worker", "w")): pytest.approx(10.0)},
        ),
        ('max_over_time(counter_total{pod="b"}[25s])', {(("pod", "b"), ("worker", "w")): 100.0}),
        (
            'avg_over_time(counter_total{pod="b"}[25s] offset 50s)',
            {(("pod", "b"), ("worker", "w")): 94.0},
        ),
        ("avg_over_time(sum(rate(counter_total[1m]))[5m:30s])", {(): pytest.approx(0.8)}),
        ("gauge unless gauge > 4", {(("location", "here"),): 3.0}),
        ("time()", NOW_S),
        ("ceil(sum(gauge) / 0)", {(): math.inf}),
        ("floor(-sum(gauge) / 0)", {(): -math.inf}),
        ("7 % 0", pytest.approx(math.nan, nan_ok=True)),
        ("(1 / 0) % 2", pytest.approx(math.nan, nan_ok=True)),
        ("-7 % 4", -3.0),
        ("0 ^ -1", math.inf),
        ("10 ^ 400", math.inf),
        ("(-8) ^ 0.5", pytest.approx(math.nan, nan_ok=True)),
        ("max((gauge - 3) / (gauge - 3))", {(): 1.0}),
        ("min((gauge - 3) / (gauge - 3))", {(): 1.0}),
        ("max((gauge - 5) / (gauge - 5))", {(): 1.0}),
        ("clamp_min(vector(0 / 0), 4)", {(): pytest.approx(math.nan, nan_ok=True)}),
    ],
)
def test_value(series: TimeSeries, query: str, value: object) -> None:
    assert PromQuery(query).value(series, NOW_S) == value


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ("histogram_quantile(0.9, gauge)", "histogram_quantile()"),
        ("topk(3, gauge)", "topk"),
        ("gauge * on (location) gauge", "on, ignoring"),
        ("predict_linear(gauge[5m], 60)", "predict_linear()"),
        ("gauge @ 5", "@"),
    ],
)
def test_what_is_not_evaluated_is_refused_by_name(query: str, what: str) -> None:
    with pytest.raises(ConfigurationError, match="is not supported by the simulation") as caught:
        PromQuery(query)
    assert what in caught.value.message


def test_a_query_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="sum"):
        PromQuery("sum(")


def test_samples_are_seen_when_they_are_old_enough() -> None:
    stored = TimeSeries()
    for at_s in (0.0, 60.0):
        stored.append("gauge", (), at_s, at_s, age_s=100.0)
    assert PromQuery("gauge").value(stored, 99.0) == {}
    assert PromQuery("gauge").value(stored, 100.0) == {(): 0.0}
    assert PromQuery("gauge").value(stored, 160.0) == {(): 60.0}


def test_a_sample_is_used_for_five_minutes() -> None:
    stored = TimeSeries()
    stored.append("gauge", (), 0.0, 1.0)
    assert PromQuery("gauge").value(stored, 299.0) == {(): 1.0}
    assert PromQuery("gauge").value(stored, 300.0) == {}


def test_a_series_whose_target_is_gone_has_no_value() -> None:
    stored = TimeSeries()
    stored.append("gauge", (), 0.0, 1.0)
    stored.end("gauge", (), 10.0)
    assert PromQuery("gauge").value(stored, 5.0) == {(): 1.0}
    assert PromQuery("gauge").value(stored, 11.0) == {}


def counted(times_s: list[float], values: list[float], from_s: float, to_s: float) -> object:
    stored = TimeSeries()
    for at_s, value in zip(times_s, values, strict=True):
        stored.append("counter_total", (), at_s, value)
    (series,) = stored.select("counter_total", ())
    return increase(series, 0, len(times_s), from_s, to_s)


def test_a_counter_that_began_anew_counts_on() -> None:
    assert counted([0.0, 10.0, 20.0], [8.0, 9.0, 2.0], 0.0, 20.0) == pytest.approx(3.0)


def test_one_sample_has_no_increase() -> None:
    assert counted([5.0], [1.0], 0.0, 10.0) is None


def test_an_increase_is_not_extrapolated_below_zero() -> None:
    # Prometheus: a counter that starts within the range is taken to start at zero.
    assert counted([50.0, 60.0], [0.0, 10.0], 0.0, 60.0) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("query", "back_s"),
    [
        ("gauge", 300),
        ("gauge offset 1h", 3900),
        ("rate(gauge[10m])", 600),
        ("max_over_time(rate(gauge[10m])[1h:1m])", 4200),
        ("1", 0),
    ],
)
def test_a_query_tells_how_far_it_looks_back(query: str, back_s: float) -> None:
    assert PromQuery(query).looks_back_s == back_s


@given(st.lists(st.floats(0, 100), min_size=2, max_size=20), st.floats(0.1, 60), st.floats(0, 1))
def test_an_increase_is_never_negative(steps: list[float], every_s: float, part: float) -> None:
    times = [every_s * (number + part) for number in range(len(steps))]
    values = [sum(steps[: number + 1]) for number in range(len(steps))]
    grown = counted(times, values, 0.0, every_s * (len(steps) + part))
    assert isinstance(grown, float)
    assert grown >= -1e-9
    assert math.isfinite(grown)
