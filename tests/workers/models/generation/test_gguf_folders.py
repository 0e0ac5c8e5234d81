"""Folders with converted GGUF files are either complete or absent.

In these tests, a script does the conversion.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from tests.limits import START_LIMIT_S
from workers.models.generation.gguf import MAX_S
from workers.models.source import resolve

ROOT = Path(__file__).parents[4]
WHOLE = 'for name in config.json tokenizer.json model.safetensors; do echo "$3" > "$4/$name"; done'
Converter = Callable[[str], None]


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Converter:
    """Uses a shell script as the converter.

    The script gets the arguments meant for Python: -m, module, file, folder.
    """

    def use(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    use(WHOLE)
    return use


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF")
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_conversion_works_from_another_folder(
    converter: Converter, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    folder = resolve("local:../a.gguf", "main", Path("var/models"))
    assert folder.is_absolute()
    assert folder.parent == elsewhere / "var/models/gguf"
    assert names(folder) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "config.json").read_text() == f"{file}\n"
    assert len(names(folder.parent)) == 1
    assert not (ROOT / "var/models/gguf").exists() or not list(
        (ROOT / "var/models/gguf").glob(f"{folder.name}*")
    )


def test_converted_file_is_converted_once(converter: Converter, file: Path, tmp_path: Path) -> None:
    folder = resolve(f"local:{file}", "main", tmp_path)
    converter("exit 1")
    assert resolve(f"local:{file}", "main", tmp_path) == folder


@pytest.mark.parametrize("left", [(), ("config.json",), ("config.json", "model.safetensors")])
def test_folder_that_lacks_something_is_no_model(
    converter: Converter, file: Path, tmp_path: Path, left: tuple[str, ...]
) -> None:
    """Earlier versions left empty folders behind."""
    folder = resolve(f"local:{file}", "main", tmp_path)
    for name in names(folder):
        if name not in left:
            (folder / name).unlink()
    assert resolve(f"local:{file}", "main", tmp_path) == folder
    assert len(names(folder)) == 3


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "could not be loaded as a model"),
        ('touch "$4/config.json"', "could not be loaded as a model"),
        (f"{WHOLE}; echo no such tensor >&2; exit 1", "no such tensor"),
        ("kill -9 $$", "it failed"),
        ("printf 'no \\377 tensor' >&2; exit 1", "no \ufffd tensor"),
    ],
)
def test_conversion_that_fails_leaves_nothing(
    converter: Converter, file: Path, tmp_path: Path, script: str, reason: str
) -> None:
    converter(script)
    with pytest.raises(ConfigurationError, match=reason) as refused:
        resolve(f"local:{file}", "main", tmp_path / "cache")
    assert refused.value.field == "source"
    assert names(tmp_path / "cache/gguf") == []


def test_folder_that_can_not_be_written_is_named(
    converter: Converter, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigurationError, match=r"a\.gguf: .*cache"):
        resolve(f"local:{file}", "main", tmp_path / "cache")


def test_two_at_a_time_make_one_folder(converter: Converter, file: Path, tmp_path: Path) -> None:
    """Each conversion waits until the other one has started."""
    both = f'{WHOLE}; touch "{tmp_path}/$$.in"'
    waits = f'until [ "$(ls {tmp_path}/*.in | wc -l)" = 2 ]; do sleep 0.01; done'
    converter(f"{both}; {waits}")
    found: list[Path] = []
    workers = [
        threading.Thread(target=lambda: found.append(resolve(f"local:{file}", "main", tmp_path)))
        for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(START_LIMIT_S)
    assert len(found) == 2
    assert found[0] == found[1]
    assert names(tmp_path / "gguf") == [found[0].name]
    assert len(names(found[0])) == 3


def test_what_a_killed_conversion_left_is_removed(
    converter: Converter, file: Path, tmp_path: Path
) -> None:
    for name, age_s in ((".making-old", 3 * MAX_S), (".making-young", MAX_S / 2)):
        left = tmp_path / "gguf" / name
        left.mkdir(parents=True)
        (left / "model.safetensors").write_bytes(bytes(1000))
        os.utime(left, (time.time() - age_s,) * 2)
    folder = resolve(f"local:{file}", "main", tmp_path)
    assert names(folder.parent) == [".making-young", folder.name]


ENDS = """
from workers.models.generation import gguf
gguf.convert = lambda path, folder: None
gguf.main()
"""


def test_conversion_that_is_done_ends_while_its_worker_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS, str(tmp_path / "a.gguf"), str(tmp_path / ".making-it")]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.wait(START_LIMIT_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


WAITS = """
import time
from workers.models.generation import gguf
gguf.convert = lambda path, folder: (print("converts", flush=True), time.sleep(1e6))
gguf.main()
"""


def test_conversion_ends_with_its_worker_and_leaves_nothing(tmp_path: Path) -> None:
    partial = tmp_path / ".making-it"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(bytes(1000))
    command = [sys.executable, "-c", WAITS, str(tmp_path / "a.gguf"), str(partial)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "converts\n"
        process.stdin.close()
        assert process.wait(START_LIMIT_S) == 1
    assert not partial.exists()
