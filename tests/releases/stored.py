"""A release's messages and Redis contents as JSON, which people can read and Redis can load."""

from __future__ import annotations

import base64
from typing import Any, TypeAlias

import redis

Plain: TypeAlias = str | dict[str, str]
"""Bytes: text is kept as is, and everything else becomes `{"base64": …}`."""
LEASES_S = 60
"""Keys that expire sooner are leases or marks left by a process that was still running."""


def plain(data: bytes) -> Plain:
    """Returns bytes in a form that JSON can represent."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
    return text


def raw(value: Plain) -> bytes:
    """Returns the bytes that were passed to `plain`."""
    return value.encode() if isinstance(value, str) else base64.b64decode(value["base64"])


def dump(url: str) -> dict[str, dict[str, Any]]:
    """Everything in a Redis except leases, keyed by Redis key."""
    with redis.Redis.from_url(url) as client:
        keys = sorted(client.keys())
        kept = [key for key in keys if not 0 <= client.ttl(key) <= LEASES_S]
        return {key.decode(): _value(client, key) for key in kept}


def load(url: str, dumped: dict[str, dict[str, Any]]) -> None:
    """Loads a dump into a Redis. None of its keys expire."""
    with redis.Redis.from_url(url) as client:
        for key, value in dumped.items():
            _put(client, key, value)


def _value(client: Any, key: bytes) -> dict[str, Any]:
    match client.type(key).decode():
        case "string":
            return {"string": plain(client.get(key))}
        case "hash":
            fields = sorted(client.hgetall(key).items())
            return {"hash": {name.decode(): plain(value) for name, value in fields}}
        case "zset":
            members = client.zrange(key, 0, -1, withscores=True)
            return {"zset": [[plain(member), score] for member, score in members]}
        case "set":
            return {"set": [plain(one) for one in sorted(client.smembers(key))]}
        case "list":
            return {"list": [plain(one) for one in client.lrange(key, 0, -1)]}
        case "stream":
            entries = client.xrange(key)
            return {
                "stream": [
                    [at.decode(), {name.decode(): plain(one) for name, one in fields.items()}]
                    for at, fields in entries
                ]
            }
        case kind:
            raise ValueError(f"{key!r} is a {kind}, which this does not know yet")


def _put(client: Any, key: str, value: dict[str, Any]) -> None:
    ((kind, inner),) = value.items()
    match kind:
        case "string":
            client.set(key, raw(inner))
        case "hash":
            client.hset(key, mapping={name: raw(one) for name, one in inner.items()})
        case "zset":
            client.zadd(key, {raw(member): score for member, score in inner})
        case "set":
            client.sadd(key, *map(raw, inner))
        case "list":
            client.rpush(key, *map(raw, inner))
        case "stream":
            for at, fields in inner:
                client.xadd(key, {name: raw(one) for name, one in fields.items()}, id=at)
