"""A folder's Cog projects: those with a cog.yaml, and test scripts in the txtar format.

A txtar file is a script followed by files, each consisting of a line `-- NAME --` and the file's
lines. Inputs are read from the script's `cog predict` and `curl` commands or from the README. If
neither contains any, they are made up from the signature.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from PIL import Image

from tests.cog_comparison.outcome import Request, RequestFile, data_of, is_data_uri

MAX_REQUESTS = 12
MAX_README_REQUESTS = 3
CANCEL_AFTER_S = 1.0
_FILE_LINE = re.compile(r"^-- (?P<name>.+) --\s*$")
_TOO_LARGE = re.compile(r"\b(torch|tensorflow|jax|diffusers|transformers|vllm)\b", re.IGNORECASE)
_EXAMPLES: Mapping[str, Any] = {"bool": True, "int": 3, "float": 1.5, "dict": {"a": 1}, "Any": "x"}
_IMAGES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".bmp": "BMP"}


class Argument(NamedTuple):
    """An argument of `predict`: its annotation as written, and whether it can be left out."""

    annotation: str
    is_optional: bool

    @property
    def is_list(self) -> bool:
        """True for a list of any kind."""
        return bool(re.search(r"\b(?:list|List)\b", self.annotation))

    @property
    def is_text(self) -> bool:
        """True if a word is treated as text, no matter what it looks like."""
        words = set(re.findall(r"\w+", self.annotation))
        return bool(words & {"str", "Secret"}) and not words & {"int", "float", "bool", "dict"}

    @property
    def is_file(self) -> bool:
        """True for a file."""
        return bool(re.search(r"\b(Path|File)\b", self.annotation))


class Signature(NamedTuple):
    """The signature of `predict`, read from the source. Nothing is imported."""

    arguments: Mapping[str, Argument] = {}
    streams: bool = False
    is_found: bool = False


class Fixture(NamedTuple):
    """A Cog project with inputs."""

    name: str
    folder: Path
    reference: str = ""
    """FILE.py:CLASS."""
    requests: Sequence[Request] = ()
    origin: str = ""
    """The source of the inputs: script, README or signature."""
    skipped: str = ""
    """Why the fixture can't run here. Empty if it can."""
    environment: Mapping[str, str] = {}
    concurrency: int = 1
    streams: bool = False


def read_fixtures(folder: Path, work: Path) -> list[Fixture]:
    """Reads all of a folder's fixtures, and unpacks its test scripts under another folder."""
    fixtures = []
    for path in sorted(folder.rglob("*.txtar")):
        script, files = split_txtar(path.read_text(encoding="utf-8", errors="surrogateescape"))
        target = work / path.stem
        for name, text in files.items():
            file = target / name
            if target.resolve() in file.resolve().parents:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8", errors="surrogateescape")
        target.mkdir(exist_ok=True)
        projects = sorted(target.rglob("cog.yaml"), key=lambda one: len(one.parts))
        project = projects[0].parent if projects else target
        fixtures.append(_read_project(path.stem, project, script, "script"))
    for settings in sorted(folder.rglob("cog.yaml")):
        readme = settings.parent / "README.md"
        script = readme.read_text(encoding="utf-8") if readme.is_file() else ""
        name = str(settings.parent.relative_to(folder))
        fixtures.append(_read_project(name, settings.parent, script, "README"))
    return fixtures


def split_txtar(text: str) -> tuple[str, dict[str, str]]:
    """Splits a test script into its commands and its files, which are keyed by name."""
    script: list[str] = []
    files: dict[str, list[str]] = {}
    lines = script
    for line in text.splitlines(keepends=True):
        if match := _FILE_LINE.match(line):
            lines = files.setdefault(match["name"], [])
        else:
            lines.append(line)
    return "".join(script), {name: "".join(kept) for name, kept in files.items()}


