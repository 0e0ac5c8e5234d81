"""Reply costs for both inbox topics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock_planning.deploy.platform_variables import Platform
from penstock_planning.deploy.prices import ListPrice, Prices
from penstock_planning.deploy.volumes import Volume
from shared.models.entry import Replies

TIB = 2**40
MIN_BYTES = 1000
"""Minimum size of a publish or delivery billed by Pub/Sub."""
THROUGHPUT = "pubsub/throughput"


def compute_billed_tib(messages: float, size_bytes: int, times: int) -> float:
    """Returns the billed TiB for messages that are each billed `times` times."""
    return messages * times * max(MIN_BYTES, size_bytes) / TIB


def reply_times(replies: Replies, platform: Platform) -> int:
    """Returns how many times a reply is billed: for its publish, and per subscription to its topic.

    Messages dropped by a filter are billed too
    (docs.cloud.google.com/pubsub/docs/subscription-message-filter).
    """
    return 2 if replies == "direct" else 1 + platform.inboxes.made_slots


def replies_tib(volume: Volume, replies: Replies, platform: Platform) -> float | None:
    """Returns the monthly billed TiB of replies, or None if their size is unknown."""
    size_bytes = volume.reply_bytes[replies]
    if size_bytes is None:
        return None
    return compute_billed_tib(volume.jobs, size_bytes, reply_times(replies, platform))


def reply_notes(volumes: Sequence[Volume], platform: Platform, prices: Prices) -> Iterator[str]:
    """Yields a note on the cost of each model's replies on each topic, if that cost is known."""
    price = prices.prices.get(THROUGHPUT)
    for volume in volumes:
        direct, slots = (replies_tib(volume, kind, platform) for kind in ("direct", "slots"))
        if price is None or not direct or not slots:
            continue
        # Either other traffic uses up the free tier, or the free tier is small.
        direct_usd = price.cost_usd("", direct, before=price.free)
        slots_usd = price.cost_usd("", slots, before=price.free)
        if direct_usd is not None and slots_usd is not None:
            yield (
                f"the replies of {volume.model}: about {direct_usd:,.2f} USD per month direct, "
                f"{slots_usd:,.2f} with {platform.inboxes.made_slots} slots; "
                f"models.yaml has {volume.replies}{_describe_shared(volume, platform, price)}"
            )


def _describe_shared(volume: Volume, platform: Platform, price: ListPrice) -> str:
    """Returns a note on the lowest possible cost of replies that share messages."""
    count, size_bytes = volume.shared_replies, volume.shared_reply_bytes
    if count == 1 or size_bytes is None:
        return ""
    times = reply_times(volume.replies, platform)
    least = compute_billed_tib(volume.jobs / count, size_bytes, times)
    usd = price.cost_usd("", least, before=price.free)
    return "" if usd is None else f", {usd:,.2f} if {count} share each message"
