"""Autoscaling by seconds of work: what is done, what arrives, and what waits.

Three triggers, of which the highest counts (decision 43):

- `arrivals`: the seconds of work that callers send each second, by what a full worker takes. It
  knows of a step before workers are busy with it, and starts the first worker.
- `work`: the workers that are kept busy, and what it takes to do in time what waits. It sees work
  that arrivals do not tell of: jobs of another region, items that take longer than usual.
- `messages`: what Pub/Sub has not had acked, one to three minutes late (its metric is sampled every
  60 s and may stay invisible for 120 s more), or what waits in the queues of a RabbitMQ, for
  predictions that no API waits for. Where neither counts them there is no such trigger.

Lost metrics never take workers away. A trigger without samples fails, so the HPA does not scale
down. Of those that lose a part, the other one holds the count. Only a model that nobody has asked
for of late may be without metrics of workers.
"""

from __future__ import annotations

from typing import Any

from infra.kubernetes.deployment import Deployment
from infra.kubernetes.trigger_queries import (
    MetricSource,
    TriggerQueries,
    managed_prometheus,
    own_prometheus,
    patient_s,
)
from shared.catalog import Model
from shared.topics import batch_subscription_id, workers_subscription_id

UTILIZATION = 0.7
"""The part of their time that workers spend on what arrives. The rest is for growth while nodes
start, and for chance."""
HPA_WAIT_SHARE = 0.3
"""Of the default deadline: the work that waits for each worker, where nothing can be added."""
FALLBACK_FAILURES = 6
"""Failed reads of a trigger until KEDA stands in for it. Until then the HPA keeps the count."""


def keda_patch(model: Model, worker: str, deployment: Deployment) -> dict[str, Any]:
    """What the ScaledObject of one worker has beyond components/keda."""
    queries = TriggerQueries(model, worker, _source(deployment))
    triggers = [
        _trigger("arrivals", queries.arrivals(), UTILIZATION, deployment),
        _trigger("work", queries.work(), 1, deployment),
    ]
    if (messages := queries.messages()) is not None:
        triggers.append(_trigger("messages", messages, patient_s(model), deployment))
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "worker"},
        "spec": {
            "minReplicaCount": model.replicas.min,
            "maxReplicaCount": model.replicas.max,
            "fallback": {
                "failureThreshold": FALLBACK_FAILURES,
                "replicas": max(1, model.replicas.min),
                "behavior": "currentReplicasIfHigher",
            },
            "triggers": triggers,
        },
    }


def _source(deployment: Deployment) -> MetricSource:
    if deployment.prometheus is None:
        return managed_prometheus(deployment.region)
    given = deployment.prometheus
    return own_prometheus(given.labels, has_rabbitmq=given.has_rabbitmq)


def _trigger(name: str, query: str, threshold: float, deployment: Deployment) -> dict[str, Any]:
    metadata = {
        "serverAddress": deployment.metrics_url,
        "query": query,
        "threshold": f"{threshold:g}",
        "activationThreshold": "0",
        # Nothing is an error: 0 would be a reason to stop workers.
        "ignoreNullValues": "false",
    }
    trigger: dict[str, Any] = {"type": "prometheus", "name": name, "metadata": metadata}
    if deployment.prometheus is None:
        trigger["authenticationRef"] = {"name": "worker"}
    return trigger


def hpa_patch(model: Model, worker: str, deployment: Deployment) -> dict[str, Any]:
    """The metrics of a worker's HorizontalPodAutoscaler, which can't multiply or add.

    So what waits is counted in items, by the first guess of the seconds that one takes. Where a
    step computes many items for little more than one, those that a full worker has wait for none.
    """
    item_s = model.definition.first_guesses.item_s
    held = model.batch.max_items if model.definition.shares_weights else 1
    here = {"resource.labels.location": deployment.region}
    metrics = [
        _external(
            "prometheus.googleapis.com|penstock_worker_busy_ratio|gauge",
            {"metric.labels.worker": worker, "metric.labels.lane": "interactive"} | here,
            f"{round(UTILIZATION * 1000)}m",
        ),
        _external(
            "prometheus.googleapis.com|penstock_api_items_in_flight|gauge",
            {"metric.labels.model": model.name, "metric.labels.lane": "interactive"} | here,
            str(max(held, round(model.deadline.default_s * HPA_WAIT_SHARE / item_s))),
        ),
    ]
    for lane in (workers_subscription_id, batch_subscription_id):
        metrics.append(
            _external(
                "pubsub.googleapis.com|subscription|num_undelivered_messages",
                {"resource.labels.subscription_id": lane(model.name)},
                str(max(held, round(patient_s(model) / item_s))),
            )
        )
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "worker"},
        "spec": {
            "minReplicas": max(1, model.replicas.min),
            "maxReplicas": model.replicas.max,
            "metrics": metrics,
        },
    }


def _external(name: str, labels: dict[str, str], target: str) -> dict[str, Any]:
    return {
        "type": "External",
        "external": {
            "metric": {"name": name, "selector": {"matchLabels": labels}},
            "target": {"type": "AverageValue", "averageValue": target},
        },
    }
