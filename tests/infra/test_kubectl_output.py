"""`penstock doctor --cluster` with a kubectl whose output isn't what it expects."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.cli.cluster_doctor import ClusterDoctor, Kubectl
from shared.models.catalog_file import read_catalog
from shared.settings import Settings


@pytest.mark.parametrize("output", ["", "[]", "null", "Please log in", "\\377{}"])
def test_output_that_is_no_object_is_a_finding(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\nprintf '{output}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    doctor = ClusterDoctor(Kubectl("penstock"), read_catalog(Path("models.yaml")), Settings())
    (finding,) = doctor.findings()
    assert "not a JSON object" in finding.facts
    assert finding.fix
