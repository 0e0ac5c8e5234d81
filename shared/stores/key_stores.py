"""Finds the store of keys that PENSTOCK_KEYS_URL names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from shared.errors import ConfigurationError
from shared.stores.key_file import KeyFile
from shared.tenants.key_store import KeyStore


def key_store(url: str) -> KeyStore:
    """The store at `url`, not open.

    Raises:
        ConfigurationError: the URL names no store.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return KeyFile(Path(unquote(parts.path)))
    raise ConfigurationError("PENSTOCK_KEYS_URL: is not file:///PATH", field="keys_url")
