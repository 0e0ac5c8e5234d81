"""The adapters in a model process's memory, and the images waiting for adapters to load.

An adapter is read in a thread while steps continue, and moved into memory between steps. The least
recently used adapters are evicted to make room. An adapter stays in memory while an image is using
it.

Adapter files that callers specify by URL are stored on the worker's disk. The API has already
fetched them into the object store. Each file is stored under its tenant's digest, so tenants share
nothing, and a tenant's files don't displace another tenant's if that tenant has fewer files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shared.errors import PenstockError, Unavailable
from shared.models.image_entry import AdapterUrls, ImageDefaults
from shared.settings import ModelSettings, read_settings
from shared.stores.objects import ObjectStore
from workers.models.base import PreparedImage
from workers.models.image.adapter_slots import AdapterSlots
from workers.models.image.adapters import PARTS, AdapterFile, LoadedAdapter, read_adapter
from workers.models.image.low_rank import LowRankModule, Row
from workers.models.source import resolve_file

ENDING = ".safetensors"
PLACEHOLDER = " "
"""The name of an adapter that changes nothing. Names in requests don't contain spaces."""
ABANDONED_S = 3600.0
"""Time after which an incompletely copied file is removed."""

MAX_ROWS = 2
"""Maximum rows per image: one for the negative prompt and one for the prompt."""
MAX_READS = 2
"""Maximum concurrent reads. More threads than this would take CPU time away from the steps."""
WAIT_S = 0.05
"""How long a step waits for an adapter when there is nothing else to draw. New items also wait this
long.
"""

log = logging.getLogger(__name__)


class _Kept(NamedTuple):
    used_at_ns: int
    size_bytes: int
    file: Path


