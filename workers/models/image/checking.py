"""`penstock models check NAME`: tries out an image model and writes its interface.

Loads the entry's pipeline, tries each task, and writes the supported tasks and fields to the file
that the entry specifies in `image.interface`.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator

import msgspec
import torch

from shared.errors import ConfigurationError, PenstockError
from shared.models.catalog import Model
from shared.models.catalog_file import read_image_entry
from shared.models.image_interface import ImageInterface
from shared.settings import ModelSettings, read_settings
from workers.models.device import Device
from workers.models.image.model import ImageModel
from workers.models.source import resolve

_PROMPT = "a photograph of a red house by a lake"


def check_model(name: str, device: str) -> Iterator[str]:
    """Tries out an image model and writes its interface. Yields human-readable lines.

    Args:
        device: auto, cpu, cuda, or cuda:N.

    Raises:
        ConfigurationError: the entry is invalid, or its pipeline can't be loaded.
        ModelFailed: the model can't draw from text or from an image.
    """
    settings = read_settings(ModelSettings)
    written = read_image_entry(settings.models_file, name)
    entry = written.as_model()
    folder = resolve(
        entry.source, entry.revision, settings.models_dir, weights_dir=settings.weights_dir
    )
    threads = len(os.sched_getaffinity(0))
    model = ImageModel(entry, folder, Device(device, threads, memory_fraction=1.0))
    model.load()
    model.use(written.as_model(model.interface), is_trial=True)
    model.warmup()
    interface = model.interface
    yield from describe_interface(interface, written.as_model(interface))
    yield from describe_drawing(model)
    if written.interface_file is None:
        yield f"to tell the API about it, set a file in the entry: image.interface: {name}.json"
        return
    try:
        written.interface_file.write_text(interface.as_json, encoding="utf-8")
    except OSError as error:
        reason = f"{written.interface_file}: {error.strerror}"
        raise ConfigurationError(f"image.interface: {reason}", field="image.interface") from error
    yield f"written: {written.interface_file}"


def describe_interface(interface: ImageInterface, entry: Model) -> Iterator[str]:
    """Yields lines that describe what a model can draw and what it accepts."""
    usual = entry.image
    yield f"{entry.name}: {interface.pipeline}"
    yield f"tasks: {', '.join(interface.tasks)}"
    yield f"fields: {', '.join(interface.fields) or 'none'}, plus the fields that all models accept"
    yield f"schedulers: {', '.join(interface.schedulers)}"
    yield (
        f"sizes: {usual.width} x {usual.height} by default, multiples of {usual.multiple}, "
        f"at most {usual.largest_pixels} pixels"
    )


def describe_drawing(model: ImageModel) -> Iterator[str]:
    """Draws one image. Yields lines about the method, the memory used, and the time taken."""
    if model.runs_alone:
        yield f"images are drawn one at a time, because {model.runs_alone}"
    for pipeline, reason in model.left_out.items():
        yield f"left out: {pipeline} can't draw: {reason}"
    if not model.has_callback:
        yield (
            "no previews and no progress, because the pipeline does not have a callback between "
            "steps"
        )
    item = model.usual_item()
    item = msgspec.structs.replace(item, steps=model.entry.image.steps, prompt=_PROMPT)
    began_s = time.monotonic()
    (result,) = model.predict([item], lambda step, steps: None)
    took_s = time.monotonic() - began_s
    if isinstance(result, PenstockError):
        raise result
    yield f"weights: {model.weights_bytes / 2**20:,.0f} MiB"
    if torch.cuda.is_available():
        yield f"memory: up to {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB of the GPU"
    else:
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        yield f"memory: up to {peak_kib / 2**10:,.0f} MiB of the process"
    yield f"one image of {item.steps} steps on {model.device_name}: {took_s:.2f} s"
