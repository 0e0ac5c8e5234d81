"""Shared by the recording tests: the transcriber's Python, sentences, and a stack."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from examples.oracles import INSTALL_LIMIT_S, RUN_LIMIT_S, fetched
from examples.show import EXAMPLES, KEPT
from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.stack import Stack
from shared.errors import ConfigurationError
from tests.keys import key_for, keys_url
from workers.models.custom.environments import python_for

KEY = key_for("default")
FORMATS = ("mp3", "opus", "flac", "wav", "pcm")
"""Text for examples/speech to speak."""
PACKAGE = "pocketsphinx-testdata"
PACKAGE_SHA256 = "eaeb7a01d54f20b799d1a81ef110ec544b2cb47ea006614078220737a33019f0"
"""Digest of version 0.8+5prealpha+1-15.

It contains five LibriVox sentences with their transcripts (BSD-2).
"""
LINE = re.compile(r"<s> (?P<said>.*) </s> \((?P<name>\S+)\)")


@pytest.fixture(scope="package")
def python() -> str:
    """Returns the Python in which the transcriber's packages are installed."""
    fetched("transcribe")
    try:
        python_for(EXAMPLES / "speech")
        return python_for(EXAMPLES / "transcribe")
    except ConfigurationError as error:
        pytest.skip(f"packages: {error.message[-200:]}")


@pytest.fixture(scope="package")
def sentences() -> dict[Path, str]:
    """Returns recordings with their transcripts. Skips if there is no Debian mirror."""
    folder = (KEPT / "transcribe" / "recordings").absolute()
    data = folder / "usr/share/pocketsphinx/test/data/librivox"
    if not data.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            command = ["apt-get", "download", PACKAGE]
            limits: dict[str, Any] = {"timeout": INSTALL_LIMIT_S, "check": True}
            subprocess.run(command, cwd=folder, capture_output=True, **limits)
        except (OSError, subprocess.SubprocessError):
            pytest.skip(f"Debian's package {PACKAGE} can't be had here")
        (package,) = folder.glob("*.deb")
        if hashlib.sha256(package.read_bytes()).hexdigest() != PACKAGE_SHA256:
            pytest.skip(f"another version: {package.name}")
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], **limits)
    lines = (data / "transcription").read_text().splitlines()
    matches = [match for line in lines if (match := LINE.fullmatch(line.strip()))]
    assert len(matches) == 5
    return {data / f"{match['name']}.wav": match["said"] for match in matches}


@pytest.fixture(scope="package")
def url(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Returns the URL of a stack that transcribes and speaks."""
    folder = tmp_path_factory.mktemp("stack")
    entries = []
    for name in ("transcribe", "speech"):
        (entry,) = yaml.safe_load((EXAMPLES / name / "models.yaml").read_text())["models"]
        entries.append(entry | {"source": f"local:{EXAMPLES / name}"})
    models = folder / "models.yaml"
    models.write_text(yaml.safe_dump({"models": entries}))
    refresh_interfaces(models, lambda line: None)
    settings = {
        "PENSTOCK_KEYS_URL": keys_url(folder, default="default"),
        "PENSTOCK_MODELS_FILE": str(models),
    }
    with Stack(folder, ports=Ports.free(len(entries)), settings=settings) as stack:
        yield stack.api_url


@pytest.fixture(scope="package")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as opened:
        yield opened


def oracle(python: str, kind: str, *arguments: str | Path) -> str:
    return run(python, EXAMPLES / "transcribe" / "oracle.py", kind, *arguments)


def run(python: str, code: str | Path, *arguments: str | Path) -> str:
    """Returns a Python program's output, run with as many threads as a class gets.

    Floating-point sums depend on the number of threads, so a word may differ on some CPUs.
    """
    program = ["-c", code] if isinstance(code, str) else [str(code)]
    done = subprocess.run(
        [python, *program, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
