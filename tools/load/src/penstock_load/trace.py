"""Traces: recorded arrivals in CSV or JSONL.

`penstock simulate` reads the arrival times from the same files.

at_s,tenant,model,size,group,items,deadline_s,cancel_after_s,lane
0.013,acme,all-MiniLM-L6-v2,12,a,1,,,
0.020,zenith,stable-diffusion-tiny,20,,1,60,2.5,batch
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shared.errors import ConfigurationError

MAX_ITEMS = 256
MAX_SIZE = 10_000
FIELD = "file"


class Arrival(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request in a trace or a day. Only `at_s` is required."""

    at_s: Annotated[float, msgspec.Meta(ge=0)]
    """Seconds from the start."""
    tenant: str = ""
    """The tenant whose key is used. Empty means the only key, or no key."""
    model: str = ""
    """Empty means the first model replayed."""
    input: str = ""
    """A text or a prompt. If empty, it is generated from `group` and `size`."""
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)] = 0
    """Number of words in a text, or of steps in an image. 0 means a typical number."""
    group: str = ""
    """Requests in the same group have the same input, and images also have the same seed.

    Empty means a separate group.
    """
    items: Annotated[int, msgspec.Meta(ge=1, le=MAX_ITEMS)] = 1
    """Number of texts or images."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Deadline requested by the caller. None means the model's default."""
    cancel_after_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Time after which the caller disconnects. None means never."""
    priority: Literal["", "interactive", "batch"] = msgspec.field(default="", name="lane")


def read_trace(path: Path) -> list[Arrival]:
    """Reads the arrivals of a trace, ordered by time. Unknown columns are ignored.

    Raises:
        ConfigurationError: the file can't be read, or a line is invalid.
    """
    arrivals = []
    for number, line in _read_numbered(path):
        try:
            arrival = msgspec.convert(line, Arrival, strict=False)
        except msgspec.ValidationError as error:
            raise _wrong(path, number, str(error).replace(" - at `$.", " in `")) from error
        for name in ("at_s", "deadline_s", "cancel_after_s"):
            if not math.isfinite(getattr(arrival, name) or 0.0):
                raise _wrong(path, number, f"{name} must be a number of seconds")
        arrivals.append(arrival)
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def read_times(path: Path) -> list[float]:
    """Reads the times in a trace, in order, as seconds from its start.

    Raises:
        ConfigurationError: the file can't be read, or a line does not have a numeric `at_s` of at
            least 0.
    """
    try:
        return sorted(_as_seconds(line["at_s"]) for _, line in _read_numbered(path))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path}: every line must have a number at_s ({error})", field=FIELD
        ) from error


def _as_seconds(value: Any) -> float:
    seconds = float(value)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"got {value}")
    return seconds


def write_trace(path: Path, arrivals: Sequence[Arrival]) -> None:
    """Writes arrivals as JSONL.

    Raises:
        ConfigurationError: the file can't be written.
    """
    encoder = msgspec.json.Encoder()
    try:
        with path.open("wb") as file:
            for arrival in arrivals:
                file.write(encoder.encode(arrival) + b"\n")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}", field=FIELD) from error


def _read_numbered(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the lines of a trace with their numbers. An empty CSV cell counts as missing."""
    number = 1
    try:
        with path.open(encoding="utf-8", newline="") as file:
            if path.suffix == ".csv":
                for number, row in enumerate(csv.DictReader(file), 2):
                    yield number, {name: cell for name, cell in row.items() if name and cell}
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, json.loads(line)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}", field=FIELD) from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise _wrong(path, number, str(error)) from error


def _wrong(path: Path, number: int, reason: str) -> ConfigurationError:
    return ConfigurationError(f"{path}: line {number}: {reason}", field=FIELD)
