import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import RobertaProcessing
from transformers import RobertaConfig, RobertaModel

from shared.errors import ConfigurationError
from shared.models.catalog import Catalog
from shared.models.tasks import Input
from shared.models.tasks.embedding import EmbeddingResult, TextInput, TokensInput
from tests.workers.models.batches import model_for
from workers.models.base import InferenceModel, PreparedText, Preparer
from workers.tasks import preparer_for

pytestmark = pytest.mark.slow

WORDS = [
    "river",
    "mill",
    "Straße",
    "漢字",
    "naïve",
    "🐈",
    "wheel",
    "don't",
    "3.14",
    "turbine",
    "İstanbul",
    "ﬁsh",
    "\u200bpenstock",
    "...",
]
LONGEST = "a very long river " * 200


def vectors(model: InferenceModel, preparer: Preparer, inputs: Sequence[Input]) -> np.ndarray:
    """Computes vectors as a model process does: prepares texts together, groups them, and restores
    the order.
    """
    batch = [item for item in preparer.prepare(inputs) if isinstance(item, PreparedText)]
    assert len(batch) == len(inputs)
    rows: dict[int, np.ndarray] = {}
    for indices in model.groups(batch):
        results = model.predict([batch[index] for index in indices], lambda step, steps: None)
        for index, result in zip(indices, results, strict=True):
            assert isinstance(result, EmbeddingResult)
            assert result.tokens == batch[index].length
            rows[index] = np.frombuffer(result.vector, "<f4")
    return np.stack([rows[index] for index in range(len(batch))])


def texts_of(seed: int) -> list[str]:
    draw = random.Random(seed)
    lengths = [draw.choice([1, 5, 10, 40, 60, 180, 400]) for _ in range(12)]
    texts = [" ".join(draw.choices(WORDS, k=length)) for length in lengths]
    return draw.sample([*texts, LONGEST, ""], 14)


@pytest.fixture(scope="session")
def reference(minilm_folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(minilm_folder), device="cpu")


def one_at_a_time(reference: SentenceTransformer, texts: Sequence[str]) -> np.ndarray:
    return np.stack([reference.encode(text) for text in texts])


@pytest.mark.parametrize("seed", range(3))
def test_vectors_equal_the_reference_in_any_mix(
    minilm: InferenceModel, minilm_preparer: Preparer, reference: SentenceTransformer, seed: int
) -> None:
    texts = texts_of(seed)
    ours = vectors(minilm, minilm_preparer, [TextInput(text) for text in texts])
    assert np.abs(ours - one_at_a_time(reference, texts)).max() < 1e-5


@pytest.mark.parametrize("text", ["a cat", "", LONGEST, "\u0000 \u200b"])
def test_a_single_text_equals_the_reference(
    minilm: InferenceModel, minilm_preparer: Preparer, reference: SentenceTransformer, text: str
) -> None:
    ours = vectors(minilm, minilm_preparer, [TextInput(text)])
    assert np.abs(ours[0] - reference.encode(text)).max() < 1e-5


