"""The classes in docs/how-to/port-a-class.md run as described there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.penstock_command import penstock

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "port-a-class.md"
_FILE = re.compile(r"^`([\w/.]+)`:\n\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RUN = re.compile(
    r"^```sh\npenstock (predict .*?)\n```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


class Port(NamedTuple):
    """A page section: its files keyed by path, a command's words, and the command's output."""

    files: dict[str, str]
    command: list[str]
    output: str


def read_page() -> dict[str, Port]:
    """Returns the sections, keyed by server name."""
    ports = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        name, _, text = section.partition("\n")
        ((command, output),) = _RUN.findall(text)
        ports[name] = Port(dict(_FILE.findall(text)), shlex.split(command), output)
    return ports


PORTS = read_page()


def write_files(port: Port) -> None:
    """Writes a section's files to the current folder."""
    for name, text in port.files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)


@pytest.mark.parametrize("name", ["LitServe", "BentoML", "Mosec", "Truss"])
def test_a_ported_class_prints_what_the_page_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    port = PORTS[name]
    write_files(port)
    folder = port.command[1]
    assert penstock("models", "check", folder) == 0
    capsys.readouterr()
    assert penstock(*port.command) == 0
    assert capsys.readouterr().out == port.output


@pytest.mark.parametrize(
    ("name", "given", "error"),
    [
        ("BentoML", "text=no end", "text has no whole sentence"),
        ("Mosec", "amplitude=0", "amplitude must be above 0"),
    ],
)
def test_a_ported_class_blames_the_input(
    name: str,
    given: str,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    port = PORTS[name]
    write_files(port)
    assert penstock("predict", port.command[1], "-i", given) == 1
    assert capsys.readouterr().err == f"penstock: {error}\n"
