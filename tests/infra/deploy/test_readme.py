"""The tables in the stages' READMEs match their variables and outputs, and every variable is
validated.
"""

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
            r'^(?:variable|output) "(\w+)" \{\n  description = "(.*)"$',
            file.read_text(),
            re.MULTILINE,
        )
    }
    shown = set(
        re.findall(
            r"^\| `(\w+)` \| (.*?) \|", (STAGES / stage / "README.md").read_text(), re.MULTILINE
        )
    )
    assert shown == said


@pytest.mark.parametrize("stage", ["platform", "workloads"])
def test_variables_are_validated(stage: str) -> None:
    declared = dict(
        re.findall(
            r'^variable "(\w+)" \{\n(.*?)^\}',
            (STAGES / stage / "variables.tf").read_text(),
            re.M | re.S,
        )
    )
    # Variables of type `any` are checked in modules/options, and each is covered by a test.
    unchecked = {
        name
        for name, body in declared.items()
        if "validation {" not in body and not re.search("type +=  ?(bool|any)$", body, re.M)
    }
    assert declared
    assert unchecked == set()
