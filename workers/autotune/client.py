"""Chooses a backend in the I/O process: reads the choice from disk, or has a process measure it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
from prometheus_client import Gauge

from shared.errors import MALFORMED, ConfigurationError
from shared.models.catalog import Model
from shared.settings import WorkerSettings
from workers.autotune.candidates import choose_layout
from workers.autotune.choice import Choice, Refusal, TuningSettings, read_choice
from workers.autotune.hardware import detect_machine
from workers.models.artifact import Artifact, find_artifact, source_digest
from workers.models.backend import choose_unmeasured_backend
from workers.runtime.child_process import child_environment

SCHEME = 6
"""Part of every fingerprint. Incremented when the way choices are made changes."""
CHOOSE_LIMIT_S = 180.0
"""Time limit for a choice, long enough for two workers in turn, each importing torch on a busy
machine.
"""

BACKEND_INFO = Gauge(
    "penstock_worker_backend_info",
    "1 for the chosen backend of a model, with its processes and threads",
    ["model", "backend", "precision", "threads", "processes"],
)

log = logging.getLogger(__name__)


async def choose_backend(entry: Model, folder: Path, settings: WorkerSettings) -> Choice:
    """Returns the backend and layout for `entry`: chosen at an earlier start, or measured now.

    Args:
        settings: device, processes, and threads (0 if undecided), and the folder for artifacts and
            choices.

    Raises:
        ConfigurationError: the entry's backend or precision is unavailable, or exceeds its
            tolerance.
    """
    began_s = time.monotonic()
    tuning = _tuning_settings(settings)
    digest, artifact = await asyncio.to_thread(_source, entry, folder, tuning)
    if artifact is None:
        _check_artifact_needed(entry, settings)
    choice = read_choice(choice_path(entry, tuning, digest, artifact))
    was_kept = choice is not None
    if choice is None:
        choice = await _choose(entry, folder, tuning, digest)
    _log_choice(entry, choice, was_kept, time.monotonic() - began_s)
    return choice


def _tuning_settings(settings: WorkerSettings) -> TuningSettings:
    return TuningSettings(
        artifacts_dir=str(settings.artifacts_dir),
        device=settings.device,
        processes=settings.processes,
        threads=settings.threads,
        memory_fraction=settings.memory_fraction,
    )


def _source(entry: Model, folder: Path, tuning: TuningSettings) -> tuple[str, Artifact | None]:
    """Returns the digest of the model's files, and the artifact built from them."""
    digest = source_digest(folder, entry.revision)
    return digest, find_artifact(Path(tuning.artifacts_dir), entry.name, digest)


def choice_path(
    entry: Model, tuning: TuningSettings, digest: str, artifact: Artifact | None
) -> Path:
    """Returns a choice's file.

    The choice's name is a fingerprint of everything the choice depends on.
    """
    facts = {
        "scheme": SCHEME,
        "machine": detect_machine().facts(),
        "entry": entry.model_dump(mode="json"),
        "source": digest,
        "artifact": None if artifact is None else artifact.digest,
        "given": (tuning.device, tuning.processes, tuning.threads, tuning.memory_fraction),
    }
    fingerprint = hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()[:16]
    return Path(tuning.artifacts_dir) / entry.name / f"choice-{fingerprint}.json"


def making_command(entry: Model, settings: WorkerSettings) -> str:
    """Returns the command that creates the artifact for `entry`."""
    return (
        f"penstock optimize {entry.name} --models-file {settings.models_file} "
        f"--artifacts-dir {settings.artifacts_dir}"
    )


def _check_artifact_needed(entry: Model, settings: WorkerSettings) -> None:
    command = making_command(entry, settings)
    choose_unmeasured_backend(entry, command)
    if entry.backend == "auto":
        log.info("no artifact, so torch only", extra={"model": entry.name, "make_it_with": command})


async def _choose(entry: Model, folder: Path, tuning: TuningSettings, digest: str) -> Choice:
    """Chooses in a separate process. Falls back to torch if that process fails."""
    words = [f"--model={entry.model_dump_json()}", f"--folder={folder}", f"--digest={digest}"]
    words += [f"--settings={msgspec.json.encode(tuning).decode()}"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "workers.autotune",
        *words,
        env=child_environment(1),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(CHOOSE_LIMIT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return _fallback(entry, tuning, f"choosing a backend took longer than {CHOOSE_LIMIT_S:g} s")
    finally:
        # Also kills the benchmark processes, which are in the same session. They are already gone
        # if the process exited normally.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    try:
        answer = msgspec.json.decode(output.splitlines()[-1], type=Choice | Refusal)
    except (IndexError, *MALFORMED):
        return _fallback(
            entry,
            tuning,
            f"the process choosing the backend exited with status {process.returncode}",
        )
    if isinstance(answer, Refusal):
        raise ConfigurationError(answer.message, field="backend")
    return answer


def _fallback(entry: Model, tuning: TuningSettings, reason: str) -> Choice:
    log.warning("no backend could be chosen", extra={"model": entry.name, "reason": reason})
    machine = detect_machine()
    layout = choose_layout(
        tuning.processes, tuning.threads, machine, is_gpu=machine.computes_on_gpu(tuning.device)
    )
    return Choice(
        backend=choose_unmeasured_backend(entry), layout=layout, reason=reason, is_provisional=True
    )


def _log_choice(entry: Model, choice: Choice, was_kept: bool, took_s: float) -> None:
    """Logs the choice and its reason, and sets the gauge."""
    backend, layout = choice.backend, choice.layout
    log.info(
        "backend chosen",
        extra={
            "model": entry.name,
            "backend": backend.name,
            "processes": layout.processes,
            "threads": layout.threads,
            "call_tokens": backend.call_tokens,
            "batch_tokens": choice.batch(entry).max_tokens,
            "budgets": msgspec.to_builtins(choice.budgets),
            "reason": choice.reason,
            "candidates": msgspec.to_builtins(choice.findings),
            "is_provisional": choice.is_provisional,
            "was_kept": was_kept,
            "took_s": round(took_s, 2),
        },
    )
    BACKEND_INFO.labels(
        entry.name, backend.backend, backend.precision, layout.threads, layout.processes
    ).set(1)
