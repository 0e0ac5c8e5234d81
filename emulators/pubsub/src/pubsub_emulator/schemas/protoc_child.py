"""The child process of `protoc.py`: compiles standard input within time and memory limits.

It runs without this package or its libraries: `protoc_child.py <libraries> <seconds> <MiB>`.
"""

import importlib
import os
import resource
import sys

FAILED = 70
"""Exit status for failures not caused by the definition: EX_SOFTWARE from sysexits.h."""
_MIB = 1024**2
_MAX_OUTPUT_BYTES = 8 * _MIB
_MAX_ERRORS_BYTES = 64 * 1024


def main(libraries: str, cpu_s: int, memory_mib: int) -> int:
    """Writes a `FileDescriptorSet` to standard output, or errors to standard error.

    Returns:
        The compiler's exit status.
    """
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_mib * _MIB,
        resource.RLIMIT_FSIZE: _MAX_OUTPUT_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    sys.path.insert(0, libraries)
    compiler = importlib.import_module("grpc_tools._protoc_compiler")
    # In-memory files, because file sizes are limited: the compiler may report thousands of errors,
    # each with a 100 KB name.
    compiled = os.memfd_create("compiled")
    errors = os.memfd_create("errors")
    standard_error = os.dup(2)
    os.dup2(errors, 2)
    # No directory is searched, so imports are never found.
    arguments = [
        "protoc",
        "--proto_path=definition.proto=/dev/stdin",
        f"--descriptor_set_out=/dev/fd/{compiled}",
        "definition.proto",
    ]
    status: int = compiler.run_main([argument.encode() for argument in arguments])
    os.dup2(standard_error, 2)
    if status:
        _copy(errors, 2, _MAX_ERRORS_BYTES)
    else:
        _copy(compiled, 1, _MAX_OUTPUT_BYTES)
    return status


def _copy(source: int, target: int, size_bytes: int) -> None:
    unwritten = os.pread(source, size_bytes, 0)
    while unwritten:
        unwritten = unwritten[os.write(target, unwritten) :]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    except Exception as error:
        # The parent process distinguishes this from an error in the definition.
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(FAILED)
