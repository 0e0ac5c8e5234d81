"""Files of adapters that callers named by URL, on the disk of a worker.

The API has fetched them into the object store. Here each is kept below the digest of its tenant, so
that tenants share nothing, and what one of them brings takes no room from those that have less.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from shared.errors import Unavailable
from shared.image_entry import AdapterUrls
from shared.stores.objects import ObjectStore

ENDING = ".safetensors"
ABANDONED_S = 3600.0
"""After this time, a file is removed whose copying broke off."""


class _Kept(NamedTuple):
    used_at_ns: int
    size_bytes: int
    file: Path


class FetchedAdapters:
    """The files of all tenants. Model processes of a machine share the folder.

    Args:
        urls: the bounds of the catalog.
        folder: where they are kept.
        objects: has them.
    """

    def __init__(self, urls: AdapterUrls, folder: Path, objects: ObjectStore) -> None:
        self.urls = urls
        self._folder = folder
        self._objects = objects

    def find(self, digest: str, key: str, owner: str) -> Path:
        """Returns the file of an adapter, which is copied from the object store if it is not here.

        Args:
            digest: of the file, as `sha256:…`. Who reads it checks that.
            key: of the object.
            owner: the digest of its tenant.

        Raises:
            BadInput: the object is gone, or larger than the catalog allows.
            Unavailable: the object store or the disk is out of reach.
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
            raise Unavailable(
                f"{file}: {error}", public="the disk of the worker is full"
            ) from error
        finally:
            partial.unlink(missing_ok=True)
        return file

    def _make_room(self, size_bytes: int) -> None:
        """Removes files until so many bytes fit: of the tenant with the most, the least used."""
        by_owner: dict[Path, list[_Kept]] = {}
        for file in self._folder.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                facts = file.stat()
                if file.suffix != ENDING:
                    if facts.st_mtime < time.time() - ABANDONED_S:
                        file.unlink()
                    continue
                kept = _Kept(facts.st_mtime_ns, facts.st_size, file)
                by_owner.setdefault(file.parent, []).append(kept)
        taken = {owner: sum(one.size_bytes for one in kept) for owner, kept in by_owner.items()}
        for files in by_owner.values():
            files.sort(reverse=True)
        while taken and sum(taken.values()) + size_bytes > self.urls.disk_bytes:
            most = max(taken, key=lambda owner: taken[owner])
            oldest = by_owner[most].pop()
            # Whoever reads it still has it open.
            oldest.file.unlink(missing_ok=True)
            taken[most] -= oldest.size_bytes
            if not by_owner[most]:
                del taken[most]
