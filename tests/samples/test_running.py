"""Runs the samples in README.md and docs that need nothing but the local stack.

Also reads each of our programs' help, which must list every option that a sample uses.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from infra.local.ports import Ports
from infra.local.stack import Stack
from tests.infra.running_up import SMALLEST
from tests.limits import WAIT_LIMIT_S
from tests.samples.blocks import ROOT, Block, all_blocks
from tests.samples.shell import commands

pytestmark = pytest.mark.slow(about_s=200)

LOCAL = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):8080")
PAGES = frozenset(
    {
        *("README.md", "docs/tutorial/first-hour.md", "docs/how-to/clients.md"),
        *("docs/reference/api.md", "docs/reference/batches.md", "docs/reference/models.md"),
        *("docs/reference/reports.md", "docs/how-to/deploy-plan.md", "docs/how-to/monitoring.md"),
    }
)
"""Pages whose samples use only models from the shipped catalog."""
NEEDS_MORE = re.compile(
    r"make (demo|test|up)|import (anthropic|cohere|litellm)|from (haystack|langchain|llama_index)"
    r"|tests\.clients|any/upscale|penstock kill|BATCH_ID|terraform apply|127.0.0.1:8090|mail -s"
    r"|optimize .* --device"
)
"""Samples that start another stack, or need an ID, a GPU, or a client or model that is missing."""
TUTORIAL = "docs/tutorial/own-model.md"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("samples")
    with Stack(folder / "var", ports=Ports.free(2), settings=SMALLEST) as running:
        yield running


def run(command: Sequence[str], folder: Path, environment: dict[str, str]) -> str:
    program = Path(sys.executable).parent
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment | {"PATH": f"{program}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def runnable() -> list[Block]:
    return [
        block
        for block in all_blocks()
        if block.page in PAGES
        and block.language in {"sh", "python"}
        and not NEEDS_MORE.search(block.text)
    ]


@pytest.mark.parametrize("block", runnable(), ids=str)
def test_sample_runs(block: Block, stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "models.yaml").symlink_to(ROOT / "models.yaml")
    line = '{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}}'
    (tmp_path / "requests.jsonl").write_text(line + "\n")
    text = LOCAL.sub(stack.api_url, block.text).replace(".venv/bin/", "")
    environment = stack.environment | {"PYTHONPATH": str(ROOT)}
    if block.language == "python":
        # Running a batch takes longer than creating it.
        text = text.partition("# Later")[0]
        run([sys.executable, "-c", text], tmp_path, environment)
        return
    if "keys create" in text:
        environment |= {"PENSTOCK_KEYS_URL": f"file://{tmp_path}/keys.json"}
        run(["penstock", "keys", "init"], tmp_path, environment)
    printed = run(["bash", "-euc", text], tmp_path, environment)
    assert not re.search(r'"error": ?[{"]', printed), printed


def test_tutorial_of_a_class_prints_what_it_shows(tmp_path: Path) -> None:
    blocks = [block for block in all_blocks() if block.page == TUTORIAL]
    outputs = [block.text for block in blocks if block.language == "text"]
    printed = []
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    for block in blocks:
        text = block.text.replace(".venv/bin/", "")
        if block.language == "sh" and not re.search(r"penstock up|curl", text):
            printed.append(run(["bash", "-euc", text], tmp_path, {"PYTHONPATH": str(ROOT)}))
    everything = "".join(printed)
    reply, measurements = outputs
    assert reply.strip() in everything
    header = measurements.splitlines()[1].split()  # the numbers below it vary
    assert any(line.split() == header for line in everything.splitlines())


def options() -> dict[tuple[str, ...], set[str]]:
    """Returns the options that samples use, by program and command."""
    used: dict[tuple[str, ...], set[str]] = {}
    for block in all_blocks():
        if block.language != "sh":
            continue
        for words in commands(block.text):
            name = Path(words[0]).name
            if name == "penstock" or words[1:2] == ["-m"]:
                named = {word.partition("=")[0] for word in words if word.startswith("--")}
                program = subcommand(words, 1 if name == "penstock" else 3)
                used.setdefault(program, set()).update(named)
    return {program: named for program, named in used.items() if named}


def subcommand(words: Sequence[str], start: int) -> tuple[str, ...]:
    """Returns the program and the commands before its first option or argument."""
    plain = []
    for word in words[start : start + 2]:
        if not re.fullmatch(r"[a-z][a-z_-]+", word) or "/" in word:
            break
        plain.append(word)
    if start == 3:
        return (sys.executable, "-m", words[2], *plain[:1])
    is_group = plain[:1] and plain[0] in {
        *("budgets", "canary", "dead-letters", "deploy", "keys", "models", "plans", "tenants"),
        "weights",
    }
    return ("penstock", *(plain if is_group else plain[:1]))


@pytest.mark.parametrize("program", sorted(options()), ids=lambda words: "-".join(words[1:]))
def test_help_has_the_options_of_samples(program: tuple[str, ...]) -> None:
    environment = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    help_text = run([*program, "--help"], ROOT, environment)
    missing = {option for option in options()[program] if option not in help_text}
    assert missing == set()
