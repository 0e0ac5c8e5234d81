"""What Replicate calls a version: how a catalogue's models are named by its clients."""

from __future__ import annotations

import hashlib

from shared.catalogue import Catalogue, Model
from shared.errors import BadInput, UnknownModel


def version_of(model: Model) -> str:
    """The id of a model's version: 256 bits of BLAKE2b (RFC 7693) over what decides its results."""
    facts = "\n".join((model.name, model.source, model.revision, model.precision))
    return hashlib.blake2b(facts.encode(), digest_size=32).hexdigest()


def find_version(catalogue: Catalogue, version: str) -> Model:
    """The model that `version` names: its name or alias, with or without an owner before it, or a version's id.

    Raises:
        BadInput: none is of this name or version.
    """
    named, _, given_id = version.partition(":")
    name = given_id or named.rpartition("/")[2]
    for model in catalogue.models:
        if name == version_of(model):
            return model
    try:
        return catalogue.find(name)
    except UnknownModel as error:
        raise BadInput(f"version: {error.message}", field="version") from error
