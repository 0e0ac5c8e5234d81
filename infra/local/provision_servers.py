"""`penstock provision`: makes topics, subscriptions and tables on embedded servers.

The local stack does the same at its start. Deployments whose servers run in containers run this
before the API. On Google's own, Terraform makes them.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from infra.local.provision import provision
from infra.reports.tables import create_tables
from shared.backoff import backoff
from shared.brokers import admin_of
from shared.catalog import Catalog, read_catalog
from shared.errors import Unavailable
from shared.settings import ApiSettings

CONNECT_LIMIT_S = 5.0
TAKEN = "taken:"
"""In the place of the functions' URL: with RabbitMQ they take their messages themselves."""


def provision_servers(
    settings: ApiSettings, functions_url: str, limit_s: float, say: Callable[[str], None]
) -> None:
    """Makes what is missing on each server that is ours. Changes nothing that is there.

    Args:
        settings: where the servers are. One without an endpoint is Google's, and is left alone.
        functions_url: where Pub/Sub pushes dead letters and webhooks. Empty: nowhere.
        limit_s: how long to wait for the servers, in seconds.
        say: gets a line for each server.

    Raises:
        ConfigurationError: the catalog can't be read.
        Unavailable: a server was not there in time, or refused.
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
        say("topics and subscriptions are Terraform's: PENSTOCK_PUBSUB_ENDPOINT is empty")
    if settings.bigquery_endpoint:
        _until(deadline_s, lambda: create_tables(settings))
        say(f"dataset {settings.dataset} is on {settings.bigquery_endpoint}")
    else:
        say("the dataset is Terraform's: PENSTOCK_BIGQUERY_ENDPOINT is empty")


def provision_broker(settings: ApiSettings, catalog: Catalog, functions_url: str) -> None:
    """Makes the topics and subscriptions.

    Raises:
        Unavailable: the broker is out of reach or refused.
    """
    asyncio.run(_provision(settings, catalog, functions_url))


def _provision_embedded(settings: ApiSettings, catalog: Catalog, functions_url: str) -> None:
    """Does not wait for a server that is not there: gRPC itself tries for half a minute."""
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
