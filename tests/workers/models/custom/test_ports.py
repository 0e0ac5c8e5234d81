"""Ports on this machine that source files name: only one process can listen on each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.workers.models.custom.classes import write_class
from workers.models.custom.checking import inspect_folder
from workers.models.custom.sources import find_fixed_ports

CLASS = """
class Predictor(BasePredictor):
    def predict(self) -> str:
        return ""

{line}
"""


@pytest.mark.parametrize(
    ("line", "port"),
    [
        ('URL = "http://127.0.0.1:8188/prompt"', 8188),
        ('COMFY = "localhost:8188"', 8188),
        ("PLACE = ('0.0.0.0', 8000)", 8000),
        ('COMMAND = ["vllm", "serve", "--port", "8001"]', 8001),
        ('COMMAND = "python main.py --listen --port 3000"', 3000),
        ('COMMAND = "serve --port=3000"', 3000),
        ("OPTIONS = dict(host=None, port=7860)", 7860),
        ('URL = "https://example.com:8443/"', None),
        ("report = 8000", None),
        ('COMMAND = ["serve", "--port", str(free_port)]', None),
    ],
)
def test_a_port_is_found_where_it_is_said(tmp_path: Path, line: str, port: int | None) -> None:
    write_class(tmp_path, CLASS.format(line=line))
    notes = find_fixed_ports(tmp_path)
    assert len(notes) == (port is not None)
    if port is not None:
        assert f": port {port}: " in notes[0]
        assert "`processes: 1`" in notes[0]


def test_check_suggests_one_process_until_the_entry_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "class").mkdir()
    folder = write_class(tmp_path / "class", CLASS.format(line='URL = "http://localhost:11434"'))
    entry = {"name": "mine", "task": "custom", "source": f"local:{folder}"}
    path = tmp_path / "models.yaml"
    monkeypatch.setenv("PENSTOCK_MODELS_FILE", str(path))
    for processes, count in ((None, 1), (2, 1), (1, 0)):
        path.write_text(yaml.safe_dump({"models": [entry | {"processes": processes}]}))
        notes = [note for note in inspect_folder(folder).notes if "port 11434" in note]
        assert len(notes) == count
        assert all(re.match(r"predict\.py:\d+: port", note) for note in notes)
