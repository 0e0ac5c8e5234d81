"""Tools are distributions that add commands to `penstock`; if one is missing, its command names
it.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from infra.cli.main import TOOLS, add_tool, app
from shared.errors import ConfigurationError

ROOT = Path(__file__).parents[1]
PROJECTS = {
    file.parent.name: tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    for file in sorted((ROOT / "tools").glob("*/pyproject.toml"))
}


@pytest.mark.parametrize("tool", PROJECTS)
def test_setup_installs_the_version_in_the_folder(tool: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    pin = f"{PROJECTS[tool]['name']}=={PROJECTS[tool]['version']}"
    assert pin in {*extras["local"], *extras["simulation"]}


@pytest.mark.parametrize("tool", PROJECTS)
def test_commands_of_a_tool_are_commands_of_penstock(tool: str) -> None:
    listed = CliRunner().invoke(app, ["--help"]).output
    for name in PROJECTS[tool]["entry-points"][TOOLS]:
        assert f"\n  {name} " in listed
        assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


def test_command_of_a_tool_that_is_not_installed_names_its_package() -> None:
    assert not entry_points(group=TOOLS, name="absent")
    commands = typer.Typer()
    commands.command("other")(lambda: None)
    add_tool(commands, "absent", "penstock-absent")
    assert "absent" not in CliRunner().invoke(commands, ["--help"]).output
    error = CliRunner().invoke(commands, ["absent", "--x", "y"]).exception
    assert isinstance(error, ConfigurationError)
    assert (
        error.message
        == "penstock absent requires the package penstock-absent, which is not installed"
    )
