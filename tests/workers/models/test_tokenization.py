import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.errors import BadInput, ConfigurationError, ContextLengthExceeded
from shared.models.catalog import Catalog
from shared.models.tasks import Input
from shared.models.tasks.embedding import TextInput, TokensInput, Truncate
from shared.models.tasks.image import ImageInput
from workers.models.base import PreparedText, Preparer
from workers.tasks import preparer_for

pytestmark = pytest.mark.slow

CLS, SEP = 101, 102
LONGEST = 256
WORDS = (
    "cat",
    "Ünïcödé",
    "漢字",
    "antidisestablishmentarianism",
    "a",
    "\u200b",
    "🙂",
    "don't",
    "x" * 101,
)


def ids(item: object) -> list[int]:
    assert isinstance(item, PreparedText)
    assert item.key == ""
    assert item.length == len(item.ids) // 4
    return [int(number) for number in np.frombuffer(item.ids, "<u4")]


def test_bad_inputs_harm_no_neighbor(minilm_preparer: Preparer) -> None:
    edit = ImageInput(
        prompt="", width=64, height=64, steps=1, guidance_scale=1.0, seed=0, scheduler="ddim"
    )
    inputs: list[Input] = [
        TextInput("a cat"),
        TextInput("\ud800"),
        TokensInput([1037, 30522]),
        TokensInput([-1]),
        edit,
        TokensInput([1037, 4937]),
    ]
    first, *bad, last = minilm_preparer.prepare(inputs)
    assert ids(first) == ids(last) == [CLS, 1037, 4937, SEP]
    assert all(isinstance(error, BadInput) and error.field == "input" for error in bad)


@pytest.mark.parametrize("side", ["end", "start"])
@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=400), takes_tokens=st.booleans())
def test_cuts_are_those_of_the_library(
    minilm_preparer: Preparer,
    minilm_folder: Path,
    side: Truncate,
    words: list[str],
    takes_tokens: bool,
) -> None:
    text = " ".join(words)
    cutting, whole = (Tokenizer.from_file(str(minilm_folder / "tokenizer.json")) for _ in range(2))
    for tokenizer in (cutting, whole):
        tokenizer.no_padding()
        tokenizer.no_truncation()
    cutting.enable_truncation(LONGEST, direction={"end": "right", "start": "left"}[side])
    expected, given_ids = cutting.encode(text).ids, whole.encode(text).ids
    beyond = max(0, len(given_ids) - LONGEST)

    def of(truncate: Truncate) -> Input:
        return TokensInput(given_ids[1:-1], truncate) if takes_tokens else TextInput(text, truncate)

    cut, refused = minilm_preparer.prepare([of(side), of("none")])
    assert isinstance(cut, PreparedText)
    assert (ids(cut), cut.truncated_tokens) == (expected, beyond)
    if not beyond:
        assert refused == cut
        return
    assert isinstance(refused, ContextLengthExceeded)
    assert refused.field == "input"
    assert (
        f"maximum context length is {LONGEST} tokens, however you requested {len(given_ids)} tokens"
        in str(refused)
    )


def test_cut_at_the_start_keeps_the_prompt_of_the_model(
    catalog: Catalog, minilm_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(minilm_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    prompts = {"prompts": {"q": "query: "}, "default_prompt_name": "q"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    preparer = preparer_for(catalog.default("embedding"), folder)
    query, colon, dog, cat = 23032, 1024, 3899, 4937
    long: list[Input] = [
        TextInput("dog " * 300 + "cat " * 250, "start"),
        TokensInput([dog] * 300 + [cat] * 250, "start"),
    ]
    for prepared in preparer.prepare(long):
        assert ids(prepared) == [CLS, query, colon, *[dog] * 2, *[cat] * 250, SEP]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("modules.json", '[{"path": ""}]'),
        ("modules.json", "[5]"),
        ("sentence_bert_config.json", '{"max_seq_length": "many"}'),
        ("sentence_bert_config.json", "[1]"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "q"}'),
        ("config.json", '{"vocab_size": "many"}'),
        ("1_Pooling/config.json", "[" * 100_000),
    ],
)
def test_a_folder_with_odd_settings_is_refused(
    catalog: Catalog, minilm_folder: Path, tmp_path: Path, name: str, text: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(minilm_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / name).write_text(text)
    with pytest.raises(ConfigurationError, match="model") as refused:
        preparer_for(catalog.default("embedding"), folder)
    assert refused.value.field == "source"


@pytest.mark.parametrize(
    ("tokens", "position"), [([30522], 0), ([7, 8, 100_256, -1], 2), ([2**31 - 1] * 3, 0)]
)
def test_ids_that_the_tokenizer_lacks_are_refused(
    minilm_preparer: Preparer, tokens: list[int], position: int
) -> None:
    (refused,) = minilm_preparer.prepare([TokensInput(tokens)])
    assert isinstance(refused, BadInput)
    assert (
        f"token ID {tokens[position]} at position {position} is not in the vocabulary; "
        "the highest token ID is 30521" in refused.message
    )


def test_nothing_to_prepare(minilm_preparer: Preparer) -> None:
    assert minilm_preparer.prepare([]) == []
    assert ids(minilm_preparer.prepare([TokensInput([])])[0]) == [CLS, SEP]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{", "tokenizer.json"),
        ("modules.json", "[", "modules.json"),
        (
            "modules.json",
            json.dumps([{"type": "m.Transformer", "path": ""}, {"type": "m.Dense", "path": "2"}]),
            "Dense",
        ),
        ("1_Pooling/config.json", json.dumps({"pooling_mode": "lasttoken"}), "lasttoken"),
    ],
)
def test_a_folder_that_can_not_be_run_is_refused(
    catalog: Catalog,
    minilm_folder: Path,
    tmp_path: Path,
    name: str,
    content: str | None,
    reason: str,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(minilm_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ConfigurationError, match=reason):
        preparer_for(catalog.default("embedding"), folder)
