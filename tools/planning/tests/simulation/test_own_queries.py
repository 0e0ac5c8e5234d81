"""The autoscaler's queries on a site's own Prometheus, with our metrics and RabbitMQ queues."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.kubernetes.autoscaling import TriggerQueries
from infra.kubernetes.deployment import OwnPrometheus
from penstock_planning.simulation.promql import PromQuery
from penstock_planning.simulation.timeseries import TimeSeries
from shared.broker.transport import batch_subscription_id, workers_subscription_id
from shared.models.catalog_file import read_catalog

MODEL = read_catalog(Path("models.yaml")).find("stable-diffusion-tiny")
GUESS_S = MODEL.definition.first_guesses.item_s
LABELS = {"namespace": "here"}
PROMETHEUS = OwnPrometheus(url="", labels=LABELS, has_rabbitmq=True)
QUERIES = TriggerQueries([MODEL], "images", "", 1, PROMETHEUS)
PRIORITIES = (workers_subscription_id(MODEL.name), batch_subscription_id(MODEL.name))
NOW_S = 3000.0


@pytest.fixture
def series() -> TimeSeries:
    return TimeSeries()


def sample(series: TimeSeries, name: str, values: dict[float, float], **labels: str) -> None:
    all_labels = tuple(sorted(({"namespace": "here"} | labels).items()))
    for at_s, value in values.items():
        series.append(name, all_labels, at_s, value)


def waits(series: TimeSeries, priority: str, count: float, **labels: str) -> None:
    sample(series, "penstock_queue_messages", {NOW_S: count}, subscription=priority, **labels)


def ask(series: TimeSeries, query: str | None) -> float | None:
    assert query is not None
    vector = PromQuery(query).value(series, NOW_S)
    assert isinstance(vector, dict)
    return vector.get(())


def test_messages_of_both_priorities_are_seconds_of_work(series: TimeSeries) -> None:
    for priority, count in zip(PRIORITIES, (30, 12), strict=True):
        # Both instances of the functions report the same queue.
        for pod in ("functions-a", "functions-b"):
            waits(series, priority, count, pod=pod)
    assert ask(series, QUERIES.messages()) == 42 * GUESS_S


def test_messages_are_weighed_by_what_items_took(series: TimeSeries) -> None:
    for name, per_s in (("inference_seconds", 0.6), ("batch_items", 0.2)):
        values = {at_s: at_s * per_s for at_s in (NOW_S - 600, NOW_S)}
        sample(series, f"penstock_worker_{name}_sum", values, worker="images", pod="a")
    for priority in PRIORITIES:
        waits(series, priority, 5)
    assert ask(series, QUERIES.messages()) == pytest.approx(10 * 3.0)


def test_queues_lost_from_sight_are_not_empty(series: TimeSeries) -> None:
    waits(series, PRIORITIES[0], 30)
    assert ask(series, QUERIES.messages()) is None


def test_another_deployment_in_the_same_prometheus_does_not_count(series: TimeSeries) -> None:
    for priority in PRIORITIES:
        waits(series, priority, 1)
        waits(series, priority, 1000, namespace="there")
    for name, seconds in (("inference_seconds", 1e6), ("batch_items", 1.0)):
        values = {NOW_S - 60: 0.0, NOW_S: seconds}
        sample(series, f"penstock_worker_{name}_sum", values, worker="images", namespace="there")
    assert ask(series, QUERIES.messages()) == 2 * GUESS_S


def test_nothing_is_asked_where_the_broker_counts_nothing() -> None:
    prometheus = PROMETHEUS.model_copy(update={"has_rabbitmq": False})
    assert TriggerQueries([MODEL], "w", "", 1, prometheus).messages() is None
