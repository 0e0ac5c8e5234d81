"""A canary's results compared with the other revision's: which comparisons run, and which count."""

import asyncio
import io
import time

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from api.dispatch.canary_comparison import CanaryComparisons
from api.dispatch.request import InferenceRequest, InferenceResponse, RequestOptions
from api.inputs.codec_pool import CodecPool
from api.inputs.image_codec import ImageCodec
from shared.canary.verdict import COMPARISON_TENANT, CanaryCounts
from shared.errors import BadInput
from shared.messages import ItemOutcome, Receipt, RequestFacts
from shared.models.blob import Blob
from shared.models.catalog import Catalog, Model
from shared.models.entry import Canary, Tolerance
from shared.models.tasks import Input, Result
from shared.models.tasks.embedding import EmbeddingResult, TextInput
from shared.models.tasks.image import ImageInput, ImageResult
from shared.models.tasks.similarity import SimilarityResult
from shared.models.tasks.text import GenerationInput, GenerationResult
from shared.money.charge import price_of
from shared.stores.objects import ObjectStore
from tests.api.harness import IMAGE_MODEL, PAIRS_MODEL, TEXT_MODEL, WRITER
from tests.canary.test_routing import FakeCanaryStore
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
RULES = Canary(revision="next", compare_share=1.0)
LIKE_TEXTS = Tolerance(rouge_l=0.5)
GREEDY = GenerationInput(16, 3, prompt="a", temperature=0.0)


class CountingCanaryStore(FakeCanaryStore):
    """Adds up the counts."""

    async def count(self, canary: Model, counts: CanaryCounts) -> None:
        self.seen.compared += counts.compared
        self.seen.outside += counts.outside


def png(noise: float) -> bytes:
    drawn = np.random.default_rng(3)
    pixels = drawn.integers(0, 256, (64, 64, 3)) + drawn.normal(0, noise, (64, 64, 3))
    buffer = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype("u1")).save(buffer, "png")
    return buffer.getvalue()


def pixels_of(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data))) / 255


def vector(*numbers: float) -> EmbeddingResult:
    return EmbeddingResult(np.array(numbers, "<f4").tobytes(), 1)


def image(noise: float) -> ImageResult:
    return ImageResult(Blob("image/png", data=png(noise)), 64, 64, 1, 1)


def text(words: str) -> GenerationResult:
    return GenerationResult(words, "stop", 3, 1, 2)


async def compared(
    model: Model,
    ours: Result,
    theirs: Result | None,
    revision: str | None = "next",
    given: Input | None = None,
    rules: Canary = RULES,
) -> tuple[int, int, list[InferenceRequest]]:
    """The counts for these results, and the requests that the other revision received."""
    canary = Catalog((model.model_copy(update={"canary": rules}),)).canaries[model.name]
    asked: list[InferenceRequest] = []
    canary_store = CountingCanaryStore()

    def response(result: Result | None, of: str | None) -> InferenceResponse:
        outcome = ItemOutcome(0, "succeeded", Receipt(revision=of), result)
        return InferenceResponse([outcome], 0.0, price_of(model, 0), "any")

    async def dispatch(request: InferenceRequest) -> InferenceResponse:
        asked.append(request)
        return response(theirs, None)

    if given is None:
        given = ImageInput("a", 8, 8, 1, 1.0, 1, "ddim") if ours.blobs else TextInput("a")
    facts = RequestFacts(request_id="req_1", tenant="acme", received_at_s=0.0, key_id="k")
    request = InferenceRequest(facts, model, [given], time.time() + 1, RequestOptions())
    async with CodecPool(1, 1 << 28) as pool:
        parts = (canary_store, dispatch, ObjectStore("memory://"), ImageCodec(pool))
        comparisons = CanaryComparisons(*parts)
        comparisons.consider(request, canary, response(ours, revision))
        async with asyncio.timeout(WAIT_LIMIT_S):
            await asyncio.gather(*comparisons.tasks)
    return canary_store.seen.compared, canary_store.seen.outside, asked


