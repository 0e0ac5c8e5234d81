"""Presents the models of the catalog to Replicate's clients, each with one version."""

from __future__ import annotations

import hashlib
import re

from shared.catalog import Catalog, Model
from shared.errors import BadInput, UnknownModel

OWNER = "penstock"
"""The owner that is shown if the caller names none."""
_CLIENTS = re.compile(r"replicate[-/]", re.IGNORECASE)


def version_of(model: Model) -> str:
    """The id of a model's version: 256 bits of BLAKE2b (RFC 7693) over what decides its results."""
    facts = "\n".join((model.name, model.source, model.revision, model.precision))
    return hashlib.blake2b(facts.encode(), digest_size=32).hexdigest()


def find_version(catalog: Catalog, version: str) -> Model:
    """Finds a model by its name or alias, with or without an owner, or by the id of its version.

    Raises:
        BadInput: none is of this name or version.
    """
    named, _, given_id = version.partition(":")
    name = given_id or named.rpartition("/")[2]
    for model in catalog.models:
        if name == version_of(model):
            return model
    try:
        return catalog.find(name)
    except UnknownModel as error:
        raise BadInput(f"version: {error.message}", field="version") from error


def is_replicates_client(user_agent: str) -> bool:
    """Whether the user agent is a client of Replicate, such as `replicate-python/1.0.7`.

    Nothing else tells it from OpenAI's where both ask for the same path: keys and hosts are the
    same here.
    """
    return _CLIENTS.match(user_agent) is not None
