"""`penstock models measure`: times a class and writes the figures for `penstock deploy plan`."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shared.errors import BadInput, PenstockError
from shared.messages import PrintedLogs
from shared.models.blob import FILE_FORMAT
from shared.models.catalog import Model
from shared.models.catalog_file import LOCAL
from shared.models.entry import MAX_STARTUP_S, MAX_WORK
from shared.models.interface import ModelInterface
from shared.models.measurement import CPU, MEASUREMENT_FILE, ModelMeasurement
from shared.models.tasks import Result
from shared.models.tasks.custom import CUSTOM, CustomResult, interface_of
from shared.process.process_tree import list_tree
from workers.models.base import PreparedCustom, PreparedFile
from workers.models.custom.aside import AsideClass
from workers.models.custom.client import ClassClient
from workers.models.custom.trial import read_assignments, read_file
from workers.models.custom.variables import entry_variables
from workers.models.gpus import VARIABLE, gpu_variables
from workers.models.reports import BatchResult, ItemEnded, StepMessage

MIB = 1024 * 1024
BATCH_LIMIT_S = 3600.0
"""Time limit for one call to the class. The user may interrupt the call sooner."""


class Conditions(NamedTuple):
    """The conditions under which a class is measured."""

    repeats: int = 5
    """Number of runs per batch. The median is used."""
    threads: int = 1
    """Number of threads per process on a CPU."""
    uses_gpu: bool = True
    """True if the class sees this machine's GPUs."""


def measure(
    folder: Path,
    interface: ModelInterface,
    inputs: Sequence[PreparedCustom],
    conditions: Conditions,
) -> ModelMeasurement:
    """Measures a class in a separate process, the way workers run it.

    Each input is run once first, without being timed. A class that computes several items at a time
    is measured with 1, 2, 4, and so on, up to its maximum.

    Args:
        inputs: at least one input, each as typical as possible.

    Raises:
        ConfigurationError: the class can't be set up.
        PenstockError: the class failed on an input. The message names the input.
    """
    folder = folder.expanduser().resolve()
    entry = _entry(folder, interface)
    device = _gpu() if conditions.uses_gpu else CPU
    if device == CPU:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the runner receives it
    load = os.getloadavg()[0]
    figures = asyncio.run(_measure_process(entry, folder, device, inputs, conditions))
    work_per_item = _work_per_item(entry, folder, inputs) if interface.weighs else None
    return ModelMeasurement(
        measured=_describe_measurement(device, conditions, len(inputs), load),
        device=device,
        setup_s=_round_to_three(figures.setup_s),
        batches={items: _round_to_three(seconds) for items, seconds in figures.batches.items()},
        work_per_item=work_per_item,
        peak_memory_bytes=figures.peak_bytes or _peak_of_children_bytes(),
        input_bytes=round(statistics.fmean(map(_input_bytes, inputs))),
        output_bytes=round(statistics.fmean(map(_output_bytes, figures.results))),
        sources_sha256=interface.sources_sha256,
    )


class _Figures(NamedTuple):
    """One class process's measurements."""

    setup_s: float
    results: list[CustomResult]
    """Results, one per input."""
    batches: dict[int, float]
    """Seconds per batch, keyed by number of items."""
    peak_bytes: int


async def _measure_process(
    entry: Model,
    folder: Path,
    device: str,
    inputs: Sequence[PreparedCustom],
    conditions: Conditions,
) -> _Figures:
    others = set(list_tree(os.getpid()))
    client = await ClassClient.start(
        entry, folder, device, conditions.threads, MAX_STARTUP_S, _keep_all
    )
    try:
        measured = MeasuredClass(client, interface_of(entry))
        results = [
            (await measured.compute([item], number))[0] for number, item in enumerate(inputs)
        ]
        batches = {
            items: await measured.batch_s(inputs, items, conditions.repeats)
            for items in _sizes(entry.batch.max_items)
        }
        return _Figures(client.facts.load_s, results, batches, _peak_bytes(others))
    finally:
        await client.close()


async def _keep_all() -> bool:
    """Does nothing, because no other model is on the device."""
    return False


def _entry(folder: Path, interface: ModelInterface) -> Model:
    """Returns a catalog entry with the largest batches that the class supports.

    A class with `predict_batch` accepts any size, so an entry's default is used here. The work per
    input is unlimited.
    """
    work = {"max": MAX_WORK} if interface.weighs else {}
    variables = entry_variables(folder)
    batch = {} if interface.batches else {"max_items": interface.concurrency}
    return Model.model_validate(
        {
            "name": "measured",
            "task": CUSTOM.name,
            "source": f"{LOCAL}{folder}",
            "interface": interface,
            "batch": batch,
            "work": work,
            "environment": dict(variables.environment),
            "secrets": dict(variables.secrets),
        }
    )


