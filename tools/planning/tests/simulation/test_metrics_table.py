"""The simulated metrics match the product's."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

import api.metrics
import workers.metrics
from penstock_planning.simulation.api_site import ApiSite, SimulatedJob
from penstock_planning.simulation.fleet import CORDONED_MAX_SHARE
from penstock_planning.simulation.metrics_table import LOST_GPUS, OF_API, OF_WORKERS, UNDELIVERED
from penstock_planning.simulation.model_load import ModelLoad
from penstock_planning.simulation.replicas import Autoscaler
from penstock_planning.simulation.rules import AutoscalerRules
from penstock_planning.simulation.service import (
    BATCH_SLOTS_SHARE,
    SHARED_WEIGHTS_SHARE,
    WholeBatches,
)
from penstock_planning.simulation.timeseries import TimeSeries
from penstock_planning.simulation.worker import Node, RunningBatch, SimulatedWorker
from shared.errors import ConfigurationError
from shared.models.catalog_file import read_catalog
from shared.tenants.plan import Priority
from workers import gpu_nodes
from workers.metrics import BusyRatio
from workers.models import step_shares
from workers.scheduling import priority_queue


def test_each_metric_is_one_of_the_product() -> None:
    assert api.metrics.IN_FLIGHT is not None
    assert workers.metrics.WAITING is not None
    exported = {name for metric in REGISTRY.collect() for name in _names(metric.name, metric.type)}
    assert {*OF_WORKERS, *OF_API, LOST_GPUS} - exported == set()


def _names(name: str, kind: str) -> list[str]:
    return {"counter": [f"{name}_total"], "histogram": [f"{name}_sum", f"{name}_count"]}.get(
        kind, [name]
    )


def test_a_rule_that_asks_for_an_unknown_metric_is_refused() -> None:
    trigger = {"name": "mine", "query": "sum(penstock_no_metric)", "threshold": 1}
    rules = AutoscalerRules.model_validate({"triggers": [trigger]})
    with pytest.raises(ConfigurationError, match="penstock_no_metric"):
        Autoscaler(rules, TimeSeries())
    known = trigger | {"query": f"sum({UNDELIVERED})"}
    Autoscaler(AutoscalerRules.model_validate({"triggers": [known]}), TimeSeries())


def test_constants_are_those_of_workers() -> None:
    assert step_shares.SHARED_WEIGHTS_SHARE == SHARED_WEIGHTS_SHARE
    assert priority_queue.BATCH_SLOTS_SHARE == BATCH_SLOTS_SHARE
    assert gpu_nodes.MAX_SHARE == CORDONED_MAX_SHARE


def worker(processes: int) -> SimulatedWorker:
    return SimulatedWorker(
        "pod",
        "here",
        "model",
        processes=processes,
        placed=simpy.Environment().event(),
        is_spread=True,
        on_evict=lambda one, why: None,
        on_lost_gpu=lambda one, after_s: None,
    )


def test_processes_share_the_interactive_items_no_matter_how_many_batch_items_wait() -> None:
    env, pod = simpy.Environment(), worker(2)
    pod.node = Node("node", 1, is_spot=False)
    entry = read_catalog(Path("models.yaml")).default("embedding")
    site = ApiSite("here", entry, 1, 80)
    for priority, count in enumerate((4, 8)):
        pod.held[priority].extend(SimulatedJob(0, 9, 1, priority == 1, site) for _ in range(count))
    load = ModelLoad(seconds_per_item=1, measured="by hand")
    WholeBatches(env, entry, load, Random(1), lambda *_: None).start(pod)
    batches = [[job.is_batch_priority for job in batch.jobs] for batch in pod.computing]
    assert batches == [[False, False], [False, False]]


def test_busy_ratio_of_two_processes_is_that_of_workers() -> None:
    now_s = 0.0
    theirs, ours = BusyRatio(2, lambda: now_s), worker(2)
    running = []
    names: tuple[Priority, Priority] = ("interactive", "batch")
    for share, priorities in ((0.0, names[:1]), (0.5, names)):
        running.append((RunningBatch(ours, [], 9.0, share, now_s), theirs.start(priorities)))
        ours.computing.append(running[-1][0])
        ours.set_busy_of_batches(now_s)
        now_s += 20
    for batch, parts in running:
        for at, priority in enumerate(names):
            assert ours.busy_ratio(now_s)[at] == pytest.approx(theirs.read(priority), abs=2e-3)
        ours.computing.remove(batch)
        ours.set_busy_of_batches(now_s)
        theirs.end(parts)
        now_s += 10
    assert ours.busy_ratio(now_s)[0] == pytest.approx(theirs.read("interactive"), abs=2e-3)


@given(st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 4), st.integers(0, 4)), max_size=20))
def test_busy_ratio_is_that_of_workers(batches: list[tuple[float, int, int]]) -> None:
    now_s = 0.0
    theirs = BusyRatio(1, lambda: now_s)
    ours = worker(1)
    for gap_s, interactive, batch in batches:
        if interactive + batch:
            priorities: list[Priority] = ["interactive"] * interactive
            priorities += ["batch"] * batch
            parts = theirs.start(priorities)
            share = batch / (interactive + batch)
            ours.set_busy((1 - share, share), now_s)
            now_s += gap_s
            theirs.end(parts)
            ours.set_busy((0.0, 0.0), now_s)
        now_s += gap_s / 2
        ratios = ours.busy_ratio(now_s)
        assert ratios[0] == pytest.approx(theirs.read("interactive"), abs=2e-3)
        assert ratios[1] == pytest.approx(theirs.read("batch"), abs=2e-3)
