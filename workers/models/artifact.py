"""Optimized artifacts, which `penstock optimize` writes and workers read and check.

An artifact is the folder `<artifacts_dir>/<model>/<digest>/`, which contains manifest.json,
calibration.npz (for embedding models), and the graphs listed in the manifest. The digest covers the
source files, so an artifact created from different weights is never used.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from shared.errors import MALFORMED, ConfigurationError
from workers.models.base import PreparedText

if TYPE_CHECKING:
    import numpy as np

FORMAT_VERSION = 3
"""Also incremented when new artifacts are better than old ones. Artifacts with earlier versions are
ignored.
"""
MANIFEST = "manifest.json"
CALIBRATION = "calibration.npz"
_DOCUMENT_SUFFIXES = (".md", ".rst", ".png", ".jpg")

log = logging.getLogger(__name__)


class Variant(msgspec.Struct, kw_only=True):
    """A variant of a model that a worker can run, measured against torch fp32.

    Cosine similarities and `ranking_agreement` (0 to 1) were measured on texts not used for
    calibration. `relative_speed` is the speed relative to torch fp32 in the same run. `recipe`
    records how it was created (for image models, the options that a worker applies to its
    pipeline).
    """

    name: str
    backend: Literal["onnx", "torch"]
    precision: Literal["fp32", "bf16", "fp16", "int8"]
    file: str = ""
    """The graph's path, relative to the artifact's folder. Empty for torch."""
    size_bytes: int = 0
    cosine_mean: float = 0.0
    cosine_min: float = 0.0
    ranking_agreement: float = 0.0
    relative_speed: float = 0.0
    note: str = ""
    recipe: dict[str, Any] = {}


class Manifest(msgspec.Struct, kw_only=True):
    """The contents of manifest.json.

    `made_by`: the versions of torch, transformers, onnx, and onnxruntime. `measured_on`: the CPU's
    instruction sets that affect speed. `relative_speed` applies only to the same instruction sets,
    while quality applies to all of them (see session_options in
    workers/models/embedding/encoder_onnx.py). A worker that makes a choice measures both for
    itself.
    `refused`: the variants that were measured but rejected, and the tolerance that each one missed.
    """

    format_version: int = FORMAT_VERSION
    model: str
    revision: str
    source_digest: str
    made_by: dict[str, str]
    measured_on: tuple[str, ...] = ()
    task: str
    variants: list[Variant]
    refused: dict[str, float] = {}


@dataclass(frozen=True)
class Calibration:
    """Texts as token IDs, with pooled torch fp32 vectors: float32 [texts, dimensions]."""

    texts: Sequence[PreparedText]
    vectors: np.ndarray


@dataclass(frozen=True)
class Artifact:
    """A complete artifact on disk."""

    folder: Path
    manifest: Manifest

    def graph(self, variant: Variant) -> Path:
        return self.folder / variant.file

    @property
    def digest(self) -> str:
        """The first 16 hex digits of the manifest's hash.

        The manifest contains the measurements.
        """
        return hashlib.sha256((self.folder / MANIFEST).read_bytes()).hexdigest()[:16]


def find_artifact(artifacts_dir: Path, model: str, digest: str) -> Artifact | None:
    """Returns `model`'s artifact for source files with this `digest`.

    None if it doesn't exist or if it is broken, in which case this is logged.
    """
    folder = artifacts_dir / model / digest
    if not folder.is_dir():
        return None
    try:
        return read_artifact(folder)
    except ConfigurationError as error:
        log.warning("artifact ignored", extra={"model": model, "reason": error.message})
        return None


def read_artifact(folder: Path) -> Artifact:
    """Reads an artifact and checks that it is complete.

    Raises:
        ConfigurationError: a file is missing, unreadable, or the wrong size, or the format is
            unknown.
    """
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, *MALFORMED) as error:
        raise ConfigurationError(f"{path}: {error}", field="artifact") from error
    if manifest.format_version != FORMAT_VERSION:
        raise ConfigurationError(
            f"{path}: unsupported format {manifest.format_version}; expected {FORMAT_VERSION}",
            field="artifact",
        )
    if (manifest.model, manifest.source_digest) != (folder.parent.name, folder.name):
        raise ConfigurationError(
            f"{path}: belongs to {manifest.model}/{manifest.source_digest}, which does not "
            "match its folder",
            field="artifact",
        )
    for variant in manifest.variants:
        _check_graph(folder, variant)
    return Artifact(folder, manifest)


def _check_graph(folder: Path, variant: Variant) -> None:
    if variant.backend == "torch":
        return
    graph = folder / variant.file
    if not variant.file or folder.resolve() not in graph.resolve().parents:
        raise ConfigurationError(
            f"{folder}: the folder has no file for variant {variant.name}", field="artifact"
        )
    if not graph.is_file() or graph.stat().st_size != variant.size_bytes:
        raise ConfigurationError(
            f"{graph}: must be {variant.size_bytes} bytes, as specified in its manifest",
            field="artifact",
        )


def read_calibration(artifact: Artifact) -> Calibration:
    """Reads the calibration set in an embedding model's artifact.

    Raises:
        ConfigurationError: the file is missing or broken.
    """
    import numpy as np  # every worker reads manifests, but few of them read texts

    path = artifact.folder / CALIBRATION
    try:
        with np.load(path, allow_pickle=False) as arrays:
            lengths = arrays["lengths"].astype(np.int64)
            ids = arrays["ids"].astype("<u4", copy=False)
            types = arrays["type_ids"].astype("<u4", copy=False) if "type_ids" in arrays else None
            vectors = arrays["vectors"].astype(np.float32, copy=False)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigurationError(f"{path}: {error}", field="artifact") from error
    flat = ids.size if types is None else types.size
    if vectors.ndim != 2 or len(vectors) != len(lengths) or not ids.size == flat == lengths.sum():
        raise ConfigurationError(f"{path}: arrays have inconsistent shapes", field="artifact")
    ends = np.cumsum(lengths)
    texts = [
        PreparedText(
            key="",
            length=int(length),
            ids=ids[end - length : end].tobytes(),
            type_ids=b"" if types is None else types[end - length : end].tobytes(),
        )
        for length, end in zip(lengths, ends, strict=True)
    ]
    return Calibration(texts, vectors)


def write_calibration(folder: Path, calibration: Calibration) -> None:
    """Writes calibration.npz: `ids` (flat uint32), `lengths`, `vectors`, and any `type_ids`."""
    import numpy as np

    texts = calibration.texts
    arrays = {
        "ids": np.frombuffer(b"".join(text.ids for text in texts), "<u4"),
        "lengths": np.array([text.length for text in texts], np.int64),
        "vectors": np.asarray(calibration.vectors, np.float32),
    }
    if any(text.type_ids for text in texts):
        zeros = [bytes(4 * text.length) for text in texts]
        parts = [text.type_ids or zero for text, zero in zip(texts, zeros, strict=True)]
        arrays["type_ids"] = np.frombuffer(b"".join(parts), "<u4")
    np.savez(folder / CALIBRATION, allow_pickle=False, **arrays)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Locks the file `path`, waiting until no other process on this machine holds the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def new_artifact(artifacts_dir: Path, model: str, digest: str) -> Iterator[Path]:
    """Yields an empty folder for a new artifact, which is published if the block succeeds.

    Open files of a replaced artifact stay readable.

    Raises:
        ConfigurationError: the folder is not a complete artifact.
    """
    target = artifacts_dir / model / digest
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as scratch:
        # The check covers the folder's name, so the draft already has its final name.
        draft = Path(scratch) / model / digest
        draft.mkdir(parents=True)
        yield draft
        read_artifact(draft)
        if target.exists():
            target.rename(Path(scratch) / "former")
        draft.rename(target)


def take_over(former: Artifact, draft: Path) -> list[Variant]:
    """Copies `former`'s graphs into `draft`. Returns the graphs' variants for the new manifest."""
    for variant in former.manifest.variants:
        if variant.file:
            shutil.copyfile(former.graph(variant), draft / variant.file)
    return former.manifest.variants


def source_digest(folder: Path, revision: str) -> str:
    """Returns the first 16 hex digits of SHA-256 over a model's source files' names and contents.

    Documents and hidden files are ignored. Hashing 90 MB takes a tenth of a second.
    """
    total = hashlib.sha256(f"{FORMAT_VERSION}\n{revision}\n".encode())
    for path in sorted(
        path for path in folder.rglob("*") if _counts(path.relative_to(folder)) and path.is_file()
    ):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        name = os.fsencode(path.relative_to(folder).as_posix())
        total.update(name + f"\n{path.stat().st_size}\n{content}\n".encode())
    return total.hexdigest()[:16]


def _counts(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and path.suffix.lower() not in _DOCUMENT_SUFFIXES
