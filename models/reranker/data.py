"""`python -m models.reranker.data FILE FOLDER...`: makes query-document pairs for training.

A short summary is a query, and the long description of the same thing is the document that answers
it: the first sentence of a docstring and the rest of it, the NAME line of a man page and its
DESCRIPTION. Python packages are read from the folders (site-packages), man pages from
/usr/share/man. Nothing is imported or run.

Pairs are split by package, so that no function is close to another of its package in another split;
pairs that occur in two packages (vendored copies, templates) stay in training only. A pair is
dropped if its document contains its query, or if its query or document occurs twice.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import lzma
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_DOCUMENT_CHARACTERS = 1100
"""Maximum length of a document, about the 200 tokens of it that training reads."""
MAX_PER_PACKAGE = 6000
"""Maximum pairs per package, so that no package dominates."""
_MIN_DOCUMENT_CHARACTERS = 120
_MIN_QUERY_WORDS, _MAX_QUERY_WORDS = 4, 40
_SHINGLE_WORDS = 8
_MAX_SHARED = 0.3
"""A held-out pair is dropped if more of its shingles than this occur in another split."""
_FAMILIES = {
    "agents": "openai",
    "anthropic": "openai",
    "_pytest": "pytest",
    "botocore": "boto3",
    "diffusers": "transformers",
    "dbt": "dbt",
    "litellm": "openai",
    "mypyc": "mypy",
    "onnxscript": "onnx",
    "pandas": "pandas",
    "polars": "polars",
    "narwhals": "polars",
    "pydantic_ai": "pydantic",
    "sentence_transformers": "transformers",
    "sklearn": "scipy",
    "torchgen": "torch",
    "vertexai": "google",
}
"""Packages that share code or wording with another package, and therefore its split."""


@dataclass(frozen=True)
class Pair:
    """A query, the document that answers it, and the package that contains both."""

    package: str
    query: str
    document: str


def docstring_pairs(package: str, source: str) -> Iterator[Pair]:
    """Yields a pair for each docstring of a module's functions and classes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node)
            if text and (pair := _pair(package, *_first_sentence(text))):
                yield pair


def man_pair(package: str, page: str) -> Pair | None:
    """Returns the NAME line and the DESCRIPTION of a man page in troff, as a pair."""
    sections = re.split(r'^\.S[Hh] +"?([^"\n]*)"?\s*$', page, flags=re.MULTILINE)
    texts = {
        name.strip().upper(): text
        for name, text in zip(sections[1::2], sections[2::2], strict=False)
    }
    names = re.split(r"\s+(?:\\-|-|–|\\\(em|--)\s+", _plain(texts.get("NAME", "")), maxsplit=1)
    if len(names) < 2:
        names = re.split(r" - ", _plain(texts.get("NAME", "")), maxsplit=1)
    if len(names) < 2:
        return None
    return _pair(package, names[1], _plain(texts.get("DESCRIPTION", "")))


def kept(pairs: Iterable[Pair], rng: random.Random) -> list[Pair]:
    """Returns pairs whose query and document are unique, up to a maximum per package."""
    pairs = list(dict.fromkeys(pairs))
    queries = Counter(_normal(pair.query) for pair in pairs)
    documents = Counter(_normal(pair.document)[:300] for pair in pairs)
    rng.shuffle(pairs)
    counts: Counter[str] = Counter()
    result = []
    for pair in pairs:
        once = queries[_normal(pair.query)] == documents[_normal(pair.document)[:300]] == 1
        if once and counts[pair.package] < MAX_PER_PACKAGE:
            counts[pair.package] += 1
            result.append(pair)
    return result


def split_of(package: str) -> str:
    """Returns "train", "validation" or "test", by the hash of a package's family."""
    family = _FAMILIES.get(package, package)
    part = int(hashlib.sha256(f"reranker {family}".encode()).hexdigest(), 16) % 100
    return "test" if part < 12 else "validation" if part < 18 else "train"


