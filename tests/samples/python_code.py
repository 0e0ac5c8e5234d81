"""Checks Python samples without calling anything: syntax, imports, and the names they use."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from tests.samples.blocks import ROOT, Block

REQUIREMENTS = "tests/clients/python/requirements"
CLIENTS: Mapping[str, str] = MappingProxyType(
    {
        "anthropic": "anthropic",
        "cohere": "cohere",
        "haystack": "haystack",
        "langchain_openai": "langchain",
        "litellm": "litellm",
        "llama_index": "llama-index",
        "mistralai": "mistral",
    }
)
"""Clients that tests/clients installs and runs: the requirements of each, by module."""
SURROUNDINGS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "docs/how-to/adding-a-task.md": (
            "shared.models.tasks.similarity",
            "shared.models.tasks.base",
        ),
        "docs/how-to/test-your-model.md": (
            *("examples.test_my_model", "shared.models.catalog", "shared.models.entry"),
        ),
        "docs/reference/own-models.md": ("cog",),
        "docs/tutorial/own-model.md": ("cog",),
    }
)
"""Modules whose names a page uses without importing them, because its text names the module."""
GIVEN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "docs/how-to/adapters.md": frozenset({"client", "replicate"}),
        "docs/how-to/speech.md": frozenset({"file", "text", "play"}),
        "docs/how-to/test-your-model.md": frozenset({"LETTERS", "SPLIT", "redis_url"}),
        "docs/reference/own-models.md": frozenset({"pydantic"}),
    }
)
"""Names that stand for something the reader supplies."""


def check_python_code(block: Block, earlier: Iterable[Block]) -> None:
    """Checks one block, which may use names from earlier blocks on its page.

    Raises:
        SyntaxError: the block does not compile.
        AssertionError: a module can't be imported, or a name is not defined anywhere.
    """
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
    tree = compile(block.text, str(block), "exec", flags)
    for module in imported_modules(tree):
        top = module.partition(".")[0]
        if top in CLIENTS:
            assert (ROOT / REQUIREMENTS / f"{CLIENTS[top]}.in").is_file(), module
        else:
            assert importlib.util.find_spec(module) is not None, module
    known = {"__file__", *dir(builtins)} | defined_names(tree) | GIVEN.get(block.page, frozenset())
    for other in earlier:
        known |= defined_names(compile(other.text, str(other), "exec", flags))
    for module in SURROUNDINGS.get(block.page, ()):
        known |= set(dir(importlib.import_module(module)))
    used = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    assert used - known == set()


def imported_modules(tree: ast.AST) -> set[str]:
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    return modules - {"__future__"}


def defined_names(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return names
