"""Finds sentences and names that read like a translation, and compares counts with a baseline."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.english.names import empty_docstrings_of, participles_of
from tests.english.patterns import PATTERNS
from tests.english.sentences import markdown_sentences, python_sentences
from tests.source_files import source_files

ROOT = Path(__file__).parents[2]
BASELINE = Path(__file__).with_name("baseline.json")
ALLOWED = Path(__file__).with_name("allowed.txt")
NOT_OURS = ("console/vendor", "swagger-ui-dist")
HERE = "tests/english/"

Baseline = dict[str, dict[str, int]]
"""Number of findings per pattern for each file, relative to the repository."""


@dataclass(frozen=True)
class Finding:
    """A sentence or name, and the pattern it matches."""

    path: str
    line: int
    pattern: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.pattern}: {self.text}"


def find_all(root: Path = ROOT) -> list[Finding]:
    allowed = set(ALLOWED.read_text(encoding="utf-8").splitlines())
    return [
        finding
        for path in source_files(root)
        if path.suffix in {".py", ".md"} and _is_ours(path.as_posix())
        for finding in find_in(root, path)
        if finding.text not in allowed
    ]


def _is_ours(path: str) -> bool:
    return not path.startswith(HERE) and not any(folder in path for folder in NOT_OURS)


def find_in(root: Path, path: Path) -> Iterator[Finding]:
    """Yields a file's findings.

    Args:
        path: relative to `root`.
    """
    text = (root / path).read_text(encoding="utf-8")
    name, is_test = path.as_posix(), "tests" in path.parts
    nodes = list(ast.walk(ast.parse(text))) if path.suffix == ".py" else []
    sentences = (
        python_sentences(text, nodes, is_test=is_test) if nodes else markdown_sentences(text)
    )
    for sentence in sentences:
        for pattern in PATTERNS:
            if pattern.search(sentence):
                yield Finding(name, sentence.line, pattern.name, sentence.text)
    for line, words in participles_of(nodes, is_test=is_test):
        yield Finding(name, line, "P14", words)
    for line, words in empty_docstrings_of(nodes):
        yield Finding(name, line, "P15", words)


def count(findings: list[Finding]) -> Baseline:
    counts: dict[str, Counter[str]] = {}
    for finding in findings:
        counts.setdefault(finding.path, Counter())[finding.pattern] += 1
    return {
        path: {pattern: counter[pattern] for pattern in sorted(counter, key=_number)}
        for path, counter in sorted(counts.items())
    }


def _number(pattern: str) -> int:
    return int(pattern.removeprefix("P"))


def read_baseline() -> Baseline:
    baseline: Baseline = json.loads(BASELINE.read_text(encoding="utf-8"))
    return baseline


def write_baseline(baseline: Baseline) -> None:
    """Writes one line per file, so that changes to different files can be merged."""
    lines = [f"{json.dumps(path)}: {json.dumps(counts)}" for path, counts in baseline.items()]
    BASELINE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def new_findings(findings: list[Finding], baseline: Baseline) -> list[Finding]:
    """Returns the findings for each file and pattern that exceeds the baseline."""
    counts = count(findings)
    return [
        finding
        for finding in findings
        if counts[finding.path][finding.pattern]
        > baseline.get(finding.path, {}).get(finding.pattern, 0)
    ]


def fixed_counts(findings: list[Finding], baseline: Baseline) -> list[str]:
    """Returns the baseline lines that allow more findings than there are."""
    counts = count(findings)
    return [
        f"{path}: {pattern} {allowed}, now {now}"
        for path, patterns in baseline.items()
        for pattern, allowed in patterns.items()
        if (now := counts.get(path, {}).get(pattern, 0)) < allowed
    ]
