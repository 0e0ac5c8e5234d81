"""Every command of the runbook is one that its program knows, with these options.

What the first deploy has is run whole in test_release_replay.py. The others need what only a
project with an incident has, so they are parsed here by the programs themselves.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from infra.cli.main import app
from tests.infra.release.programs import NOWHERE, gcloud_without_account
from tests.infra.release.replay import DEPLOY_PAGE
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow(about_s=60)
PROGRAMS = ("docker", "gcloud", "helm", "kubectl", "penstock")
OTHER_PAGES = [
    DEPLOY_PAGE.with_name(f"{name}.md")
    for name in (
        *("operate", "troubleshoot"),
        *("pubsub-quota", "poisoned-model", "compromised-key", "lost-region"),
    )
]
VALUES = {"P": "my-project", "R": "europe-west4", "MODEL": "all-MiniLM-L6-v2", "NOW": "2026-01-01"}
"""Of placeholders whose form programs check. Others get any word."""
UNKNOWN = {
    "gcloud": r"unrecognized arguments|Invalid choice|argument .*: Must be specified",
    "helm": r"unknown (shorthand )?flag|unknown command",
    "kubectl": r"unknown (shorthand )?flag|unknown command",
}
"""What they say of a command that they do not know."""


def commands() -> list[str]:
    """All commands in the text and in its blocks, but for those of the first deploy."""
    text = DEPLOY_PAGE.read_text(encoding="utf-8")
    text = text.partition("\n## First deploy\n")[0] + text.partition("\n## Add a model\n")[2]
    text += "".join(page.read_text(encoding="utf-8") for page in OTHER_PAGES)
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    fenced = [block for language, block in blocks if language in ("", "sh")]
    lines = [line for block in fenced for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S))
    found = [" ".join(one.split()) for one in (*lines, *inline)]
    # Without settings before, and without what follows a pipe, a redirection or a remark.
    found = [re.sub(r"^([A-Z_]+=\S+ )+", "", one) for one in found]
    found = [re.split(r" [|>] | # ", one)[0].strip() for one in found]
    return sorted(
        {
            one
            for one in found
            if one.split()[0:2] != one.split()[0:1] and one.split()[0] in PROGRAMS
        }
    )


def of(program: str) -> list[str]:
    return [one for one in commands() if one.startswith(f"{program} ")]


def words(command: str) -> list[str]:
    """The words of a command with its placeholders filled in, without its optional parts."""
    command = re.sub(r"\[[^\]]*\]", "", command).replace("…", "x")
    return [VALUES.get(word, word) for word in shlex.split(command)]


def test_there_are_some() -> None:
    assert {one.split()[0] for one in commands()} >= {"gcloud", "helm", "kubectl", "penstock"}


@pytest.mark.parametrize("command", of("penstock"))
def test_penstock_knows_the_command(command: str) -> None:
    found: Any = typer.main.get_command(app)
    rest = words(command)[1:]
    if rest[:1] == ["models"] and rest[1] not in found.commands["models"].commands:
        pytest.skip(f"penstock models {rest[1]} is not in this tree")
    while hasattr(found, "commands") and rest:
        assert rest[0] in found.commands, rest
        found = found.commands[rest.pop(0)]
    known = {option for one in found.params for option in (*one.opts, *one.secondary_opts)}
    forwarded = found.context_settings.get("ignore_unknown_options")
    asked = {word.partition("=")[0] for word in rest if word.startswith("--")}
    assert forwarded or asked - known == set()


@pytest.mark.parametrize("command", [*of("gcloud"), *of("kubectl"), *of("helm")])
def test_other_programs_know_the_command(command: str, tmp_path: Path) -> None:
    program, *rest = words(command)
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    settings = gcloud_without_account(tmp_path) | {
        "HOME": str(tmp_path),
        "PATH": f"{Path(shutil.which(program) or '').parent}:/usr/bin:/bin",
    }
    if program == "kubectl":
        rest += ["--server", NOWHERE, "--request-timeout", "1s"]
    done = subprocess.run(
        [program, *rest],
        cwd=tmp_path,
        env=settings,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )
    # Nothing is there to talk to, so each fails; but not for its words.
    assert done.returncode != 0
    assert re.search(UNKNOWN[program], done.stderr) is None, done.stderr
    assert done.returncode != 2 or program != "gcloud", done.stderr
