"""Inspects a folder's class in another process and writes its penstock.schema.json."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from shared.errors import ConfigurationError
from shared.models.interface import (
    INTERFACE_FILE,
    MAX_BYTES,
    MAX_INPUTS,
    ModelInterface,
    read_interface,
)
from shared.models.measurement import MEASUREMENT_FILE, read_measurement
from workers.models.custom.environments import python_for, unmet
from workers.models.custom.predictions import NO_ANSWER
from workers.models.custom.process import RunnerProcess, end_of
from workers.models.custom.runner.confinement import SRC
from workers.models.custom.runner.frames import Frame
from workers.models.custom.sources import (
    find_fixed_ports,
    find_without_effect,
    place_of,
    read_sources,
)
from workers.models.custom.variables import entry_variables, variables_of

INSPECTION_LIMIT_S = 300.0
"""Time limit for importing the class's module, which may load large libraries."""


class Inspected(NamedTuple):
    """A class's interface, and notes for its author.

    `notes`: cog.yaml settings that have no effect here. `printed`: what its module printed during
    import.
    """

    interface: ModelInterface
    notes: list[str]
    printed: str = ""


def inspect_folder(folder: Path) -> Inspected:
    """Imports a folder's class in a separate process, without calling `setup`, and inspects it.

    If the catalog has an entry for it, the process gets that entry's variables.

    Raises:
        ConfigurationError: the folder does not contain a class that can be served. The message
            includes the reason and the module's output.
    """
    folder = _check_folder(folder)
    sources = read_sources(folder)
    entry = entry_variables(folder)
    left_out: list[str] = []
    variables = variables_of(folder, entry, left_out)
    runner = RunnerProcess(
        folder,
        python=python_for(folder),
        environment=variables.environment,
        hidden=variables.hidden,
        inspects_only=True,
    )
    try:
        frames = runner.receive(INSPECTION_LIMIT_S)
        printed = runner.printed.take().after(0).strip()
        limits = _limits_of_view(folder, runner)
    except ValueError as error:  # from the class, which may write to its socket
        raise ConfigurationError(f"{folder}: {NO_ANSWER}", field="source") from error
    finally:
        status = runner.close()
    message = _read_inspection(folder, frames, status, printed)
    try:
        interface = ModelInterface(**message["ready"], sources_sha256=sources.sha256)
    except ValidationError as error:
        raise ConfigurationError(f"{folder}: {error.errors()[0]['msg']}", field="source") from error
    except TypeError as error:
        raise ConfigurationError(f"{folder}: {NO_ANSWER}", field="source") from error
    _check_size(folder, interface)
    ports = [] if entry.processes == 1 else find_fixed_ports(folder)
    notes = [*read_notes(folder), *message["notes"], *left_out, *ports, *limits]
    return Inspected(interface, notes, printed)


def _read_inspection(
    folder: Path, frames: Sequence[Frame] | None, status: int, printed: str
) -> dict[str, Any]:
    """Returns the message that contains an inspected class's interface.

    Args:
        frames: the frames the process sent. None if it exited.
        status: exit status of the class's process.

    Raises:
        ConfigurationError: the class was not inspected.
    """
    message: dict[str, Any] = frames[0].message if frames else {}
    if "ready" in message:
        return message
    reason = f"importing its module took longer than {INSPECTION_LIMIT_S:g} s"
    if frames is None:
        reason = f"its process {end_of(status)} before it could be inspected"
    elif frames:
        reason = message.get("failed", "it did not start")
    output = f"\n{printed}" if printed else ""
    raise ConfigurationError(f"{folder}: {reason}{output}", field="source")


def _limits_of_view(folder: Path, runner: RunnerProcess) -> list[str]:
    """Describes which operations this system denies to a class in this folder."""
    notes = []
    if linked := runner.read_only_files():
        more = f" (and {len(linked) - 1} more)" if len(linked) > 1 else ""
        notes.append(
            f"{linked[0]}{more}: the class can read it but can't write to it on this system, "
            "which only copies files of up to 8 MiB"
        )
    if runner.view != SRC and (place := place_of(folder, f"{SRC}/")):
        notes.append(
            f"{place}: {SRC} does not exist here because this system does not support a "
            "mount namespace for the class; use the folder of __file__ or relative paths"
        )
    return notes


