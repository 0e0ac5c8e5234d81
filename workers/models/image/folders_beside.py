"""Folders that an image model loads in addition to its weights: ControlNets and IP-Adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shared.errors import ConfigurationError, PenstockError
from shared.models.catalog import Model
from shared.models.image_entry import Control, IpAdapter
from shared.settings import ModelSettings, read_settings
from workers.models.source import resolve

MAX_SIDE_PX = 1024
"""Maximum side of an image encoder's input. IP-Adapter encoders read 224 x 224 or 336 x 336."""


class IpAdapterFiles(NamedTuple):
    """An IP-Adapter's files. `digest`: the weights' expected digest, or None to accept any weights.

    `side_px`: side of its image encoder's square input, in pixels.
    """

    weights: Path
    encoder: Path
    digest: str | None
    side_px: int


def control_folders(entry: Model) -> dict[str, Path]:
    """Returns each control's folder, keyed by name.

    Downloads any missing folders, which may take minutes.

    Raises:
        ConfigurationError: a source doesn't exist.
    """
    return _folders(entry.image.controls, "image.controls")


def ip_adapter_files(entry: Model) -> dict[str, IpAdapterFiles]:
    """Returns each IP-Adapter's files, keyed by name.

    Downloads any missing files, as `control_folders` does.

    Raises:
        ConfigurationError: a source doesn't exist or lacks these files.
    """
    folders = _folders(entry.image.ip_adapters, "image.ip_adapters")
    return {
        name: _files(source, folders[name], f"image.ip_adapters.{name}")
        for name, source in entry.image.ip_adapters.items()
    }


def _folders(known: Mapping[str, Control | IpAdapter], where: str) -> dict[str, Path]:
    if not known:
        return {}
    settings = read_settings(ModelSettings)
    folders = {}
    for name, source in known.items():
        try:
            folders[name] = resolve(
                source.source,
                source.revision,
                settings.models_dir,
                weights_dir=settings.weights_dir,
            )
        except PenstockError as error:
            field = f"{where}.{name}"
            raise type(error)(f"{field}: {error.message}", field=field) from error
    return folders


def _files(entry: IpAdapter, folder: Path, field: str) -> IpAdapterFiles:
    below = folder / entry.subfolder
    weights = below / entry.weight_name
    # Same as in `load_ip_adapter`.
    encoder = (folder if "/" in entry.image_encoder_folder else below) / entry.image_encoder_folder
    if not weights.is_file():
        raise ConfigurationError(f"{field}: {weights} is not a file", field=field)
    config = encoder / "config.json"
    try:
        side_px = json.loads(config.read_text("utf-8"))["image_size"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{config} does not specify the image_size of an image encoder"
        raise ConfigurationError(f"{field}: {reason}", field=field) from error
    if not isinstance(side_px, int) or not 0 < side_px <= MAX_SIDE_PX:
        reason = f"image_size must be from 1 to {MAX_SIDE_PX}, got {side_px!r}"
        raise ConfigurationError(f"{field}: {config}: {reason}", field=field)
    return IpAdapterFiles(weights, encoder, entry.digest, side_px)
