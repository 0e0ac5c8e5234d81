"""`python -m tests.english [PATTERN|FILE|FOLDER...]`: prints text that reads like a translation.

`--counts` prints totals per pattern instead. `--check` fails if a file has more findings than
baseline.json allows, or fewer; if there are fewer, `--lower` writes the lower counts.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.english.linter import (
    Baseline,
    Finding,
    count,
    find_all,
    fixed_counts,
    new_findings,
    read_baseline,
    write_baseline,
)
from tests.english.patterns import PATTERNS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.english", description=__doc__)
    parser.add_argument("wanted", nargs="*", metavar="PATTERN|FILE|FOLDER")
    modes = parser.add_mutually_exclusive_group()
    for mode in ("--counts", "--check", "--lower"):
        modes.add_argument(mode, action="store_true")
    options = parser.parse_args()
    findings = find_all()
    if options.check:
        return check(findings, read_baseline())
    if options.lower:
        write_baseline(lower(findings, read_baseline()))
        return 0
    findings = [finding for finding in findings if _is_wanted(finding, options.wanted)]
    if options.counts:
        print_counts(findings)
    else:
        print(*findings, sep="\n")
    return 0


def check(findings: list[Finding], baseline: Baseline) -> int:
    """Prints where the counts and the baseline differ. Returns the exit code."""
    new, fixed = new_findings(findings, baseline), fixed_counts(findings, baseline)
    instead = {pattern.name: pattern.instead for pattern in PATTERNS}
    for finding in new:
        print(f"{finding}  ->  {instead.get(finding.pattern, 'a verb first, or delete it')}")
    if new:
        print(
            f"{len(new)} sentences in files that have more of a pattern than baseline.json allows"
        )
    elif fixed:
        print(*fixed, sep="\n")
        print("lower the baseline: python -m tests.english --lower")
    return 1 if new or fixed else 0


def lower(findings: list[Finding], baseline: Baseline) -> Baseline:
    counts = count(findings)
    lowered = {
        path: {
            pattern: min(allowed, counts[path][pattern])
            for pattern, allowed in patterns.items()
            if pattern in counts.get(path, {})
        }
        for path, patterns in baseline.items()
    }
    return {path: patterns for path, patterns in lowered.items() if patterns}


def print_counts(findings: list[Finding]) -> None:
    counts = Counter(finding.pattern for finding in findings)
    instead = {pattern.name: pattern.instead for pattern in PATTERNS}
    for name in sorted(counts, key=lambda name: int(name[1:])):
        print(f"{name:4}{counts[name]:6}  {instead.get(name, '')}".rstrip())
    print(f"all {counts.total():6}")


def _is_wanted(finding: Finding, wanted: list[str]) -> bool:
    patterns = {name for name in wanted if name[:1] == "P" and name[1:].isdigit()}
    paths = [name.rstrip("/") for name in wanted if name not in patterns]
    is_pattern = not patterns or finding.pattern in patterns
    return is_pattern and (
        not paths or any(f"{finding.path}/".startswith(f"{path}/") for path in paths)
    )


if __name__ == "__main__":
    sys.exit(main())