def _work_per_item(entry: Model, folder: Path, inputs: Sequence[PreparedCustom]) -> float:
    """Returns the average work per input as reported by the class."""
    aside = AsideClass(entry, folder)
    try:
        return statistics.fmean(map(aside.weigh, inputs))
    finally:
        aside.close()


def _sizes(maximum: int) -> list[int]:
    """Returns 1, 2, 4, and so on, followed by the maximum."""
    sizes = [1]
    while sizes[-1] < maximum:
        sizes.append(min(2 * sizes[-1], maximum))
    return sizes


class MeasuredClass:
    """A class running in its process, with timed batches."""

    def __init__(self, client: ClassClient, interface: ModelInterface) -> None:
        self._client = client
        self._computes_batches = interface.batches

    async def batch_s(self, inputs: Sequence[PreparedCustom], items: int, repeats: int) -> float:
        """Returns seconds per batch of this size: the mean of the inputs' medians."""
        medians = []
        for first in range(0, len(inputs), items):
            batch = [inputs[(first + place) % len(inputs)] for place in range(items)]
            took_s = []
            for _ in range(repeats):
                began_s = time.perf_counter()
                await self.compute(batch, first)
                took_s.append(time.perf_counter() - began_s)
            medians.append(statistics.median(took_s))
        return statistics.fmean(medians)

    async def compute(self, batch: Sequence[PreparedCustom], first: int) -> list[CustomResult]:
        """Runs items together until all are done.

        Args:
            batch: the items.
            first: index of the first item among the inputs, for error messages.

        Raises:
            PenstockError: a prediction failed.
        """
        if self._computes_batches:
            done = await self._client.run(batch, BATCH_LIMIT_S)
            return [
                _check_outcome(outcome, first + at, done.logs.get(at))
                for at, outcome in enumerate(done.outcomes)
            ]
        ended: dict[int, BatchResult] = {}

        def on_message(message: StepMessage) -> None:
            if isinstance(message, ItemEnded):
                ended[message.slot] = message.done

        await self._client.run_steps(batch, BATCH_LIMIT_S, on_message)
        return [
            _check_outcome(ended[slot].outcomes[0], first + slot, ended[slot].logs.get(0))
            for slot in range(len(batch))
        ]


def _check_outcome(
    outcome: Result | PenstockError, number: int, logs: PrintedLogs | None
) -> CustomResult:
    if isinstance(outcome, PenstockError):
        reason = f"input {number + 1}: {outcome.message}"
        printed = logs.after(0).strip() if logs is not None else ""
        raise type(outcome)(f"{reason}\n{printed}" if printed else reason)
    assert isinstance(outcome, CustomResult), (
        "the class returned a different type of result; this is a bug"
    )
    return outcome


def read_inputs(
    interface: ModelInterface, assignments: Sequence[str], lines: Path | None
) -> list[PreparedCustom]:
    """Reads the inputs for the measurement.

    If no inputs are given, uses the simplest possible input.

    Args:
        assignments: NAME=VALUE and NAME=@PATH pairs for one input.
        lines: a file with one JSON object of inputs per line. A file is written as a string,
            `@PATH`, relative to the folder containing this file.

    Raises:
        BadInput: an input is invalid, or a required input is missing.
    """
    if lines is not None:
        return list(_lines(interface, lines))
    chosen = assignments or list(_simplest(interface))
    values, files, blobs = read_assignments(interface, chosen)
    missing = [name for name in interface.inputs.get("required", ()) if name not in values]
    if missing:
        raise BadInput(
            f"{missing[0]}: is required; set it with -i {missing[0]}=VALUE", field=missing[0]
        )
    prepared = [
        PreparedFile(where["at"], where["name"], blob)
        for where, blob in zip(files, blobs, strict=True)
    ]
    return [_prepare(values, prepared, interface)]


def _simplest(interface: ModelInterface) -> Iterator[str]:
    """Yields assignments for the required inputs if none of them is a file."""
    for name, value in interface.example_inputs("some text").items():
        shape = interface.properties[name]
        element = shape.get("items", {}) if shape.get("type") == "array" else shape
        if element.get("format") == FILE_FORMAT:
            raise BadInput(f"{name}: must be a file; set it with -i {name}=@PATH", field=name)
        yield f"{name}={value if isinstance(value, str) else json.dumps(value)}"


