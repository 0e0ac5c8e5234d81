"""`penstock predict`: runs a class locally, without a stack, and shows its output."""

from __future__ import annotations

import json
import mimetypes
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shared.errors import BadInput, ConfigurationError, ModelFailed
from shared.models.blob import FILE_FORMAT
from shared.models.interface import ModelInterface
from shared.models.tasks.custom import format_piece
from workers.models.custom.checking import show_inspection
from workers.models.custom.environments import python_for
from workers.models.custom.predictions import NO_ANSWER
from workers.models.custom.printed import show
from workers.models.custom.process import RunnerProcess, end_of
from workers.models.custom.runner.frames import Frame
from workers.models.custom.variables import entry_variables, variables_of

WAIT_S = 1.0


def predict(folder: Path, assignments: Sequence[str], out: Path) -> None:
    """Runs a class once. Prints its output as JSON, and writes its files.

    Args:
        assignments: NAME=VALUE for each input, NAME=@PATH for a file. A list is given either as
            JSON or by repeating the name.
        out: folder for the output's files, or a file for the output itself: its first file or, if
            it has no files, its text or JSON. Additional files get a number in their names.

    Raises:
        ConfigurationError: the class can't be loaded or set up.
    """
    interface = show_inspection(folder)
    folder = folder.expanduser().resolve()
    frame, count = _run(folder, interface, assignments, out)
    print(frame.message.get("log", ""), end="", file=sys.stderr)
    if "batch_error" in frame.message:
        raise ModelFailed(frame.message["batch_error"])
    if "error" in frame.message:
        kind = BadInput if frame.message["kind"] == "input" else ModelFailed
        raise kind(frame.message["error"])
    if interface.streams:
        print()
    else:
        _show_output(frame, out)
    if not out.is_dir() and not frame.message["files"] and not count:
        _write(out, _text_of(frame.message["output"], interface).encode())


def _run(
    folder: Path, interface: ModelInterface, assignments: Sequence[str], out: Path
) -> tuple[Frame, int]:
    """Runs a class once, and shows its pieces.

    Returns:
        The last frame, and the number of files in the pieces.

    Raises:
        ConfigurationError: the class can't be loaded or set up.
        BadInput: an assignment or a file is invalid.
        ModelFailed: the class's process exited or was killed.
    """
    values, files, blobs = read_assignments(interface, assignments)
    variables = variables_of(folder, entry_variables(folder))
    runner = RunnerProcess(
        folder,
        python=python_for(folder),
        environment=variables.environment,
        hidden=variables.hidden,
        shows=show,
    )
    frame: Frame | None
    count = 0  # number of files in the pieces so far
    try:
        frames = _frames(runner)
        ready = next(frames, None)
        if ready is not None and "failed" in ready.message:
            raise ConfigurationError(f"{folder}: {ready.message['failed']}", field="source")
        batch = [({"batch": 1}, ())] if interface.batches else []
        runner.send_all([*batch, ({"id": 1, "input": values, "files": files}, blobs)])
        while (frame := next(frames, None)) is not None and "piece" in frame.message:
            count = _show_piece(frame, interface, out, count)
    finally:
        reason = runner.killed_for
        runner.kill("it is no longer needed")
        status = runner.close()
    if frame is None:
        how = f"was killed: {reason}" if reason else end_of(status)
        raise ModelFailed(f"the model process {how}")
    if frame.message.get("is_packed"):
        written, *blobs = frame.blobs
        frame = Frame(frame.message | {"output": json.loads(written)}, blobs)
    return frame, count


def _frames(runner: RunnerProcess) -> Iterator[Frame]:
    """Yields the process's frames until it exits. The user may interrupt the wait.

    Raises:
        ModelFailed: the process sent something else.
    """
    try:
        while (frames := runner.receive(WAIT_S)) is not None:
            yield from frames
    except ValueError as error:  # from the class, which may write to its socket
        raise ModelFailed(f"the model process was killed: {NO_ANSWER}") from error


