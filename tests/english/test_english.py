"""The sentence linter: what it finds, what it ignores, and that counts only fall."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.english.__main__ import check, lower
from tests.english.linter import Finding, find_in
from tests.english.names import empty_docstrings_of, participles_of
from tests.english.patterns import PATTERNS
from tests.english.sentences import Sentence, markdown_sentences, python_sentences

TRANSLATED = [
    ("P1", "argument", "of the model."),
    ("P1", "docstring", "Of the replies in one message."),
    ("P2", "docstring", "What a batch may weigh."),
    ("P2", "docs", "What is wrong is refused with its line."),
    ("P2", "docstring", "How images are drawn."),
    ("P2", "docstring", "Whether the cache may answer the same request with its results."),
    ("P3", "docstring", "Who calls checks the digest."),
    ("P3", "comment", "It is charged to whoever canceled it."),
    ("P4", "docs", "Field names are those of the protocol."),
    ("P4", "comment", "It costs these and its prompt."),
    ("P5", "message", "it is no text in UTF-8"),
    ("P5", "docstring", "Rows of no customer."),
    ("P6", "docstring", "Waits until all have ended, at most so long."),
    ("P7", "argument", "the most tokens of a window."),
    ("P7", "docs", "X MiB, which is the most of one request."),
    ("P8", "docs", "A price of one's own."),
    ("P9", "comment", "A batch is split as the entry says."),
    ("P10", "docstring", "The items that are to be preempted."),
    ("P11", "docs", "Files are kept beside predictions."),
    ("P11", "docstring", "The id behind which a reader goes on."),
    ("P12", "docstring", "The input of an item of a step of a flow."),
    ("P13", "docs", "The class must give a Path."),
    ("P13", "comment", "The stream goes on."),
    ("P16", "message", "Redis is out of reach"),
    ("P16", "docs", "The file stands in the folder."),
    ("P17", "comment", "One seed would not do, as all processes would begin with it."),
    ("P18", "docs", "Where the machine has it, it is used."),
]
NATIVE = [
    ("docs", "Of 40 chats, 11 continued to run."),
    ("docs", "What happens if a worker dies?"),
    ("heading", "What a worker needs"),
    ("docstring", "How long a link is valid."),
    ("docstring", "True if its results may be served from the cache."),
    ("comment", "A caller who hangs up pays for nothing, and nobody waits for it."),
    ("docs", "There is no second copy."),
    ("docs", "A worker is no longer asked."),
    ("message", "the most recent revision"),
    ("docs", "The goal is to reduce the load."),
    ("docs", "The document is too long, and the client gives up."),
    ("docs", "One of the tenants waits."),
    ("docs", "The folder where the weights are."),
    ("argument", "size in bytes."),
]


@pytest.mark.parametrize(("pattern", "kind", "text"), TRANSLATED)
def test_what_reads_like_a_translation_is_found(pattern: str, kind: str, text: str) -> None:
    assert pattern in _patterns_in(kind, text)


@pytest.mark.parametrize(("kind", "text"), NATIVE)
def test_plain_english_is_left_alone(kind: str, text: str) -> None:
    assert _patterns_in(kind, text) == set()


def _patterns_in(kind: str, text: str) -> set[str]:
    sentence = Sentence(1, kind, text)  # type: ignore[arg-type]
    return {pattern.name for pattern in PATTERNS if pattern.search(sentence)}


MODULE = '''\
"""First line. Second line."""

LIMIT = 3
"""An attribute's text."""


def send(path: str, kept: int) -> None:
    """Sends a file.

    Args:
        path: of the file.
        kept: seconds to keep it,
            at most a day.
    """
    # A comment of
    # two lines.
    raise ValueError(f"{path} is not a file that can be sent")
'''


def test_sentences_of_a_module_with_their_lines() -> None:
    nodes = list(ast.walk(ast.parse(MODULE)))
    sentences = {
        (sentence.line, sentence.kind, sentence.text)
        for sentence in python_sentences(MODULE, nodes, is_test=False)
    }
    assert sentences == {
        (1, "docstring", "First line."),
        (1, "docstring", "Second line."),
        (4, "docstring", "An attribute's text."),
        (8, "docstring", "Sends a file."),
        (11, "argument", "of the file."),
        (12, "argument", "seconds to keep it, at most a day."),
        (15, "comment", "A comment of two lines."),
        (17, "message", "X is not a file that can be sent"),
    }


def test_sentences_of_a_page_leave_out_code() -> None:
    page = "# What it is\n\nRun `make test`. It\nends.\n\n```\nWhat is this\n```\n\n"
    page += "| a |\n|-|\n| b `c` |\n"
    assert [(s.line, s.kind, s.text) for s in markdown_sentences(page)] == [
        (1, "heading", "What it is"),
        (3, "docs", "Run X."),
        (3, "docs", "It ends."),
        (10, "heading", "a"),
        (12, "docs", "b X"),
    ]


def test_names_without_a_verb_and_docstrings_without_a_fact() -> None:
    module = (
        "def _measured():\n    'Returns it.'\n    one = 1\n"
        "def embed_texts(limit):\n    '''Embeds texts.\n\n"
        "    Args:\n        limit: of texts.\n    '''\n"
        "@property\ndef kept_bytes(self):\n    'Size in bytes.'\n"
    )
    nodes = list(ast.walk(ast.parse(module)))
    assert sorted(participles_of(nodes, is_test=False)) == [(1, "_measured"), (3, "one")]
    assert [text for _, text in empty_docstrings_of(nodes)] == ["Returns it.", "limit: of texts."]


def test_more_findings_than_the_baseline_fail(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding("a.md", 3, "P2", "What it is."), Finding("a.md", 9, "P2", "How it ends.")]
    assert check(findings, {"a.md": {"P2": 1}}) == 1
    assert "a.md:9: P2: How it ends." in capsys.readouterr().out


def test_fewer_findings_than_the_baseline_fail_until_it_is_lowered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    findings = [Finding("a.md", 3, "P2", "What it is.")]
    baseline = {"a.md": {"P2": 2, "P9": 1}, "gone.md": {"P1": 1}}
    assert check(findings, baseline) == 1
    assert "--lower" in capsys.readouterr().out
    assert lower(findings, baseline) == {"a.md": {"P2": 1}}
    assert check(findings, lower(findings, baseline)) == 0


def test_lowering_never_raises() -> None:
    findings = [Finding("a.md", 3, "P2", "What it is."), Finding("new.md", 1, "P2", "What it is.")]
    assert lower(findings, {"a.md": {"P2": 0}}) == {"a.md": {"P2": 0}}


def test_findings_of_a_file_name_it(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("A price of one's own.\n", encoding="utf-8")
    assert list(map(str, find_in(tmp_path, Path("page.md")))) == [
        "page.md:1: P8: A price of one's own."
    ]
