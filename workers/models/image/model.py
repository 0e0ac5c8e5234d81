"""Draws images with diffusers: one loaded model, with an unmodified pipeline per item."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from shared.errors import BadInput, ConfigurationError, ModelFailed, PenstockError
from shared.models.catalog import Model
from shared.models.image_interface import ImageInterface, ImageMode
from shared.models.tasks import Result
from shared.models.tasks.image import ImageResult
from shared.models.tasks.text import TokenChunk
from shared.settings import ModelSettings, read_settings
from workers.models.base import (
    OnStep,
    OutOfMemory,
    PreparedControl,
    PreparedImage,
    PreparedItem,
    RgbImage,
    StepEnd,
)
from workers.models.device import Device, memory_errors
from workers.models.image.compilation import only_what_is_compiled
from workers.models.image.controls import Controls
from workers.models.image.deep_cache import DeepCache
from workers.models.image.drawing import Drawing
from workers.models.image.folders_beside import control_folders, ip_adapter_files
from workers.models.image.hub import Hub, Run
from workers.models.image.image_files import ImageFiles
from workers.models.image.ip_adapters import IpAdapters
from workers.models.image.options import OptionCheck, describe
from workers.models.image.own_pipeline import Interception, state_of
from workers.models.image.pipeline import (
    LoadedPipelines,
    denoiser_of,
    load_pipelines,
    parameters_of,
)
from workers.models.image.plan import capability_of, plan_for
from workers.models.image.prompts import Prompts
from workers.models.image.resident_adapters import MAX_ROWS, PLACEHOLDER, ResidentAdapters
from workers.models.image.row_batching import CompiledSizes, RowBatching
from workers.models.image.schedulers import Schedulers
from workers.models.image.vae import copy_to_host, draw_preview
from workers.models.kernel_store import KernelStore

_NEEDS_UNET = "adapters require a Stable Diffusion or Stable Diffusion XL pipeline"
WARMUP_LIMIT_S = 100.0
"""Time limit after which warm-up starts no further sizes.

Compiling a size can take a minute if it isn't cached on disk.
"""
_WARMUP_STEPS = 4
_ALONE: dict[type, str] = {}
"""Pipeline classes whose images are drawn one at a time, each with the reason. PAG pipelines change
their modules, for example.

