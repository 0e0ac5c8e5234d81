"""A choice of backend, with the figures it rests on, as it is kept on disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from workers.models.backend import Backend


class Layout(NamedTuple):
    """How many model processes, and threads of each."""

    processes: int
    threads: int

    @property
    def name(self) -> str:
        """For logs: `2 x 1` are two processes of one thread."""
        return f"{self.processes} x {self.threads}"


class TuningSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's settings say about a choice; as in WorkerSettings."""

    artifacts_dir: str
    device: str
    processes: int
    threads: int


class Finding(msgspec.Struct, kw_only=True):
    """What was found out about one candidate.

    Cosines are to torch fp32 over the calibration set, texts_per_s by Layout.name. `disturbance`: the greatest share of
    a timing in which others had the cores. `reason`: why it is left out; empty where it is not.
    """

    name: str
    cosine_min: float = 0.0
    cosine_mean: float = 0.0
    texts_per_s: dict[str, float] = {}
    disturbance: float = 0.0
    reason: str = ""


class Choice(msgspec.Struct, kw_only=True, tag="choice"):
    """What a worker runs: the backend, its processes and the threads of each, and why.

    `is_provisional`: it rests on no measurement, or on one that real batches contradict, so it is measured again once
    the worker is idle (workers/autotune/renewal.py). `cpu_s_per_token`: what a computed token cost when it was
    measured; 0 where that is not known.
    """

    backend: Backend
    layout: Layout
    reason: str
    is_provisional: bool = False
    cpu_s_per_token: float = 0.0
    findings: list[Finding] = []


class Refusal(msgspec.Struct, kw_only=True, tag="refusal"):
    """There is nothing the catalog's entry allows; the message of a ConfigurationError."""

    message: str


def read_choice(path: Path) -> Choice | None:
    """The choice kept in `path`; None where there is none that can be read, or its graph is gone."""
    try:
        choice = msgspec.json.decode(path.read_bytes(), type=Choice)
    except (OSError, msgspec.MsgspecError):
        return None
    is_whole = not choice.backend.graph or Path(choice.backend.graph).is_file()
    return choice if is_whole else None


def write_choice(path: Path, choice: Choice) -> None:
    """Keeps `choice` in `path`; whoever reads it meanwhile sees the former one or this one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".choice-", delete=False) as file:
        file.write(msgspec.json.format(msgspec.json.encode(choice)) + b"\n")
    os.replace(file.name, path)
