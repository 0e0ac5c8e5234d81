"""Similarity with the real encoder, in this process and in a model process."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from shared.errors import BadInput
from shared.models.catalog import Catalog, Model
from shared.models.tasks import Input
from shared.models.tasks.embedding import TextInput
from shared.models.tasks.similarity import SimilarityInput, SimilarityResult
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.batches import model_for
from workers.models.base import (
    InferenceModel,
    Prepared,
    PreparedItem,
    PreparedOutcome,
    PreparedPair,
    PreparedText,
)
from workers.models.embedding.model import EmbeddingModel
from workers.models.embedding.similarity import SimilarityModel
from workers.runtime.pool import HostedModel, ModelPool
from workers.tasks import preparer_for

pytestmark = pytest.mark.slow

PAIRS = [
    ("a cat on a mat", "a kitten on a rug"),
    ("the price of copper fell", "a kitten on a rug"),
    ("a cat on a mat", "a cat on a mat"),
    ("", "a long river " * 60),
]


@pytest.fixture(scope="module")
def entry(catalog: Catalog) -> Model:
    fields = catalog.default("embedding").model_dump()
    return Model.model_validate(fields | {"name": "pairs-of-texts", "task": "similarity"})


@pytest.fixture(scope="module")
def model(entry: Model, minilm_folder: Path) -> InferenceModel:
    made = model_for(entry, minilm_folder, "cpu")
    made.setup()
    made.warmup()
    return made


@pytest.fixture(scope="module")
def prepared(entry: Model, minilm_folder: Path) -> Sequence[PreparedOutcome]:
    return preparer_for(entry, minilm_folder).prepare([SimilarityInput(*pair) for pair in PAIRS])


@pytest.fixture(scope="module")
def expected(minilm_folder: Path) -> list[float]:
    """Cosine similarities from sentence-transformers, one text at a time."""
    reference = SentenceTransformer(str(minilm_folder), device="cpu")
    vectors = [[reference.encode(text) for text in pair] for pair in PAIRS]
    return [float(text @ query) for text, query in vectors]


def scores(results: Sequence[object]) -> list[float]:
    return [result.score for result in results if isinstance(result, SimilarityResult)]


def test_scores_are_the_cosines_of_the_reference(
    model: InferenceModel, prepared: Sequence[PreparedItem], expected: list[float]
) -> None:
    results = model.predict(prepared, lambda step, steps: None)
    assert scores(results) == pytest.approx(expected, abs=1e-5)
    assert all(-1 <= score <= 1 for score in scores(results))
    assert scores(results)[2] == 1
    lengths = [item.length for item in prepared]
    assert [result.tokens for result in results if isinstance(result, SimilarityResult)] == lengths
    assert model.groups(prepared) == [[0, 1, 2, 3]]
    assert model.computed_work(lengths) == sum(lengths)


def test_order_and_company_change_nothing(
    model: InferenceModel, prepared: Sequence[PreparedItem], expected: list[float]
) -> None:
    for index in reversed(range(len(PAIRS))):
        alone = model.predict([prepared[index]], lambda step, steps: None)
        assert scores(alone) == [pytest.approx(expected[index], abs=1e-5)]


def test_a_long_text_is_refused_or_cut(entry: Model, minilm_folder: Path) -> None:
    long = "word " * 400
    given: list[Input] = [
        SimilarityInput("a", long, "none"),
        SimilarityInput(long, "a"),
        TextInput("a"),
    ]
    refused, cut, foreign = preparer_for(entry, minilm_folder).prepare(given)
    assert isinstance(refused, BadInput)
    assert refused.code == "context_length_exceeded"
    assert isinstance(cut, Prepared)
    assert cut.length == 256 + 3
    assert isinstance(foreign, BadInput)


@pytest.mark.anyio
async def test_pairs_reach_a_model_process(
    entry: Model, minilm_folder: Path, prepared: Sequence[PreparedItem], expected: list[float]
) -> None:
    async with ModelPool([HostedModel(entry, minilm_folder)], device="cpu", processes=1) as pool:
        await pool.processes[0].ready()
        done = await pool.processes[0].run(list(prepared), timeout_s=WAIT_LIMIT_S, model=0)
    assert scores(done.results) == pytest.approx(expected, abs=1e-5)


def test_every_part_of_a_pair_is_in_its_cache_key() -> None:
    forms = {
        SimilarityInput("a", "b", "none").cache_form(),
        *(SimilarityInput(*pair).cache_form() for pair in ("ab", "ba", "ac", ("ab", ""))),
    }
    assert len(forms) == 5


class ZeroEncoder:
    """Encodes texts that start with token 0 as zeros, and all other texts as ones."""

    device_name = "cpu"
    pads = overlaps = False

    def open(self) -> int:
        return 2

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def encode(self, ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
        firsts = ids[np.cumsum(lengths) - lengths]
        return np.repeat((firsts[:, None] != 0).astype(np.float32), 2, axis=1)


def test_text_without_a_direction_has_no_score(entry: Model) -> None:
    """A score of 0 would imply that the text is unrelated to everything."""
    encoder = EmbeddingModel(entry.model_copy(update={"dimensions": 2}), ZeroEncoder())
    texts = [PreparedText(key="", length=1, ids=bytes((token, 0, 0, 0))) for token in (0, 1, 2)]
    pairs = [PreparedPair(key="", length=2, text=text, query=texts[2]) for text in texts]
    results = SimilarityModel(encoder).predict(pairs, lambda step, steps: None)
    wrong = [one.find_wrong_number() for one in results if isinstance(one, SimilarityResult)]
    assert [bool(one) for one in wrong] == [True, False, False]
