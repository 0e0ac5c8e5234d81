"""Checks that the pool's inboxes are there as the API's settings have them."""

from __future__ import annotations

from shared.brokers import admin_of
from shared.errors import Unavailable
from shared.settings import ApiSettings
from shared.topics import direct_id, slot_subscription_id


async def check_inboxes(settings: ApiSettings, limit_s: float) -> None:
    """Looks for all subscriptions of each inbox that an instance may lease.

    Raises:
        Unavailable: some are missing. An instance that leases such an inbox is never ready.
        PenstockError: as the admin's calls do.
    """
    pool = range(settings.inbox_first, settings.inbox_first + settings.inbox_pool)
    wanted = [
        name
        for inbox in map(str, pool)
        for name in (
            direct_id(inbox),
            *(slot_subscription_id(inbox, slot) for slot in range(settings.reply_slots)),
        )
    ]
    async with admin_of(settings, timeout_s=limit_s) as admin:
        missing = await admin.missing_subscriptions(wanted)
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise Unavailable(
            f"of {len(wanted)} subscriptions, {missing[0]}{others} are missing; "
            "penstock up and terraform apply make them"
        )
