"""Every `penstock` command with its options and defaults, because scripts rely on them.

CHANGELOG.md must explain each removal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from infra.cli.main import app
from infra.cli.optimize import VARIANTS
from tests.penstock_command import penstock
from workers.tasks import WORKER_TASKS

COMMANDS: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "commands.json").read_text(encoding="utf-8")
)
PROGRAMS = ("bench", "bigquery", "pubsub")
"""Commands whose options are declared by a program in another distribution."""


def list_options(command: Any, name: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """Yields each command in a group: its name and the defaults of its options."""
    if hasattr(command, "commands"):
        for word, inner in command.commands.items():
            yield from list_options(inner, f"{name} {word}".strip())
    else:
        yield name, dict(map(describe_option, command.params))


def describe_option(option: Any) -> tuple[str, str]:
    """Returns an option's names, and its default with its environment variable."""
    if option.param_type_name == "argument":
        return option.metavar or option.name.upper(), str(option.default or "")
    names = " ".join(sorted([*option.opts, *option.secondary_opts]))
    variable = f" ${option.envvar}" if option.envvar else ""
    return names, f"{option.default or ''}{variable}"


def test_commands_and_options_are_those_of_the_list() -> None:
    known = dict(list_options(typer.main.get_command(app)))
    for name in PROGRAMS:
        assert known.pop(name) == {}
    assert known == {name: COMMANDS[name] for name in COMMANDS if name not in PROGRAMS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_their_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert penstock(name, "--help") == 0
    text = capsys.readouterr().out
    for option in COMMANDS[name]:
        assert option in text


def test_help_names_the_variants_of_each_task() -> None:
    tasks = {name: ", ".join(task.variants) for name, task in WORKER_TASKS.items()}
    assert VARIANTS.split("; ") == [f"{name}: {names}" for name, names in tasks.items() if names]
