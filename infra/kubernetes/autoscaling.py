"""PromQL queries for the autoscaler: seconds of work in progress, arriving, and waiting.

There are three triggers; the highest one wins (decision 43):

- `arrivals`: the seconds of work that callers send each second, in full-worker seconds. It detects
a step increase before workers are busy with it, and starts the first worker.
- `work`: the workers that are busy, plus the workers needed to finish the waiting work in time. It
covers work that arrivals don't show, such as jobs from another region and items that take longer
than usual.
- `messages`: unacknowledged messages in Pub/Sub, one to three minutes late (its metric is sampled
  every 60 s and may stay invisible for 120 s more), or messages in RabbitMQ's queues, for
  predictions that no API is waiting for. If no metric counts the messages, this trigger is omitted.

Lost metrics never remove workers. A trigger without samples fails, so the HPA does not scale down.
If a trigger loses some of its samples, another trigger keeps the worker count up. Worker metrics
may be missing only for a model without recent requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infra.kubernetes.deployment import Deployment, OwnPrometheus
from shared.broker.transport import batch_subscription_id, workers_subscription_id
from shared.models.catalog import Model, WorkerGroup

MAX_UTILIZATION = 0.9
"""Target share of worker time spent on batches, used when only workers report their load."""
PATIENT_SHARE = 0.5
"""Share of the longest deadline within which work must finish if no caller is waiting on a
connection.
"""
FRESH = "1m"
"""Workers whose last sample is older than this are considered gone. Managed Prometheus has no
staleness markers.
"""
ARRIVED = "90s"
"""Arrivals are averaged over this period. A shorter period makes the worker count jump at random.
"""
MEASURED = "30m"
"""Seconds per item are averaged over this period, which is longer than most gaps in the metrics."""
MAX_STEP = 4
"""Arrivals count only up to this multiple of the workers' throughput, because callers may hang up
immediately.
"""
QUIET = "10m"
"""A model that receives no requests for this long may have no workers."""

UTILIZATION = 0.7
"""Share of worker time that arrivals should use. The rest absorbs random peaks and growth while
nodes are starting.
"""
FALLBACK_FAILURES = 6
"""Number of times a trigger may fail before KEDA's fallback takes over.