class FetchedAdapters:
    """All tenants' files. The model processes on a machine share the folder.

    Args:
        urls: the catalog's limits on adapter URLs.
        folder: the folder for the files.
    """

    def __init__(self, urls: AdapterUrls, folder: Path, objects: ObjectStore) -> None:
        self.urls = urls
        self._folder = folder
        self._objects = objects

    def find(self, digest: str, key: str, owner: str) -> Path:
        """Returns an adapter's file, first copying it from the object store if it isn't local.

        Args:
            digest: the file's digest, as `sha256:…`. The reader checks it.
            key: the file's key in the object store.
            owner: digest of the tenant that owns the file.

        Raises:
            BadInput: the object no longer exists, or exceeds the catalog's size limit.
            Unavailable: the object store or the disk is unreachable.
        """
        file = self._folder / owner / f"{digest.removeprefix('sha256:')}{ENDING}"
        with contextlib.suppress(FileNotFoundError):
            os.utime(file)
            return file
        partial = file.with_name(f".{uuid.uuid4().hex}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._objects.download(key, partial, self.urls.max_bytes)
            self._make_room(partial.stat().st_size)
            partial.rename(file)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "is full" if is_full else "can't be written to"
            raise Unavailable(f"{file}: {error}", public=f"the worker's disk {reason}") from error
        finally:
            partial.unlink(missing_ok=True)
        return file

    def _make_room(self, size_bytes: int) -> None:
        """Removes the largest tenant's least recently used files until `size_bytes` fit."""
        by_owner: dict[Path, list[_Kept]] = {}
        for file in self._folder.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                facts = file.stat()
                if file.suffix != ENDING:
                    if facts.st_mtime < time.time() - ABANDONED_S:
                        file.unlink()
                    continue
                file_facts = _Kept(facts.st_mtime_ns, facts.st_size, file)
                by_owner.setdefault(file.parent, []).append(file_facts)
        used_bytes = {
            owner: sum(file.size_bytes for file in owner_files)
            for owner, owner_files in by_owner.items()
        }
        for files in by_owner.values():
            files.sort(reverse=True)
        while used_bytes and sum(used_bytes.values()) + size_bytes > self.urls.disk_bytes:
            largest_owner = max(used_bytes, key=lambda owner: used_bytes[owner])
            oldest = by_owner[largest_owner].pop()
            # A reader may still have the file open.
            oldest.file.unlink(missing_ok=True)
            used_bytes[largest_owner] -= oldest.size_bytes
            if not by_owner[largest_owner]:
                del used_bytes[largest_owner]


Applied = tuple[LoadedAdapter, float] | None
"""An image's adapter and scale. None if the image has no adapter."""


class ResidentAdapters:
    """Adapters, keyed by name, within `image.adapter_memory_bytes`.

    Args:
        image: the catalog entry's `image` section.
        compiled_images: maximum images per call to the compiled UNet. 0 if it isn't compiled.
    """

    def __init__(
        self,
        image: ImageDefaults,
        pipeline: Any,
        device: torch.device,
        compiled_images: int = 0,
    ) -> None:
        self._image = image
        self._pipeline = pipeline
        self._device = device
        self._settings = read_settings(ModelSettings)
        self._fetched = None
        if (urls := image.adapter_urls) is not None:
            folder = self._settings.models_dir / "adapters-by-url"
            self._fetched = FetchedAdapters(urls, folder, ObjectStore(self._settings.objects_url))
        self._modules = {
            part: LowRankModule(module)
            for part in PARTS
            if isinstance(module := getattr(pipeline, part, None), torch.nn.Module)
        }
        self._slots: AdapterSlots | None = None
        if image.has_adapters and compiled_images:
            unet = self._modules["unet"]
            # Compiled code is only valid for the hooks it was compiled with.
            unet.prepare(list(unet.layers))
            self._slots = AdapterSlots(
                unet.layers,
                count=compiled_images,
                rows=MAX_ROWS * compiled_images,
                rank=image.compiled_rank,
            )
            log.info("room for adapters in compiled code", extra={"bytes": self._slots.nbytes})
        self._resident: OrderedDict[str, LoadedAdapter] = OrderedDict()
        self._reads: dict[str, Future[LoadedAdapter]] = {}
        self._permits = threading.BoundedSemaphore(MAX_READS)
        self._waiting: dict[int, PreparedImage] = {}
        self._lacks_room = False

    @property
    def resident_bytes(self) -> int:
        return sum(adapter.nbytes for adapter in self._resident.values())

    @property
    def resident_names(self) -> list[str]:
        """Names of the adapters in memory, least recently used first."""
        return list(self._resident)

    @property
    def waiting(self) -> list[int]:
        """Slots of the waiting images, in order."""
        return list(self._waiting)

    def holds_back(self, slot: int, item: PreparedImage) -> bool:
        """Returns whether an image has to wait.

        `take_ready` then returns the image as soon as it can continue.

        While an image waits for room, later images wait too, so that it eventually gets the room it
        needs.
        """
        if not item.adapter or (item.adapter in self._resident and not self._lacks_room):
            return False
        self._waiting[slot] = item
        if item.adapter not in self._resident:
            self._begin_read(item)
        return True

    def take_ready(
        self, in_use: Collection[str]
    ) -> Iterator[tuple[int, PreparedImage | PenstockError]]:
        """Returns the images that are done waiting, by slot, with an error if their adapter failed.

        Args:
            in_use: names of the adapters that running images are using. They stay in memory.
        """
        used = set(in_use)
        self._lacks_room = False
        self._forget_unwanted()
        for slot, item in list(self._waiting.items()):
            outcome: PreparedImage | PenstockError = item
            try:
                if not self._bring_in(item, used):
                    if self._lacks_room:
                        return
                    continue
            except PenstockError as error:
                outcome = error
            del self._waiting[slot]
            used.add(item.adapter)
            yield slot, outcome

    def drop(self, slot: int) -> None:
        """Forgets an image, which may be waiting."""
        self._waiting.pop(slot, None)
        self._lacks_room = self._lacks_room and bool(self._waiting)

    def pause(self) -> None:
        """Waits briefly for the adapters being read."""
        wait(self._reads.values(), timeout=WAIT_S, return_when=FIRST_COMPLETED)

    def of(self, item: PreparedImage) -> Applied:
        """Returns the adapter for an image that isn't waiting."""
        if not item.adapter:
            return None
        self._resident.move_to_end(item.adapter)
        return self._resident[item.adapter], item.adapter_scale

    def changes_prompts(self, applied: Applied) -> bool:
        """Returns whether an adapter changes how prompts are encoded."""
        return applied is not None and any(part != "unet" for part in applied[0].parts)

    @contextmanager
    def apply(self, part: str, rows: Sequence[Applied]) -> Iterator[None]:
        """Within this context, a part of the pipeline computes these rows.

        A single row applies to the whole batch. If the compiled UNet has no room for the adapters,
        it runs eagerly.
        """
        module, slots = self._modules.get(part), self._slots if part == "unet" else None
        own_rows = [_row(row, part) for row in rows]
        if module is None or not any(own_rows):
            yield
        elif slots is None:
            with module.apply(own_rows):
                yield
        elif slots.place(own_rows):
            with slots.use():
                yield
        else:
            with module.apply(own_rows), torch.compiler.set_stance("force_eager"):
                yield

    @contextmanager
    def placeholder(self) -> Iterator[None]:
        """Within this context, an adapter that changes nothing is in memory, for warm-up."""
        adapter = LoadedAdapter(torch.empty(0), {"unet": {}})
        self._resident[PLACEHOLDER] = adapter
        try:
            yield
        finally:
            self._forget(PLACEHOLDER)

    def _bring_in(self, item: PreparedImage, in_use: Collection[str]) -> bool:
        """Returns whether an image's adapter is in memory now.

        Raises:
            PenstockError: the adapter can't be read.
        """
        name = item.adapter
        if name in self._resident:
            return True
        read = self._begin_read(item)
        if not read.done():
            return False
        if (error := read.exception()) is not None:
            del self._reads[name]
            raise error
        adapter = read.result()
        if not self._make_room(adapter.nbytes, in_use):
            self._lacks_room = True
            return False
        del self._reads[name]
        for part, layers in adapter.parts.items():
            self._modules[part].prepare(list(layers))
        self._resident[name] = adapter.on(self._device)
        return True

    def _forget_unwanted(self) -> None:
        """Discards adapters that were read for images that have since been canceled."""
        wanted = {item.adapter for item in self._waiting.values()}
        for name, read in list(self._reads.items()):
            if read.done() and name not in wanted:
                del self._reads[name]

    def _make_room(self, nbytes: int, in_use: Collection[str]) -> bool:
        """Evicts the least recently used adapters until `nbytes` fit. Returns whether they fit."""
        idle = [name for name in self._resident if name not in in_use]
        while self.resident_bytes + nbytes > self._image.adapter_memory_bytes:
            if not idle:
                return False
            dropped = idle.pop(0)
            self._forget(dropped)
            log.info("adapter dropped", extra={"adapter": dropped})
        return True

    def _forget(self, name: str) -> None:
        adapter = self._resident.pop(name)
        if self._slots is not None and "unet" in adapter.parts:
            self._slots.forget(adapter.parts["unet"])

    def _begin_read(self, item: PreparedImage) -> Future[LoadedAdapter]:
        """Starts reading an adapter. The read continues even if the image is canceled."""
        name = item.adapter
        if (read := self._reads.get(name)) is None:
            read = self._reads[name] = Future()
            file = self._file_of(item)
            # A daemon thread, so the process can exit without waiting for a download.
            threading.Thread(
                target=self._read, args=(file, read), name=f"adapter-{name}", daemon=True
            ).start()
        return read

    def _file_of(self, item: PreparedImage) -> AdapterFile:
        name, places = item.adapter, self._settings
        if item.adapter_key:
            assert self._fetched is not None, "adapters by URL are disabled; this is a bug"
            find = partial(self._fetched.find, name, item.adapter_key, item.adapter_owner)
            return AdapterFile(name, find, name, self._fetched.urls.max_rank, is_callers=True)
        entry = self._image.adapters[name]
        source, revision, weights = entry.source, entry.revision, places.weights_dir

        def find_in_catalog() -> Path:
            return resolve_file(source, revision, places.models_dir, weights_dir=weights)

        return AdapterFile(name, find_in_catalog, entry.digest, entry.max_rank)

    def _read(self, file: AdapterFile, loading: Future[LoadedAdapter]) -> None:
        name = file.name
        with self._permits:
            began_s = time.monotonic()
            try:
                limit_bytes = self._image.adapter_memory_bytes
                loaded = read_adapter(file, self._pipeline, self._modules, limit_bytes)
            except PenstockError as error:
                log.warning("adapter not read", extra={"adapter": name, "reason": error.message})
                loading.set_exception(error)
                return
            except Exception as error:
                # The boundary with the libraries that read adapters. Every waiting image must get a
                # result.
                log.warning("adapter not read", exc_info=True, extra={"adapter": name})
                loading.set_exception(file.make_internal_error("it could not be read", str(error)))
                return
        took_s = time.monotonic() - began_s
        log.info("adapter read", extra={"adapter": name, "bytes": loaded.nbytes, "s": took_s})
        loading.set_result(loaded)


def _row(applied: Applied, part: str) -> Row:
    if applied is None or part not in applied[0].parts:
        return None
    return applied[0].parts[part], applied[1]
