"""`penstock optimize MODEL --device`: measures a model on this device for plans and simulations."""

from __future__ import annotations

import asyncio
import re
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shared.errors import ConfigurationError, PenstockError
from shared.models.catalog import Model
from shared.models.catalog_file import read_catalog
from shared.models.device_profile import SUFFIX, DeviceProfile, ImageTiming
from shared.models.tasks.embedding import EmbeddingTask, TextInput
from shared.models.tasks.image import ImageInput, ImageTask
from shared.settings import WorkerSettings
from workers.autotune.benchmark_pool import BenchmarkPool
from workers.autotune.choice import Choice
from workers.autotune.client import choose_backend
from workers.autotune.hardware import LIBRARIES, Machine, detect_machine
from workers.autotune.search import LIBRARY_OF, mix_of, time_batch
from workers.models.base import InferenceModel, OutOfMemory, PreparedImage, PreparedText
from workers.models.embedding.model_folder import read_sentence_folder
from workers.models.embedding.tokenization import TextPreparer
from workers.models.source import resolve
from workers.optimize.calibration import calibration_texts
from workers.tasks import WORKER_TASKS
from workers.tasks.base import Resources

BATCH_TOKENS = (512, 2048, 8192, 32_768)
"""Batch sizes to time, in addition to the one found for the device."""

Say = Callable[[str], None]


def profile_device(settings: WorkerSettings, say: Say) -> Path:
    """Measures the model in `settings` on this machine and writes its profile. Returns the path.

    Raises:
        ConfigurationError: the model can't be measured here.
        ModelFailed: a process died.
    """
    entry = read_catalog(settings.models_file).find(settings.model)
    folder = resolve(
        entry.source, entry.revision, settings.models_dir, weights_dir=settings.weights_dir
    )
    if isinstance(entry.definition, EmbeddingTask):
        profile = _profile_encoder(entry, folder, settings, say)
    elif isinstance(entry.definition, ImageTask):
        profile = _profile_images(entry, folder, settings, say)
    else:
        raise ConfigurationError(
            f"--device: {entry.definition.noun} can't be measured this way; use "
            "`penstock models measure` for a custom class, and `penstock report batches` for texts",
            field="device",
        )
    path = settings.artifacts_dir / entry.name / f"{_slug(profile.device)}{SUFFIX}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8")
    return path


def _profile_encoder(
    entry: Model, folder: Path, settings: WorkerSettings, say: Say
) -> DeviceProfile:
    say("choosing the backend and batch size")
    choice = asyncio.run(choose_backend(entry, folder, settings))
    machine, texts = detect_machine(), calibration_texts()
    preparer = TextPreparer(folder)
    prepared = [text for text in _tokenize(preparer, texts) if isinstance(text, PreparedText)]
    mix = mix_of(prepared, read_sentence_folder(folder).max_length)
    libraries = [LIBRARY_OF[choice.backend.backend]]
    fraction = settings.memory_fraction
    with BenchmarkPool(entry, folder, settings.device, machine, libraries, fraction) as pool:
        pool.open(choice.backend, choice.layout)
        batch_tokens = choice.batch(entry).max_tokens or 0
        rates = _rates(pool, choice, mix, sorted({*BATCH_TOKENS, batch_tokens}), say)
        return DeviceProfile(
            model=entry.name,
            revision=entry.revision,
            device=pool.device_name(),
            measured=_describe(f"{choice.backend.name}, {choice.layout.name}", machine),
            versions=_versions(),
            processes=choice.layout.processes,
            batch_tokens=batch_tokens,
            tokens_per_s=rates,
            peak_memory_bytes=pool.peak_memory_bytes(),
            call_us=round(pool.call_s(prepared[0]) * 1e6, 1),
            text_us=_text_us(preparer, texts),
        )


