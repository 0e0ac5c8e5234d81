"""Python imports this at start wherever this folder is on PYTHONPATH: notes which files run.

bench/request_files.py sets the environment. A byte of a shared file says when to note calls.
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


def install(trace_dir: Path, root: Path) -> None:
    """Notes each file of ours in which a function is called while the shared byte is 1."""
    with (trace_dir / "is_on").open("r+b") as file:
        is_on = mmap.mmap(file.fileno(), 1)
    ours = tuple(f"{root / folder}/" for folder in FOLDERS)
    seen: set[tuple[int, str]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not is_on[0]:
            return
        code = frame.f_code
        # The process id, because model processes are forked and inherit what was seen.
        key = (os.getpid(), code.co_filename)
        if key in seen or code.co_name == "<module>":
            return
        seen.add(key)
        if code.co_filename.startswith(ours):
            with (trace_dir / f"{os.getpid()}.files").open("a") as out:
                out.write(f"{Path(code.co_filename).relative_to(root)}\n")

    threading.setprofile(note)
    sys.setprofile(note)


if "TRACE_DIR" in os.environ:
    install(Path(os.environ["TRACE_DIR"]), Path(__file__).parents[2])
