"""`penstock provision`: creates topics, subscriptions, and tables on embedded or local servers.

The local stack does the same at startup. Deployments whose servers run in containers run this
before the API starts. On Google's servers, Terraform creates them.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from infra.reports.tables import create_tables
from shared.broker.transport import (
    DEAD_LETTER_RETENTION_S,
    DEAD_LETTER_RETRY_S,
    WEBHOOK_RETRY_S,
    WEBHOOKS_SUBSCRIPTION_ID,
    WEBHOOKS_TOPIC_ID,
    Admin,
    SubscriptionSettings,
    dead_letter_push_subscription_id,
    dead_letter_topic_id,
    make_inbox,
    make_jobs,
)
from shared.brokers import admin_of
from shared.errors import Unavailable
from shared.models.catalog import Catalog
from shared.models.catalog_file import read_catalog
from shared.process.concurrency import backoff
from shared.settings import ApiSettings

PUSH_LIMIT_S = 60
"""A function's per-message time limit."""
EVENT_RETENTION_S = 24 * 3600

CONNECT_LIMIT_S = 5.0
TAKEN = "taken:"
"""Used in place of the functions' URL, because with RabbitMQ the functions pull their messages."""


async def provision(
    admin: Admin, catalog: Catalog, inbox_pool: int, slots: int, functions_url: str = ""
) -> None:
    """Creates everything that is missing and leaves existing resources unchanged.

    Args:
        catalog: each model gets a jobs topic, a subscription per priority for its workers, and a
            dead-letter topic.
        inbox_pool: number of reply inboxes to create, numbered from 0.
        slots: number of filtered subscriptions per inbox.
        functions_url: base URL of the functions, each of which has its own path. Empty if no
            functions run.

    Raises:
        PenstockError: the broker rejected the request or did not respond.
    """
    await admin.ensure_topic(WEBHOOKS_TOPIC_ID)
    await asyncio.gather(*(make_jobs(admin, model.name) for model in catalog.deployed))
    if functions_url:
        await _provision_pushes(admin, catalog, functions_url)
    for number in range(inbox_pool):
        await make_inbox(admin, str(number), slots)


async def _provision_pushes(admin: Admin, catalog: Catalog, functions_url: str) -> None:
    dead_letters = {
        dead_letter_push_subscription_id(model.name): SubscriptionSettings(
            dead_letter_topic_id(model.name),
            ack_deadline_s=PUSH_LIMIT_S,
            retention_s=DEAD_LETTER_RETENTION_S,
            retry_min_s=DEAD_LETTER_RETRY_S[0],
            retry_max_s=DEAD_LETTER_RETRY_S[1],
            push_endpoint=f"{functions_url}/dead_letter",
        )
        for model in catalog.deployed
    }
    webhooks = SubscriptionSettings(
        WEBHOOKS_TOPIC_ID,
        ack_deadline_s=PUSH_LIMIT_S,
        retention_s=EVENT_RETENTION_S,
        retry_min_s=WEBHOOK_RETRY_S[0],
        retry_max_s=WEBHOOK_RETRY_S[1],
        push_endpoint=f"{functions_url}/webhook",
    )
    pushed = dead_letters | {WEBHOOKS_SUBSCRIPTION_ID: webhooks}
    await asyncio.gather(
        *(admin.ensure_subscription(name, settings) for name, settings in pushed.items())
    )


def provision_servers(
    settings: ApiSettings, functions_url: str, limit_s: float, say: Callable[[str], None]
) -> None:
    """Creates missing resources on each local server. Changes nothing that exists.

    Args:
        settings: the servers' endpoints. A server without an endpoint is Google's and is left
            alone.
        functions_url: URL to which Pub/Sub pushes dead letters and webhooks. If empty, nothing is
            pushed.
        limit_s: maximum wait for the servers, in seconds.

    Raises:
        ConfigurationError: the catalog can't be read. Unavailable: a server was not ready in time,
            or rejected a request.
    """
    deadline_s = time.monotonic() + limit_s
    catalog = read_catalog(settings.models_file)
    if settings.broker:
        _until(deadline_s, lambda: provision_broker(settings, catalog, TAKEN))
        say(f"topics and subscriptions are on {settings.broker.rpartition('@')[2]}")
    elif settings.pubsub_endpoint:
        _until(deadline_s, lambda: _provision_embedded(settings, catalog, functions_url))
        say(f"topics and subscriptions are on {settings.pubsub_endpoint}")
    else:
        say("topics and subscriptions are managed by Terraform: PENSTOCK_PUBSUB_ENDPOINT is empty")
    if settings.bigquery_endpoint:
        _until(deadline_s, lambda: create_tables(settings))
        say(f"dataset {settings.dataset} is on {settings.bigquery_endpoint}")
    else:
        say("the dataset is managed by Terraform: PENSTOCK_BIGQUERY_ENDPOINT is empty")


def provision_broker(settings: ApiSettings, catalog: Catalog, functions_url: str) -> None:
    """Creates the topics and subscriptions.

    Raises:
        Unavailable: the broker is unreachable or rejected a request.
    """
    asyncio.run(_provision(settings, catalog, functions_url))


def _provision_embedded(settings: ApiSettings, catalog: Catalog, functions_url: str) -> None:
    """Fails quickly if the server isn't running; gRPC itself would retry for half a minute."""
    host, _, port = settings.pubsub_endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_LIMIT_S).close()
    except (OSError, ValueError) as error:
        raise Unavailable(f"no Pub/Sub at {settings.pubsub_endpoint}: {error}") from error
    provision_broker(settings, catalog, functions_url)


def _until(deadline_s: float, make: Callable[[], None]) -> None:
    for pause_s in backoff(0.5, 5.0):
        try:
            make()
        except Unavailable:
            if time.monotonic() + pause_s > deadline_s:
                raise
            time.sleep(pause_s)
        else:
            return


async def _provision(settings: ApiSettings, catalog: Catalog, functions_url: str) -> None:
    async with admin_of(settings) as admin:
        await provision(admin, catalog, settings.inbox_pool, settings.reply_slots, functions_url)