Determined when a model warms up, which on a CPU happens only once.
"""
_CHANGES_MODULES = "the pipeline changes shared modules while it draws"
_IS_NOT_INTERCEPTED = "the pipeline doesn't call its denoiser as one of its parts"

_BROKEN: dict[Path, dict[type, str]] = {}
"""Pipeline classes for images or masks that turned out not to be able to draw, each with the
reason, keyed by model folder. Determined at warm-up, like `_ALONE`.
"""

log = logging.getLogger(__name__)


class ImageModel:
    """Draws images prepared by ImagePreparer, using a diffusers pipeline.

    Images join between steps and leave when they are done (see SteppedModel). Batches whose images
    all start at the same time are drawn the same way.
    """

    device_name = ""
    pads = False

    def __init__(
        self, entry: Model, folder: Path, device: Device, *, warmup_limit_s: float = WARMUP_LIMIT_S
    ) -> None:
        self.entry = entry
        self._folder = folder
        self._requested_device = device
        self._warmup_limit_s = warmup_limit_s
        self._kernels: KernelStore | None = None
        self._is_warm = False
        self._drawings: dict[int, Drawing] = {}
        self._queued: dict[int, PreparedImage] = {}
        """Items waiting for the previous item to finish, if images are drawn one at a time."""
        self._encoding: dict[int, tuple[PreparedImage, Future[Result | PenstockError]]] = {}
        self._aside: list[_Aside] = []
        """Preempted images, oldest first."""

    def setup(self) -> None:
        """Loads a pipeline of any class, without its safety checker.

        Raises:
            ConfigurationError: the folder does not contain an image pipeline, the pipeline can't
                draw with the entry's defaults or doesn't match the entry's interface, or a required
                package is missing.
        """
        self.load()
        self.use(self.entry)

    def load(self) -> None:
        """Loads the pipeline, which can be used only after calling `use`.

        Raises:
            ConfigurationError: same as `setup`.
        """
        self._device, self.device_name = self._requested_device.open()
        self._plan = plan_for(self.entry, capability_of(self._device))
        self._files = ImageFiles(self._device)
        loaded = load_pipelines(self._folder, self._device, self._plan)
        self._pipelines = loaded.with_images_of(self._can_draw)

    def use(self, entry: Model, *, is_trial: bool = False) -> None:
        """Prepares to draw as specified in a catalog entry that has the same source.

        Args:
            is_trial: True if the warm-up skips interface tasks that fail.

        Raises:
            ConfigurationError: same as `setup`.
        """
        self.entry = entry
        self._is_trial = is_trial
        self._sizes = CompiledSizes(entry.image.width, entry.image.height)
        if entry.image.has_adapters and not hasattr(self._main, "unet"):
            reason = f"{self._folder}: {_NEEDS_UNET}"
            raise ConfigurationError(reason, field="image.adapters")
        self._pipelines = self._pipelines_for(entry.image.interface)
        if self._plan.is_compiled:
            folder = read_settings(ModelSettings).kernels_dir
            self._kernels = KernelStore(folder, self.entry.name, self._device)
            self._kernels.restore()
        self._schedulers = Schedulers(self._main.scheduler)
        self._prompts = Prompts()
        self._set_up_hub()
        self._options = OptionCheck(self._pipelines, entry.image.guidance_scale)
        refusal = self._options.refusal(self.usual_item())
        if refusal is not None:
            reason = f"{self._folder} can't draw with the defaults of {self.entry.name}: {refusal}"
            raise ConfigurationError(reason, field=f"image.{refusal.field}")

    def _pipelines_for(self, interface: ImageInterface | None) -> LoadedPipelines:
        """Returns the pipelines for the interface's tasks, or for all tasks without an interface.

        Raises:
            ConfigurationError: the interface is missing or does not match the pipeline.
        """
        hint = f"run penstock models check {self.entry.name}"
        field = "image.interface"
        if interface is not None:
            pipelines = self._pipelines.only(interface.tasks)
            if difference := interface.difference(describe(pipelines)):
                raise ConfigurationError(f"{field}: {difference}; {hint}", field=field)
            return pipelines
        pipelines = self._pipelines.without_edits()
        if not pipelines.by_mode:
            kind = type(self._main).__name__
            reason = f"{kind} does not support strength, and the API needs to know this; {hint}"
            raise ConfigurationError(f"{field}: {reason}", field=field)
        return pipelines

    @property
    def interface(self) -> ImageInterface:
        return describe(self._pipelines)

    def _can_draw(self, pipeline: Any) -> bool:
        return type(pipeline) not in _BROKEN.get(self._folder, ())

    @property
    def left_out(self) -> dict[str, str]:
        """Pipeline classes that were unable to draw, each with the reason."""
        return {kind.__name__: why for kind, why in _BROKEN.get(self._folder, {}).items()}

    @property
    def has_callback(self) -> bool:
        """True if its pipelines report their steps, so that progress and previews are available."""
        pipelines = self._pipelines.by_mode.values()
        return all("callback_on_step_end" in parameters_of(pipeline) for pipeline in pipelines)

    @property
    def weights_bytes(self) -> int:
        """Total in-memory size of all parts' weights."""
        parts = self._main.components.values()
        modules = [part for part in parts if isinstance(part, torch.nn.Module)]
        return sum(weight.nbytes for module in modules for weight in module.parameters())

    @property
    def _main(self) -> Any:
        return self._pipelines.main

    @property
    def runs_alone(self) -> str:
        """The reason items are drawn one at a time. Empty if they are drawn together."""
        return _ALONE.get(type(self._main), "")

    def _set_up_hub(self) -> None:
        image, pipeline = self.entry.image, self._main
        compiled_images = max(self._plan.batch_sizes) if self._plan.is_compiled else 0
        self.adapters = ResidentAdapters(image, pipeline, self._device, compiled_images)
        self._ip_adapters = IpAdapters(
            ip_adapter_files(self.entry),
            pipeline,
            self._device,
            self._plan.dtype,
            MAX_ROWS * compiled_images,
        )
        self._batching = RowBatching(
            denoiser_of(pipeline),
            self.adapters,
            self._ip_adapters,
            None if image.deep_cache is None else DeepCache(image.deep_cache, pipeline),
            image.guidance_stop,
            self._sizes,
            self._pipelines.eager_calls,
        )
        self._hub = Hub(self._batching)
        self._interception = Interception(self._hub)
        folders = control_folders(self.entry)
        self._controls = Controls(folders, pipeline, self._plan, self._interception)

    def warmup(self) -> None:
        """Draws at the default size, from text and from an image.

        Compiles as many batch sizes as time allows, and saves the compiled code for other workers.
        """
        self._find_out_if_alone()
        until_s = time.monotonic() + self._warmup_limit_s
        seconds: dict[int, float] = {}
        for size in self._plan.batch_sizes if self._plan.is_compiled else (1,):
            if self._is_cut_short(until_s, size):
                break
            items = [self.usual_item()] * size
            self._warm(items)
            if self._plan.is_compiled:
                call_began_s = time.monotonic()
                self._warm(items)
                seconds[size] = time.monotonic() - call_began_s
        self._compile_additions(seconds, until_s)
        self._sizes.seconds = seconds
        self._try_other_tasks()
        self._is_warm = True
        if self._kernels is not None:
            self._kernels.keep()

    def _is_cut_short(self, until_s: float, batch_size: int) -> bool:
        if time.monotonic() <= until_s:
            return False
        log.warning(
            "warm-up cut short; the next start will find more already compiled",
            extra={"batch_size": batch_size},
        )
        return True

    def _compile_additions(self, sizes: Collection[int], until_s: float) -> None:
        """Compiles the UNet for each combination of ControlNets, IP-Adapters, and adapters."""
        items = [self.usual_item()]
        for addition in self._additions():
            items += [msgspec.structs.replace(item, **addition) for item in items]
        with self.adapters.placeholder():
            for size in sizes:
                for item in items[1:]:
                    if self._is_cut_short(until_s, size):
                        return
                    self._warm([item] * size)

    def _additions(self) -> Iterator[dict[str, Any]]:
        """Yields one set of an item's fields for each kind of addition that requests may use."""
        image = self.entry.image
        for name in list(image.controls)[:1]:
            pixels = bytes(3 * image.width * image.height)
            yield {"controls": [PreparedControl(name, pixels, 1.0, 0.0, 1.0)]}
        for name, side_px in list(self._ip_adapters.sides_px.items())[:1]:
            yield {"ip_adapter": name, "ip_adapter_pixels": bytes(3 * side_px**2)}
        if image.has_adapters:
            yield {"adapter": PLACEHOLDER}

    def _try_other_tasks(self) -> None:
        """Draws from an image, and within a mask. Omits pipelines that fail."""
        for mode in list(self._pipelines.by_mode)[1:]:
            pipeline = self._pipelines.by_mode[mode]
            try:
                self._warm([self.usual_item(mode)])
            except ModelFailed as error:
                has_promised = self.entry.image.interface is not None and not self._is_trial
                if isinstance(error, OutOfMemory) or has_promised:
                    raise
                _BROKEN.setdefault(self._folder, {})[type(pipeline)] = str(error)
                name = type(pipeline).__name__
                log.warning("pipeline left out", extra={"pipeline": name, "reason": str(error)})
        self._pipelines = self._pipelines.with_images_of(self._can_draw)
        self._options = OptionCheck(self._pipelines, self.entry.image.guidance_scale)

    def _find_out_if_alone(self) -> None:
        """Draws the first step of several images and checks what their pipeline changed and called.

        One image has a different row count, which shows the hub which tensors vary with the row
        count.
        """
        pipeline, reason = self._main, ""
        before = state_of(pipeline)
        usual = self.usual_item()
        for guidance_scale in dict.fromkeys((usual.guidance_scale, 1.0)):
            self.admit(0, msgspec.structs.replace(usual, guidance_scale=guidance_scale))
            outcome = self.step().results.get(0)
            if state_of(pipeline) != before:
                reason = _CHANGES_MODULES
            elif isinstance(outcome, ImageResult) and not self._hub.work:
                reason = _IS_NOT_INTERCEPTED
            self.drop(0)
        _ALONE[type(pipeline)] = reason
        if reason:
            log.warning(
                "images are generated one at a time",
                extra={"pipeline": type(pipeline).__name__, "reason": reason},
            )

    def usual_item(self, mode: ImageMode | None = None) -> PreparedImage:
        """Returns an item with the entry's defaults for a task (by default, the model's first)."""
        usual = self.entry.image
        mode = mode or next(iter(self._pipelines.by_mode))
        pixels = usual.width * usual.height
        is_edited = mode != "text"
        return PreparedImage(
            key="",
            length=pixels * _WARMUP_STEPS,
            prompt="warm up",
            negative_prompt="",
            width=usual.width,
            height=usual.height,
            steps=_WARMUP_STEPS,
            guidance_scale=usual.guidance_scale,
            seed=0,
            scheduler=usual.scheduler,
            strength=1.0 if is_edited and usual.accepts("strength") else None,
            source=bytes(3 * pixels) if is_edited else None,
            mask=b"\xff" * pixels if mode == "mask" else None,
        )

    def _warm(self, items: Sequence[PreparedImage]) -> None:
        """Draws `items` and discards the results."""
        for outcome in self.predict(items, lambda step, steps: None):
            if isinstance(outcome, Exception):
                raise outcome

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        """Returns a single group, because the hub splits it into the compiled sizes itself."""
        return [list(range(len(batch)))]

    def computed_work(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> list[Result | PenstockError]:
        """Returns one outcome per item, in order. Each depends only on its own seed."""
        outcomes: dict[int, Result | PenstockError] = {}
        reported = 0
        try:
            for slot, item in enumerate(batch):
                try:
                    self.admit(slot, item)
                except BadInput as error:
                    outcomes[slot] = error
            while len(outcomes) < len(batch):
                drawings = list(self._drawings.values())
                end = self.step()
                outcomes |= end.results
                if end.preempted:
                    raise OutOfMemory(
                        "the device does not have enough memory for all the images in a batch"
                    )
                done = min((drawing.done for drawing in drawings), default=0)
                if done not in (0, reported):
                    reported = done
                    on_step(done, drawings[0].steps)
        finally:
            for slot in range(len(batch)):
                self.drop(slot)
        for outcome in outcomes.values():
            if isinstance(outcome, OutOfMemory):
                raise outcome
        return [outcomes[slot] for slot in range(len(batch))]

    def admit(self, slot: int, item: PreparedItem) -> None:
        """Admits an item. The item starts at the next step, or once its adapter is loaded."""
        assert isinstance(item, PreparedImage), "the item is not an image; this is a bug"
        if (refusal := self._options.refusal(item)) is not None:
            raise refusal
        if self.adapters.holds_back(slot, item):
            return
        try:
            self._begin(slot, item)
        except OutOfMemory:
            if not self._end_aside():
                raise
            self._begin(slot, item)

    def step(self) -> StepEnd:
        """Computes one denoising step for each item. Decodes finished images."""
        end = StepEnd()
        self._end_waits(end)
        if not self._drawings and not self._encoding:
            self.adapters.pause()
            return end
        # Their files are encoded on threads, which doesn't take any time away from the step.
        end.waiting += self._encoding
        oldest = next(iter(self._drawings), None)
        with torch.inference_mode(), self._forbid_compiling():
            outcomes = self._advance()
        end.work = sum(owner.pixels * rows for owner, rows in self._hub.work)
        for slot, outcome in outcomes.items():
            # Once other images have left, there may be room for it. If even the oldest one doesn't
            # fit, it fails.
            if isinstance(outcome, OutOfMemory) and (slot != oldest or self._end_aside()):
                end.preempted.append(slot)
            else:
                end.results[slot] = outcome
        return end

    def _end_waits(self, end: StepEnd) -> None:
        """Starts items whose adapters are now loaded.

        Fails items whose adapters could not be loaded.
        """
        in_use = {drawing.item.adapter for drawing in self._drawings.values()}
        for slot, item in self.adapters.take_ready(in_use):
            try:
                if isinstance(item, PenstockError):
                    raise item
                self._begin(slot, item)
            except PenstockError as error:
                end.waiting.append(slot)
                if isinstance(error, OutOfMemory) and (self._drawings or self._end_aside()):
                    end.preempted.append(slot)
                else:
                    end.results[slot] = error
        if self._queued and not self._drawings:
            slot = next(iter(self._queued))
            self._begin(slot, self._queued.pop(slot))
        end.waiting += [*self.adapters.waiting, *self._queued]

    def take_eager_calls(self) -> int:
        return self._batching.take_eager_calls()

    def take_chunks(self) -> dict[int, TokenChunk]:
        """Returns an empty dict, because only text models produce chunks."""
        return {}

    def _forbid_compiling(self) -> contextlib.AbstractContextManager[None]:
        """Within this context, nothing is compiled once warm-up is over."""
        if self._is_warm and self._plan.is_compiled:
            return only_what_is_compiled()
        return contextlib.nullcontext()

    def preview(self, indices: Sequence[int]) -> list[RgbImage | None]:
        """Returns small images between steps. See workers.models.base.Previewer."""
        return [self.image(slot) for slot in indices]

    def image(self, slot: int) -> RgbImage | None:
        """Returns a small preview of an item between steps, or None if it can't be drawn."""
        drawing = self._drawings.get(slot)
        if drawing is None or drawing.latents is None:
            return None
        with torch.inference_mode(), self._forbid_compiling():
            item = drawing.item
            return draw_preview(self._main, drawing.latents, item.width, item.height)

    def progress(self) -> dict[int, tuple[int, int]]:
        """Returns each item's completed and total steps."""
        return {slot: (drawing.done, drawing.steps) for slot, drawing in self._drawings.items()}

    def drop(self, slot: int) -> None:
        self._queued.pop(slot, None)
        self._drawings.pop(slot, None)
        self._encoding.pop(slot, None)
        self.adapters.drop(slot)
        with torch.inference_mode():
            self._hub.drop(slot)

    def interrupt(self, slot: int) -> None:
        """Sets an image aside. If an identical item is admitted later, it resumes from there.

        Set-aside images take up at most one batch's budget in total. To make room, the oldest
        images are dropped and have to start over.
        """
        if self.runs_alone or not (slot in self._drawings or slot in self._encoding):
            self.drop(slot)  # it would leave shared modules modified, or has produced nothing yet
            return
        if (drawing := self._drawings.pop(slot, None)) is not None:
            self._aside.append(_Aside(drawing.item, drawing, self._hub.set_aside(slot)))
        else:
            item, file = self._encoding.pop(slot)
            self._aside.append(_Aside(item, file=file))
        self._end_aside(self.entry.budget, self.entry.batch.max_items)

    def _end_aside(self, room: int = 0, count: int = 0) -> bool:
        """Drops set-aside images, oldest first, until the remaining ones fit.

        Returns:
            False if no image had to be dropped.
        """
        before = len(self._aside)
        while len(self._aside) > count or sum(aside.room for aside in self._aside) > room:
            if (run := self._aside.pop(0).run) is not None:
                with torch.inference_mode():
                    self._hub.end(run)
        return len(self._aside) < before

    def _resume(self, slot: int, item: PreparedImage) -> bool:
        """Resumes an image that was set aside. Returns False if the image wasn't set aside."""
        aside = next((aside for aside in self._aside if aside.item == item), None)
        if aside is None:
            return False
        self._aside.remove(aside)
        if aside.file is not None:
            self._encoding[slot] = item, aside.file
        if aside.drawing is not None and aside.run is not None:
            # Its adapter may have been evicted from memory and reloaded since.
            aside.drawing.adapter = self.adapters.of(item)
            self._drawings[slot] = aside.drawing
            self._hub.put_back(slot, aside.run)
        return True

    def _begin(self, slot: int, item: PreparedImage) -> None:
        """Lets an item's pipeline start or continue at the next step."""
        if self.runs_alone and self._drawings:
            self._queued[slot] = item
            return
        if self._resume(slot, item):
            return
        pipeline = self._pipelines.of(item)
        own = self._interception.own(pipeline, self._schedulers.create(item.scheduler))
        adapter = self.adapters.of(item)
        is_varied = self.adapters.changes_prompts(adapter)
        variant = f"{item.adapter}@{item.adapter_scale}" if is_varied else ""
        drawing = Drawing(item, own, self._prompts.intercept(own, variant), adapter)
        with torch.inference_mode(), memory_errors():
            drawing.controls = self._controls.start(item)
            drawing.ip_adapter = self._ip_adapters.start(item)
        self._drawings[slot] = drawing
        self._hub.add(slot, drawing.draw, drawing)

    def _advance(self) -> dict[int, Result | PenstockError]:
        """Computes one step for each item. Returns the outcomes of finished items."""
        outcomes: dict[int, Result | PenstockError] = {}
        for slot, outcome in self._hub.step().items():
            drawing = self._drawings.pop(slot)
            if isinstance(outcome, Exception):
                outcomes[slot] = _as_error(outcome)
                continue
            self._encoding[slot] = drawing.item, self._files.begin(drawing, copy_to_host(outcome))
        if not self._drawings and self._encoding:
            wait([future for _, future in self._encoding.values()], return_when="FIRST_COMPLETED")
        for slot, (_, future) in list(self._encoding.items()):
            if future.done():
                outcomes[slot] = future.result()
                del self._encoding[slot]
        return outcomes


@dataclass(frozen=True, slots=True, eq=False)
class _Aside:
    """An image that was set aside, either during drawing or while its file was being encoded."""

    item: PreparedImage
    drawing: Drawing | None = None
    run: Run | None = None
    file: Future[Result | PenstockError] | None = None

    @property
    def room(self) -> int:
        return self.item.room or self.item.length


def _as_error(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    log.warning("image failed", exc_info=error)
    return ModelFailed(f"{type(error).__name__}: {error}")
