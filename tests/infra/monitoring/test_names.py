"""Every metric, label and label value that an alert or a dashboard asks for is one that a process
of the product exports.
"""

import json
import re
import subprocess
import sys
from functools import cache

import pytest

from shared.slo import ENDS
from shared.usage.charge import SHARED
from tests.infra.monitoring.promql import asked_by, grafana_queries, queries
from tests.limits import START_LIMIT_S

MODULES = (
    "api.__main__",
    "api.batches.process",
    "workers.__main__",
    "workers.functions.main",
    "infra.row_archive.__main__",
)
"""What the processes of the product import at their start. That registers their metrics."""
_DUMP = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
from prometheus_client import REGISTRY
print(json.dumps({c._name: [c._type, list(c._labelnames)] for c in REGISTRY._collector_to_names
                  if hasattr(c, "_labelnames")}))
"""
_SAMPLES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
FROM_THE_COLLECTOR = "worker"
"""Label of the workers' series: infra/kubernetes/cluster/pod-monitoring.yaml,
infra/monitoring/scraping.py.
"""
OF_GOOGLE = {"pubsub_googleapis_com:subscription_oldest_unacked_message_age"}
RECORDED = re.compile(r"penstock:slo_(errors:ratio|bad:increase)\d+[mhd]")


@cache
def exported() -> dict[str, set[str]]:
    """The labels of each series of our processes, by its name."""
    found: dict[str, set[str]] = {}
    for module in MODULES:
        done = subprocess.run(
            [sys.executable, "-c", _DUMP, module],
            capture_output=True,
            text=True,
            timeout=START_LIMIT_S,
            check=True,
        )
        for name, (kind, labels) in json.loads(done.stdout).items():
            for suffix in _SAMPLES[kind]:
                extra = {"le"} if suffix == "_bucket" else set()
                found[name + suffix] = {*labels, *extra}
    return found


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_metrics_and_labels_are_exported(where: str, query: str) -> None:
    asked = asked_by(query)
    known: set[str] = set()
    for name, matchers in asked.metrics.items():
        if name in OF_GOOGLE:
            known |= {"subscription_id", "monitored_resource"}
        elif RECORDED.fullmatch(name):
            known |= {"objective", "scope", "model"}
        else:
            assert name in exported(), where
            assert {label for label, _ in matchers} <= exported()[name], where
            known |= exported()[name]
            known |= {FROM_THE_COLLECTOR} if name.startswith("penstock_worker_") else set()
    assert asked.labels <= known


def test_values_of_labels_exist() -> None:
    values = {
        (label, value)
        for _, query in queries()
        for matchers in asked_by(query).metrics.values()
        for label, text in matchers
        for value in text.split("|")
    }
    assert {value for label, value in values if label == "end"} <= set(ENDS)
    assert {value for label, value in values if label == "cache"} == SHARED
    assert {value for label, value in values if label == "route"} == {"/healthz", "/readyz"}


def test_legends_name_labels_of_their_queries() -> None:
    for title, query, legend in grafana_queries():
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= asked_by(query).labels, title
