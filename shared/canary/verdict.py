"""Evaluates a canary by comparing its outcomes with the other revision's. Does no I/O.

Each of the three rules asks the same question: could a revision that stays within its limit have
this many bad items? The rules use the upper tail of the binomial distribution. A canary is bad if
the probability is below FALSE_ALARM. A few items are therefore enough if all of them are bad, while
many are needed if only some are.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from shared.models.entry import Canary

COMPARISON_TENANT = "penstock-canary"
"""The tenant used in rows and fair shares for items that run only for comparison."""
FALSE_ALARM = 1e-5
"""Probability below which a canary is judged bad.

It is small because canaries are checked every second.
"""
MIN_ITEMS = 50
"""Minimum number of items from the other revision needed to compare times."""
P95 = 0.95
SLACK_S = 0.05
"""Smaller delays are not noticeable, and a busy machine can add this much by itself."""
OUTSIDE_RATIO = 0.01
"""Fraction of compared results that may be outside the tolerance because of rounding."""
STEP = 1.1
"""Ratio between the lower bounds of consecutive bins in a histogram of times."""
NEGLIGIBLE = 1e-18
"""A share of a sum below which a term is left out, along with smaller ones."""
_FIRST_S = 0.001


@dataclass(slots=True)
class RevisionCounts:
    """One revision's item counts, by outcome."""

    items: int = 0
    failed: int = 0
    bins: Counter[int] = field(default_factory=Counter)
    """Items by histogram bin. Times run from publication to completion, in seconds."""

    def add(self, seconds: float | None = None) -> None:
        """Counts a finished item.

        `seconds` is None if the time doesn't reflect the revision's speed.
        """
        self.items += 1
        if seconds is not None:
            self.bins[bin_of(seconds)] += 1

    def add_failed(self, items: int = 1) -> None:
        self.items += items
        self.failed += items

    @property
    def p95_s(self) -> float | None:
        """The 95th percentile in seconds, rounded up to the upper bound of its bin.

        None if there are no items.
        """
        total, seen = self.bins.total(), 0
        for number in sorted(self.bins):
            seen += self.bins[number]
            if seen >= P95 * total:
                return end_of_bin_s(number)
        return None


@dataclass(slots=True)
class CanaryCounts:
    """Both revisions' counts in the window being judged."""

    stable: RevisionCounts = field(default_factory=RevisionCounts)
    canary: RevisionCounts = field(default_factory=RevisionCounts)
    compared: int = 0
    outside: int = 0
    """Number of compared results that were outside the tolerance."""


@dataclass(frozen=True, slots=True)
class CanaryJudgment:
    """The verdict on a canary, which is good unless it breaks one of the rules."""

    is_good: bool
    reason: str
    """The reason, in one line."""


def judge(counts: CanaryCounts, rules: Canary) -> CanaryJudgment:
    """Judges a canary by its error rate, p95, and results."""
    for bad in (_too_many_failed(counts, rules), _too_slow(counts, rules), _too_different(counts)):
        if bad:
            return CanaryJudgment(False, bad)
    stable, canary = counts.stable, counts.canary
    times = f"p95 {_show_seconds(canary.p95_s)} against {_show_seconds(stable.p95_s)}"
    return CanaryJudgment(
        True,
        f"{canary.failed} of {canary.items} items failed, compared with {stable.failed} "
        f"of {stable.items}; {times}; {counts.outside} of {counts.compared} results "
        "outside the tolerance",
    )


def bin_of(seconds: float) -> int:
    """Returns the bin number in a histogram of times."""
    return max(0, math.ceil(math.log(max(seconds, _FIRST_S) / _FIRST_S, STEP)))


def end_of_bin_s(number: int) -> float:
    """Returns the upper bound of a bin, in seconds."""
    return float(_FIRST_S * STEP**number)


def tail(seen: int, of: int, ratio: float) -> float:
    """Returns the probability of at least `seen` hits in `of` trials with probability `ratio`."""
    if seen <= 0 or ratio >= 1:
        return 1.0
    if ratio <= 0:
        return 0.0
    logs = (math.log(ratio), math.log1p(-ratio))
    ways, total = math.lgamma(of + 1), 0.0
    for count in range(seen, of + 1):
        share = math.exp(
            ways
            - math.lgamma(count + 1)
            - math.lgamma(of - count + 1)
            + count * logs[0]
            + (of - count) * logs[1]
        )
        total += share
        # Beyond the expected number of hits, each term is smaller than the one before.
        if count > ratio * of and share <= NEGLIGIBLE * total:
            break
    return total


def _is_bad(seen: int, of: int, ratio: float) -> bool:
    return seen > ratio * of and tail(seen, of, ratio) < FALSE_ALARM


def _too_many_failed(counts: CanaryCounts, rules: Canary) -> str:
    stable, canary = counts.stable, counts.canary
    ratio = rules.error_ratio + (stable.failed / stable.items if stable.items else 0.0)
    if not _is_bad(canary.failed, canary.items, ratio):
        return ""
    return (
        f"{canary.failed} of {canary.items} items failed, compared with {stable.failed} "
        f"of {stable.items}"
    )


def _too_slow(counts: CanaryCounts, rules: Canary) -> str:
    usual_s = counts.stable.p95_s
    if usual_s is None or counts.stable.bins.total() < MIN_ITEMS:
        return ""
    limit_s = max(usual_s * rules.p95_ratio, usual_s + SLACK_S)
    bins = counts.canary.bins
    slow = sum(count for number, count in bins.items() if end_of_bin_s(number - 1) > limit_s)
    # An equally fast revision has 5% of its items above the p95 and fewer above the limit.
    if not _is_bad(slow, bins.total(), 1 - P95):
        return ""
    return (
        f"{slow} of {bins.total()} items took more than {limit_s:.3g} s, which is "
        f"{limit_s / usual_s:.3g} times the other revision's p95"
    )


def _too_different(counts: CanaryCounts) -> str:
    if not _is_bad(counts.outside, counts.compared, OUTSIDE_RATIO):
        return ""
    return f"{counts.outside} of {counts.compared} results were outside the tolerance"


def _show_seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.3g} s"
