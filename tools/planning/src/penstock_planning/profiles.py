"""Measurements from device profiles (`penstock optimize MODEL --device`), not assumptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import ConfigurationError
from shared.models.catalog import Catalog, Model
from shared.models.device_profile import DeviceProfile
from shared.models.tasks.embedding import EmbeddingTask
from shared.models.tasks.image import IMAGE

Profiles = Sequence[DeviceProfile]


def find_profile(profiles: Profiles, model: Model) -> DeviceProfile | None:
    """Returns a model's profile on its entry's GPU type, or None if it was not measured."""
    return next((profile for profile in profiles if profile.is_of(model)), None)


def with_served_batches(catalog: Catalog, profiles: Profiles = ()) -> Catalog:
    """Returns the catalog with the batch sizes that workers will use.

    They depend on the device. On a device without a profile, the default batch sizes are assumed.
    """
    models = []
    for model in catalog.models:
        profile = find_profile(profiles, model)
        batch = model.usual_batch if profile is None else profile.batch(model)
        models.append(model.model_copy(update={"batch": batch}))
    return Catalog(tuple(models), catalog.flows, catalog.shared_workers)


def find_seconds(
    model: Model, load: Mapping[str, Any], profiles: Profiles, where: str
) -> dict[str, Any]:
    """Returns `seconds_per_item` and its source for a load that doesn't specify them.

    Empty if there are no profiles or they don't include figures for this kind of model.

    Args:
        load: a model's rates or its load in a scenario, not validated yet.

    Raises:
        ConfigurationError: the model was not measured on its GPU type, or the token count is
            missing.
    """
    is_encoder = isinstance(model.definition, EmbeddingTask)
    if not profiles or not (is_encoder or model.task == IMAGE.name):
        return {}
    profile = find_profile(profiles, model)
    item_s = None
    if profile is not None and is_encoder:
        item_s = _text_s(model, load, profile, where)
    elif profile is not None:
        item_s = profile.image_s(model)
    if profile is None or item_s is None:
        raise ConfigurationError(
            f"{where}: not measured on {model.gpu.type}: no profile has its figures; run `penstock "
            f"optimize {model.name} --device` there, or set seconds_per_item",
            field=where,
        )
    found: dict[str, Any] = {
        "seconds_per_item": float(f"{item_s:.4g}"),
        "measured": _describe(profile),
    }
    if profile.text_us is not None:
        found["host_seconds_per_item"] = profile.text_us / 1e6
    return found


def _text_s(
    model: Model, load: Mapping[str, Any], profile: DeviceProfile, where: str
) -> float | None:
    tokens, token_s = load.get("tokens_per_item"), profile.tokens_s(model)
    if not isinstance(tokens, int | float):
        raise ConfigurationError(
            f"{where}.tokens_per_item is missing: a profile has the tokens per second", field=where
        )
    return None if token_s is None else tokens * token_s


def _describe(profile: DeviceProfile) -> str:
    return f"{profile.device}: {profile.measured}"
