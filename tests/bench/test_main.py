from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.__main__ import MODULES, PROGRAMS, find_summary, main


@pytest.mark.parametrize("name", MODULES)
def test_each_benchmark_is_a_module_that_runs(name: str) -> None:
    # Modules are read rather than imported, because many of them import torch.
    spec = find_spec(f"bench.{MODULES[name]}")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert "run" in functions | imported


def test_benchmarks_are_listed_if_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listing = " ".join(capsys.readouterr().out.split())
    for name, module in MODULES.items():
        assert len(find_summary(module)) > len(name)
        assert f" {name} {find_summary(module)} " in listing
    for name in PROGRAMS:
        assert f"`python -m bench.{name}" in listing
