"""Model names in Kubernetes, which allows fewer characters than the catalog."""

from __future__ import annotations

import hashlib
import re

SLUG_LIMIT = 40
"""Kubernetes allows 63 characters in a label, and our object names use some of them."""


def slug(model: str) -> str:
    """Returns a model's name in Kubernetes, as in infra/terraform/platform/models.tf."""
    plain = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    if len(plain) <= SLUG_LIMIT:
        return plain
    return f"{plain[:31].strip('-')}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"
