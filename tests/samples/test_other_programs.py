"""gcloud, kubectl and Helm parse their commands on all pages, and penstock parses those in the
text.

Nothing responds, so each command fails, but not because of its arguments. The first deploy's
commands run as a whole in tests/infra/release/test_release_replay.py.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from infra.cli.main import app
from tests.infra.release.programs import NOWHERE, gcloud_without_account
from tests.infra.release.replay import DEPLOY_PAGE
from tests.limits import WAIT_LIMIT_S
from tests.samples.blocks import ROOT, pages, read_blocks, without_blocks
from tests.samples.shell import commands

pytestmark = pytest.mark.slow(about_s=150)

PROGRAMS = frozenset({"gcloud", "helm", "kubectl"})
VALUES = {"P": "my-project", "R": "europe-west4", "MODEL": "all-MiniLM-L6-v2", "NOW": "2026-01-01"}
"""Values for placeholders whose format the programs check."""
UNKNOWN = {
    "gcloud": r"unrecognized arguments|Invalid choice",
    "helm": r"unknown (shorthand )?flag|unknown command",
    "kubectl": r"unknown (shorthand )?flag|unknown command",
}
"""Each program's message about an unknown word."""
INCOMPLETE = {
    "gcloud": r"argument .*: (Must be specified|expected one argument)",
    "helm": r"requires (at least )?\d+ argument|flag needs an argument",
    "kubectl": r"required flag|flag needs an argument",
}
"""Each program's message about a missing value, which prose may omit."""


def read_block_commands() -> set[tuple[str, ...]]:
    """Returns the commands for PROGRAMS in the blocks on all pages, except for the first deploy."""
    return {
        fill_placeholders(words)
        for page in pages()
        for block in read_blocks(page)
        if block.language == "sh" and block.line not in read_first_deploy(page)
        for words in commands(block.text)
        if words[0] in PROGRAMS
    }


def read_first_deploy(page: Path) -> range:
    """Returns the first deploy's line numbers on its page, and none on other pages."""
    text = page.read_text(encoding="utf-8")
    before, heading, rest = text.partition("\n## First deploy\n")
    if page != ROOT / DEPLOY_PAGE:
        return range(0)
    assert heading
    first = before.count("\n") + 1
    return range(first, first + rest.partition("\n## ")[0].count("\n") + 2)


def read_text_commands(*programs: str) -> set[tuple[str, ...]]:
    """Returns the commands in all pages' text, without their `[optional]` parts."""
    spans = {
        " ".join(span.split())
        for page in pages()
        for span in re.findall(r"`([^`]+)`", without_blocks(page))
    }
    return {
        fill_placeholders(words)
        for span in spans
        if span.split(" ")[0] in programs
        for words in commands(re.sub(r"\[[^\]]*\]", "", span))[:1]
        if len(words) > 1
    }


def fill_placeholders(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(VALUES.get(word, word).replace("…", "x") for word in words)


def run(words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command without an account, a cluster or a network. Skips if it is not installed."""
    program, *rest = words
    if (place := shutil.which(program)) is None:
        pytest.skip(f"{program} is not installed")
    settings = gcloud_without_account(folder) | {
        "HOME": str(folder),
        "PATH": f"{Path(place).parent}:/usr/bin:/bin",
    }
    if program == "kubectl":
        rest += ["--server", NOWHERE, "--request-timeout", "1s"]
    return subprocess.run(
        [program, *rest],
        cwd=folder,
        env=settings,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )


def test_all_programs_have_commands() -> None:
    assert {words[0] for words in read_block_commands()} == PROGRAMS
    assert {words[0] for words in read_text_commands(*PROGRAMS)} == PROGRAMS


@pytest.mark.parametrize("words", sorted(read_block_commands()), ids=" ".join)
def test_program_knows_the_command_of_a_block(words: tuple[str, ...], tmp_path: Path) -> None:
    done = run(words, tmp_path)
    assert done.returncode != 0
    refused = f"{UNKNOWN[words[0]]}|{INCOMPLETE[words[0]]}"
    assert re.search(refused, done.stderr) is None, done.stderr
    assert done.returncode != 2 or words[0] != "gcloud", done.stderr


@pytest.mark.parametrize("words", sorted(read_text_commands(*PROGRAMS)), ids=" ".join)
def test_program_knows_the_command_in_a_text(words: tuple[str, ...], tmp_path: Path) -> None:
    done = run(words, tmp_path)
    assert re.search(UNKNOWN[words[0]], done.stderr) is None, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("gcloud", "pubsub", "frobnicate"),
        ("gcloud", "run", "services", "list", "--frobnicate"),
        ("kubectl", "frobnicate"),
        ("kubectl", "get", "pods", "--frobnicate"),
        ("helm", "frobnicate"),
        ("helm", "template", "--frobnicate"),
    ],
    ids=" ".join,
)
def test_wrong_command_is_found(words: tuple[str, ...], tmp_path: Path) -> None:
    assert re.search(UNKNOWN[words[0]], run(words, tmp_path).stderr) is not None


@pytest.mark.parametrize("words", sorted(read_text_commands("penstock")), ids=" ".join)
def test_penstock_knows_the_command_in_a_text(words: tuple[str, ...]) -> None:
    command: Any = typer.main.get_command(app)
    rest = list(words[1:])
    while hasattr(command, "commands") and rest:
        assert rest[0] in command.commands, rest
        command = command.commands[rest.pop(0)]
        options = {
            name for value in command.params for name in (*value.opts, *value.secondary_opts)
        }
    is_forwarded = command.context_settings.get("ignore_unknown_options")
    used = {word.partition("=")[0] for word in rest if word.startswith("--")}
    assert is_forwarded or used - options - {"--help"} == set()
