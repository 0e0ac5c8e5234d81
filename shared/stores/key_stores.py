"""Finds the store of keys that PENSTOCK_KEYS_URL names, and what its plans and keys may name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from redis.connection import parse_url

from shared.catalog import Catalog
from shared.errors import ConfigurationError
from shared.stores.key_file import KeyFile
from shared.stores.key_redis import KeyRedis
from shared.tenants.key_store import KeyStore
from shared.tenants.rules import Served
from shared.webhook_urls import parse_webhook_url


def key_store(url: str, *, is_writable: bool = False) -> KeyStore:
    """The store at `url`, not open.

    Args:
        url: `file:///PATH`, or a URL of Redis.
        is_writable: whether a file may be changed here. Redis always may.

    Raises:
        ConfigurationError: the URL names no store.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return KeyFile(Path(unquote(parts.path)), is_writable=is_writable)
    if parts.scheme in ("redis", "rediss", "unix"):
        try:
            parse_url(url)  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise ConfigurationError(f"PENSTOCK_KEYS_URL: {error}", field="keys_url") from error
        return KeyRedis(url)
    raise ConfigurationError(
        "PENSTOCK_KEYS_URL: is not file:///PATH, redis://HOST or rediss://HOST", field="keys_url"
    )


def served_by(catalog: Catalog, *, allow_private: bool) -> Served:
    """What plans and keys may name in a deployment.

    Args:
        catalog: its models.
        allow_private: whether its webhooks may go to private addresses and over http.
    """
    return Served(
        units={model.name: model.definition.unit for model in catalog.models},
        aliases={alias: model.name for model in catalog.models for alias in model.aliases},
        check_webhook=partial(parse_webhook_url, allow_private=allow_private),
    )
