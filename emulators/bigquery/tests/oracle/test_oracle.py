"""Compares GoogleSQL with Google's own reference evaluator, which comes with the analyzer.

The files in `queries` have one query per line. Each query must return the evaluator's values in the
same order, fail if the evaluator fails, or be rejected as unsupported. Rejected queries are listed
in `unsupported.txt`, so that support can't shrink unnoticed; `python -m tests.oracle.test_oracle`
updates the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from bigquery_emulator.duckdb_words import is_of_the_database
from bigquery_emulator.googlesql.translation.functions.scalar import FUNCTIONS
from tests.oracle.expressions import (
    random_query,
    random_table_query,
)
from tests.oracle.null_calls import NEVER_ASKED, builtin_functions, null_calls
from tests.oracle.world import Found, World

QUERIES = Path(__file__).parent / "queries"
_UNSUPPORTED = Path(__file__).parent / "unsupported.txt"
_RULES = ("Array cannot have a null element", "Duplicate column names in the result")
"""Errors that BigQuery raises about results but the evaluator does not."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


@pytest.fixture(scope="module")
def given(world: World) -> Callable[[str], Found]:
    """Returns the result from the embedded BigQuery.

    Each query runs only once, no matter how often its result is used.
    """
    return cache(world.given)


def queries_of(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("--")]


@pytest.mark.parametrize("path", sorted(QUERIES.glob("*.sql")), ids=lambda path: path.stem)
def test_queries_answer_as_google_s_evaluator_does(
    world: World, given: Callable[[str], Found], path: Path
) -> None:
    known = set(_UNSUPPORTED.read_text(encoding="utf-8").splitlines())
    wrong = []
    for sql in queries_of(path):
        expected, answer = world.expected(sql), given(sql)
        is_told = answer.error.startswith(_RULES) or expected.is_unsupported
        if answer.is_unsupported and sql not in known:
            wrong.append(f"{sql}\n  is refused now: {answer.error}")
        elif sql in known and not answer.is_unsupported:
            wrong.append(f"{sql}\n  is answered now; take it out of unsupported.txt")
        elif not answer.is_unsupported and not is_told and not _agree(expected, answer):
            wrong.append(
                f"{sql}\n  expected: {expected.rows} {expected.error}"
                f"\n  given:    {answer.rows} {answer.error}"
            )
    assert not wrong, "\n".join([f"{len(wrong)} of {len(queries_of(path))}:", *wrong])


@pytest.mark.parametrize("text", ["xyz", "abéd", "ag1", "abc日本語日本語日本語"])
def test_text_that_is_not_hexadecimal_is_refused_in_the_evaluators_words(
    world: World, text: str
) -> None:
    sql = f"SELECT FROM_HEX('{text}')"
    assert world.expected(sql).error.partition("Message: ")[2] == world.given(sql).error


@pytest.mark.parametrize("first", range(0, 300, 100))
@pytest.mark.parametrize("query", [random_query, random_table_query])
def test_random_queries_answer_as_google_s_evaluator_does(
    world: World, query: Callable[[int], str], first: int
) -> None:
    wrong, refused = [], 0
    for seed in range(first, first + 100):
        sql = query(seed)
        answer = world.given(sql)
        if answer.is_unsupported:
            refused += 1
            continue
        expected = world.expected(sql)
        # The order in which rows are evaluated and dropped is undefined, so an error may not occur.
        is_missed = query is random_table_query and expected.error and not answer.error
        if not (_agree(expected, answer) or _is_only_null(expected, answer) or is_missed):
            wrong.append(f"{seed}: {sql}\n  expected: {expected}\n  given:    {answer}")
    assert not wrong, "\n".join(wrong)
    assert refused < 10


def _is_only_null(expected: Found, given: Found) -> bool:
    """True if one result has NULL where the other has an error.

    Values next to a NULL need not be evaluated.
    """
    answers = [side.rows for side in (expected, given) if not side.error]
    return answers == [[(None,)]] or answers == [[([],)]]


def _agree(expected: Found, given: Found) -> bool:
    return (given.rows, bool(given.error)) == (expected.rows, bool(expected.error))


@pytest.mark.parametrize("part", range(4))
def test_an_argument_that_is_null_comes_before_every_special_case(world: World, part: int) -> None:
    """Calls each scalar function with a NULL, both by itself and combined with special values."""
    names = frozenset(sorted(FUNCTIONS)[part::4])
    wrong = []
    for _, sql in null_calls(builtin_functions(), names):
        answer = world.given(sql)
        expected = answer if answer.is_unsupported else world.expected(sql)
        if not (expected.is_unsupported or _agree(expected, answer)):
            wrong.append(f"{sql}\n  expected: {expected}\n  given:    {answer}")
    assert not wrong, "\n".join([f"{len(wrong)}:", *wrong])


def test_every_function_is_called_with_a_null() -> None:
    called = {name for name, _ in null_calls(builtin_functions(), frozenset(FUNCTIONS))}
    assert FUNCTIONS.keys() - called == NEVER_ASKED


@pytest.mark.parametrize("path", sorted(QUERIES.glob("*.sql")), ids=lambda path: path.stem)
def test_errors_have_no_words_of_the_database(given: Callable[[str], Found], path: Path) -> None:
    errors = {sql: given(sql).error for sql in queries_of(path)}
    leaking = {sql: error for sql, error in errors.items() if is_of_the_database(error)}
    assert not leaking


def test_there_are_enough_of_them() -> None:
    files = list(QUERIES.glob("*.sql"))
    assert sum(len(set(queries_of(path))) for path in files) >= 1_900


def _write_unsupported() -> None:
    world = World()
    refused = [
        sql
        for path in sorted(QUERIES.glob("*.sql"))
        for sql in queries_of(path)
        if world.given(sql).is_unsupported
    ]
    _UNSUPPORTED.write_text("\n".join([*refused, ""]), encoding="utf-8")


if __name__ == "__main__":
    _write_unsupported()
