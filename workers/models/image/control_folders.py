"""The folders of the ControlNets of an image model, on this machine."""

from __future__ import annotations

from pathlib import Path

from shared.catalog import Model
from shared.errors import PenstockError
from shared.settings import ModelSettings, read_settings
from workers.models.source import resolve


def control_folders(entry: Model) -> dict[str, Path]:
    """Returns the folder of each control by its name. Downloads what is not there, for minutes.

    Raises:
        ConfigurationError: a source does not exist.
        Unavailable: a source is unreachable.
    """
    if not entry.image.controls:
        return {}
    settings = read_settings(ModelSettings)
    folders = {}
    for name, control in entry.image.controls.items():
        try:
            folders[name] = resolve(
                control.source,
                control.revision,
                settings.models_dir,
                weights_dir=settings.weights_dir,
            )
        except PenstockError as error:
            field = f"image.controls.{name}"
            raise type(error)(f"{field}: {error.message}", field=field) from error
    return folders