def _read_project(name: str, folder: Path, script: str, origin: str) -> Fixture:
    fixture = Fixture(name, folder)
    try:
        settings = yaml.safe_load((folder / "cog.yaml").read_text()) or {}
    except (OSError, yaml.YAMLError):
        return fixture._replace(skipped="no readable cog.yaml: a test of Cog's command")
    reference = settings.get("run") or settings.get("predict")
    if not isinstance(reference, str) or ":" not in reference:
        return fixture._replace(skipped="cog.yaml names no class: a test of Cog's command")
    if reason := _reason_to_skip(folder, settings):
        return fixture._replace(skipped=reason)
    signature = read_signature(folder, reference)
    requests = [_with_files(one, signature) for one in _read_requests(script, folder, signature)]
    if "/cancel " in script:
        requests = [one._replace(cancel_after_s=CANCEL_AFTER_S) for one in requests]
    if origin == "README":
        requests = requests[:MAX_README_REQUESTS]
    if not requests:
        if "\n! cog build" in script:
            return fixture._replace(skipped="its build must fail: a test of Cog's command")
        origin, requests = "signature", [_made_up(signature)]
    asked = (settings.get("concurrency") or {}).get("max", 1)
    lines = settings.get("environment") or []
    return fixture._replace(
        reference=reference,
        requests=requests[:MAX_REQUESTS],
        origin=origin,
        environment=dict(one.partition("=")[::2] for one in lines),
        concurrency=asked if isinstance(asked, int) else 1,
        streams=signature.streams,
    )


def _reason_to_skip(folder: Path, settings: Mapping[str, Any]) -> str:
    build = settings.get("build") or {}
    if build.get("gpu"):
        return "needs a GPU image"
    named = folder / str(build.get("python_requirements") or "requirements.txt")
    packages = str(build.get("python_packages", ""))
    if named.is_file():
        packages += named.read_text(errors="replace")
    if match := _TOO_LARGE.search(packages):
        return f"installs {match[0].lower()}"
    if settings.get("weights"):
        return "pulls its weights from a registry"
    return ""


def read_signature(folder: Path, reference: str) -> Signature:
    """Reads the signature of a class's `run` or `predict`, or of a function."""
    file, _, wanted = reference.partition(":")
    try:
        tree = ast.parse((folder / file).read_text())
    except (OSError, SyntaxError):
        return Signature()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == wanted:
            return _signature_of(node, first=0)
        if isinstance(node, ast.ClassDef) and node.name == wanted:
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name in (
                    "run",
                    "predict",
                ):
                    return _signature_of(method, first=1)
    return Signature()


def _signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef, first: int) -> Signature:
    every = [*node.args.posonlyargs, *node.args.args]
    defaults: list[ast.expr | None] = [None] * (len(every) - len(node.args.defaults))
    defaults += node.args.defaults
    every += node.args.kwonlyargs
    defaults += node.args.kw_defaults
    arguments = {
        one.arg: Argument(
            ast.unparse(one.annotation) if one.annotation else "", _is_optional(default)
        )
        for one, default in list(zip(every, defaults, strict=True))[first:]
    }
    returns = ast.unparse(node.returns) if node.returns else ""
    return Signature(arguments, "Iterator" in returns or "Generator" in returns, is_found=True)


def _is_optional(default: ast.expr | None) -> bool:
    if default is None:
        return False
    is_input = isinstance(default, ast.Call) and ast.unparse(default.func).endswith("Input")
    if not is_input:
        return True
    return bool(default.args) or any(  # type: ignore[attr-defined]
        one.arg in ("default", "default_factory")
        for one in default.keywords  # type: ignore[attr-defined]
    )


