"""Each task has its own file in every layer, and no other code checks which task a model serves."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.tasks import API_TASKS
from infra.rollout.examples import EXAMPLES
from shared.models.tasks import TASKS
from workers.tasks import WORKER_TASKS

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / "shared/models/tasks", ROOT / "api/tasks", ROOT / "workers/tasks"]
REGISTRIES = {"TASKS", "API_TASKS", "WORKER_TASKS", "EXAMPLES"}
SOURCES = [
    path
    for folder in ("api", "bench", "infra", "models", "shared", "tests", "workers")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.parent not in FOLDERS
]


def test_a_task_has_a_file_of_its_name_in_each_layer() -> None:
    for folder in FOLDERS:
        found = {path.stem for path in folder.glob("*.py")} - {"__init__", "base"}
        assert found == set(TASKS), folder
    assert list(TASKS) == list(API_TASKS) == list(WORKER_TASKS) == list(EXAMPLES)


@pytest.mark.slow(about_s=6)
def test_only_the_registries_ask_for_the_task() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if (lines := list(branches(path.read_text())))
    }
    assert found == {}


@pytest.mark.parametrize(
    "code",
    [
        "if model.task=='image': pass",
        "x = 'image' != task",
        "x = model.task not in ('image', 'embedding')",
        "x = GUESSES[model.task]",
        "x = {'image': 1}[task]",
        "x = GUESSES.get(entry.task)",
        "match model.task:\n    case 'image': pass",
        "x = model.task.startswith('im')",
    ],
)
def test_a_branch_is_found(code: str) -> None:
    assert list(branches(code)) == [1]


@pytest.mark.parametrize(
    "code",
    [
        "TASKS[model.task]",
        "WORKER_TASKS[entry.task].preparer",
        "task is None",
        "row(task=model.task)",
        "wait([task])",
    ],
)
def test_the_registry_may_be_asked(code: str) -> None:
    assert list(branches(code)) == []


def branches(source: str) -> Iterator[int]:
    """Lines that branch on a task's name instead of using a registry."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                chooses = not all(isinstance(op, ast.Is | ast.IsNot) for op in ops)
                if chooses and any(map(is_task, [left, *others])):
                    yield node.lineno
            case ast.Subscript(value=table, slice=key):
                if is_task(key) and not (isinstance(table, ast.Name) and table.id in REGISTRIES):
                    yield node.lineno
            case ast.Call(func=ast.Attribute(attr="get"), args=[key, *_]) if is_task(key):
                yield node.lineno
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(attr="task"), attr="startswith" | "endswith")
            ):
                yield node.lineno
            case ast.Match(subject=subject) if is_task(subject):
                yield node.lineno


def is_task(node: ast.expr) -> bool:
    match node:
        case ast.Name(id="task") | ast.Attribute(attr="task"):
            return True
    return False
