"""File and batch IDs, and their keys in the object store.

    batches/files/<owner>/<file>/data, file.json     an uploaded file, or the output of a batch
    batches/runs/<owner>/<batch>/…                   the documents and the segments of a batch
    batches/open/<owner>/<batch>/open, cancel        markers of the batches that are not over
    batches/admissions/<owner>/<number>              which of them were admitted

`<owner>` is a digest of the tenant, so one tenant's IDs can't lead to another tenant's objects. IDs
begin with a creation timestamp that counts down, so the newest ID sorts first.
"""

from __future__ import annotations

import hashlib
import re
import secrets

from api.inputs.storage import BATCH_FILES
from api.inputs.storage import owner_of as owner_of

FILES = BATCH_FILES
RUNS = "batches/runs"
OPEN = "batches/open"
ADMISSIONS = "batches/admissions"
_LAST_MS = 16**12 - 1
_FILE = re.compile(r"file-[0-9a-f]{32}")
_BATCH = re.compile(r"batch_[0-9a-f]{32}")


def new_file_id(at_s: float, seed: str = "") -> str:
    """Returns the ID for a file created at `at_s` (Unix time). The same seed yields the same ID."""
    return f"file-{_countdown(at_s)}{_tail(seed)}"


def new_batch_id(at_s: float) -> str:
    """Returns the ID for a batch created at `at_s` (Unix time)."""
    return f"batch_{_countdown(at_s)}{_tail('')}"


def parse_created_at_s(batch_id: str) -> float:
    """Returns the creation time in a batch ID (Unix time)."""
    return (_LAST_MS - int(batch_id.removeprefix("batch_")[:12], 16)) / 1000


def is_file_id(name: str) -> bool:
    """Returns whether `name` looks like a file ID."""
    return _FILE.fullmatch(name) is not None


def is_batch_id(name: str) -> bool:
    """Returns whether `name` looks like a batch ID."""
    return _BATCH.fullmatch(name) is not None


def _countdown(at_s: float) -> str:
    return f"{_LAST_MS - int(at_s * 1000):012x}"


def _tail(seed: str) -> str:
    if not seed:
        return secrets.token_hex(10)
    return hashlib.blake2b(seed.encode(), digest_size=10).hexdigest()
