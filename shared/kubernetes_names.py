"""The name of a model in Kubernetes, whose names have fewer letters than in the catalog."""

from __future__ import annotations

import hashlib
import re

SLUG_LIMIT = 40
"""Kubernetes allows 63 in a label, of which the names of our objects need some."""


def slug(model: str) -> str:
    """The name of a model in Kubernetes, the same as in infra/terraform/platform/models.tf."""
    plain = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    if len(plain) <= SLUG_LIMIT:
        return plain
    return f"{plain[:31].strip('-')}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"