def _read_requests(script: str, folder: Path, signature: Signature) -> Iterator[Request]:
    """Yields the inputs from the commands that it can parse."""
    for line in script.replace("\\\n", " ").splitlines():
        # Even if a header is rejected, the input may be valid.
        must_fail = line.startswith("! ") and " -H " not in line
        try:
            words = shlex.split(line.removeprefix("! ").strip().removeprefix("$ "))
        except ValueError:
            continue
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError, StopIteration):
            if words[:1] == ["curl"]:
                request = _request_by_curl(words, folder)
            elif words[:2] in (["cog", "predict"], ["cog", "run"]):
                request = _request_by_command(words, folder, signature)
            else:
                continue
            if request is not None:
                yield request._replace(must_fail=must_fail)


def _with_files(request: Request, signature: Signature) -> Request:
    """Turns data URIs in file inputs into files, as the API does."""
    values, files = dict(request.values), list(request.files)
    for name, value in request.values.items():
        argument = signature.arguments.get(name)
        if argument is None or not argument.is_file:
            continue
        if is_data_uri(value):
            values[name] = None
            files.append(RequestFile([name], "file", data_of(value)))
        elif isinstance(value, list) and value and all(map(is_data_uri, value)):
            values[name] = [None] * len(value)
            files += [RequestFile([name, n], "file", data_of(one)) for n, one in enumerate(value)]
    return request._replace(values=values, files=files)


def _request_by_curl(words: Sequence[str], folder: Path) -> Request | None:
    paths = [word for word in words if word.startswith("/predictions")]
    if not paths or paths[0].endswith("/cancel"):
        return None
    body = words[-1]
    if body.startswith("@"):
        body = (folder / body[1:]).read_text()
    message = json.loads(body)
    return Request(message["input"], context=message.get("context") or {})


def _request_by_command(words: Sequence[str], folder: Path, signature: Signature) -> Request | None:
    if not signature.is_found:
        return None
    values: dict[str, Any] = {}
    files: list[RequestFile] = []
    left = iter(words[2:])
    for word in left:
        if word in ("-i", "--input"):
            _add_word(next(left), folder, signature, values, files)
        elif word == "--json":
            body = next(left)
            body = (folder / body[1:]).read_text() if body.startswith("@") else body
            values |= json.loads(body)
        elif word == "-e":
            next(left)
    return Request(values, files)


def _add_word(
    word: str,
    folder: Path,
    signature: Signature,
    values: dict[str, Any],
    files: list[RequestFile],
) -> None:
    name, _, text = word.partition("=")
    argument = signature.arguments.get(name, Argument("", is_optional=True))
    at: list[str | int] = [name]
    if argument.is_list:
        at.append(len(values.setdefault(name, [])))
        values[name].append(None)
    value: Any = text
    if text.startswith("@"):
        value = None
        files.append(RequestFile(at, Path(text[1:]).name, _file_bytes(folder / text[1:])))
    elif not argument.is_text:
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(text)
    if argument.is_list and value is not None:
        values[name][-1] = value
    elif not argument.is_list:
        values[name] = value


def _made_up(signature: Signature) -> Request:
    values: dict[str, Any] = {}
    files: list[RequestFile] = []
    for name, argument in signature.arguments.items():
        if argument.is_optional or "None" in argument.annotation:
            continue
        at: list[str | int] = [name, 0] if argument.is_list else [name]
        value: Any = "hello"
        if argument.is_file:
            value = None
            files.append(RequestFile(at, "image.png", _file_bytes(Path("image.png"))))
        elif not argument.is_text:
            words = re.findall(r"\w+", argument.annotation)
            value = next((_EXAMPLES[word] for word in words if word in _EXAMPLES), "hello")
        values[name] = [value] if argument.is_list else value
    return Request(values, files)


def _file_bytes(path: Path) -> bytes:
    """Reads one of a fixture's files. A file that the fixture's test would create is an image or a
    text.
    """
    if path.is_file():
        return path.read_bytes()
    if kind := _IMAGES.get(path.suffix.lower()):
        buffer = io.BytesIO()
        Image.new("RGB", (16, 16), "teal").save(buffer, kind)
        return buffer.getvalue()
    return f"the content of {path.name}\n".encode()
