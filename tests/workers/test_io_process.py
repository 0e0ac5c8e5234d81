"""The process that pulls jobs starts quickly and stays small: it never imports a model library, or
anything that only a few models need. Neither does a model process before it knows its model.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = ("torch", "transformers", "diffusers", "onnxruntime", "PIL", "aiormq", "numpy")


@pytest.mark.parametrize("module", ["workers.__main__", "workers.runtime.server"])
def test_no_model_library_is_imported_by_the_io_process(module: str) -> None:
    program = f"import sys, {module}; print([m for m in {MODULES} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
