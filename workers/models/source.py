"""Resolves a catalog entry's `source` to a folder on this machine.

Downloads the folder if necessary. Also defines the layout of weights copied from the Hub, in a
bucket or its mounted folder. A copy is the folder `hub/ORG/NAME/REVISION`, with the repository's
files unchanged. A file next to it, `hub/ORG/NAME/REVISION.json`, lists those files and is written
last, so a copy that has a list is complete.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import msgspec
import obstore
from obstore.exceptions import BaseError
from obstore.store import GCSStore, ObjectStore

from shared.errors import MALFORMED, ConfigurationError, PenstockError, Unavailable
from shared.stores.objects import GoogleCredentials
from workers.models.base import OpenGguf
from workers.models.generation.gguf import open_for_torch

if TYPE_CHECKING:
    from obstore._get import GetOptions
    from obstore._list import ObjectMeta

_GGUF = ".gguf"
PART_BYTES = 32 * 1024 * 1024
CONNECTIONS = 8
"""How many parts of a bucket's objects are downloaded at a time."""
READ_BYTES = 8 * 1024 * 1024
_LOADED = re.compile(r"(model|diffusion_pytorch_model)(-\d+-of-\d+)?\.safetensors")
DOWNLOAD_LIMIT = timedelta(hours=1)
"""Time limit for one file, from the request to the last byte.

The client's default of 30 s is too short for weights.
"""

log = logging.getLogger(__name__)


class Copy(msgspec.Struct, kw_only=True):
    """A copy's contents: its revision's commit at that time, and each file's size in bytes."""

    commit: str
    files: dict[str, int]


def folder_of(repository: str, revision: str) -> PurePosixPath:
    """Returns a copy's path in the bucket.

    Even a revision such as refs/pr/1 becomes a single folder.
    """
    return PurePosixPath("hub", repository, revision.replace("/", "--"))


def list_of(repository: str, revision: str) -> PurePosixPath:
    """Returns the path of a copy's file list."""
    folder = folder_of(repository, revision)
    return folder.with_name(f"{folder.name}.json")


def find_copy(weights_dir: Path, repository: str, revision: str) -> Path | None:
    """Returns the folder of a complete copy under `weights_dir`, or None."""
    listed = weights_dir / list_of(repository, revision)
    folder = weights_dir / folder_of(repository, revision)
    try:
        copy = msgspec.json.decode(listed.read_bytes(), type=Copy)
    except FileNotFoundError:
        log.info("weights were not prefetched", extra={"source": f"hf:{repository}"})
        return None
    except (OSError, *MALFORMED) as error:
        log.warning("the list of prefetched weights can't be read", extra={"error": str(error)})
        return None
    wrong = [name for name, size in copy.files.items() if _size(folder / name) != size]
    if wrong:
        log.warning("prefetched weights are not complete", extra={"files": wrong[:5]})
        return None
    return folder


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def read_ahead(folder: Path, room_bytes: int) -> int:
    """Reads the weights in a copy once, so that a loader finds them in memory.

    A loader maps files into memory and reads them in small pieces, each of which a mounted bucket
    would have to fetch. Reads nothing if the weights need more than `room_bytes`. Loaders report
    files that can't be read.

    Returns:
        The number of bytes read. 0 if not all could be.
    """
    try:
        paths = [path for path in folder.rglob("*") if _is_loaded(path)]
        if sum(path.stat().st_size for path in paths) > room_bytes:
            return 0
        with ThreadPoolExecutor(CONNECTIONS, "weights") as pool:
            return sum(pool.map(_read, paths))
    except OSError as error:
        log.warning("weights could not be read ahead", extra={"reason": str(error)})
        return 0


def _is_loaded(path: Path) -> bool:
    """Returns whether diffusers and transformers load this file, by its name."""
    return bool(_LOADED.fullmatch(path.name)) and path.parent.name != "safety_checker"


def _read(path: Path) -> int:
    buffer, read_bytes = bytearray(READ_BYTES), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            read_bytes += count
    return read_bytes


OpenBucket = Callable[[str], ObjectStore]


def open_gcs_bucket(name: str, prefix: str = "") -> ObjectStore:
    """Opens a Google Cloud Storage bucket, or part of one, using the machine's credentials."""
    return GCSStore(
        name,
        prefix=prefix or None,
        credential_provider=GoogleCredentials(),
        client_options={
            "timeout": DOWNLOAD_LIMIT,
            "read_timeout": timedelta(seconds=30),
            "connect_timeout": timedelta(seconds=10),
        },
        retry_config={"max_retries": 5, "retry_timeout": timedelta(minutes=1)},
    )


