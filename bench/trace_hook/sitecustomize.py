"""Python imports this at start wherever this folder is on PYTHONPATH: notes which functions run.

bench/request_files.py sets the environment. A byte of a shared file has the number of the window in
which calls are noted. 0: none.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

FOLDERS = ("api", "shared", "workers")
ROWS_ONLY = 128
"""In windows from this number on, only what is called while rows are written is noted."""


def install(trace_dir: Path, root: Path) -> None:
    """Notes each function of ours that is called, once in each window and process."""
    with (trace_dir / "window").open("r+b") as file:
        window = mmap.mmap(file.fileno(), 1)
    ours = tuple(f"{root / folder}/" for folder in FOLDERS)
    seen: set[tuple[int, int, str]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not window[0]:
            return
        code = frame.f_code
        # The process id, because model processes are forked and inherit what was seen.
        key = (os.getpid(), window[0], f"{code.co_filename} {code.co_qualname}")
        if key in seen or code.co_name == "<module>" or not code.co_filename.startswith(ours):
            return
        if window[0] >= ROWS_ONLY and not _writes_rows(frame):
            return
        seen.add(key)
        with (trace_dir / f"{os.getpid()}.files").open("a") as out:
            path = Path(code.co_filename).relative_to(root)
            out.write(f"{window[0]} {path} {code.co_qualname}\n")

    threading.setprofile(note)
    sys.setprofile(note)


def _writes_rows(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "_write_rows":
            return True
        frame = frame.f_back
    return False


if "TRACE_DIR" in os.environ:
    install(Path(os.environ["TRACE_DIR"]), Path(__file__).parents[2])
