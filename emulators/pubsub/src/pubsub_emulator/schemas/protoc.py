"""Runs Google's protocol buffer compiler in a separate process."""

import re
import subprocess
import sys
from pathlib import Path

import grpc_tools
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from pubsub_emulator.errors import ServerUnavailable
from pubsub_emulator.schemas.mismatch import Malformed
from pubsub_emulator.schemas.protoc_child import FAILED

MAX_CPU_S = 5
MAX_MEMORY_MIB = 512
"""Far more than any real definition needs.

At the maximum size of 300 KiB, 50,000 reserved numbers took the longest to compile, and names
50,000 letters long used the most memory.
"""
LIMIT_S = 30.0
_CHILD = Path(__file__).with_name("protoc_child.py")
_LIBRARIES = Path(grpc_tools.__file__).parents[1]
_AT_A_PLACE = re.compile(r"^/dev/stdin:(\d+):(\d+): (.+)", re.M)
_IN_THE_FILE = re.compile(r"^(?:definition\.proto|/dev/stdin): (.+)", re.M)


def compile_definition(definition: str) -> FileDescriptorProto:
    """Return the compiled form of a protocol buffer definition.

    This takes tens of milliseconds, so call it in a thread.

    Raises:
        Malformed: the first error reported by the compiler, with its line and column.
        ServerUnavailable: the machine is too busy, or the compiler does not run on it.
    """
    limits = [str(MAX_CPU_S), str(MAX_MEMORY_MIB)]
    command = [sys.executable, "-I", "-S", str(_CHILD), str(_LIBRARIES), *limits]
    try:
        done = subprocess.run(
            command, input=definition.encode(), capture_output=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerUnavailable(
            "The machine does not have enough resources to compile the definition."
        ) from error
    if done.returncode < 0:
        raise Malformed(
            f"compiling it takes more than {MAX_CPU_S} s or {MAX_MEMORY_MIB} MiB of memory"
        )
    if done.returncode == FAILED:
        reason = done.stderr.decode(errors="replace").strip()
        raise ServerUnavailable(f"The schema compiler can't run here: {reason}")
    if done.returncode:
        raise Malformed(_first_error(done.stderr.decode(errors="replace")))
    (compiled,) = FileDescriptorSet.FromString(done.stdout).file
    return compiled


def _first_error(report: str) -> str:
    places = [match.groups() for match in _AT_A_PLACE.finditer(report)]
    errors = [error for error in places if not error[2].startswith("warning: ")]
    # A missing import is reported first, on a line without a position.
    for line, column, reason in [
        error for error in errors if error[2].startswith("Import ")
    ] + errors:
        if reason.startswith("Import "):
            reason = "a definition can't import other files"
        return f"line {line}, column {column}: {reason}"
    in_the_file = _IN_THE_FILE.search(report)
    return in_the_file[1] if in_the_file else "the compiler did not report a reason"