def resolve(
    source: str,
    revision: str,
    cache_dir: Path,
    *,
    weights_dir: Path | None = None,
    open_bucket: OpenBucket = open_gcs_bucket,
    open_gguf: OpenGguf | None = None,
) -> Path:
    """Returns the folder with the model's files.

    Downloads the files if necessary, which may take minutes.

    Args:
        source: `package:IMPORT.NAME/sub/path` (a folder in an installed package), `local:PATH`
            (either may be a GGUF file; see workers/models/generation/gguf.py), `hf:ORG/NAME` (the
            Hugging Face Hub, or its cache on this machine), `hf:ORG/NAME/FILE.gguf`, or
            `gs://BUCKET/PREFIX`.
        revision: branch, tag, or commit in a Hub repository. A copy in a bucket is stored under
            this name.
        cache_dir: folder for copies from buckets and for converted files.
        weights_dir: folder where copies of Hub repositories are mounted (workers/models/source.py).
            A complete copy is used in place.
        open_gguf: creates the folder for a GGUF file. None means that the folder is for torch.

    Raises:
        ConfigurationError: the source doesn't exist.
        Unavailable: the Hub or the bucket is unreachable, or the files can't be stored.
    """
    open_gguf = open_gguf or open_for_torch
    kind, _, rest = source.partition(":")
    if kind == "package":
        return _existing(_in_package(source, rest), source, cache_dir, open_gguf)
    if kind == "local":
        return _existing(_expand_user(rest), source, cache_dir, open_gguf)
    if kind == "hf" and rest.endswith(_GGUF):
        file = resolve_file(source, revision, cache_dir, weights_dir=weights_dir)
        return open_gguf(file, cache_dir)
    if kind == "hf":
        copy = find_copy(weights_dir, rest, revision) if weights_dir else None
        return copy or _from_hub(rest, revision)
    if source.startswith("gs://"):
        return _from_bucket(source, revision, cache_dir, open_bucket)
    raise _unknown_source(source)


def resolve_file(
    source: str,
    revision: str,
    cache_dir: Path,
    *,
    weights_dir: Path | None = None,
    open_bucket: OpenBucket = open_gcs_bucket,
) -> Path:
    """Returns a single file, downloading it first if necessary.

    Args:
        source: same as in `resolve`, but with the file's path appended: `hf:ORG/NAME/FILE`,
            `gs://BUCKET/FILE`, `local:FILE`, or `package:IMPORT.NAME/FILE`.
        weights_dir: same as in `resolve`. A copy of a repository includes the file.

    Raises:
        ConfigurationError: the file doesn't exist, or its source's prefix is unknown.
        Unavailable: same as in `resolve`.
    """
    kind, _, rest = source.partition(":")
    if kind == "package":
        file = _in_package(source, rest)
    elif kind == "local":
        file = _expand_user(rest)
    elif kind == "hf":
        repository, name = repository_of(source)
        folder = find_copy(weights_dir, repository, revision) if weights_dir else None
        file = (folder or _from_hub(repository, revision)) / name
    elif source.startswith("gs://"):
        file = _file_from_bucket(source, revision, cache_dir, open_bucket)
    else:
        raise _unknown_source(source)
    if not file.is_file():
        raise _no_such(source, f"{file} is not a file")
    return file


def _unknown_source(source: str) -> ConfigurationError:
    return ConfigurationError(
        f"source: must start with package:, local:, hf: or gs://, got {source!r}", field="source"
    )


def repository_of(source: str) -> tuple[str, str]:
    """Returns ORG/NAME and the file path in `hf:ORG/NAME/FILE`."""
    parts = source.removeprefix("hf:").split("/", 2)
    if len(parts) < 3 or not all(parts):
        raise _no_such(source, "must be hf:ORG/NAME/FILE")
    return f"{parts[0]}/{parts[1]}", parts[2]


def _in_package(source: str, rest: str) -> Path:
    name, _, below = rest.partition("/")
    try:
        # Finds a top-level package without importing it.
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise _no_such(source, str(error)) from error
    if spec is None or not spec.submodule_search_locations:
        raise _no_such(source, f"package {name!r} is not installed")
    return Path(next(iter(spec.submodule_search_locations))) / below


def _expand_user(path: str) -> Path:
    """Unlike Path's method, accepts a user who doesn't exist."""
    return Path(os.path.expanduser(path))


def _existing(folder: Path, source: str, cache_dir: Path, open_gguf: OpenGguf) -> Path:
    if folder.suffix == _GGUF and folder.is_file():
        return open_gguf(folder, cache_dir)
    if not folder.is_dir():
        raise _no_such(source, f"{folder} is not a folder")
    return folder.resolve()


