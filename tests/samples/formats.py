"""Checks sample files: catalog entries, sites, rates, prices, Terraform variables, and SQL."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import sqlglot
import yaml
from sqlglot import exp

from infra.kubernetes.site import SelfHostedSite
from penstock_planning.deploy.prices import ListPrice, Prices
from penstock_planning.deploy.rates import DemandRates
from shared.models.entry import CatalogEntry, FlowEntry, WorkersEntry
from tests.samples.blocks import ROOT, Block

DIGEST = "sha256:" + "0" * 64
SITE = "infra/kubernetes/site.example.yaml"
TABLES = MappingProxyType(
    {
        "rows_deduplicated": "rows",
        "worker_hours_deduplicated": "worker_hours",
        "daily_usage": "daily_usage",
    }
)
"""The tables, and the columns of the views."""
NODE_CLIENTS = "tests/clients/node"


def check_json(block: Block) -> None:
    json.loads(block.text)


def check_yaml(block: Block) -> None:
    """Validates a document with the model that reads such files. A partial document is completed
    first.

    Raises:
        AssertionError: no model has these fields.
        pydantic.ValidationError: a field is invalid.
    """
    document = yaml.safe_load(block.text.replace("sha256:…", DIGEST))
    if isinstance(document, list):
        document = {"models": document}
    names = set(document)
    if isinstance(document.get("models"), dict):
        DemandRates.model_validate(document)
    elif names <= {"models", "flows", "workers"}:
        check_catalog(document)
    elif names == {"sources", "prices"}:
        Prices.model_validate(document)
    elif all("/" in name for name in names):
        for price in document.values():
            ListPrice.model_validate(price)
    elif isinstance(document.get("environment"), list):
        check_variables(document["environment"])
    elif names <= {"adapters", "adapter_urls"}:
        validate_entry({"image": document})
    elif names <= CatalogEntry.model_fields.keys():
        validate_entry(document)
    else:
        assert names <= SelfHostedSite.model_fields.keys(), f"no rule for {names}"
        site = yaml.safe_load((ROOT / SITE).read_text(encoding="utf-8"))
        SelfHostedSite.model_validate(site | document)


def check_catalog(document: Mapping[str, Any]) -> None:
    for entry in document.get("models", []):
        validate_entry(entry)
    for flow in document.get("flows", []):
        FlowEntry.model_validate(flow)
    for workers in document.get("workers", []):
        WorkersEntry.model_validate(workers)


def validate_entry(fields: Mapping[str, Any]) -> None:
    """Validates a catalog entry. A partial one is completed from the shipped entry with its name or
    task.
    """
    shipped = yaml.safe_load((ROOT / "models.yaml").read_text(encoding="utf-8"))["models"]
    is_custom = "secrets" in fields
    base = {"name": "mine", "task": "custom", "source": "local:mine"} if is_custom else shipped[-1]
    base = next((entry for entry in shipped if entry["name"] == fields.get("name")), base)
    entry = dict(fields) if {"task", "source"} <= fields.keys() else _merged(base, fields)
    # The reader is expected to have the file with the interface.
    entry.pop("interface", None)
    if isinstance(entry.get("image"), dict):
        entry["image"] = {k: v for k, v in entry["image"].items() if k != "interface"}
    CatalogEntry.model_validate(entry)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        is_part = isinstance(value, dict) and isinstance(base.get(name), dict)
        merged[name] = _merged(base[name], value) if is_part else value
    return merged


def check_variables(lines: list[str]) -> None:
    """Checks that our code reads each variable in a cog.yaml."""
    sources = "".join(path.read_text() for path in (ROOT / "workers/models/custom").rglob("*.py"))
    for line in lines:
        assert line.partition("=")[0] in sources, line


def check_hcl(block: Block) -> None:
    """Checks that the platform has these variables, and checks the syntax if Terraform is
    installed.
    """
    variables = (ROOT / "infra/terraform/platform/variables.tf").read_text(encoding="utf-8")
    names = re.findall(r"(?m)^(\w+) *=", block.text)
    assert names
    assert all(f'variable "{name}"' in variables for name in names), names
    if shutil.which("terraform") is not None:
        done = subprocess.run(
            ["terraform", "fmt", "-"], input=block.text, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def check_sql(block: Block) -> None:
    """Parses a statement, and looks up the columns of our tables and views."""
    is_duckdb = "read_parquet" in block.text
    tree = sqlglot.parse_one(block.text, dialect="duckdb" if is_duckdb else "bigquery")
    table = "rows" if is_duckdb else TABLES[next(iter(tree.find_all(exp.Table))).name]
    schema = json.loads((ROOT / f"infra/bigquery/{table}.schema.json").read_text())
    columns = {column["name"] for column in schema}
    columns |= {alias.alias for alias in tree.find_all(exp.Alias)}
    named = {column.name for column in tree.find_all(exp.Column)}
    # The parser treats units as columns: DATE_TRUNC(day, MONTH).
    unknown = named - columns - {"MONTH", "union_by_name"}
    assert not unknown, f"{table} has no columns {unknown}"


def check_js(block: Block, folder: Path) -> None:
    """Has Node parse a module, and looks up its packages in tests/clients."""
    manifests = [
        json.loads(path.read_text()) for path in (ROOT / NODE_CLIENTS).glob("*/package.json")
    ]
    installed = {name for manifest in manifests for name in manifest.get("dependencies", {})}
    assert set(re.findall(r'from "([^"]+)"', block.text)) <= installed
    if shutil.which("node") is not None:
        (folder / "sample.mjs").write_text(block.text, encoding="utf-8")
        done = subprocess.run(
            ["node", "--check", folder / "sample.mjs"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def check_dockerfile(block: Block) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), "--failure-threshold", "error", "-"],
        input=block.text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


FORMATS: Mapping[str, Callable[[Block], None]] = MappingProxyType(
    {
        "dockerfile": check_dockerfile,
        "hcl": check_hcl,
        "json": check_json,
        "sql": check_sql,
        "yaml": check_yaml,
    }
)
