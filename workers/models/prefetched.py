"""The layout of weights that were copied from the hub: in a bucket, and where one is mounted.

A copy is the folder `hub/ORG/NAME/REVISION`, with the files of the repository as they are there. A
file beside it, `hub/ORG/NAME/REVISION.json`, lists them and is written last, so a copy with a list
is complete.
"""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath

import msgspec

log = logging.getLogger(__name__)


class Copy(msgspec.Struct, kw_only=True):
    """What a copy has: the commit that its revision named then, and the bytes of each file."""

    commit: str
    files: dict[str, int]


def folder_of(repository: str, revision: str) -> PurePosixPath:
    """The path of a copy in the bucket. A revision such as refs/pr/1 is one folder too."""
    return PurePosixPath("hub", repository, revision.replace("/", "--"))


def list_of(repository: str, revision: str) -> PurePosixPath:
    """The path of the list of its files."""
    folder = folder_of(repository, revision)
    return folder.with_name(f"{folder.name}.json")


def find_copy(weights_dir: Path, repository: str, revision: str) -> Path | None:
    """The folder of a complete copy below `weights_dir`, or None."""
    listed = weights_dir / list_of(repository, revision)
    folder = weights_dir / folder_of(repository, revision)
    try:
        copy = msgspec.json.decode(listed.read_bytes(), type=Copy)
    except FileNotFoundError:
        log.info("weights were not prefetched", extra={"source": f"hf:{repository}"})
        return None
    except (OSError, msgspec.MsgspecError) as error:
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
