"""Files of the repository that Terraform reads by a relative path exist."""

from __future__ import annotations

import re
from pathlib import Path

TERRAFORM = Path(__file__).parents[3] / "infra" / "terraform"


def test_files_that_terraform_reads_are_there() -> None:
    """`try(file(…), …)` hides one that was moved: prices would silently be 0."""
    read = {
        (source.parent / path).resolve()
        for source in TERRAFORM.rglob("*.tf")
        for path in re.findall(r'\$\{path\.module\}/(\.\./[\w./-]+\.\w+)"', source.read_text())
    }
    assert read, "Terraform reads the list of prices"
    assert {str(path) for path in read if not path.exists()} == set()
