"""Plans of the Terraform stages, made with the checker that replaces the providers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.limits import START_LIMIT_S

STAGES = Path("infra/terraform")
CHECKER = os.environ.get("TFOFFLINE", "")
"""A stand-in for Terraform's providers. Google's would require an account."""

REGIONS = {"europe-west4": {"index": 0}, "europe-west1": {"index": 1}}
PROJECT = "example-project"
INVOICES = {"seller": "Example GmbH\nBerlin", "tax_name": "VAT", "tax_percent": 8.25}


@dataclass(frozen=True)
class Plan:
    """The expected result of an apply: resources by type, and the outputs known in advance."""

    resources: list[dict[str, Any]]
    outputs: dict[str, Any]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Each of this type's resources, as its values."""
        return [resource["values"] for resource in self.resources if resource["type"] == kind]


def plan_platform(folder: Path, **variables: object) -> Plan:
    """Plans the `platform` stage; skips the test if the checker is missing."""
    _need_terraform()
    given = {
        "project_id": PROJECT,
        "registry_location": "europe",
        "api": {"image": "registry.example.com/api@sha256:0", "max_instances": 1},
        "inboxes": {"per_region": 2, "slots": 2},
    }
    file, saved = folder / "given.tfvars.json", folder / "saved.plan"
    file.write_text(json.dumps(given | variables))
    _run("plan", f"-var-file={file}", f"-out={saved}")
    shown = json.loads(_run("show", "-json", str(saved)))["planned_values"]
    outputs = {name: output.get("value") for name, output in shown["outputs"].items()}
    return Plan(_resources(shown["root_module"]), outputs)


def refusals(folder: Path, root: str, given: dict[str, object]) -> dict[str, list[str]]:
    """The reasons a root's plan is rejected, keyed by the name of the invalid variable."""
    _need_terraform()
    file = folder / "given.tfvars.json"
    file.write_text(json.dumps(given))
    command = [CHECKER, "-q", "plan", str(STAGES / root), "-json", f"-var-file={file}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=START_LIMIT_S, check=False
    )
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        said = json.loads(line).get("diagnostic", {})
        if said.get("severity") == "error":
            reason = f"{said['summary']}: {said.get('detail', '')}"
            for variable in _variables_of(root, reason):
                found.setdefault(variable, []).append(reason)
    assert found or done.returncode == 0, done.stdout + done.stderr
    return found


def _variables_of(root: str, reason: str) -> list[str]:
    """The options that don't exist, or the variable whose rule caused the rejection.

    Empty if neither.
    """
    if unknown := re.findall(r"no such option: (\w+)[.]", reason):
        return unknown
    rule = re.search(r"validation rule at (\S+):(\d+),", reason)
    if rule is None:
        return [""]
    lines = (STAGES / root / rule[1]).read_text().splitlines()
    number = int(rule[2])
    variable = next(
        found[1]
        for line in reversed(lines[:number])
        if (found := re.match(r'variable "(\w+)"', line))
    )
    if variable != "options":
        return [variable]
    option = re.search(r"var[.]options[.](\w+)", "\n".join(lines[number:]))
    assert option is not None
    return [option[1]]


def waits_for(stage: str = "platform") -> dict[str, set[str]]:
    """Maps each of a stage's resources to the resources created before it, by address without keys.

    This is Terraform's own graph, so it has the edges from every file, module and `depends_on`.
    """
    _need_terraform()
    shown = _run("graph", stage=stage)
    edges: dict[str, set[str]] = {}
    for source, target in re.findall(r'^\s+"([^"]+)" -> "([^"]+)";$', shown, re.MULTILINE):
        edges.setdefault(source, set()).add(target)
    return {source: _reached(edges, source) for source in edges}


def _reached(edges: dict[str, set[str]], source: str) -> set[str]:
    found: set[str] = set()
    ahead = [source]
    while ahead:
        new = edges.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return found


def api_container(plan: Plan, region: str) -> dict[str, Any]:
    container: dict[str, Any]
    (container,) = [
        container
        for service in plan.of("google_cloud_run_v2_service")
        for container in service["template"][0]["containers"]
        if service["location"] == region and container.get("name") == "api"
    ]
    return container


def api_settings(plan: Plan, region: str) -> dict[str, str | None]:
    """The API's environment; values known only after an apply are None."""
    return {env["name"]: env.get("value") for env in api_container(plan, region)["env"]}


def function_settings(plan: Plan, service: str) -> dict[str, str | None]:
    """A function's environment; values known only after an apply are None."""
    (container,) = [
        container
        for found in plan.of("google_cloud_run_v2_service")
        for container in found["template"][0]["containers"]
        if found["name"] == service
    ]
    return {env["name"]: env.get("value") for env in container["env"]}


def _need_terraform() -> None:
    if shutil.which("terraform") is None:
        pytest.skip("terraform is not installed")
    if not CHECKER:
        pytest.skip("TFOFFLINE names no stand-in for Terraform's providers")
    assert shutil.which(CHECKER), f"TFOFFLINE names no program: {CHECKER}"


def _run(verb: str, *words: str, stage: str = "platform") -> str:
    command = [CHECKER, "-q", verb, str(STAGES / stage), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=START_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _resources(module: dict[str, Any]) -> list[dict[str, Any]]:
    own = [resource for resource in module.get("resources", []) if resource["mode"] == "managed"]
    return own + [found for child in module.get("child_modules", []) for found in _resources(child)]