def _lines(interface: ModelInterface, path: Path) -> Iterator[PreparedCustom]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        objects = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"--inputs {path}: {error}") from error
    if not objects or not all(isinstance(values, dict) for values in objects):
        raise BadInput(f"--inputs {path}: each line must be a JSON object of inputs")
    for values in objects:
        files: list[PreparedFile] = []
        for name, value in values.items():
            shape = interface.properties.get(name)
            if shape is None:
                known = ", ".join(interface.properties) or "none"
                raise BadInput(f"--inputs {path}: {name} is not an input; use one of {known}")
            values[name] = _without_files(path, [name], value, shape, files)
        yield _prepare(values, files, interface)


def _without_files(
    path: Path, at: list[str | int], value: Any, shape: dict[str, Any], files: list[PreparedFile]
) -> Any:
    """Returns a value with null in place of each file. The files are added to `files`."""
    if shape.get("type") == "array" and isinstance(value, list):
        inner = shape.get("items", {})
        return [
            _without_files(path, [*at, number], element, inner, files)
            for number, element in enumerate(value)
        ]
    if shape.get("format") != FILE_FORMAT or value is None:
        return value
    if not isinstance(value, str) or not value.startswith("@"):
        raise BadInput(
            f"--inputs {path}: {at[0]}: a file must be written as @PATH", field=str(at[0])
        )
    file = Path(value.removeprefix("@"))
    data = read_file(f"--inputs {path}: {at[0]}", file, path.parent)
    files.append(PreparedFile(at, file.name, data))
    return None


def _prepare(
    values: dict[str, Any], files: list[PreparedFile], interface: ModelInterface
) -> PreparedCustom:
    return PreparedCustom(
        key="", length=1, values=values, files=files, is_streamed=bool(interface.streams)
    )


def _input_bytes(item: PreparedCustom) -> int:
    return len(json.dumps(item.values)) + sum(len(file.data) for file in item.files)


def _output_bytes(result: CustomResult) -> int:
    files = sum(len(file.data or b"") for file in result.files)
    return len(msgspec.json.encode(result.output)) + files


def _peak_bytes(others: set[int]) -> int:
    """Returns the total peak memory of this process's descendants, each at its own peak.

    Excludes `others`, which don't belong to the class. Returns 0 if the system doesn't report peak
    memory.
    """
    total = 0
    for pid in set(list_tree(os.getpid())) - others:
        try:
            lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return total


def _peak_of_children_bytes() -> int:
    """Returns the peak memory of the largest process that this one has waited for."""
    unit = 1 if platform.system() == "Darwin" else 1024
    return max(1, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit)


def _describe_measurement(device: str, conditions: Conditions, inputs: int, load: float) -> str:
    where = device if device != CPU else f"{_cpu_model()}, threads: {conditions.threads}"
    return (
        f"penstock models measure, {where}, inputs: {inputs}, repeats: {conditions.repeats}, "
        f"load before: {load:.1f}, {datetime.now(UTC):%Y-%m-%d}"
    )


def _cpu_model() -> str:
    """Returns the CPU's model name.

    On Linux, it comes from this file; on other systems, from `platform`.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _gpu() -> str:
    """Returns the name of the first GPU that a class sees here, or `cpu`."""
    program = shutil.which("nvidia-smi")
    if program is None or os.environ.get(VARIABLE) in ("", "-1"):
        return CPU
    first = gpu_variables("cuda:0")[VARIABLE]
    command = [program, f"--id={first}", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return CPU
    return next(iter(done.stdout.splitlines()), CPU).strip()


def _round_to_three(seconds: float) -> float:
    """Rounds to three digits, because any further digits are noise."""
    return float(f"{seconds:.3g}")


def write_measurement(folder: Path, measurement: ModelMeasurement) -> Path:
    """Writes penstock.measured.json. Returns its path.

    Raises:
        ConfigurationError: the file can't be written, or the author already has a different file
            with that name.
    """
    text = measurement.model_dump_json(indent=2) + "\n"
    return MEASUREMENT_FILE.write(folder.expanduser(), text)


def report(measurement: ModelMeasurement) -> str:
    lines = [
        f"  {measurement.measured}",
        f"  set up after {measurement.setup_s:g} s; at most "
        f"{measurement.peak_memory_bytes / MIB:,.0f} MiB of memory",
        *(
            f"  {items} at a time: {seconds:g} s, {seconds / items:.3g} s an item"
            for items, seconds in measurement.batches.items()
        ),
        *(
            [f"  an input weighs {measurement.work_per_item:g}"]
            if measurement.work_per_item is not None
            else []
        ),
        f"  {measurement.input_bytes:,} bytes in, {measurement.output_bytes:,} bytes out",
    ]
    return "\n".join(lines)