def test_token_ids_give_the_vector_of_their_text(
    minilm: InferenceModel, minilm_preparer: Preparer, minilm_folder: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    texts = texts_of(7)
    tokens = [TokensInput(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    as_texts = vectors(minilm, minilm_preparer, [TextInput(text) for text in texts])
    assert np.abs(vectors(minilm, minilm_preparer, tokens) - as_texts).max() < 1e-5


@pytest.fixture
def variant(minilm_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the folder with different settings."""

    def make(
        *, pooling: dict[str, object], normalize: bool = True, **more: dict[str, object]
    ) -> Path:
        folder = tmp_path / "variant"
        shutil.copytree(
            minilm_folder,
            folder,
            copy_function=lambda source, target: Path(target).symlink_to(source),
        )
        modules = json.loads((minilm_folder / "modules.json").read_text())
        files = {
            "modules.json": modules if normalize else modules[:2],
            "1_Pooling/config.json": pooling,
            **more,
        }
        for name, content in files.items():
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_text(json.dumps(content))
        return folder

    return make


@pytest.mark.parametrize(
    ("dimensions", "settings"),
    [
        (384, {"pooling": {"word_embedding_dimension": 384, "pooling_mode_cls_token": True}}),
        (
            384,
            {
                "pooling": {"word_embedding_dimension": 384, "pooling_mode_max_tokens": True},
                "normalize": False,
            },
        ),
        (
            768,
            {
                "pooling": {
                    "embedding_dimension": 384,
                    "pooling_mode": ["mean_sqrt_len_tokens", "cls"],
                }
            },
        ),
        (
            384,
            {
                "pooling": {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True},
                "sentence_bert_config.json": {"max_seq_length": 20, "do_lower_case": True},
                "config_sentence_transformers.json": {
                    "prompts": {"q": "query: "},
                    "default_prompt_name": "q",
                },
            },
        ),
    ],
    ids=["cls", "max-unnormalized", "two-modes", "prompt-and-short"],
)
def test_what_the_folder_says_is_done(
    catalog: Catalog, variant: Callable[..., Path], dimensions: int, settings: dict[str, object]
) -> None:
    folder = variant(**settings)
    entry = catalog.default("embedding").model_copy(update={"dimensions": dimensions})
    model, preparer = model_for(entry, folder, "cpu"), preparer_for(entry, folder)
    model.setup()
    texts = ["A Cat", "the mill wheel turns " * 10, "漢字 and more of it"]
    expected = one_at_a_time(SentenceTransformer(str(folder), device="cpu"), texts)
    assert (
        np.abs(vectors(model, preparer, [TextInput(text) for text in texts]) - expected).max()
        < 1e-5
    )


def test_a_transformer_of_another_family_equals_the_reference(
    catalog: Catalog, tmp_path: Path
) -> None:
    """RoBERTa counts positions from its padding id and has no token types; its folder has no
    modules.json.
    """
    letters = ["<s>", "<pad>", "</s>", "<unk>", *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        BPE({letter: number for number, letter in enumerate(letters)}, [], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 40,
        "pad_token": "<pad>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    settings = RobertaConfig(
        vocab_size=len(letters),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=42,
        type_vocab_size=1,
    )
    RobertaModel(settings).save_pretrained(tmp_path)
    entry = catalog.default("embedding").model_copy(update={"dimensions": 32})
    model, preparer = model_for(entry, tmp_path, "cpu"), preparer_for(entry, tmp_path)
    model.setup()
    texts = ["a", "some words", "a text that is much too long for forty tokens of one byte"]
    expected = one_at_a_time(SentenceTransformer(str(tmp_path), device="cpu"), texts)
    assert (
        np.abs(vectors(model, preparer, [TextInput(text) for text in texts]) - expected).max()
        < 1e-5
    )


def test_bf16_stays_near_fp32(
    catalog: Catalog, minilm: InferenceModel, minilm_preparer: Preparer, minilm_folder: Path
) -> None:
    entry = catalog.default("embedding").model_copy(update={"precision": "bf16"})
    model = model_for(entry, minilm_folder, "cpu")
    model.setup()
    inputs = [TextInput("a cat"), TextInput("the mill wheel turns in the river")]
    similarity = (
        vectors(model, minilm_preparer, inputs) * vectors(minilm, minilm_preparer, inputs)
    ).sum(1)
    assert (similarity > 0.995).all()


def test_a_wrong_number_of_dimensions_is_refused(catalog: Catalog, minilm_folder: Path) -> None:
    entry = catalog.default("embedding").model_copy(update={"dimensions": 768})
    with pytest.raises(ConfigurationError, match="384 dimensions; expected 768"):
        model_for(entry, minilm_folder, "cpu").setup()


def test_an_absent_gpu_is_refused(catalog: Catalog, minilm_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no such GPU"):
        model_for(catalog.default("embedding"), minilm_folder, "cuda:99").setup()
