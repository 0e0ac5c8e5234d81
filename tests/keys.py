"""API keys for tests: a file with one key per tenant, each of which tests refer to by name."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared.tenants.api_key import (
    ALPHABET,
    ID_LENGTH,
    SECRET_LENGTH,
    ApiKey,
    hash_of,
    key_of,
    parse_key,
)
from shared.tenants.directory import Document, StoredKey, StoredTenant, encode_document
from shared.tenants.plan import Plan

SALT = bytes(16)


def key_for(name: str) -> str:
    """The key that tests call `name`, which is always the same."""
    return _key(name).text


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key_for(name)}"}


def keys_url(
    folder: Path,
    *,
    plans: Mapping[str, Plan] | None = None,
    tenants: Mapping[str, str] | None = None,
    keys: Sequence[StoredKey] = (),
    **tenant_of: str,
) -> str:
    """Writes a key file, and returns its URL for PENSTOCK_KEYS_URL.

    Args:
        tenants: the plan of each tenant.
        keys: additional keys, created with `stored`.
        tenant_of: the tenant of each key, by key name.
    """
    document = Document(
        plans=dict(plans or {}),
        tenants={tenant: StoredTenant(plan) for tenant, plan in (tenants or {}).items()},
        keys=(*(stored(name, tenant) for name, tenant in tenant_of.items()), *keys),
    )
    file = folder / "keys.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(encode_document(document))
    return file.resolve().as_uri()


def stored(name: str, tenant: str, **fields: Any) -> StoredKey:
    """The stored form of the key that tests call `name`."""
    key = _key(name)
    return msgspec.structs.replace(
        StoredKey(
            id=key.id,
            tenant=tenant,
            name=name,
            salt=SALT.hex(),
            hash=hash_of(SALT, key).hex(),
            created_s=1,
        ),
        **fields,
    )


def _key(name: str) -> ApiKey:
    text = ""
    for number in range(2):
        digest = hashlib.blake2b(f"{name}\0{number}".encode()).digest()
        text += "".join(ALPHABET[byte % len(ALPHABET)] for byte in digest)
    key = key_of(text[:ID_LENGTH], text[ID_LENGTH : ID_LENGTH + SECRET_LENGTH])
    assert parse_key(key.text) == key
    return key
