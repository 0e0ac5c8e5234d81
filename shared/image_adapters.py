"""The adapter of an image: what a request names, checked against the catalog."""

from __future__ import annotations

import msgspec

from shared.catalog_entry import MAX_LORA_SCALE, MIN_LORA_SCALE, CatalogEntry
from shared.errors import BadInput

_MAX_TOLD = 50
"""Names of adapters in an error. The schema of the model has all."""


class ChosenAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that an image is drawn with.

    `version`: the digest of its file, as the catalog of the API has it.
    """

    name: str
    version: str
    scale: float


def choose_adapter(
    entry: CatalogEntry, name: str | None, scale: float | None
) -> ChosenAdapter | None:
    """Returns what a request has chosen by `lora_weights` and `lora_scale`. None: no adapter.

    Args:
        entry: of the model.
        name: of an adapter.
        scale: how strongly it counts. None: as the catalog says.

    Raises:
        BadInput: the model has no such adapter, or there is a scale without one.
    """
    if name is None:
        if scale is not None:
            raise BadInput("lora_scale: is for lora_weights; leave it out", field="lora_scale")
        return None
    adapters = entry.image.adapters
    if not adapters:
        raise BadInput(
            f"lora_weights: {entry.name} has no adapters; leave it out", field="lora_weights"
        )
    adapter = adapters.get(name)
    if adapter is None:
        told = ", ".join(list(adapters)[:_MAX_TOLD])
        more = f" and {len(adapters) - _MAX_TOLD} more" if len(adapters) > _MAX_TOLD else ""
        raise BadInput(
            f"lora_weights: {name[:80]!r} is not an adapter of {entry.name}; it has {told}{more}",
            field="lora_weights",
        )
    used = adapter.scale if scale is None else scale
    if not MIN_LORA_SCALE <= used <= MAX_LORA_SCALE:
        raise BadInput(
            f"lora_scale: {used} is not from {MIN_LORA_SCALE:g} to {MAX_LORA_SCALE:g}",
            field="lora_scale",
        )
    return ChosenAdapter(name, adapter.version, used)
