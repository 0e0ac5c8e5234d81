"""Each metric appears in the source under its name in `/metrics`, so people can search for it."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("Counter", "Gauge", "Histogram", "CountingHistogram")


@cache
def metrics() -> list[tuple[str, str]]:
    """Each metric declared in the source, as (kind, name)."""
    found = []
    for folder in ("api", "shared", "workers", "infra"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id in KINDS
                ):
                    name = node.args[0] if node.args else None
                    if isinstance(name, ast.Constant) and str(name.value).startswith("penstock_"):
                        found.append((node.func.id, str(name.value)))
    return found


def test_counters_and_no_others_end_in_total() -> None:
    assert len(metrics()) > 40
    assert [
        name for kind, name in metrics() if name.endswith("_total") != (kind == "Counter")
    ] == []


def test_each_name_is_declared_once() -> None:
    names = [name for _, name in metrics()]
    assert sorted(names) == sorted(set(names))
