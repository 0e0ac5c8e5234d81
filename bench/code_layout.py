"""`python -m bench.code_layout [REVISION ...]`: measures how the code is laid out and worded.

Without a revision it measures the working tree. With several it prints them side by side, so that a
change of layout can be judged. Everything is read from the source. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("api", "workers", "shared", "infra", "models", "bench")
"""Production code and its benchmarks. Tests are not measured."""
SHOWN_MEMBERS = 10
"""Packages of fewer members are measured but not printed."""
LINE_LENGTH = 100
OLD_IDIOM = r"\b(nobody|whoever|whose|what is|stands?|lies|told|mend|of its own|bears?)\b"
"""Words that mark English translated from another language."""

Graph = dict[str, set[str]]


@dataclass(frozen=True, slots=True)
class PackageLayout:
    """Imports among the modules and packages directly inside one package."""

    members: int
    """Modules and packages side by side."""
    layers: int
    """The longest chain of imports, a cycle counted as one layer."""
    imports: int
    """Pairs of members of which one imports the other."""
    cycles: int
    """Groups of members that import each other."""


def layout(graph: Graph) -> PackageLayout:
    """Measures the import graph of one package."""
    groups = strongly_connected(graph)
    group_of = {member: number for number, group in enumerate(groups) for member in group}
    condensed: dict[int, set[int]] = {number: set() for number in range(len(groups))}
    for member, imported in graph.items():
        condensed[group_of[member]] |= {group_of[other] for other in imported} - {group_of[member]}
    height: dict[int, int] = {}
    for group in TopologicalSorter(condensed).static_order():
        height[group] = 1 + max((height[below] for below in condensed[group]), default=0)
    imports = sum(map(len, graph.values()))
    cycles = sum(len(group) > 1 for group in groups)
    return PackageLayout(len(graph), max(height.values(), default=0), imports, cycles)


def strongly_connected(graph: Graph) -> list[set[str]]:
    """Splits the members into cycles. A member in no cycle is a group by itself."""
    merged = {member: {member} for member in graph}
    while True:
        edges = {min(group): set[str]() for group in merged.values()}
        for member, imported in graph.items():
            here = min(merged[member])
            edges[here] |= {min(merged[other]) for other in imported} - {here}
        try:
            TopologicalSorter(edges).prepare()
        except CycleError as error:
            cycle = set[str]().union(*(merged[member] for member in error.args[1]))
            merged.update(dict.fromkeys(cycle, cycle))
        else:
            return [merged[member] for member in edges]


def import_graphs(modules: dict[str, ast.Module]) -> dict[str, Graph]:
    """The import graph of each package, by package name: which member imports which."""
    graphs: dict[str, Graph] = defaultdict(dict)
    for name in modules:
        for package, member in _levels(name):
            graphs[package].setdefault(member, set())
    for name, tree in modules.items():
        for imported in _imports(tree):
            for package, member in _levels(name):
                other = _member_in(package, imported)
                if other in graphs[package] and other != member:
                    graphs[package][member].add(other)
    return graphs


def _levels(module: str) -> Iterator[tuple[str, str]]:
    """Each package that holds the module, with the member of that package where it is found."""
    parts = module.split(".")
    for depth in range(1, len(parts)):
        yield ".".join(parts[:depth]), parts[depth]


def _member_in(package: str, module: str) -> str:
    return module[len(package) + 1 :].split(".")[0] if module.startswith(f"{package}.") else ""


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """The modules that import each module of the product. Benchmarks are left out."""
    product = {name for name in modules if name.split(".")[0] != "bench"}
    graphs: dict[str, set[str]] = {name: set() for name in product if "." in name}
    for name in product:
        for imported in _imports(modules[name]):
            other = imported if imported in graphs else imported.rpartition(".")[0]
            if other in graphs and other != name:
                graphs[other].add(name)
    return graphs


def homonyms(modules: dict[str, ast.Module]) -> list[str]:
    """Public names that two or more classes have."""
    seen: dict[str, set[str]] = defaultdict(set)
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                seen[node.name].add(module)
    return sorted(name for name, where in seen.items() if len(where) > 1)


def docstrings(trees: Iterable[ast.Module]) -> str:
    """All docstrings, those of fields and constants too."""
    names = []
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                names += [node.value.value] if isinstance(node.value.value, str) else []
    return "\n".join(names)


def measure(root: Path) -> tuple[dict[str, PackageLayout], dict[str, str]]:
    """The layout of every package of one tree, and the figures of the whole as text."""
    paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    sources = {path: path.read_text() for path in paths}
    modules = {_module_name(root, path): ast.parse(source) for path, source in sources.items()}
    layouts = {name: layout(graph) for name, graph in import_graphs(modules).items()}
    lines = [line for source in sources.values() for line in source.splitlines()]
    words = len((text := docstrings(modules.values())).split())
    long_lines = sum(len(line) > LINE_LENGTH for line in lines)
    old_words = len(re.findall(OLD_IDIOM, text))
    packages = {_module_name(root, path) for path in paths if path.name == "__init__.py"}
    imported = {k: v for k, v in importers(modules).items() if k not in packages}
    single = sum(len(by) == 1 for by in imported.values())
    return layouts, {
        "members of the largest package": str(max(one.members for one in layouts.values())),
        "layers of the deepest package": str(max(one.layers for one in layouts.values())),
        "cycles in all packages": str(sum(one.cycles for one in layouts.values())),
        "modules of the product that one other imports": f"{single} of {len(imported)}",
        "files, lines": f"{len(paths)}, {len(lines):,}",
        f"lines over {LINE_LENGTH} characters": f"{long_lines:,}",
        "public class names defined twice": str(len(homonyms(modules))),
        "semicolons per 1,000 words of docstrings": f"{1000 * text.count(';') / words:.1f}",
        "words of the old idiom per 1,000": f"{1000 * old_words / words:.1f}",
    }


def _module_name(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def measure_revision(revision: str) -> tuple[dict[str, PackageLayout], dict[str, str]]:
    """Measures a commit, from an archive of it."""
    command = ["git", "archive", revision, *PACKAGES]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with tempfile.TemporaryDirectory() as folder:
        # tarfile takes no filter before Python 3.11.4, and wants one from 3.12 on.
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        return measure(Path(folder))


def main() -> None:
    """Prints the figures as Markdown tables, one column for each revision."""
    revisions = sys.argv[1:]
    measured = [measure_revision(one) for one in revisions] or [measure(ROOT)]
    columns = revisions or ["working tree"]
    print("| members, layers, imports, cycles |", " | ".join(columns), "|")
    print("|---|" + "---|" * len(columns))
    for package in sorted({name for layouts, _ in measured for name in layouts}):
        layouts_of_package = [layouts.get(package) for layouts, _ in measured]
        if max(one.members for one in layouts_of_package if one) >= SHOWN_MEMBERS:
            print(f"| `{package}` |", " | ".join(map(_shown, layouts_of_package)), "|")
    print("\n| |", " | ".join(columns), "|")
    print("|---|" + "---|" * len(columns))
    for figure in measured[0][1]:
        print(f"| {figure} |", " | ".join(figures[figure] for _, figures in measured), "|")


def _shown(layout: PackageLayout | None) -> str:
    return f"{layout.members}, {layout.layers}, {layout.imports}, {layout.cycles}" if layout else ""


if __name__ == "__main__":
    main()
