"""Autoscaling by seconds of queued work, from the metrics of API and workers.

The API counts the items that wait for a worker (`penstock_api_items_in_flight`), the workers time
their batches (`penstock_worker_inference_seconds`, `penstock_worker_batch_items`). Items times
seconds per item is what one worker alone would need to be done. Divided by the queue that one
worker may have, it is the number of workers. Pub/Sub's own count of messages is the second trigger,
one to three minutes late (platform-facts G17), for jobs no API waits for any more.
"""

from __future__ import annotations

from typing import Any

from infra.kubernetes.deployment import Deployment
from shared.catalog import Model
from shared.pubsub.names import batch_subscription_id, workers_subscription_id

WAIT_SHARE = 0.1
"""Of the default deadline: the wait at which one more worker is wanted."""
SHORTEST_WAIT_S = 0.5
MESSAGES_PER_WORKER = 64


def wait_s(model: Model) -> float:
    """Seconds of work that may wait for each worker."""
    return max(SHORTEST_WAIT_S, model.deadline.default_s * WAIT_SHARE)


def waiting_seconds(model: Model, worker: str, region: str) -> str:
    """PromQL: what one worker alone would need for all items in flight of a region, in seconds.

    Only of this region: workers of all regions pull from one subscription, and each region's
    autoscaler answers for the callers of its own.

    Args:
        model: as the API labels its items.
        worker: as the collector labels the pods of this model.
        region: as Managed Prometheus labels what a region's API exports.
    """
    chosen = f'worker="{worker}"'
    in_flight = (
        f'sum(penstock_api_items_in_flight{{model="{model.name}",location="{region}"}})'
        " or vector(0)"
    )
    seconds = f"sum(rate(penstock_worker_inference_seconds_sum{{{chosen}}}[10m]))"
    items = f"sum(rate(penstock_worker_batch_items_sum{{{chosen}}}[10m]))"
    first_guess_s = model.definition.first_guesses.item_s
    return f"({in_flight}) * (({seconds} / ({items} > 0)) or vector({first_guess_s:g}))"


def waiting_messages(model: Model) -> str:
    """PromQL: jobs of both lanes that Pub/Sub has not had acked."""
    lanes = (workers_subscription_id(model.name), batch_subscription_id(model.name))
    chosen = [
        f'monitored_resource="pubsub_subscription",subscription_id="{lane}"' for lane in lanes
    ]
    counts = [
        f"sum(pubsub_googleapis_com:subscription_num_undelivered_messages{{{one}}})"
        for one in chosen
    ]
    return " + ".join(f"({count} or vector(0))" for count in counts)


def keda_patch(model: Model, worker: str, deployment: Deployment) -> dict[str, Any]:
    """What the ScaledObject of one worker has beyond components/keda."""

    def trigger(name: str, query: str, threshold: float) -> dict[str, Any]:
        metadata = {
            "serverAddress": deployment.metrics_url,
            "query": query,
            "threshold": f"{threshold:g}",
            "activationThreshold": "0",
            "ignoreNullValues": "true",
        }
        return {
            "type": "prometheus",
            "name": name,
            "metadata": metadata,
            "authenticationRef": {"name": "worker"},
        }

    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "worker"},
        "spec": {
            "minReplicaCount": model.replicas.min,
            "maxReplicaCount": model.replicas.max,
            "fallback": {"failureThreshold": 6, "replicas": max(1, model.replicas.min)},
            "triggers": [
                trigger(
                    "waiting-seconds",
                    waiting_seconds(model, worker, deployment.region),
                    wait_s(model),
                ),
                trigger("waiting-messages", waiting_messages(model), MESSAGES_PER_WORKER),
            ],
        },
    }


def hpa_patch(model: Model, deployment: Deployment) -> dict[str, Any]:
    """The metrics of a worker's HorizontalPodAutoscaler: items, as it can't multiply."""
    target = max(1, round(wait_s(model) / model.definition.first_guesses.item_s))
    metric = {
        "name": "prometheus.googleapis.com|penstock_api_items_in_flight|gauge",
        "selector": {
            "matchLabels": {
                "metric.labels.model": model.name,
                "resource.labels.location": deployment.region,
            }
        },
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "worker"},
        "spec": {
            "minReplicas": max(1, model.replicas.min),
            "maxReplicas": model.replicas.max,
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": metric,
                        "target": {"type": "AverageValue", "averageValue": str(target)},
                    },
                }
            ],
        },
    }
