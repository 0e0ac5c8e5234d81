"""Checks shell samples without running them: their syntax, their programs, and the names they use.

`penstock` commands are parsed by the CLI itself, curl requests are looked up in the OpenAPI
document, and targets, modules, and files must exist.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import typer

from infra.cli.main import app
from tests.samples.blocks import ROOT, Block

KEYWORDS = frozenset({"for", "do", "done", "if", "then", "fi", "{", "}", "!"})
LOCAL_HOSTS = ("127.0.0.1", "localhost", "$URL")
CURL_FLAGS = frozenset(["--fail", "-s", "-i", "-si", "-fsS"])
CURL_VALUES = frozenset(["-H", "-d", "-F", "-o", "-w", "-X", "--output", "--data", "--header"])
PARSED_BY_ITSELF = frozenset({"docker", "gcloud", "helm", "kubectl", "terraform"})
"""test_other_programs.py has gcloud, Helm and kubectl parse their own commands."""
NOT_OURS = frozenset(
    {
        *("alias", "apt-get", "caddy", "cat", "cd", "compose", "echo", "export", "git"),
        *("grafana", "jq", "mail", "mapfile", "mkdir", "openssl", "prometheus", "tail"),
    }
)
"""Programs whose arguments don't name anything in this repository."""


def commands(text: str) -> list[list[str]]:
    """Returns the simple commands in a shell text, without assignments and redirections."""
    text = re.sub(r"(?m)(^|\s)# .*$", "", text.replace("\\\n", " "))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    found: list[list[str]] = [[]]
    redirected = False
    for word in lexer:
        if word and set(word) <= set("<>"):
            redirected = True
        elif word and set(word) <= set(";&|()\n"):
            found.append([])
            redirected = False
        elif redirected:
            redirected = False
        else:
            found[-1].append(word)
    return [words for command in found if (words := _without_assignments(command))]


def _without_assignments(words: list[str]) -> list[str]:
    while words and (words[0] in KEYWORDS or re.match(r"[A-Za-z_]+=", words[0])):
        words = [] if words[0] == "for" else words[1:]
    return words


def check_shell(block: Block, openapi: Mapping[str, Any]) -> None:
    """Checks one block of shell commands.

    Raises:
        AssertionError: bash can't parse it, it calls a program that no rule covers, or it names a
            command, option, route, module, target, or file that doesn't exist.
    """
    done = subprocess.run(
        ["bash", "-n", "-c", block.text], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    folder = ROOT
    for words in commands(block.text):
        program = Path(words[0]).name
        if program == "cd":
            folder = ROOT / words[1]
            assert folder.is_dir(), words
        elif program == "curl":
            check_curl(words, openapi)
        elif program in CHECKS:
            CHECKS[program](words, folder)
        elif program.endswith(".sh"):
            assert (ROOT / words[0]).is_file(), words
        else:
            assert program in PARSED_BY_ITSELF | NOT_OURS, f"no rule for the program {program}"


def check_penstock(words: list[str], _folder: Path) -> None:
    """Parses a `penstock` command with its own parser, which knows every option."""
    found: Any = typer.main.get_command(app)
    context = found.make_context("penstock", [], resilient_parsing=True)
    rest = [re.sub(r"^\[(.*)\]$", r"\1", word) for word in words[1:]]
    while hasattr(found, "get_command") and rest:
        inner = found.get_command(context, rest[0])
        assert inner is not None, f"penstock has no command {' '.join(words[1:])}"
        found, rest = inner, rest[1:]
        context = found.context_class(found, parent=context, **found.context_settings)
    found.make_parser(context).parse_args(rest)


def check_make(words: list[str], _folder: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words[1:]:
        name, is_variable, _ = word.partition("=")
        pattern = rf"\b{name}\b" if is_variable else rf"(?m)^{name}:"
        assert re.search(pattern, makefile), f"the Makefile has no {name}"


def check_python(words: list[str], _folder: Path) -> None:
    assert words[1] == "-m", words
    assert importlib.util.find_spec(words[2]) is not None, words[2]


def check_pytest(words: list[str], _folder: Path) -> None:
    assert all((ROOT / word).exists() for word in words[1:]), words


def check_cp(words: list[str], folder: Path) -> None:
    source = folder / words[1]
    assert source.exists() or words[1].startswith("classes/"), words


def check_sh(words: list[str], _folder: Path) -> None:
    assert (ROOT / words[1]).is_file(), words


CHECKS: Mapping[str, Callable[[list[str], Path], None]] = MappingProxyType(
    {
        "penstock": check_penstock,
        "make": check_make,
        "python": check_python,
        "pytest": check_pytest,
        "cp": check_cp,
        "sh": check_sh,
    }
)


def check_curl(words: list[str], openapi: Mapping[str, Any]) -> None:
    """Looks up an API request in the OpenAPI document, and parses its JSON."""
    method, urls, fields = "get", [], set()
    rest = iter(words[1:])
    for word in rest:
        if word in CURL_VALUES:
            value = next(rest)
            if word in {"-d", "-F", "--data"}:
                method = "post"
            if word in {"-d", "--data"}:
                fields |= set(json.loads(value))
        elif word not in CURL_FLAGS:
            assert not word.startswith("-"), f"no rule for curl {word}"
            urls.append(word)
    (url,) = urls
    path = urlsplit(url if "://" in url else f"http://{url}").path.removeprefix("$URL")
    if "8090" in url or not url.startswith(("http://127.0.0.1", "localhost", "$URL")):
        assert path in {"/reports", "/livez"}, url
        return
    operation = next(iter(_operations(openapi, path, method)), None)
    assert operation is not None, f"the API has no {method.upper()} {path}"
    known = _fields(openapi, operation)
    assert not known or fields <= known, fields - known


def _operations(openapi: Mapping[str, Any], path: str, method: str) -> Iterator[dict[str, Any]]:
    for place, operations in openapi["paths"].items():
        if method in operations and re.fullmatch(re.sub(r"{[^}]*}", "[^/]+", place), path):
            yield operations[method]


def _fields(openapi: Mapping[str, Any], operation: dict[str, Any]) -> set[str]:
    """Returns the fields in the operation's JSON body. Empty if any field is accepted."""
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    if reference := schema.get("$ref"):
        schema = openapi["components"]["schemas"][reference.rpartition("/")[2]]
    return set(schema.get("properties", {}))
