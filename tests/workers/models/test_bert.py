"""BERT and related models compute the same results as transformers' modules, operator by operator.

Other models are left unchanged.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.limits import WAIT_LIMIT_S
from workers.models.device import computes_bf16
from workers.models.embedding.bert_weights import read_bert_folder
from workers.models.embedding.encoder_torch import BertEncoder, find_bert

pytestmark = pytest.mark.slow

VOCABULARY = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.2,
    "type_vocab_size": 2,
}


CONFIGS = pytest.mark.parametrize(
    "config",
    [
        transformers.BertConfig(**SIZES),
        transformers.BertConfig(**SIZES, hidden_act="relu"),
        transformers.RobertaConfig(**SIZES, pad_token_id=1),
        transformers.XLMRobertaConfig(**SIZES, pad_token_id=1),
        transformers.CamembertConfig(**SIZES, pad_token_id=1),
    ],
    ids=["bert", "bert-relu", "roberta", "xlm-roberta", "camembert"],
)


def model_of(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return transformers.AutoModel.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("lengths", "computed"),
    [
        ((7, 1, 12, 3), (23, 23)),
        ((7, 40, 1, 12, 37), (97, 112)),
        ((70,), (70, 80)),
        ((64, 32), (96, 96)),
    ],
    ids=["few tokens", "filled up", "one filled up", "full"],
)
@pytest.mark.parametrize("in_bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("has_types", [False, True])
@CONFIGS
def test_states_are_those_of_the_modules(
    config: Any, has_types: bool, in_bf16: bool, lengths: tuple[int, ...], computed: tuple[int, int]
) -> None:
    if in_bf16 and not computes_bf16():
        pytest.skip("this CPU does not support bf16")
    model = model_of(config)
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(5, VOCABULARY, (sum(lengths),), generator=draw)
    types = torch.randint(0, 2, (sum(lengths),), generator=draw) if has_types else None
    with torch.inference_mode():
        bert = find_bert(model, in_bf16=in_bf16)
        assert bert is not None
        encoder = BertEncoder(*bert, in_bf16=in_bf16)
        assert encoder.computed_tokens(lengths) == computed[in_bf16]
        together = encoder.states(ids, types, lengths)
        start = 0
        for length in lengths:
            text = slice(start, start + length)
            some_types = None if types is None else types[text]
            given = {} if some_types is None else {"token_type_ids": some_types[None]}
            wanted = model(input_ids=ids[text][None], **given).last_hidden_state[0]
            apart = float(wanted.abs().max()) * (0.03 if in_bf16 else 1e-5)
            assert (together[text] - wanted).abs().max() < apart
            assert (encoder.states(ids[text], some_types, [length]) - wanted).abs().max() < apart
            start += length


@pytest.mark.parametrize(
    "config",
    [
        # Each token sees only the tokens before it.
        transformers.BertConfig(**SIZES, is_decoder=True),
        transformers.ElectraConfig(**SIZES, embedding_size=16),
        transformers.MPNetConfig(
            **{name: size for name, size in SIZES.items() if name != "type_vocab_size"}
        ),
    ],
    ids=["decoder", "electra", "mpnet"],
)
def test_what_computes_otherwise_is_left_alone(config: Any) -> None:
    with torch.inference_mode():
        assert find_bert(model_of(config), in_bf16=False) is None


@CONFIGS
@pytest.mark.parametrize("in_bf16", [False, True], ids=["fp32", "bf16"])
def test_a_folder_read_directly_computes_the_same_bits(
    tmp_path: Path, config: Any, in_bf16: bool
) -> None:
    if in_bf16 and not computes_bf16():
        pytest.skip("this CPU does not support bf16")
    model = model_of(config)
    model.save_pretrained(tmp_path)
    ids, lengths = torch.arange(5, VOCABULARY), (20, 1, 14)
    types = torch.arange(len(ids)) % 2
    with torch.inference_mode():
        known, bert = find_bert(model, in_bf16=in_bf16), read_bert_folder(tmp_path)
        assert known is not None
        assert bert is not None
        assert bert.width == SIZES["hidden_size"]
        wanted, read = (BertEncoder(*loaded, in_bf16=in_bf16) for loaded in (known, bert))
        for some_types in (None, types):
            assert torch.equal(
                read.states(ids, some_types, lengths), wanted.states(ids, some_types, lengths)
            )


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "electra"},
        {"hidden_act": "gelu_new"},
        {"is_decoder": True},
        {"position_embedding_type": "relative_key"},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {"auto_map": {"AutoModel": "own.Own"}},
        {"max_position_embeddings": 511},
        {"num_hidden_layers": 1},
        {"num_attention_heads": 3},
        {"layer_norm_eps": None},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_settings_that_are_not_usual_are_left_to_transformers(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    model_of(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path)
    assert read_bert_folder(tmp_path) is not None
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    assert read_bert_folder(tmp_path) is None


@pytest.mark.parametrize("name", ["encoder.layer.0.adapter.weight", "bert.pooler.dense.weight"])
def test_weights_beyond_those_of_bert_are_left_to_transformers(tmp_path: Path, name: str) -> None:
    model_of(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {name: torch.zeros(3)}, path)
    assert read_bert_folder(tmp_path) is None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"[]"], ids=["missing", "broken"])
def test_files_that_cannot_be_read_are_left_to_transformers(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    model_of(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert read_bert_folder(tmp_path) is None


def test_an_adapter_is_left_to_transformers(tmp_path: Path) -> None:
    model_of(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert read_bert_folder(tmp_path) is None


READ = """
import sys
from pathlib import Path
from workers.models.embedding.bert_weights import read_bert_folder

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

before_bytes = anonymous_bytes()
bert = read_bert_folder(Path(sys.argv[1]))
assert all(tensor.isfinite().all() for tensor in bert.weights.tensors.values())
print(anonymous_bytes() - before_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells kinds of memory")
def test_weights_are_mapped_and_not_copied(tmp_path: Path) -> None:
    """In a separate process, because other tests free and reuse memory in this one."""
    config = transformers.BertConfig(**SIZES | {"vocab_size": 400_000})
    model_of(config).save_pretrained(tmp_path)
    size_bytes = (tmp_path / "model.safetensors").stat().st_size
    assert size_bytes > 50_000_000
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_LIMIT_S,
    )
    assert int(done.stdout) < size_bytes / 2