def _no_such(source: str, reason: str) -> PenstockError:
    return ConfigurationError(f"source {source}: {reason}", field="source")


def _from_hub(repository: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # A complete copy in the cache is used in place, so startup requires no network access.
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return download_from_hub(repository, revision)


def download_from_hub(repository: str, revision: str, cache_dir: Path | None = None) -> Path:
    """Downloads a repository from the Hugging Face Hub.

    The name of the returned folder is the commit.

    The token for a gated repository comes from HF_TOKEN, or from the file at HF_TOKEN_PATH.

    Args:
        revision: branch, tag, or commit.
        cache_dir: the Hub's cache. None means this machine's default.

    Raises:
        ConfigurationError: the repository or revision doesn't exist, or the token does not grant
            access.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(repository, revision=revision, cache_dir=cache_dir))
    except GatedRepoError as error:
        raise _no_such(
            f"hf:{repository}",
            "the repository is gated; accept its terms and set a token (HF_TOKEN, "
            "HF_TOKEN_PATH) with access to it",
        ) from error
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise _no_such(f"hf:{repository}", str(error)) from error
    except OSError as error:
        raise Unavailable(f"source hf:{repository}: {error}", field="source") from error


def _from_bucket(source: str, revision: str, cache_dir: Path, open_bucket: OpenBucket) -> Path:
    """Downloads to a temporary folder and then renames it, so any existing folder is complete."""
    bucket, _, prefix = source.removeprefix("gs://").partition("/")
    folder = cache_dir / bucket / prefix.strip("/").replace("/", "--") / revision
    if folder.is_dir():
        return folder.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True
        ) as parent:
            partial = Path(parent, folder.name)
            partial.mkdir()
            if not _download(open_bucket(bucket), prefix.strip("/"), partial):
                raise _no_such(source, "it is empty")
            _publish(partial, folder)
    except (BaseError, OSError) as error:
        raise Unavailable(f"source {source}: {error}", field="source") from error
    return folder.resolve()


def _publish(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        # Another worker on this machine finished first, and its copy is just as good.
        if not folder.is_dir():
            raise


def _file_from_bucket(source: str, revision: str, cache_dir: Path, open_bucket: OpenBucket) -> Path:
    """Downloads under a temporary name and renames the file, so any existing file is complete."""
    bucket, _, path = source.removeprefix("gs://").partition("/")
    place = PurePosixPath(path)
    folder = cache_dir / bucket / str(place.parent).replace("/", "--") / revision
    file = folder / place.name
    if file.is_file():
        return file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{place.name}-", dir=folder, ignore_cleanup_errors=True
        ) as parent:
            store, partial = open_bucket(bucket), Path(parent, place.name)
            _download_objects(store, [(_find_object(store, path, source), partial)])
            partial.rename(file)
    except (BaseError, OSError) as error:
        raise Unavailable(f"source {source}: {error}", field="source") from error
    return file


def _find_object(store: ObjectStore, path: str, source: str) -> ObjectMeta:
    try:
        return obstore.head(store, path)
    except FileNotFoundError as error:
        raise _no_such(source, "the object does not exist") from error


def _download(store: ObjectStore, prefix: str, folder: Path) -> int:
    """Copies all objects under `prefix` into `folder`. Returns the number of objects."""
    objects = [
        (entry, folder / PurePosixPath(entry["path"]).relative_to(prefix))
        for page in obstore.list(store, prefix or None)
        for entry in page
    ]
    _download_objects(store, objects)
    return len(objects)


def _download_objects(store: ObjectStore, objects: Sequence[tuple[ObjectMeta, Path]]) -> None:
    """Copies objects in parts, several at a time, because a single connection is slow."""
    parts = []
    for entry, path in objects:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(entry["size"])
        starts = range(0, entry["size"], PART_BYTES)
        parts += [(entry, path, at, min(at + PART_BYTES, entry["size"])) for at in starts]
    with ThreadPoolExecutor(CONNECTIONS, "weights") as pool:
        try:
            for copying in [pool.submit(_download_part, store, *part) for part in parts]:
                copying.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _download_part(store: ObjectStore, entry: ObjectMeta, path: Path, start: int, end: int) -> None:
    options: GetOptions = {"range": (start, end)}
    if entry["e_tag"]:
        options["if_match"] = entry["e_tag"]  # parts of a replaced object don't fit together
    with path.open("r+b") as file:
        file.seek(start)
        for chunk in obstore.get(store, entry["path"], options=options):
            file.write(chunk)
