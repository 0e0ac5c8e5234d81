"""The process that pulls jobs starts quickly and stays small: it never imports a model library."""

from __future__ import annotations

import subprocess
import sys

MODULES = ("torch", "transformers", "diffusers", "onnxruntime")


def test_no_model_library_is_imported_by_the_io_process() -> None:
    program = f"import sys, workers.__main__; print([m for m in {MODULES} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
