"""`penstock weights prefetch`: copies models from the Hub to a bucket, once for all workers.

Workers then read the copy from the mounted bucket (PENSTOCK_WEIGHTS_DIR). They don't need access to
the Hub or a Hub token.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import msgspec
import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore

from shared.errors import ConfigurationError, Unavailable
from shared.models.catalog import Catalog
from shared.models.entry_fields import hub_repository
from workers.models.source import (
    Copy,
    download_from_hub,
    folder_of,
    list_of,
    open_gcs_bucket,
)


def prefetch(catalog: Catalog, to: str, names: Sequence[str], *, again: bool) -> Iterator[str]:
    """Copies missing models, and yields each model's result.

    Args:
        catalog: the models, with their adapters. Models that don't come from the Hub are skipped.
        to: `gs://BUCKET[/PREFIX]`, or a folder.
        names: the models to copy. Empty means all models.
        again: True to replace existing copies, because a branch may have moved.

    Raises:
        ConfigurationError: a model is not in the catalog or does not come from the Hub, or its
            repository does not exist or is not accessible with this token.
        Unavailable: the Hub or the bucket is unreachable.
    """
    store = _open(to)
    for (repository, revision), models in _choose_revisions(catalog, names).items():
        label = f"{', '.join(models)}: {repository}@{revision}"
        try:
            if not again and _is_there(store, list_of(repository, revision)):
                yield f"{label}: is there"
                continue
            copy = _copy(store, repository, revision)
        except (BaseError, OSError) as error:
            raise Unavailable(f"{to}: {error}", field="to") from error
        size_mb = sum(copy.files.values()) / 1e6
        yield f"{label}: copied {len(copy.files)} files, {size_mb:,.0f} MB, commit {copy.commit}"


def _choose_revisions(catalog: Catalog, names: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Returns the repositories and revisions to copy, along with the models that use each one."""
    requested = {catalog.find(name).name for name in names}
    models = [model for model in catalog.deployed if not names or model.public_name in requested]
    revisions: dict[tuple[str, str], list[str]] = {}
    for model in models:
        origins = list(model.sources.items())
        origins += [
            (model.name, (adapter.source, adapter.revision))
            for adapter in model.image.adapters.values()
        ]
        keys = [
            (name, (repository, revision))
            for name, (source, revision) in origins
            if (repository := hub_repository(source))
        ]
        for name, key in dict.fromkeys(keys):
            revisions.setdefault(key, []).append(name)
        if names and not keys:
            raise ConfigurationError(
                f"{model.name}: its source {model.source} is not a model on the Hugging Face Hub",
                field="model",
            )
    return revisions


def _open(to: str) -> ObjectStore:
    if to.startswith("gs://"):
        bucket, _, prefix = to.removeprefix("gs://").partition("/")
        return open_gcs_bucket(bucket, prefix.strip("/"))
    if "://" in to:
        raise ConfigurationError(f"--to: must be gs://BUCKET or a folder, got {to}", field="to")
    return LocalStore(Path(to).expanduser().resolve(), mkdir=True)


def _is_there(store: ObjectStore, path: PurePosixPath) -> bool:
    try:
        obstore.head(store, str(path))
    except FileNotFoundError:
        return False
    return True


def _copy(store: ObjectStore, repository: str, revision: str) -> Copy:
    """Downloads to a temporary folder, and uploads from there. The file list is uploaded last."""
    into, listed = folder_of(repository, revision), str(list_of(repository, revision))
    with tempfile.TemporaryDirectory(prefix="penstock-weights-") as cache:
        folder = download_from_hub(repository, revision, Path(cache))
        if _is_there(store, list_of(repository, revision)):
            # Until the list is there, workers that start up use the Hub rather than a partial copy.
            obstore.delete(store, listed)
        files = {}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            files[name] = path.stat().st_size
            obstore.put(store, str(into / name), path.resolve())
        _delete_others(store, into, files)
        copy = Copy(commit=folder.name, files=files)
        obstore.put(store, listed, msgspec.json.encode(copy))
    return copy


def _delete_others(store: ObjectStore, into: PurePosixPath, wanted_files: dict[str, int]) -> None:
    """Deletes files from earlier commits, which would be mistaken for part of this commit."""
    for page in obstore.list(store, f"{into}/"):
        for entry in page:
            if PurePosixPath(entry["path"]).relative_to(into).as_posix() not in wanted_files:
                obstore.delete(store, entry["path"])