def show_inspection(folder: Path) -> ModelInterface:
    """Inspects a class as `inspect_folder` does, and prints its output and the notes to stderr.

    Notes about cog.yaml come first, because an ignored setting may be why the class fails.
    """
    early = read_notes(_check_folder(folder))
    for note in early:
        print(f"note: {note}", file=sys.stderr, flush=True)
    inspected = inspect_folder(folder)
    if inspected.printed:
        print(inspected.printed, file=sys.stderr, flush=True)
    for note in inspected.notes:
        if note not in early:
            print(f"note: {note}", file=sys.stderr, flush=True)
    return inspected.interface


def read_notes(folder: Path) -> list[str]:
    """Describes cog.yaml settings that have no effect here, without importing the class.

    Raises:
        ConfigurationError: cog.yaml is invalid.
    """
    return [*find_without_effect(folder), *unmet(folder)]


def _check_folder(folder: Path) -> Path:
    # Unlike Path's method, this one accepts a user who doesn't exist.
    folder = Path(os.path.expanduser(folder)).resolve()
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is not a folder", field="source")
    return folder


def _check_size(folder: Path, interface: ModelInterface) -> None:
    if (count := len(interface.properties)) > MAX_INPUTS:
        raise ConfigurationError(
            f"{folder}: must have at most {MAX_INPUTS} inputs, got {count}", field="source"
        )
    if (size := len(interface.as_json.encode())) > MAX_BYTES:
        raise ConfigurationError(
            f"{folder}: {INTERFACE_FILE.name} would be {size} bytes, which exceeds the "
            f"maximum of {MAX_BYTES}",
            field="source",
        )


def is_current(folder: Path) -> bool:
    """Returns whether a folder's penstock.schema.json matches its current sources."""
    folder = Path(os.path.expanduser(folder))
    with contextlib.suppress(ConfigurationError):
        known = read_interface(INTERFACE_FILE.find(folder))
        return known.sources_sha256 == read_sources(folder).sha256
    return False


def write_interface(folder: Path, interface: ModelInterface) -> Path:
    """Writes penstock.schema.json atomically. Returns its path.

    Raises:
        ConfigurationError: the file can't be written, or the author already has a file with that
            name.
    """
    return INTERFACE_FILE.write(folder.expanduser(), interface.as_json)


def check_class(folder: Path, *, only_if_changed: bool) -> Iterator[str]:
    """Inspects a class and writes its interface. Yields human-readable lines.

    Args:
        only_if_changed: if the interface on disk is up to date, only installs the packages.

    Raises:
        ConfigurationError: the class can't be served.
    """
    if only_if_changed and is_current(folder):
        python_for(folder)
        return
    interface = show_inspection(folder)
    path = write_interface(folder, interface)
    names = ", ".join(interface.properties) or "none"
    streams = {"": "as a whole", "text": "as a stream of text", "items": "element by element"}
    form = "in batches" if interface.batches else streams[interface.streams]
    yield f"{path}: inputs {names}; the output comes {form}"
    yield _describe_capacity(folder.expanduser(), interface)


def _describe_capacity(folder: Path, interface: ModelInterface) -> str:
    """Describes how many predictions a process runs at a time, and how much memory they use."""
    many = f"up to {interface.concurrency} predictions at a time (concurrency.max)"
    count = "batches, by default of up to 64 items" if interface.batches else many
    if not interface.batches and interface.concurrency == 1:
        return "each process computes one prediction at a time"
    memory = f"to measure how much memory this takes: penstock models measure {folder}"
    with contextlib.suppress(ConfigurationError):
        measured = read_measurement(MEASUREMENT_FILE.find(folder))
        if measured.sources_sha256 == interface.sources_sha256:
            peak_mib = measured.peak_memory_bytes / 2**20
            memory = f"{max(measured.batches)} at a time took {peak_mib:,.0f} MiB of memory"
    return f"each process computes {count}; batch.max_items in the entry changes that; {memory}"