@pytest.mark.parametrize(
    ("model", "ours", "theirs", "outside"),
    [
        (TEXT_MODEL, vector(1, 0), vector(1, 0.001), 0),
        (TEXT_MODEL, vector(1, 0), vector(1, 0.1), 1),
        (TEXT_MODEL, vector(1, 0), vector(0, 0), 1),
        (TEXT_MODEL, vector(1, 0), vector(1, 0, 0), 1),
        (TEXT_MODEL, vector(float("nan"), 0), vector(1, 0), 1),
        (PAIRS_MODEL, SimilarityResult(0.5, 1), SimilarityResult(0.51, 1), 0),
        (PAIRS_MODEL, SimilarityResult(0.5, 1), SimilarityResult(0.6, 1), 1),
        (IMAGE_MODEL, image(0), image(0), 0),
        (IMAGE_MODEL, image(0), image(2), 0),
        (IMAGE_MODEL, image(0), image(60), 1),
    ],
)
async def test_results_are_judged_by_the_tolerance(
    model: Model, ours: Result, theirs: Result, outside: int
) -> None:
    assert (await compared(model, ours, theirs))[:2] == (1, outside)


@pytest.mark.parametrize(
    ("theirs", "outside"),
    [("a red hen, and a cat", 0), ("a red cat, and a dog", 0), ("no such thing", 1), ("", 1)],
)
async def test_texts_are_judged_by_their_common_words(theirs: str, outside: int) -> None:
    rules = RULES.model_copy(update={"tolerance": LIKE_TEXTS})
    ours = text("a red hen, and a cat")
    found = await compared(WRITER, ours, text(theirs), given=GREEDY, rules=rules)
    assert found[:2] == (1, outside)


@pytest.mark.parametrize(
    ("given", "tolerance"),
    [(replace(GREEDY, temperature=0.7), LIKE_TEXTS), (GREEDY, Tolerance()), (GREEDY, None)],
)
async def test_no_text_is_written_twice_for_nothing(
    given: GenerationInput, tolerance: Tolerance | None
) -> None:
    rules = RULES.model_copy(update={"tolerance": tolerance})
    found = await compared(WRITER, text("a hen"), text("a hen"), given=given, rules=rules)
    assert found == (0, 0, [])


async def test_nobody_reads_along_what_is_compared() -> None:
    rules = RULES.model_copy(update={"tolerance": LIKE_TEXTS})
    streamed = replace(GREEDY, is_streamed=True)
    counted = await compared(WRITER, text("a hen"), text("a hen"), given=streamed, rules=rules)
    assert counted[:2] == (1, 0)
    (asked,) = counted[2]
    assert asked.inputs == [GREEDY]


async def test_comparison_is_nobodys_request() -> None:
    _, _, (asked,) = await compared(TEXT_MODEL, vector(1, 0), vector(1, 0))
    facts = asked.facts
    assert (facts.tenant, facts.price_share, facts.key_id) == (COMPARISON_TENANT, 0.0, "")
    assert (facts.priority, asked.options.cache_read, asked.options.cache_write) == (
        "batch",
        False,
        False,
    )
    assert facts.request_id != "req_1"
    assert asked.model is TEXT_MODEL


async def test_answer_of_the_other_revision_is_not_compared() -> None:
    assert await compared(TEXT_MODEL, vector(1, 0), vector(1, 0), "now") == (0, 0, [])
    assert await compared(TEXT_MODEL, vector(1, 0), vector(1, 0), None) == (0, 0, [])


async def test_item_that_the_other_revision_failed_says_nothing() -> None:
    assert (await compared(TEXT_MODEL, vector(1, 0), None))[:2] == (0, 0)


async def test_distance_of_images_is_that_of_the_optimizer() -> None:
    from workers.optimize.quality import psnr_db  # SciPy, 0.7 s in each process of a run

    async with CodecPool(1, 1 << 28) as pool:
        codec, until_s = ImageCodec(pool), time.time() + WAIT_LIMIT_S
        found = await codec.psnr_db(png(0), png(20), until_s)
        assert found == pytest.approx(psnr_db(pixels_of(png(0)), pixels_of(png(20))), abs=1e-6)
        assert await codec.psnr_db(png(0), png(0), until_s) == 100
        with pytest.raises(BadInput):
            await codec.psnr_db(png(0), b"no image", until_s)
