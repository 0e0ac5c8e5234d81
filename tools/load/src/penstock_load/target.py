"""The Penstock deployment to test: its URL, its tenants' keys, and its models."""

from __future__ import annotations

import csv
import http.client
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock_load.pool import Server
from shared.errors import MALFORMED, BadInput, ConfigurationError, Unavailable
from shared.tenants.api_key import parse_key

USER_AGENT = "penstock-load"
LIST_LIMIT_S = 20.0


class LoadCaller(NamedTuple):
    """A request's caller."""

    tenant: str
    """The tenant as named in rows. Empty if unknown."""
    key_id: str
    """The public part of the key. Empty if no key is used, or if it is not a Penstock key."""
    headers: dict[str, str]


class ServedModel(msgspec.Struct, frozen=True):
    """A model as listed by GET /v1/models."""

    id: str
    task: str
    aliases: tuple[str, ...] = ()


class _Models(msgspec.Struct):
    data: list[ServedModel]


class Target:
    """A Penstock deployment and how to call it.

    Args:
        url: URL of the API, without /v1.
        key: the key for every request. Empty if none is needed.
        keys: a key for each tenant instead.

    Raises:
        BadInput: `url` is not a URL.
    """

    def __init__(self, url: str, key: str = "", keys: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            parts = urllib.parse.urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise BadInput(f"url: {url!r}: {error}", field="url") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(
                f"url: {url!r} is not a valid URL; expected a URL such as http://127.0.0.1:8080",
                field="url",
            )
        is_tls = parts.scheme == "https"
        self.server = Server(
            parts.hostname,
            port or (443 if is_tls else 80),
            ssl.create_default_context() if is_tls else None,
        )
        self.host_header = parts.netloc.rpartition("@")[2]
        self.path = parts.path
        self.keys = dict(keys or {})
        self._only = _caller("", key)
        self._callers = {
            tenant: _caller(tenant, tenant_key) for tenant, tenant_key in self.keys.items()
        }

    def caller(self, tenant: str) -> LoadCaller:
        """Returns the key for a tenant's requests.

        With `keys`, the tenants of all requests are known.
        """
        return self._callers[tenant] if self.keys else self._only

    def models(self) -> dict[str, ServedModel]:
        """Returns the served models, keyed by name and alias.

        Raises:
            Unavailable: the API is unreachable or rejected the request.
        """
        caller = next(iter(self._callers.values()), self._only)
        request = urllib.request.Request(f"{self.url}/v1/models", headers=caller.headers)
        try:
            with urllib.request.urlopen(request, timeout=LIST_LIMIT_S) as response:
                listed = msgspec.json.decode(response.read(), type=_Models).data
        except urllib.error.HTTPError as error:
            with error:
                raise Unavailable(
                    f"{self.url}/v1/models returned {error.code}; check the key"
                ) from error
        except (OSError, http.client.HTTPException, *MALFORMED) as error:
            raise Unavailable(f"{self.url}/v1/models: {error}") from error
        return {name: model for model in listed for name in (model.id, *model.aliases)}


def read_keys(path: Path) -> dict[str, str]:
    """Reads the key of each tenant from a CSV file with `tenant` and `key` columns.

    Raises:
        ConfigurationError: the file can't be read, or a line lacks one of the columns.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            keys = {row["tenant"]: row["key"] for row in csv.DictReader(file)}
    except OSError as error:
        raise ConfigurationError(f"keys: {path}: {error.strerror}", field="keys") from error
    except (KeyError, ValueError, csv.Error) as error:
        raise ConfigurationError(
            f"keys: {path}: must have the columns tenant and key", field="keys"
        ) from error
    if not keys or not all(tenant and key for tenant, key in keys.items()):
        raise ConfigurationError(
            f"keys: {path}: every line must have a tenant and its key", field="keys"
        )
    return keys


def _caller(tenant: str, key: str) -> LoadCaller:
    headers = {"user-agent": USER_AGENT} | ({"authorization": f"Bearer {key}"} if key else {})
    parsed = parse_key(key)
    return LoadCaller(tenant, parsed.id if parsed else "", headers)
