"""Checks blocks that show output or diagram a request's path."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from infra.cli.main import app
from infra.kubernetes.self_hosted import main as render_site
from infra.kubernetes.site import site_schema
from tests.keys import key_for
from tests.samples.blocks import ROOT, Block
from tests.workers.models.custom.test_port_page import PORTS

DIAGRAM = re.compile("▼|──▶")
CODE_FOLDERS = "api|infra|shared|workers"


def check_text(block: Block, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Checks one block without a language.

    Raises:
        AssertionError: no rule covers the block, or it does not show what the program prints.
    """
    if DIAGRAM.search(block.text):
        check_diagram(block)
        return
    starts = [
        start for start in OUTPUTS.get(block.page, {}) if block.text.lstrip().startswith(start)
    ]
    assert starts, f"no rule for the output {block.text[:40]!r}"
    OUTPUTS[block.page][starts[0]](block, capsys, folder)


def check_diagram(block: Block) -> None:
    paths = re.findall(rf"\b((?:{CODE_FOLDERS})/[\w/]+\.\w+)", block.text)
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def _check_key(block: Block, *_: object) -> None:
    assert re.fullmatch(block.text.strip(), key_for("a"))


def _check_plan(block: Block, *_: object) -> None:
    rates = str(ROOT / "tools/planning/rates.example.yaml")
    printed = CliRunner().invoke(app, ["deploy", "plan", "--rates", rates], catch_exceptions=False)
    lines = {line.rstrip() for line in printed.stdout.splitlines()}
    wanted = [line for line in block.text.splitlines() if line.strip() not in {"", "…"}]
    assert [line for line in wanted if line.rstrip() not in lines] == []


def _check_port(block: Block, *_: object) -> None:
    # tests/workers/models/custom/test_port_page.py runs the command and compares the output.
    outputs = {port.output for port in PORTS.values()}
    assert block.text in outputs | {text for port in PORTS.values() for text in port.files.values()}


def _check_caddyfile(block: Block, *_: object) -> None:
    directive, address = block.text.splitlines()[1].split()
    assert directive == "reverse_proxy"
    assert address == f"127.0.0.1:{_default_port('api-port')}"


def _default_port(option: str) -> int:
    help_text = CliRunner().invoke(app, ["up", "--help"], terminal_width=200).stdout
    found = re.search(rf"--{option}.*?default: (\d+)", help_text)
    assert found is not None
    return int(found[1])


def _check_deaths(block: Block, *_: object) -> None:
    source = (ROOT / "infra/local/supervision.py").read_text(encoding="utf-8")
    words = re.findall(r"^ *[\d.]+ s  (\w+) ", block.text, re.MULTILINE)
    assert words == ["died", "back"]
    assert all(f'"{word}"' in source for word in words)


def _check_site_error(block: Block, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    example = (ROOT / "infra/kubernetes/site.example.yaml").read_text(encoding="utf-8")
    site: dict[str, Any] = yaml.safe_load(example)
    site["broker"]["volume"]["size"] = "20"
    (folder / "site.yaml").write_text(yaml.safe_dump(site), encoding="utf-8")
    assert render_site(["--site", str(folder / "site.yaml"), "--out", str(folder / "out")]) != 0
    printed = capsys.readouterr().err.replace(f"{folder}/", "")
    assert block.text.strip() in printed


def _check_chart_error(block: Block, *_: object) -> None:
    found = re.search(r"does not match pattern '(.*)'", block.text)
    assert found is not None
    assert json.dumps(found[1]) in json.dumps(site_schema())


def _check_headers(block: Block, *_: object) -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "api").rglob("*.py")]
    for name in re.findall(r"^([\w-]+): ", block.text, re.MULTILINE):
        assert any(name in source.lower() for source in sources), name


def _check_tutorial(block: Block, *_: object) -> None:
    # test_running.py compares it with the tutorial's output.
    assert block.text.strip()


Check = Callable[[Block, pytest.CaptureFixture[str], Path], None]
OUTPUTS: Mapping[str, Mapping[str, Check]] = MappingProxyType(
    {
        "docs/how-to/keys.md": {"pk_live_": _check_key},
        "docs/how-to/deploy-plan.md": {"Models": _check_plan},
        "docs/how-to/port-a-class.md": {"": _check_port},
        "docs/how-to/self-hosting.md": {
            "ai.example.com": _check_caddyfile,
            "37.0 s": _check_deaths,
            "infra.kubernetes": _check_site_error,
            "at '/broker": _check_chart_error,
        },
        "docs/tutorial/first-hour.md": {"x-penstock-cache": _check_headers},
        "docs/tutorial/own-model.md": {"desserts": _check_tutorial, "Models": _check_tutorial},
    }
)
"""The rule for each output, by its page and first words."""
