"""The autoscaler's queries on the metrics exported by a running stack's processes."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from infra.kubernetes.autoscaling import TriggerQueries
from infra.kubernetes.deployment import OwnPrometheus
from infra.local.stack import Stack
from penstock_planning.simulation.promql import PromQuery
from penstock_planning.simulation.timeseries import TimeSeries
from shared.models.catalog_file import read_catalog
from shared.models.kubernetes_names import slug
from tests.end_to_end.conftest import EMBEDDER
from tests.end_to_end.rows import eventually
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow

CATALOG = read_catalog(Path("models.yaml"))
LABELS = {"namespace": "penstock"}
GAP_S = 90.0
"""Time between two scrapes, according to their sample timestamps.

Arrivals during the whole interval are counted.
"""
TEXTS = 12


class Scrapes:
    """Scrapes the processes as a site's `scrape.yaml` would, at times that the test chooses."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.series = TimeSeries()

    def take(self, at_s: float) -> None:
        ports = self._stack.ports
        self._read(ports.metrics, {"pod": "api"}, at_s)
        for model, port in zip(CATALOG.deployed, ports.health, strict=False):
            name = slug(model.name)
            self._read(port, {"pod": f"worker-{name}", "worker": name}, at_s)
        if self._stack.broker == "rabbitmq":
            self._read(ports.functions, {"pod": "functions"}, at_s)

    def _read(self, port: int, target: dict[str, str], at_s: float) -> None:
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=WAIT_LIMIT_S) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(sorted((sample.labels | target | LABELS).items()))
                self.series.append(sample.name, labels, at_s, sample.value)

    def value(self, query: str | None, at_s: float) -> float | None:
        assert query is not None
        found = PromQuery(query).value(self.series, at_s)
        assert isinstance(found, dict)
        return found.get(())


@pytest.fixture
def scrapes(stack: Stack) -> Scrapes:
    return Scrapes(stack)


def queries(model: str) -> TriggerQueries:
    prometheus = OwnPrometheus(url="", labels=LABELS, has_rabbitmq=True)
    return TriggerQueries([CATALOG.find(model)], slug(model), "", 1, prometheus)


def test_work_that_was_asked_for_is_seen(
    scrapes: Scrapes, client: openai.OpenAI, text: str
) -> None:
    client.embeddings.create(model=EMBEDDER, input=text)
    scrapes.take(0.0)
    texts = [f"{text} {number}" for number in range(TEXTS)]
    client.embeddings.create(model=EMBEDDER, input=texts)
    scrapes.take(GAP_S)
    asked = queries(EMBEDDER)
    seconds, items = (
        scrapes.value(f'sum(increase({name}{{worker="{slug(EMBEDDER)}"}}[30m]))', GAP_S)
        for name in ("penstock_worker_inference_seconds_sum", "penstock_worker_batch_items_sum")
    )
    assert seconds
    assert items
    expected = TEXTS / GAP_S * seconds / items
    assert scrapes.value(asked.arrivals(), GAP_S) == pytest.approx(expected)
    work = scrapes.value(asked.work(), GAP_S)
    assert work is not None
    assert 0 < work <= 1 / 0.9


def test_models_that_nobody_asks_for_have_an_answer(scrapes: Scrapes) -> None:
    for at_s in (0.0, GAP_S):
        scrapes.take(at_s)
    for model in CATALOG.deployed:
        asked = queries(model.name)
        for query in (asked.arrivals(), asked.work()):
            assert scrapes.value(query, GAP_S) is not None, query


def test_queues_of_rabbitmq_are_seen(scrapes: Scrapes, stack: Stack) -> None:
    if stack.broker != "rabbitmq":
        pytest.skip("the embedded Pub/Sub has no metrics")

    def seen() -> bool:
        scrapes.take(0.0)
        return scrapes.value(queries(EMBEDDER).messages(), 0.0) is not None

    assert eventually(seen)
