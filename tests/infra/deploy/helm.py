"""Helm itself: the program if it is installed, otherwise its code as a library."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.infra.deploy.manifests import Objects, objects_of
from tests.limits import WAIT_LIMIT_S

_LIBRARY = """
import json, sys
from helm_python import Chart, HelmError, lint

asked = json.load(sys.stdin)
answers = []
with Chart.load(asked["chart"]) as chart:
    for values in asked["values"]:
        try:
            made = chart.render(values, name="penstock", namespace="default")
            answers.append({"text": "\\n---\\n".join(made.values()), "refusal": ""})
        except HelmError as error:
            answers.append({"text": "", "refusal": str(error)})
report = lint(asked["chart"], asked["values"][0], strict=True)
found = report["errors"] + [one["error"] for one in report["messages"] if one["severity"] > 1]
json.dump({"answers": answers, "lint": found}, sys.stdout)
"""
"""Used in a separate process, because Go's runtime stays in any process that has loaded it."""


@dataclass(frozen=True)
class Answer:
    """Helm's result for a set of values: the objects, or the error message."""

    objects: Objects
    refusal: str


def templates(chart: Path, values: list[dict[str, Any]]) -> list[Answer]:
    """Runs `helm template` with each of these values."""
    if shutil.which("helm"):
        return [_by_program(chart, one) for one in values]
    answers = _by_library(chart, values)["answers"]
    return [Answer(objects_of(one["text"]), one["refusal"]) for one in answers]


def lint(chart: Path, values: dict[str, Any]) -> list[str]:
    """Returns errors from `helm lint --strict`, without its advice."""
    if shutil.which("helm"):
        done = _helm(chart, values, "lint", "--strict", str(chart))
        return [] if done.returncode == 0 else [done.stdout + done.stderr]
    found: list[str] = _by_library(chart, [values])["lint"]
    return found


def _by_library(chart: Path, values: list[dict[str, Any]]) -> dict[str, Any]:
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("neither helm nor helm-python-sdk is installed")
    done = subprocess.run(
        [sys.executable, "-c", _LIBRARY],
        input=json.dumps({"chart": str(chart), "values": values}),
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _by_program(chart: Path, values: dict[str, Any]) -> Answer:
    done = _helm(chart, values, "template", "penstock", str(chart), "--namespace", "default")
    return Answer(objects_of(done.stdout), done.stderr if done.returncode else "")


def _helm(chart: Path, values: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
    file = chart.parent / "values.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    return subprocess.run(
        ["helm", *words, "--values", str(file)],
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )
