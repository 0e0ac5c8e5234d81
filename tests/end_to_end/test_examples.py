"""The programs in examples/ run unmodified against the whole pipeline."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.local.stack import Stack
from tests.end_to_end.conftest import KEY
from tests.limits import START_LIMIT_S

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run(stack: Stack, name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=os.environ | {"PENSTOCK_URL": stack.api_url, "PENSTOCK_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )


def test_related_sentences_have_the_greatest_cosine(stack: Stack) -> None:
    done = run(stack, "embed.py")
    assert done.returncode == 0, done.stderr
    cosines = [float(line.split()[0]) for line in done.stdout.splitlines()]
    assert len(cosines) == 3
    assert cosines[0] > 0.5 > max(cosines[1:])


def test_an_image_is_saved(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "star.png"
    done = run(stack, "draw.py", "a green star", str(file))
    assert done.returncode == 0, done.stderr
    assert file.read_bytes().startswith(PNG_SIGNATURE)


def test_a_chat_without_a_language_model_says_how_to_install_one(stack: Stack) -> None:
    done = run(stack, "chat_stream.py")
    assert done.returncode == 1
    assert "make text" in done.stderr
