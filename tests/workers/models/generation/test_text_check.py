"""`penstock models check NAME` for a text model."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.penstock_command import penstock
from tests.workers.models.generation import tiny

pytestmark = pytest.mark.slow(about_s=40)

NUMBERS_OF_A_TOKEN = 2 * 2 * 2 * 8
"""Keys and values for 2 layers with 2 heads of 8 numbers each."""

LONG = {"context_tokens": 512, "default_tokens": 16, "longest_tokens": 100}


@pytest.fixture
def has_engine() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("the extra `text` is not installed")


def check(folder: Path, **changes: Any) -> int:
    """Checks a model using a catalog in the current folder. Returns the exit status."""
    entry = json.loads(tiny.entry().model_dump_json(exclude_unset=True))
    entry |= {"source": f"local:{folder}", **changes}
    Path("models.yaml").write_text(yaml.safe_dump({"models": [entry]}), encoding="utf-8")
    return penstock("models", "check", "tiny-text", "--device", "cpu")


@pytest.fixture(autouse=True)
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_MODELS_FILE", str(tmp_path / "models.yaml"))


def test_it_shows_the_memory_of_our_engine_and_how_many_texts_fit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(folder) == 0
    out = capsys.readouterr().out
    assert re.search(r"^tiny-text: started in \d+\.\d s on cpu$", out, re.MULTILINE)
    (resident,) = re.findall(r"^memory: ([\d,]+) MiB resident after the start$", out, re.MULTILINE)
    assert int(resident.replace(",", "")) > 10
    assert f"keys and values: {4 * NUMBERS_OF_A_TOKEN} bytes per token, up to 0 MiB" in out
    assert "for 800 tokens, allocated as they are written" in out
    assert "at a time: 4 texts of 160 tokens each" in out
    assert "up to 5 shorter ones with 640 tokens in total" in out
    (free,) = re.findall(r"while it was running: ([\d,]+) MiB$", out, re.MULTILINE)
    assert int(free.replace(",", "")) > 0


def test_keys_and_values_have_the_precision_of_the_entry(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(folder, precision="bf16") == 0
    assert f"{2 * NUMBERS_OF_A_TOKEN} bytes per token" in capsys.readouterr().out


@pytest.mark.usefixtures("has_engine")
@pytest.mark.parametrize(("budget", "tokens"), [(640, 640), (800, 5 * 256)])
def test_it_shows_the_cache_of_llama_cpp(
    folder: Path, capsys: pytest.CaptureFixture[str], budget: int, tokens: int
) -> None:
    """All texts share the context, or each has its own if the budget has room for that."""
    from tests.workers.models.generation.gguf_file import write_gguf

    write_gguf(folder)
    batch = {"max_tokens": budget, "max_items": 5}
    assert check(folder, engine="llama.cpp", precision="auto", batch=batch) == 0
    out = capsys.readouterr().out
    assert f"keys and values: {2 * NUMBERS_OF_A_TOKEN} bytes per token" in out
    assert f"for {tokens:,} tokens, allocated at the start" in out
    assert f"at a time: {budget // 160} texts" in out


def break_nothing(_: Path) -> None: ...


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def damage_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x" * 100)


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "changes", "reason"),
    [
        (remove_config, {}, "config"),
        (damage_weights, {}, "not a causal language model"),
        (remove_tokenizer, {}, "tokenizer"),
        (break_nothing, {"generation": LONG}, "must be at most 256"),
        (break_nothing, {"source": "local:/does/not/exist"}, "/does/not/exist"),
        (break_nothing, {"source": "package:no_such_package/x"}, "no_such_package"),
        (break_nothing, {"source": "local:weights.gguf"}, "weights.gguf"),
        (break_nothing, {"precision": "fp64"}, "precision"),
        (break_nothing, {"engine": "llama.cpp", "precision": "auto"}, "no_gguf"),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_a_model_that_cannot_be_started_is_an_error_without_a_traceback(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Any,
    changes: dict[str, Any],
    reason: str,
) -> None:
    copy = tmp_path / "no_gguf"
    copy.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".gguf":
            (copy / file.name).write_bytes(file.read_bytes())
    (tmp_path / "weights.gguf").write_bytes(b"GGUF" + bytes(100))
    damage(copy)
    assert check(copy, **changes) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("penstock: ")
    assert reason in errors
    assert "Traceback" not in errors


@pytest.mark.usefixtures("has_engine")
def test_a_damaged_file_for_llama_cpp_is_an_error_without_a_traceback(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "damaged"
    copy.mkdir()
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja"):
            (copy / file.name).write_bytes(file.read_bytes())
    (copy / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    assert check(copy, engine="llama.cpp", precision="auto") == 1
    errors = capsys.readouterr().err
    assert "the engine can't run this model" in errors
    assert "Traceback" not in errors
