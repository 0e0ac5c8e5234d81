"""The resources of Terraform's `platform` stage: topics, subscriptions, node pools, Redis.

A test compares this list to Terraform's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from infra.kubernetes.deployment import GpuType, gpu_class
from infra.kubernetes.placement import can_overflow
from penstock_planning.deploy.platform_variables import INBOX_STRIDE, Platform
from shared.broker.transport import (
    WEBHOOKS_SUBSCRIPTION_ID,
    WEBHOOKS_TOPIC_ID,
    batch_subscription_id,
    dead_letter_push_subscription_id,
    dead_letter_subscription_id,
    dead_letter_topic_id,
    direct_id,
    inbox_topic_id,
    jobs_topic_id,
    slot_subscription_id,
    workers_subscription_id,
)
from shared.models.catalog import Model


def topics(models: Iterable[Model], platform: Platform) -> list[str]:
    """Returns the IDs of all topics in the project."""
    of_models = [
        name
        for model in models
        for name in (jobs_topic_id(model.name), dead_letter_topic_id(model.name))
    ]
    inboxes = [
        name for inbox in _inboxes(platform) for name in (inbox_topic_id(inbox), direct_id(inbox))
    ]
    return [*of_models, *inboxes, WEBHOOKS_TOPIC_ID]


def subscriptions(models: Iterable[Model], platform: Platform) -> list[str]:
    """Returns the IDs of all subscriptions in the project."""
    of_model = [workers_subscription_id, batch_subscription_id, dead_letter_subscription_id]
    if platform.functions.dead_letters is not None:
        of_model.append(dead_letter_push_subscription_id)
    names = [name(model.name) for model in models for name in of_model]
    for inbox in _inboxes(platform):
        slots = range(platform.inboxes.made_slots)
        names += [direct_id(inbox), *(slot_subscription_id(inbox, slot) for slot in slots)]
    return names + ([WEBHOOKS_SUBSCRIPTION_ID] if platform.functions.webhooks is not None else [])


def _inboxes(platform: Platform) -> list[str]:
    return [
        str(region.index * INBOX_STRIDE + offset)
        for region in platform.regions.values()
        for offset in range(platform.inboxes.per_region)
    ]


def gpu_pools(
    models: Iterable[Model], platform: Platform, region: str, gpus: dict[str, GpuType]
) -> list[str]:
    """Returns a region's GPU node pools by name, or none if ComputeClasses create nodes."""
    if platform.nodes.compute_classes:
        return []
    names, overflow = [], platform.overflow_in(region)
    for gpu in dict.fromkeys(model.gpu for model in models if model.gpu.type != "none"):
        name = gpu_class(gpu)
        if gpu.provisioning == "flex-start":
            names.append(name)
            continue
        if gpu.type in platform.regions[region].reservations:
            names.append(f"{name}-reserved")
        if gpus[gpu.type].on_demand:
            names.append(name)
        if platform.nodes.spot:
            names.append(f"{name}-spot")
        if can_overflow(gpu) and overflow not in (None, gpu.type):
            names.append(f"{name}-on-{overflow}")
    return names


@dataclass(frozen=True)
class Redis:
    """A Memorystore instance: a primary and its replicas."""

    region: str
    use: str
    node_type: str
    nodes: int


def redis(platform: Platform) -> list[Redis]:
    """Returns one per region for cache and leases, and one for all records if they are separate."""
    cache, records = platform.cache, platform.records
    names = [
        Redis(region, "cache", cache.node_type, 1 + cache.replicas) for region in platform.regions
    ]
    is_separate = records.apart if records.apart is not None else len(platform.regions) > 1
    return names + (
        [Redis(platform.home, "records", records.node_type, 1 + records.replicas)]
        if is_separate
        else []
    )