def split(pairs: Iterable[Pair]) -> dict[str, list[Pair]]:
    """Splits by package, and drops held-out pairs whose words occur in another split."""
    splits: dict[str, list[Pair]] = {"train": [], "validation": [], "test": []}
    for pair in pairs:
        splits[split_of(pair.package)].append(pair)
    seen = {shingle for pair in splits["train"] for shingle in _shingles(pair)}
    for name in ("validation", "test"):
        clean = []
        for pair in splits[name]:
            shingles = _shingles(pair)
            if sum(shingle in seen for shingle in shingles) <= _MAX_SHARED * len(shingles):
                clean.append(pair)
        seen |= {shingle for pair in clean for shingle in _shingles(pair)}
        splits[name] = clean
    return splits


def write(path: Path, splits: dict[str, list[Pair]]) -> None:
    """Writes split, package, query and document as JSON lines, compressed with xz."""
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as file:
        for name, pairs in splits.items():
            for pair in sorted(pairs, key=lambda pair: (pair.package, pair.query)):
                line = {"split": name, **vars(pair)}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


def main() -> None:
    """Reads all packages and man pages, and prints the number of pairs in each split."""
    path, folders = Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]]
    pairs = [*_packages(folders), *_man_pages(Path("/usr/share/man"))]
    splits = split(kept(pairs, random.Random(41)))
    write(path, splits)
    for name, members in splits.items():
        packages = Counter(pair.package for pair in members)
        print(f"{name}: {len(members)} pairs of {len(packages)} packages")
        print("  " + ", ".join(f"{package} {n}" for package, n in packages.most_common(25)))


def _packages(folders: list[Path]) -> Iterator[Pair]:
    for folder in folders:
        for path in sorted(folder.glob("*/**/*.py")):
            package = path.relative_to(folder).parts[0].removesuffix(".py")
            if "_vendor" in path.parts or "tests" in path.parts or "test" in path.parts:
                continue
            try:
                yield from docstring_pairs(package, path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError):
                continue


def _man_pages(folder: Path) -> Iterator[Pair]:
    owners = {}
    for listing in sorted(Path("/var/lib/dpkg/info").glob("*.list")):
        for line in listing.read_text().splitlines():
            if "/man/man" in line:
                owners[line] = "debian-" + listing.stem.split(":")[0]
    for path in sorted(folder.glob("man[1-8]/*.gz")):
        package = owners.get(str(path))
        if package and not re.match(r"gcloud_(alpha|beta)", path.name):
            page = gzip.decompress(path.read_bytes()).decode(errors="replace")
            if pair := man_pair(package, page):
                yield pair


def _pair(package: str, query: str, document: str) -> Pair | None:
    query = " ".join(query.split()).rstrip(".")
    document = re.sub(r"[ \t]+", " ", re.sub(r"\s*\n\s*", "\n", document)).strip()
    document = document[:MAX_DOCUMENT_CHARACTERS]
    if not _MIN_QUERY_WORDS <= len(query.split()) <= _MAX_QUERY_WORDS:
        return None
    if len(document) < _MIN_DOCUMENT_CHARACTERS or _normal(query) in _normal(document):
        return None
    return Pair(package, query, document)


def _first_sentence(text: str) -> tuple[str, str]:
    paragraph, _, rest = text.strip().partition("\n\n")
    parts = re.split(r"(?<=[.!?])\s+(?=[A-Z`*:\"'])", paragraph, maxsplit=1)
    return parts[0], "\n".join([*parts[1:], rest])


def _plain(troff: str) -> str:
    lines = []
    for line in troff.splitlines():
        if re.match(r"\.(?:[BI]|SS|N[dm])", line):
            line = line.partition(" ")[2].replace('"', "")
        elif line.startswith((".", "'")):
            continue
        lines.append(line)
    text = re.sub(r"\\f\(?[A-Z0-9]{1,2}|\\f\[[^]]*\]|\\[&|/,)^]|\\s[-+]?\d", "", "\n".join(lines))
    text = re.sub(r"\\\*\(.{2}|\\\(..|\\\*\[[^]]*\]", "", text)
    return text.replace("\\-", "-").replace("\\ ", " ").replace("\\e", "\\").replace("\\(aq", "'")


def _normal(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _shingles(pair: Pair) -> set[int]:
    words = _normal(f"{pair.query} {pair.document}").split()
    last = max(1, len(words) - _SHINGLE_WORDS + 1)
    return {hash(" ".join(words[at : at + _SHINGLE_WORDS])) for at in range(last)}


if __name__ == "__main__":
    main()
