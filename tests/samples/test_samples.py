"""Every command and code sample in README.md and docs is checked. A block without a rule fails.

test_running.py also runs the samples that need nothing but the local stack. Other tests run some
pages' samples: the first deploy (tests/infra/release/test_release_replay.py), incidents
(tests/infra/test_incident_pages.py) and ported classes
(tests/workers/models/custom/test_port_page.py). test_other_programs.py has gcloud, kubectl and Helm
parse their commands.
"""

from __future__ import annotations

from contextlib import nullcontext
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from api.app import create_app
from shared.models.catalog_file import read_catalog
from shared.settings import ApiSettings, read_settings
from tests.samples.blocks import ROOT, Block, all_blocks, read_blocks
from tests.samples.formats import FORMATS, check_js
from tests.samples.outputs import check_text
from tests.samples.python_code import check_python_code
from tests.samples.shell import check_shell, commands

LANGUAGES = {*FORMATS, "js", "python", "sh", "text"}


@pytest.fixture(scope="module")
def openapi(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("api")
    settings = read_settings(ApiSettings, objects_url=f"file://{folder}")
    nothing: Any = nullcontext()
    app = create_app(settings, read_catalog(ROOT / "models.yaml"), nothing, nothing, nothing)
    return dict(app.openapi())


def of(*languages: str) -> list[Block]:
    return [block for block in all_blocks() if block.language in languages]


def test_every_block_has_a_language_with_a_rule() -> None:
    assert [str(block) for block in all_blocks() if block.language not in LANGUAGES] == []
    assert {block.language for block in all_blocks()} == LANGUAGES


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_shell_sample_names_what_exists(block: Block, openapi: dict[str, Any]) -> None:
    check_shell(block, openapi)


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_sample_compiles_and_finds_its_names(block: Block) -> None:
    earlier = [
        other for other in of("python") if other.page == block.page and other.line < block.line
    ]
    check_python_code(block, earlier)


@pytest.mark.parametrize("block", of(*FORMATS), ids=str)
def test_sample_of_a_file_is_valid(block: Block) -> None:
    FORMATS[block.language](block)


@pytest.mark.parametrize("block", of("js"), ids=str)
def test_js_sample_parses(block: Block, tmp_path: Path) -> None:
    check_js(block, tmp_path)


@pytest.mark.parametrize("block", of("text"), ids=str)
def test_output_is_what_is_printed(
    block: Block, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    check_text(block, capsys, tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("frobnicate now\n", "no rule for the program frobnicate"),
        ("penstock frobnicate\n", "penstock has no command frobnicate"),
        ("make frobnicate\n", "the Makefile has no frobnicate"),
        ("curl http://127.0.0.1:8080/v1/frobnicate\n", "the API has no GET /v1/frobnicate"),
        ("curl http://127.0.0.1:8080/v1/embeddings -d '{\"inputs\": 1}'\n", "inputs"),
        ("penstock up --frobnicate\n", "--frobnicate"),
        ("(\n", "syntax error"),
    ],
)
def test_wrong_shell_sample_is_found(text: str, reason: str, openapi: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=reason):
        check_shell(Block("README.md", 1, "sh", text), openapi)


@pytest.mark.parametrize(
    ("language", "text", "error", "reason"),
    [
        ("yaml", "frobnicate: 1\n", AssertionError, "no rule for {'frobnicate'}"),
        (
            "yaml",
            "- {name: custom, task: custom, source: 'local:a', frobnicate: 1}\n",
            ValidationError,
            "(?m)^frobnicate$",
        ),
        ("json", "{'a': 1}\n", JSONDecodeError, "double quotes"),
        ("hcl", "frobnicate = {}\n", AssertionError, "frobnicate"),
        (
            "sql",
            "SELECT frobnicate FROM penstock.rows_deduplicated\n",
            AssertionError,
            "no columns {'frobnicate'}",
        ),
        ("dockerfile", "FROBNICATE it\n", AssertionError, "unexpected 'F'"),
    ],
)
def test_wrong_sample_of_a_file_is_found(
    language: str, text: str, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        FORMATS[language](Block("README.md", 1, language, text))


def test_name_that_is_defined_nowhere_is_found() -> None:
    with pytest.raises(AssertionError):
        check_python_code(Block("README.md", 1, "python", "frobnicate()\n"), ())


def test_commands_are_split_at_operators_and_lines() -> None:
    text = "A=1 B=$(openssl rand) make up > log  # now\ncd a && \\\n  penstock up | mail me\n"
    assert commands(text) == [
        ["openssl", "rand"],
        ["make", "up"],
        ["cd", "a"],
        ["penstock", "up"],
        ["mail", "me"],
    ]


def test_block_keeps_its_place_and_loses_its_indentation(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    first = read_blocks(page)[0]
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[first.line - 1] == f"```{first.language}"
    assert first.text.splitlines()[0] == lines[first.line]
