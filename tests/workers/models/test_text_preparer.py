import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from shared.catalogue import Catalogue
from shared.errors import BadInput, ConfigurationError
from shared.messages import ImageInput, Input, TextInput, TokensInput
from workers.models import preparer_for
from workers.models.base import PreparedText, Preparer

CLS, SEP = 101, 102


def ids(item: object) -> list[int]:
    assert isinstance(item, PreparedText)
    assert item.key == ""
    assert item.length == len(item.ids) // 4
    return [int(number) for number in np.frombuffer(item.ids, "<u4")]


def test_bad_inputs_harm_no_neighbour(minilm_preparer: Preparer) -> None:
    picture = ImageInput(prompt="", width=64, height=64, steps=1, guidance_scale=1.0, seed=0, scheduler="ddim")
    inputs: list[Input] = [
        TextInput("a cat"),
        TextInput("\ud800"),
        TokensInput([1037, 30522]),
        TokensInput([-1]),
        picture,
        TokensInput([1037, 4937]),
    ]
    first, *bad, last = minilm_preparer.prepare(inputs)
    assert ids(first) == ids(last) == [CLS, 1037, 4937, SEP]
    assert all(isinstance(error, BadInput) and error.field == "input" for error in bad)


@pytest.mark.parametrize("long", [TextInput("cat " * 5000), TokensInput([4937] * 5000)], ids=["text", "tokens"])
def test_what_is_too_long_is_cut_with_its_special_tokens_kept(
    minilm_preparer: Preparer, long: TextInput | TokensInput
) -> None:
    assert ids(minilm_preparer.prepare([long])[0]) == [CLS, *[4937] * 254, SEP]


def test_nothing_to_prepare(minilm_preparer: Preparer) -> None:
    assert minilm_preparer.prepare([]) == []
    assert ids(minilm_preparer.prepare([TokensInput([])])[0]) == [CLS, SEP]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
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
    catalogue: Catalogue, minilm_folder: Path, tmp_path: Path, name: str, content: str | None, reason: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(minilm_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ConfigurationError, match=reason):
        preparer_for(catalogue.default("embedding"), folder)
