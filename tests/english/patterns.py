"""Patterns for sentences that read like a translation; CONTRIBUTING.md names the common ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.english.sentences import Sentence

PEOPLE = (
    "administrator|anyone|attacker|author|buyer|caller|client|colleague|contributor|customer|designer|"
    "developer|engineer|everyone|founder|human|maintainer|man|member|newcomer|operator|owner|people|"
    "person|provider|reader|reviewer|seller|sender|speaker|stranger|subscriber|team|tenant|those|"
    "user|visitor|woman|writer"
)
QUESTION = re.compile(r"\?[\"')]?$")


@dataclass(frozen=True)
class Pattern:
    """A kind of wording that `search` finds in a sentence, and what to write instead."""

    name: str
    search: Callable[[Sentence], object]
    instead: str


def _regex(pattern: str, flags: int = 0) -> Callable[[Sentence], object]:
    compiled = re.compile(pattern, flags)
    return lambda sentence: compiled.search(sentence.text)


def _noun_is_missing(sentence: Sentence) -> object:
    if sentence.kind == "argument":
        return re.match(r"[Oo]f (?!course\b)", sentence.text)
    return re.match(r"Of (?!course\b)[^,]*$", sentence.text)


FREE_RELATIVE = re.compile(
    r"""^(What|Whatever|Which)\b
    | ^How\ (?!long|many|much|far|often|fast|large|big|old|to)
    | ^Whether\b
    | \b(of|by|from|with|than|to|after|before|beside|without)\ (what|whatever|whoever|whose)\b
      (?!\ follows)""",
    re.VERBOSE,
)


def _is_free_relative(sentence: Sentence) -> object:
    if sentence.kind == "heading" or QUESTION.search(sentence.text):
        return None
    return FREE_RELATIVE.search(sentence.text)


WHO = re.compile(r"(?:(\S+) )?\b[Ww]ho\b")
PERSON = re.compile(rf"(?:{PEOPLE})s?[,)]?$", re.IGNORECASE)


def _has_no_person(sentence: Sentence) -> object:
    if re.search(r"\b(whoever|whomever)\b", sentence.text, re.IGNORECASE):
        return True
    if sentence.kind == "heading" or QUESTION.search(sentence.text):
        return None
    return any(not (match[1] and PERSON.search(match[1])) for match in WHO.finditer(sentence.text))


def _starts_with_where(sentence: Sentence) -> object:
    if sentence.kind == "heading" or QUESTION.search(sentence.text):
        return None
    return re.search(r"^Where\b|\bif it is so\b", sentence.text)


NO_SUBJECT = (
    r"longer|more|less|fewer|better|worse|different|doubt|need|reason|way|good|later|earlier"
)
PATTERNS = (
    Pattern("P1", _noun_is_missing, "start with the noun or unit, not with “of”"),
    Pattern("P2", _is_free_relative, "name the thing; no “what …” or “whether …” as a noun"),
    Pattern("P3", _has_no_person, "name the person: “the caller”, “a tenant who …”"),
    Pattern(
        "P4",
        _regex(
            r"\b(that|those) of\b|\b[Tt]hose (that|which)\b"
            r"|\b(?:These|these)( (and|or|are|have|must|may)\b|[,.;:)]|$)"
        ),
        "repeat the noun",
    ),
    Pattern(
        "P5",
        _regex(
            rf"(?<!\bthere )(?<!\bThere )\b(is|are|was|were) no (?!{NO_SUBJECT})\w"
            r"|\b(has|have|had) none\b|\bof no (?!(more|longer|use|help)\b)\w"
        ),
        "negate the verb: “is not a …”, “does not have …”, “without …”",
    ),
    Pattern(
        "P6",
        _regex(r"\bat most so\b|\bso (long|many|much|few|large|often)(?=[.,;:)]|$)"),
        "give the measure",
    ),
    Pattern(
        "P7",
        _regex(
            r"\b[Tt]he (most|least|fewest) (of|that|which|any|(?!\w+(ous|ss)\b)\w+s)\b"
            r"|\bwhich is the (most|least)\b|^(Most|Least|The most|The least) (that|of|which)\b"
        ),
        "“maximum tokens per window”",
    ),
    Pattern(
        "P8",
        _regex(r"\b([Oo]ne's|of (its|their|his|your|our)) own\b"),
        "custom; separate; its own …",
    ),
    Pattern(
        "P9",
        _regex(r"\b([Ss]ays?|said|saying|[Tt]ells?|told|telling)\b"),
        "specify, report, state, notify",
    ),
    Pattern(
        "P10",
        _regex(
            r"(?<!goal )(?<!aim )(?<!purpose )(?<!idea )(?<!way )(?<!point )(?<!job )(?<!remedy )"
            r"(?<!alternative )(?<!rule )(?<!default )(?<!fix )(?<!solution )(?<!plan )(?<!task )"
            r"\b(is|are|was|were) to [a-z]+\b"
        ),
        "“must”, “to preempt”",
    ),
    Pattern(
        "P11",
        _regex(r"\b([Bb]esides?|anew|for ever)\b|\bbehind (which|the id|an id|it|them)\b"),
        "alongside, again, forever, after",
    ),
    Pattern(
        "P12",
        _regex(
            r"\bof (?!(one|each|some|all|any|most|both|part|none|many|two|three|a (number|set|list|"
            r"kind|pair|sort|type|couple|row|range|series)|the (rest|number|sum|kind|end)) of)"
            r"(\w+ ){1,3}of \w"
        ),
        "nouns in a row: “a flow step item”",
    ),
    Pattern(
        "P13",
        _regex(r"\b[Gg](ive|ives|ave|iving)\b(?! up\b)|\b[Gg]o(es)? on\b|\b[Tt](akes?|ook) note\b"),
        "return, provide, continue, record",
    ),
    Pattern(
        "P16",
        _regex(
            r"\bout of reach\b|\b(is|are|was|were) away\b"
            r"|\b(lies?|stands?|stood) (in|on|at|below|beside|above|under)\b"
        ),
        "unreachable; is in",
    ),
    Pattern(
        "P17",
        _regex(r", as (it|they|there|we|all|no|each|every)\b|, for (it|they|there|we)\b"),
        "because",
    ),
    Pattern("P18", _starts_with_where, "if"),
)
