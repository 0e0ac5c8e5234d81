"""The documents refer only to files that exist, and lead a newcomer to the line that acks a job."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "api",
    "bench",
    "docs",
    "emulators",
    "examples",
    "infra",
    "models",
    "shared",
    "tests",
    "tools",
    "workers",
)
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for found in (ROOT.glob("*.md"), *((ROOT / folder).rglob("*.md") for folder in FOLDERS))
    for path in found
)
DECISIONS = sorted((ROOT / "docs/decisions").glob("0*.md"))
MAX_DECISION_WORDS = 500
PATH_TO_THE_ACK = (
    "README.md",
    "docs/explanation/architecture.md",
    "workers/worker.py",
    "workers/jobs/consumer.py",
    "workers/jobs/completion.py",
    "workers/jobs/registry.py",
)
PATH_TO_A_FIRST_CHANGE = (
    "README.md",
    "CONTRIBUTING.md",
    "api/openai/embeddings.py",
)
MAX_HOPS = 5


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_relative_links_lead_to_files(document: Path) -> None:
    missing = [
        link for link in links(document) if not (ROOT / document).parent.joinpath(link).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_anchors_of_links_exist(document: Path) -> None:
    missing = []
    for link in re.findall(r"\]\(([^)\s:]*#[^)\s]+)\)", (ROOT / document).read_text()):
        path, _, anchor = link.partition("#")
        page = (ROOT / document).parent / path if path else ROOT / document
        if page.suffix == ".md" and anchor not in read_anchors(page.resolve()):
            missing.append(link)
    assert missing == []


@cache
def read_anchors(page: Path) -> frozenset[str]:
    """Returns a page's anchors as GitHub creates them: from its headings and each `<a id>`."""
    text = page.read_text()
    anchors = re.findall(r'<a id="([^"]+)">', text)
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    uses: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w -]", "", title).replace(" ", "-")
        anchors.append(f"{anchor}-{uses[anchor]}" if uses[anchor] else anchor)
        uses[anchor] += 1
    return frozenset(anchors)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_paths_in_documents_exist(document: Path) -> None:
    named = re.findall(
        rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./*-]+)", (ROOT / document).read_text()
    )
    missing = {
        path
        for path in named
        if not any(any(folder.glob(path.rstrip("./"))) for folder in homes(document))
    }
    assert missing == set()


@cache
def module_names() -> frozenset[str]:
    return frozenset(path.name for folder in FOLDERS for path in module_paths(folder))


def module_paths(folder: str) -> Iterator[Path]:
    return (ROOT / folder).rglob("*.py")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_modules_named_without_their_folder_exist(document: Path) -> None:
    named = set(re.findall(r"`(\w+\.py)`", (ROOT / document).read_text()))
    assert named - module_names() == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_modules_in_documents_exist(document: Path) -> None:
    named = re.findall(rf"python -m ((?:{'|'.join(FOLDERS)})[\w.]*)", (ROOT / document).read_text())
    missing = [
        name
        for name in named
        if not any(has_module(folder, name.rstrip(".")) for folder in homes(document))
    ]
    assert missing == []


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_is_one_page_of_context_decision_and_consequences(page: Path) -> None:
    text = page.read_text()
    assert text.startswith(f"# {int(page.stem[:4])}. ")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]
    assert len(text.split()) <= MAX_DECISION_WORDS
    assert f"({page.name})" in (page.parent / "README.md").read_text()


def test_each_decision_has_a_number_of_its_own() -> None:
    numbers = [page.name[:4] for page in DECISIONS]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("folder", ["", *FOLDERS])
def test_decisions_that_are_named_have_a_page(folder: str) -> None:
    """A comment often has only a number.

    A changelog uses the decision numbers that were current at the time.
    """
    member_pages = (ROOT / "emulators").glob("*/docs/decisions/*.md")
    pages = {path.name[:4] for path in (*DECISIONS, *member_pages)}
    missing = {
        f"{path.relative_to(ROOT)}: {number}"
        for path in (ROOT / folder).glob("**/*" if folder else "*")
        if path.suffix in {".md", ".py", ".sql", ".tf", ".yaml"} and path.name != "CHANGELOG.md"
        for number in re.findall(
            r"(?:decisions/|\bdecisions?\s+\[?)(\d{1,4})\b", path.read_text(), re.IGNORECASE
        )
        if number.zfill(4) not in pages
    }
    assert missing == set()


