"""The tables in the stages' READMEs are those of their variables and outputs."""

from __future__ import annotations

import re

import pytest

from tests.infra.deploy.terraform import STAGES


@pytest.mark.parametrize("stage", ["platform", "workloads"])
def test_tables_have_every_variable_and_output(stage: str) -> None:
    said = {
        (name, description)
        for file in (STAGES / stage).glob("*.tf")
        for name, description in re.findall(
            r'^(?:variable|output) "(\w+)" \{\n  description = "(.*)"$', file.read_text(), re.MULTILINE
        )
    }
    shown = set(re.findall(r"^\| `(\w+)` \| (.*?) \|", (STAGES / stage / "README.md").read_text(), re.MULTILINE))
    assert shown == said
