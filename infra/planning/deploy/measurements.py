"""Fills in what `penstock models measure` found for models of one's own, if rates do not say it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.catalog import LOCAL, Catalog, Model
from shared.errors import ConfigurationError
from shared.model_measurement import FILE_NAME, ModelMeasurement, read_measurement

FIELD = "measurement"
"""In the rates of a model: the path of its measured.json, from the folder of the rates."""


def with_measurements(document: Any, catalog: Catalog, folder: Path) -> Any:
    """The rates with the figures of measured models of one's own whose seconds rates do not say.

    The seconds of a class with `work` are those of a unit of its work, so that the work per item of
    the rates may be another one than that of the measured inputs.

    Args:
        document: the rates, not checked yet.
        catalog: the models.
        folder: of the file of rates.

    Raises:
        ConfigurationError: a measured.json is wrong, or is not of this entry: of other sources, or
            on another GPU.
    """
    models = document.get("models") if isinstance(document, dict) else None
    if not isinstance(models, dict):
        return document
    served = {model.name: model for model in catalog.models if model.definition.has_interface}
    filled = {
        name: _filled(served[name], rate, folder)
        if name in served and isinstance(rate, dict)
        else rate
        for name, rate in models.items()
    }
    return {**document, "models": filled}


def _filled(model: Model, rate: dict[str, Any], folder: Path) -> dict[str, Any]:
    said = {name: value for name, value in rate.items() if name != FIELD}
    path = _path_of(model, rate, folder)
    if path is None or rate.keys() & {"seconds_per_item", "seconds_per_work"}:
        return said
    measurement = read_measurement(path)
    _check(model, measurement, path)
    return {
        **_seconds(model, measurement),
        "measured": measurement.measured,
        "peak_memory_bytes": measurement.peak_memory_bytes,
        "input_bytes": measurement.input_bytes,
        "output_bytes": measurement.output_bytes,
        **said,
    }


def _seconds(model: Model, measurement: ModelMeasurement) -> dict[str, float]:
    seconds_per_item = measurement.seconds_per_item(model.batch.max_items)
    work = measurement.work_per_item
    if work is None:
        return {"seconds_per_item": seconds_per_item}
    return {"seconds_per_work": seconds_per_item / work, "work_per_item": work}


def _path_of(model: Model, rate: dict[str, Any], folder: Path) -> Path | None:
    """The measured.json of a model. None: rates name none, and its class has none beside it."""
    if isinstance(named := rate.get(FIELD), str):
        return folder / named
    if not model.source.startswith(LOCAL):
        return None
    path = Path(model.source.removeprefix(LOCAL)).expanduser() / FILE_NAME
    return path if path.exists() else None


def _check(model: Model, measurement: ModelMeasurement, path: Path) -> None:
    again = f"measure again: penstock models measure {path.parent}"
    if model.interface and model.interface.sources_sha256 != measurement.sources_sha256:
        raise ConfigurationError(
            f"models.{model.name}: {path}: the sources have changed since; {again}",
            field=f"models.{model.name}",
        )
    if not measurement.is_of(model.gpu.type):
        raise ConfigurationError(
            f"models.{model.name}: {path}: measured on {measurement.device}, and gpu.type is "
            f"{model.gpu.type}; {again}",
            field=f"models.{model.name}",
        )