def homes(document: Path) -> list[Path]:
    """The folders that a document's paths and modules are relative to.

    They are the document's distribution, the repository, and, for relative links, the document's
    own folder.
    """
    is_member = document.parts[0] == "emulators" and len(document.parts) > 2
    distribution = [ROOT.joinpath(*document.parts[:2])] if is_member else []
    return [*distribution, ROOT, (ROOT / document).parent]


def has_module(folder: Path, name: str) -> bool:
    path = folder.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def test_five_hops_lead_from_the_readme_to_the_ack() -> None:
    assert len(PATH_TO_THE_ACK) - 1 <= MAX_HOPS
    for here, there in pairwise(PATH_TO_THE_ACK):
        assert there in leads_to(Path(here)), f"{here} does not lead to {there}"
    assert "subscription.ack(" in (ROOT / PATH_TO_THE_ACK[-1]).read_text()


def test_the_readme_leads_to_an_error_message_and_its_test() -> None:
    for here, there in pairwise(PATH_TO_A_FIRST_CHANGE):
        assert there in leads_to(Path(here)), f"{here} does not lead to {there}"
    assert "tests/api/test_bad_input.py" in leads_to(Path("CONTRIBUTING.md"))
    message = "must be at most {model.dimensions} for {model.name}"
    assert message in (ROOT / PATH_TO_A_FIRST_CHANGE[-1]).read_text()
    assert "must be at most 384" in (ROOT / "tests/api/test_bad_input.py").read_text()


def test_forms_of_a_text_are_defined_where_the_document_says() -> None:
    text = (ROOT / "docs/explanation/architecture.md").read_text()
    rows = re.findall(r"^\| (`[A-Z][^|]+) \| `([\w./]+)` \|", text, re.MULTILINE)
    assert rows
    for names, path in rows:
        files = (ROOT / path).glob("*.py") if (ROOT / path).is_dir() else [ROOT / path]
        defined = {
            name
            for file in files
            for name in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE)
        }
        assert set(re.findall(r"`(\w+)`", names)) <= defined


def test_members_in_the_architecture_exist() -> None:
    text = (ROOT / "docs/explanation/architecture.md").read_text()
    members = re.findall(r"`([A-Z]\w+)\.(\w+)`", text)
    assert members
    sources = [
        path.read_text() for folder in ("api", "shared", "workers") for path in module_paths(folder)
    ]
    missing = {
        f"{owner}.{member}"
        for owner, member in members
        if not any(
            re.search(rf"^class {owner}\b", source, re.MULTILINE)
            and re.search(rf"\bdef {member}\b", source)
            for source in sources
        )
    }
    assert missing == set()


def leads_to(file: Path) -> set[str]:
    """The files that `file` refers to: links in a document, paths and imports in a module."""
    if file.suffix == ".md":
        found = ((ROOT / file).parent.joinpath(link).resolve() for link in links(file))
        return {str(path.relative_to(ROOT)) for path in found if path.is_relative_to(ROOT)}
    text = (ROOT / file).read_text()
    imported = {
        f"{name.replace('.', '/')}.py"
        for name in re.findall(r"^from ([\w.]+) import", text, re.MULTILINE)
    }
    return imported | set(re.findall(r"[\w/]+\.py", text))


def links(document: Path) -> Iterator[str]:
    """A document's relative links and images, without their anchors."""
    text = (ROOT / document).read_text()
    for link in re.findall(r'(?:\]\(|<img src=")([^)"\s]+)[)"]', text):
        if not re.match(r"[a-z]+:", link) and (path := link.partition("#")[0]):
            yield path