def _rates(
    pool: BenchmarkPool,
    choice: Choice,
    mix: Sequence[PreparedText],
    sizes: Sequence[int],
    say: Say,
) -> dict[int, float]:
    """Returns tokens per second for each number of tokens per batch that fits into memory."""
    rates = {}
    for tokens in sizes:
        try:
            rates[tokens] = time_batch(pool, choice, mix, tokens).tokens_per_s
        except OutOfMemory:
            say(f"batches of {tokens:,} tokens: not enough memory")
            break
        say(f"batches of {tokens:,} tokens: {rates[tokens]:,.0f} tokens/s")
    return rates


def _tokenize(preparer: TextPreparer, texts: Sequence[str]) -> Sequence[object]:
    return preparer.prepare([TextInput(text, "end") for text in texts])


def _text_us(preparer: TextPreparer, texts: Sequence[str]) -> float:
    began_s = time.process_time()
    _tokenize(preparer, texts)
    return round((time.process_time() - began_s) / len(texts) * 1e6, 1)


def _profile_images(
    entry: Model, folder: Path, settings: WorkerSettings, say: Say
) -> DeviceProfile:
    task = WORKER_TASKS[entry.task]
    resources = Resources(
        device=settings.device,
        threads=settings.threads or 1,  # as in a worker, which has several processes instead
        memory_fraction=settings.memory_fraction,
    )
    model: Any = task.model(entry, folder, resources)
    say("loading")
    model.setup()
    model.warmup()
    images = [
        timing
        for width, height in _sizes(entry)
        for timing in _time_images(entry, folder, model, width, height, say)
    ]
    return DeviceProfile(
        model=entry.name,
        revision=entry.revision,
        device=model.device_name,
        measured=_describe("whole batches", detect_machine()),
        versions=_versions(),
        images=tuple(images),
        peak_memory_bytes=_peak_memory_bytes(model.device_name),
    )


def _sizes(entry: Model) -> list[tuple[int, int]]:
    """Returns the default size, and also twice that size if requests can ask for it."""
    width, height = entry.image.width, entry.image.height
    is_doubled = 4 * width * height <= entry.image.largest_pixels
    return [(width, height), *([(2 * width, 2 * height)] if is_doubled else [])]


def _time_images(
    entry: Model, folder: Path, model: InferenceModel, width: int, height: int, say: Say
) -> list[ImageTiming]:
    """Times one image and then a full batch."""
    usual = entry.image
    inputs = [
        ImageInput(
            "a red circle",
            width=width,
            height=height,
            steps=usual.steps,
            guidance_scale=usual.guidance_scale,
            seed=seed,
            scheduler=usual.scheduler,
        )
        for seed in range(entry.batch.max_items)
    ]
    prepared = WORKER_TASKS[entry.task].preparer(entry, folder).prepare(inputs)
    work = width * height * usual.steps
    max_items = max(1, min(entry.batch.max_items, entry.budget // work))
    timings = []
    for items in sorted({1, max_items}):
        batch = [item for item in prepared[:items] if isinstance(item, PreparedImage)]
        try:
            # The first call may include loading a GPU's kernels, as in `time_batch`.
            batch_s = min(_time_batch_of_images(model, batch) for _ in range(2))
        except OutOfMemory:
            break
        say(f"{items} of {width} x {height}: {batch_s / items:.3g} s per image")
        timings.append(
            ImageTiming(width=width, height=height, steps=usual.steps, items=items, batch_s=batch_s)
        )
    return timings


def _time_batch_of_images(model: InferenceModel, batch: Sequence[PreparedImage]) -> float:
    """Returns the seconds until all images are written to files, including the device's work.

    Raises:
        PenstockError: an image failed.
    """
    began_s = time.perf_counter()
    for outcome in model.predict(batch, lambda step, steps: None):
        if isinstance(outcome, PenstockError):
            raise outcome
    return float(f"{time.perf_counter() - began_s:.4g}")


def _peak_memory_bytes(device: str) -> int:
    import torch

    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated()


def _describe(how: str, machine: Machine) -> str:
    where = f"{machine.cores} cores of {machine.cpu}"
    return f"penstock optimize --device, {how}, {where}, {datetime.now(UTC):%Y-%m-%d}"


def _versions() -> dict[str, str]:
    versions = {}
    for name in (*LIBRARIES, "diffusers"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _slug(device: str) -> str:
    return re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")
