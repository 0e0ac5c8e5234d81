"""Reads what it can of a message that can't be decoded as a job, in order to answer its callers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from shared.messages import Envelope


def salvage_envelope(attributes: Mapping[str, str]) -> Envelope | None:
    """Returns the envelope with unreadable fields left empty, or None without request_id and part.

    This works for every schema, because request_id, part, inbox and slot never changed.
    """
    known: dict[str, Any] = {}
    for field in msgspec.structs.fields(Envelope):
        if field.name in attributes:
            try:
                known[field.name] = msgspec.convert(
                    attributes[field.name], field.type, strict=False
                )
            except msgspec.ValidationError:
                continue
    if "request_id" not in known or "part" not in known:
        return None
    unknown: dict[str, Any] = {
        "model": "",
        "tenant": "",
        "deadline_s": 0.0,
        "received_at_s": time.time(),
        "published_at_s": 0.0,
    }
    return Envelope(**unknown | known)