Until then, the HPA leaves the worker count unchanged.
"""


def _matchers(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in labels.items())


def patient_s(model: Model) -> float:
    """Returns how soon work must finish, in seconds, if no caller is waiting on a connection."""
    return model.deadline.longest_s * PATIENT_SHARE


class TriggerQueries:
    """PromQL queries for the workers of one or several models in one region.

    Only requests from callers in this region are counted. Workers in all regions pull from one
    subscription, and each region's autoscaler is responsible for its own callers and workers.
    Therefore, if one region runs out of GPUs, workers elsewhere get busier and their number grows.

    Requests for several models are added up, weighted by each model's seconds per item.

    Args:
        processes: model processes per worker. They run concurrently, so a worker's average time per
            item is a process's time per item divided by this number.
        prometheus: the site's own, where the whole deployment counts as one region. None means
            Google's Managed Prometheus, which adds a `location` label.
    """

    def __init__(
        self,
        models: Sequence[Model],
        worker: str,
        region: str,
        processes: int,
        prometheus: OwnPrometheus | None = None,
    ) -> None:
        self._models = models
        self._worker = worker
        self._processes = processes
        self._prometheus = prometheus
        self._deployment = {} if prometheus is None else prometheus.labels
        self._region = {"location": region} if prometheus is None else prometheus.labels
        self._here = _matchers({"worker": worker} | self._region)

    def arrivals(self) -> str:
        """Returns the seconds of work that callers in the region request each second.

        Rejected items count too. Requests with `batch` priority wait for idle workers.
        """
        each = [self._query_arrivals(model) for model in self._models]
        arrived = _add_up(
            f"({admitted} + {shed}) * ({self._item_s(model)})"
            for model, (admitted, shed) in zip(self._models, each, strict=True)
        )
        max_rate = f"{MAX_STEP} * (({self._busy_workers()} or vector(0)) + 1)"
        admitted = " and ".join(admitted for admitted, _ in each)
        return f"({arrived} < {max_rate}) or ({max_rate} and {admitted})"

    def _query_arrivals(self, model: Model) -> tuple[str, str]:
        """Returns PromQL for the items admitted and the items rejected each second."""
        selector = f'{{{self._items_of(model)},lane="interactive"}}[{ARRIVED}]'
        admitted, shed = (
            f"sum(rate(penstock_api_items_{name}_total{selector}))" for name in ("admitted", "shed")
        )
        return admitted, shed

    def _items_of(self, model: Model) -> str:
        return _matchers({"model": model.name} | self._region)

    def work(self) -> str:
        """Returns PromQL for the number of full workers needed for current and waiting work.

        There is no series if worker metrics are lost. Without workers, it is 0 if there were no
        recent requests.
        """
        arrivals = _add_up(
            f"sum(increase(penstock_api_items_admitted_total{{{self._items_of(model)}}}[{QUIET}]))"
            for model in self._models
        )
        busy = f"{self._busy_workers()} or ({arrivals} == 0)"
        waiting = _add_up(
            f"({self._waiting(model)}) * ({self._item_s(model)})" for model in self._models
        )
        return f"({busy}) / {MAX_UTILIZATION:g} + {waiting}"

    def _waiting(self, model: Model) -> str:
        in_flight = f"penstock_api_items_in_flight{{{self._items_of(model)},lane="
        return (
            f'sum({in_flight}"interactive"}}) / {model.deadline.default_s:g}'
            f' + sum({in_flight}"batch"}}) / {patient_s(model):g}'
        )

    def messages(self) -> str | None:
        """Returns the seconds of work in waiting messages of both priorities.

        None if no metric counts the messages: the embedded Pub/Sub exports none.
        """
        if self._prometheus is not None and not self._prometheus.has_rabbitmq:
            return None
        parts = []
        for model in self._models:
            subscriptions = (workers_subscription_id(model.name), batch_subscription_id(model.name))
            counts = " + ".join(f"({self._count(subscription)})" for subscription in subscriptions)
            parts.append(f"({counts}) * ({self._item_s(model)})")
        return _add_up(parts)

    def _count(self, subscription_id: str) -> str:
        """Returns PromQL for the number of messages waiting in a subscription."""
        if self._prometheus is not None:
            # Every instance of the functions reports the same queues.
            chosen = _matchers({"subscription": subscription_id} | self._deployment)
            return f"max(penstock_queue_messages{{{chosen}}})"
        name = "pubsub_googleapis_com:subscription_num_undelivered_messages"
        chosen = f'monitored_resource="pubsub_subscription",subscription_id="{subscription_id}"'
        # Google may export no sample for an empty subscription. This trigger only adds workers.
        return f"sum({name}{{{chosen}}}) or vector(0)"

    def _busy_workers(self) -> str:
        fresh = f'penstock_worker_busy_ratio{{{self._here},lane="interactive"}}[{FRESH}]'
        return f"sum(last_over_time({fresh}))"

    def _item_s(self, model: Model) -> str:
        """Returns PromQL for the time per item in full-worker seconds.

        Spare time is time that other items could have used at no cost
        (shared/models/service_rate.py). Workers report process seconds.
        """
        # Workers from earlier releases serve one model and don't set this label.
        of_model = {"model": model.name} if len(self._models) > 1 else {}
        labels = {"worker": self._worker} | of_model | self._deployment
        # Sums cover all regions, so a region without workers learns from the others.
        seconds, spare, items = (
            f"sum(rate(penstock_worker_{name}{{{_matchers(labels)}}}[{MEASURED}]))"
            for name in ("inference_seconds_sum", "spare_seconds_total", "batch_items_sum")
        )
        guess_s = model.definition.first_guesses.item_s
        # Spare time is 0 for workers that don't report it, so their items count for more, not less.
        busy_seconds = f"({seconds} - ({spare} or vector(0)))"
        process_s = f"{busy_seconds} / ({items} > 0) or vector({guess_s:g})"
        return process_s if self._processes == 1 else f"({process_s}) / {self._processes}"


def _add_up(parts: Iterable[str]) -> str:
    return " + ".join(parts)


def keda_patch(
    group: WorkerGroup, worker: str, deployment: Deployment, processes: int
) -> dict[str, Any]:
    """Returns the fields of a worker's ScaledObject that are not in components/keda."""
    queries = TriggerQueries(
        group.models, worker, deployment.region, processes, deployment.prometheus
    )
    triggers = [
        _trigger("arrivals", queries.arrivals(), UTILIZATION, deployment),
        _trigger("work", queries.work(), 1, deployment),
    ]
    if (messages := queries.messages()) is not None:
        wait_s = min(patient_s(model) for model in group.models)
        triggers.append(_trigger("messages", messages, wait_s, deployment))
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "worker"},
        "spec": {
            "minReplicaCount": group.replicas.min,
            "maxReplicaCount": group.replicas.max,
            "fallback": {
                "failureThreshold": FALLBACK_FAILURES,
                "replicas": max(1, group.replicas.min),
                "behavior": "currentReplicasIfHigher",
            },
            "triggers": triggers,
        },
    }


def _trigger(name: str, query: str, threshold: float, deployment: Deployment) -> dict[str, Any]:
    metadata = {
        "serverAddress": deployment.metrics_url,
        "query": query,
        "threshold": f"{threshold:g}",
        "activationThreshold": "0",
        # A missing value is an error, because 0 would cause workers to be stopped.
        "ignoreNullValues": "false",
    }
    trigger: dict[str, Any] = {"type": "prometheus", "name": name, "metadata": metadata}
    if deployment.prometheus is None:
        trigger["authenticationRef"] = {"name": "worker"}
    return trigger