def _show_piece(frame: Frame, interface: ModelInterface, out: Path, count: int) -> int:
    """Shows a piece that comes after `count` files. Returns the new number of files."""
    if interface.streams == "text":
        print(frame.message["piece"], end="", flush=True)
    else:
        print(json.dumps(_with_files(frame, "piece", out, count)), flush=True)
    return count + len(frame.blobs)


def _show_output(frame: Frame, out: Path) -> None:
    print(json.dumps(_with_files(frame, "output", out), indent=2, ensure_ascii=False))
    if metrics := frame.message["metrics"]:
        print(f"metrics: {json.dumps(metrics)}", file=sys.stderr)


def _with_files(frame: Frame, field: str, out: Path, count: int = 0) -> Any:
    """Writes a frame's files. Returns one of its fields, including their paths."""
    whole: dict[str, Any] = {"value": frame.message[field]}
    files = zip(frame.message["files"], frame.blobs, strict=True)
    for number, (where, data) in enumerate(files, count):
        suffix = Path(where["name"]).suffix or mimetypes.guess_extension(where["media_type"]) or ""
        suffix_number = f"-{number}" if number else ""
        path = out.with_stem(out.stem + suffix_number)
        if out.is_dir():
            path = out / f"output{suffix_number}{suffix}"
        _write(path, data)
        place: Any = whole
        # A piece's paths start with its number.
        at = ["value", *(where["at"][1:] if field == "piece" else where["at"])]
        for part in at[:-1]:
            place = place[part]
        place[at[-1]] = str(path)
    return whole["value"]


def _text_of(output: Any, interface: ModelInterface) -> str:
    """Formats an output for a file: text as is, anything else as JSON."""
    if interface.streams == "text":
        return "".join(map(format_piece, output))
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False) + "\n"


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigurationError(f"-o {path}: {error.strerror}") from error


def read_assignments(
    interface: ModelInterface, assignments: Sequence[str]
) -> tuple[dict[str, Any], list[dict[str, Any]], list[bytes]]:
    """Parses NAME=VALUE and NAME=@PATH.

    Returns the values, the files' places, and the files' bytes.

    Raises:
        BadInput: an assignment is malformed, or there is no such input or file.
    """
    values: dict[str, Any] = {}
    files: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        shape = interface.properties.get(name)
        if not equals or shape is None:
            known = ", ".join(interface.properties) or "none"
            raise BadInput(
                f"-i {assignment}: must be NAME=VALUE, where NAME is one of the inputs: {known}"
            )
        is_list = shape.get("type") == "array"
        element = shape.get("items", {}) if is_list else shape
        if element.get("format") == FILE_FORMAT:
            at: list[str | int] = [name]
            if is_list:
                at.append(len(values.setdefault(name, [])))
                values[name].append(None)
            else:
                values[name] = None
            path = Path(text.removeprefix("@"))
            blobs.append(read_file(f"-i {name}", path))
            files.append({"at": at, "name": path.name})
        elif is_list and not text.startswith("["):
            value = text if element.get("type") == "string" else _from_json(name, text)
            elements = values.setdefault(name, [])
            if not isinstance(elements, list):
                raise BadInput(f"-i {name}: {elements[:80]} is not a list as JSON", field=name)
            elements.append(value)
        else:
            values[name] = text if shape.get("type") == "string" else _from_json(name, text)
    return values, files, blobs


def read_file(label: str, path: Path, folder: Path = Path()) -> bytes:
    """Returns the bytes of a file passed for an input.

    Args:
        label: where the path was passed, for the error message.
        folder: folder that the path is relative to.

    Raises:
        BadInput: the file can't be read.
    """
    try:
        return (folder / path.expanduser()).read_bytes()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, or a null character
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{label}: {folder / path}: {reason}") from error


def _from_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        return text  # a union may accept the text
