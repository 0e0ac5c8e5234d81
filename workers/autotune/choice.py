"""A choice of backend and batch size and its measurements, as saved on disk."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from shared.errors import MALFORMED
from shared.models.catalog import Model
from shared.models.entry import Batch
from shared.models.tasks.embedding import batch_of_tokens
from workers.autotune.batch_budget import BudgetTiming
from workers.models.backend import Backend

PROVISIONAL_S = 24 * 60 * 60.0
"""How long a provisional choice remains valid. The first start after that measures again."""


class Layout(NamedTuple):
    """The number of model processes, and the number of threads in each."""

    processes: int
    threads: int

    @property
    def name(self) -> str:
        """The layout's name in logs: `2 x 1` is two processes with one thread each."""
        return f"{self.processes} x {self.threads}"


class TuningSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The worker settings that affect a choice; see WorkerSettings."""

    artifacts_dir: str
    device: str
    processes: int
    threads: int
    memory_fraction: float


class Finding(msgspec.Struct, kw_only=True):
    """The measurements of one candidate.

    Cosine similarities compare it with torch fp32 on the calibration set. `texts_per_s` is 0 if it
    was not timed. `reason` explains why the candidate was ruled out, or is empty.
    """

    name: str
    cosine_min: float = 0.0
    cosine_mean: float = 0.0
    texts_per_s: float = 0.0
    reason: str = ""


class Choice(msgspec.Struct, kw_only=True, tag="choice"):
    """The choice for a worker: the backend, its processes and threads, and the reason.

    `batch_tokens`: tokens per batch on this device. 0: not measured. `budgets` are the timings that
    this number is based on. `is_provisional`: True if something could not be measured.
    """

    backend: Backend
    layout: Layout
    reason: str
    is_provisional: bool = False
    findings: list[Finding] = []
    batch_tokens: int = 0
    budgets: list[BudgetTiming] = []

    def batch(self, entry: Model) -> Batch:
        """Returns a batch's limits, which never exceed the entry's."""
        return batch_of_tokens(entry, self.batch_tokens) if self.batch_tokens else entry.usual_batch


class Refusal(msgspec.Struct, kw_only=True, tag="refusal"):
    """The catalog entry does not allow any of the candidates.

    `message` is the message of a ConfigurationError.
    """

    message: str


def read_choice(path: Path) -> Choice | None:
    """Returns the choice saved in `path`.

    None if it is missing, unreadable, or an expired provisional choice, or if its graph is missing.
    """
    try:
        choice = msgspec.json.decode(path.read_bytes(), type=Choice)
        age_s = time.time() - path.stat().st_mtime
    except (OSError, *MALFORMED):
        return None
    is_whole = not choice.backend.graph or Path(choice.backend.graph).is_file()
    is_old = choice.is_provisional and age_s > PROVISIONAL_S
    return choice if is_whole and not is_old else None


def write_choice(path: Path, choice: Choice) -> None:
    """Saves `choice` in `path` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".choice-", delete=False) as file:
        file.write(msgspec.json.format(msgspec.json.encode(choice)) + b"\n")
    os.replace(file.name, path)
