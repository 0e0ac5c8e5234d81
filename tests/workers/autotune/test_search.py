"""Choices made with real encoders in real probe processes.

Only the speeds are made up, so that timing does not affect the outcome.
"""

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel

from shared.errors import ConfigurationError, ModelFailed
from shared.models.catalog import Model
from workers.autotune.benchmark_pool import BenchmarkPool
from workers.autotune.choice import Layout
from workers.autotune.hardware import Machine
from workers.autotune.search import MEASURE_LIMIT_S, Measure, SearchSpec, choose
from workers.models.artifact import (
    CALIBRATION,
    Calibration,
    Manifest,
    Variant,
    find_artifact,
    new_artifact,
    write_calibration,
    write_manifest,
)
from workers.models.backend import Backend
from workers.models.base import PreparedText
from workers.models.embedding.encoder_onnx import OnnxEncoder
from workers.models.embedding.model_folder import read_sentence_folder
from workers.optimize.embedding import export_graph, load_transformer

pytestmark = pytest.mark.slow(about_s=3)

WIDTH, VOCABULARY = 32, 50
ENTRY = Model.model_validate(
    {
        "name": "tiny",
        "task": "embedding",
        "source": "local:tiny",
        "dimensions": WIDTH,
        "batch": {"max_tokens": 512},
    }
)
PLAIN_CPU = Machine("a CPU", (), 2, (), ())
DIGEST = "d1"


def text_of(seed: int, length: int) -> PreparedText:
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, length).astype("<u4")
    return PreparedText(key="", length=length, ids=ids.tobytes())


TEXTS = [text_of(seed, length) for seed, length in enumerate([3, 9, 9, 20, 40, 5])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        BertModel(config, add_pooling_layer=False).save_pretrained(made)
    (made / "tokenizer.json").write_text("{}")
    return made


@pytest.fixture(scope="module")
def artifacts_dir(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four variants that all claim to be exact: two are, one has different weights, and one is not
    a graph at all.
    """
    artifacts = tmp_path_factory.mktemp("artifacts")
    with new_artifact(artifacts, "tiny", DIGEST) as made:
        export_graph(load_transformer(folder), made / "exact.onnx", has_types=False)
        (made / "again.onnx").write_bytes((made / "exact.onnx").read_bytes())
        spoil(made / "exact.onnx", made / "spoiled.onnx")
        (made / "noise.onnx").write_bytes(b"noise")
        encoder = OnnxEncoder(
            read_sentence_folder(folder), made / "exact.onnx", device="cpu", threads=1
        )
        encoder.open()
        alone = [
            encoder.encode(ids[0], None, np.array([ids.shape[1]])) for ids in map(ids_of, TEXTS)
        ]
        write_calibration(made, Calibration(TEXTS, np.concatenate(alone)))
        variants = [variant_of(made, name) for name in ("noise", "spoiled", "exact", "again")]
        variants.append(Variant(name="coarse", backend="torch", precision="int8", cosine_min=0.98))
        variants[-1].backend, variants[-1].file = "onnx", "exact.onnx"
        variants[-1].size_bytes = (made / "exact.onnx").stat().st_size
        write_manifest(
            made,
            Manifest(
                model="tiny",
                revision="main",
                source_digest=DIGEST,
                made_by={},
                task="embedding",
                variants=variants,
            ),
        )
    return artifacts


def ids_of(text: PreparedText) -> np.ndarray:
    return np.frombuffer(text.ids, "<u4").astype(np.int64)[None]


def variant_of(folder: Path, name: str) -> Variant:
    size = (folder / f"{name}.onnx").stat().st_size
    return Variant(
        name=name,
        backend="onnx",
        precision="fp32",
        file=f"{name}.onnx",
        size_bytes=size,
        cosine_min=1.0,
    )


def spoil(source: Path, target: Path) -> None:
    """Writes the same graph with a little noise added to every matrix."""
    graph = onnx.load(source)
    draw = np.random.default_rng(1)
    for weights in graph.graph.initializer:
        matrix = onnx.numpy_helper.to_array(weights)
        if matrix.ndim == 2:
            noisy = matrix + 0.1 * draw.standard_normal(matrix.shape).astype(matrix.dtype)
            weights.CopyFrom(onnx.numpy_helper.from_array(noisy, weights.name))
    onnx.save(graph, target)


@pytest.fixture
def spec(folder: Path, artifacts_dir: Path) -> SearchSpec:
    artifact = find_artifact(artifacts_dir, "tiny", DIGEST)
    assert artifact is not None
    entry = ENTRY.model_copy(
        update={"backend": "onnx"}
    )  # torch takes seconds to import, so it is imported only where needed
    return SearchSpec(entry, folder, artifact, PLAIN_CPU, "cpu", 0, 0, TEXTS)


def speeds(**texts_per_s: float) -> Measure:
    """A meter with a fixed result for each variant, by name."""

    def meter(
        pool: BenchmarkPool, backend: Backend, layout: Layout, texts: Sequence[PreparedText]
    ) -> float:
        return texts_per_s[backend.name.replace("-", "_")]

    return meter


@pytest.mark.parametrize(
    ("exact", "again", "best"), [(50, 100, "again"), (100, 50, "exact"), (100, 103, "exact")]
)
def test_the_faster_of_two_within_the_tolerance_is_chosen(
    spec: SearchSpec, exact: float, again: float, best: str
) -> None:
    choice = choose(spec, meter=speeds(exact=exact, again=again, spoiled=1000, noise=1000))
    assert choice.backend.name == best
    assert Path(choice.backend.graph).name == f"{best}.onnx"
    assert choice.backend.call_tokens > 0
    assert choice.layout == Layout(2, 2)
    assert not choice.is_provisional
    findings = {finding.name: finding for finding in choice.findings}
    assert (findings["exact"].texts_per_s, findings["again"].texts_per_s) == (exact, again)
    assert findings["exact"].cosine_min == pytest.approx(1.0, abs=1e-6)
    assert findings["spoiled"].texts_per_s == 0
    assert findings["spoiled"].cosine_min < 0.9999
    assert "below the tolerance of 0.9999" in findings["spoiled"].reason
    assert "noise.onnx" in findings["noise"].reason
    assert "minimum cosine found during optimization is 0.98000" in findings["coarse"].reason


def test_a_wider_tolerance_lets_more_in(spec: SearchSpec) -> None:
    entry = spec.entry.model_copy(
        update={"tolerance": spec.entry.tolerance.model_copy(update={"cosine": 0.5})}
    )
    meter = speeds(exact=50, again=50, spoiled=1000, coarse=60)
    assert choose(replace(spec, entry=entry), meter=meter).backend.name == "spoiled"


def test_given_processes_and_threads_stand(spec: SearchSpec) -> None:
    one = replace(spec, processes=1, threads=1)
    choice = choose(one, meter=speeds(exact=50, again=40))
    assert choice.layout == Layout(1, 1)


def test_a_candidate_whose_process_dies_is_left_out(spec: SearchSpec) -> None:
    def meter(
        pool: BenchmarkPool, backend: Backend, layout: Layout, texts: Sequence[PreparedText]
    ) -> float:
        if backend.name == "exact":
            for process in multiprocessing.active_children():
                process.kill()
        return pool.texts_per_s(texts, backend.call_tokens, layout, 0.0)

    choice = choose(spec, meter=meter)
    assert choice.backend.name == "again"
    assert [finding.reason for finding in choice.findings if finding.name == "exact"] == [
        "its process died"
    ]
    assert choice.findings[-1].texts_per_s > 0


def replayed(*rounds: dict[str, float]) -> Measure:
    """A meter that returns texts/s by variant name, round by round."""
    turns: Counter[str] = Counter()

    def meter(
        pool: BenchmarkPool, backend: Backend, layout: Layout, texts: Sequence[PreparedText]
    ) -> float:
        turns[backend.name] += 1
        return rounds[turns[backend.name] - 1][backend.name]

    return meter


@pytest.mark.parametrize(
    ("rounds", "best"),
    [
        (({"exact": 100.0, "again": 50.0}, {"exact": 40.0, "again": 80.0}), "exact"),
        (({"exact": 10.0, "again": 50.0}, {"exact": 40.0, "again": 20.0}), "again"),
    ],
)
def test_the_best_of_alternating_readings_counts(
    spec: SearchSpec, rounds: tuple[dict[str, float], ...], best: str
) -> None:
    assert choose(spec, meter=replayed(*rounds)).backend.name == best


def test_measuring_ends_at_its_limit(spec: SearchSpec) -> None:
    now_s: Iterator[float] = iter(np.arange(100) * 2 * MEASURE_LIMIT_S)
    clock: Callable[[], float] = lambda: next(now_s)  # noqa: E731
    choice = choose(spec, meter=speeds(exact=50, again=1000), clock=clock)
    assert choice.backend.name == "exact"
    reasons = {finding.name: finding.reason for finding in choice.findings}
    assert reasons["again"] == "not measured: exceeded 10 s"
    assert reasons["exact"] == ""


def test_all_is_loaded_before_anything_is_timed(spec: SearchSpec) -> None:
    timed: list[tuple[str, int]] = []

    def meter(
        pool: BenchmarkPool, backend: Backend, layout: Layout, texts: Sequence[PreparedText]
    ) -> float:
        timed.append((backend.name, len(multiprocessing.active_children())))
        return 50.0

    choose(spec, meter=meter)
    assert timed == [("exact", 2), ("again", 2)] * 2


def larger(spec: SearchSpec, **batch: int) -> SearchSpec:
    fields = spec.entry.model_dump(exclude={"batch"}) | ({"batch": batch} if batch else {})
    return replace(spec, entry=Model.model_validate(fields), threads=1)


def calls(call_s: float, token_s: float, died_at: int = 2**40) -> Measure:
    """A meter with a fixed time per call. It counts the tokens it has to compute."""

    def meter(
        pool: BenchmarkPool, backend: Backend, layout: Layout, texts: Sequence[PreparedText]
    ) -> float:
        tokens = sum(text.length for text in texts)
        if tokens >= died_at:
            raise ModelFailed("its process died")
        return layout.processes * len(texts) / (call_s + tokens * token_s)

    return meter


@pytest.mark.parametrize(
    ("call_s", "tokens", "timed"), [(0.0, 2048, 2), (0.001, 8192, 4), (1.0, 32_768, 5)]
)
def test_a_batch_is_as_large_as_the_device_needs(
    spec: SearchSpec, call_s: float, tokens: int, timed: int
) -> None:
    choice = choose(larger(spec), meter=calls(call_s, 1e-6))
    assert choice.batch_tokens == tokens
    assert [timing.tokens for timing in choice.budgets] == [2048 * 2**n for n in range(timed)]
    assert choice.backend.name in ("exact", "again")


def test_a_batch_is_not_timed_beyond_the_entry(spec: SearchSpec) -> None:
    choice = choose(larger(spec, max_tokens=4096), meter=calls(0.1, 1e-6))
    assert [timing.tokens for timing in choice.budgets] == [2048, 4096]
    assert choice.batch_tokens == 4096
    small = choose(larger(spec, max_tokens=2048), meter=calls(0.1, 1e-6))
    assert (small.batch_tokens, small.budgets) == (0, [])


def test_the_first_batch_of_a_size_may_be_slow(spec: SearchSpec) -> None:
    seen: set[int] = set()
    steady = calls(0.01, 1e-6)

    def meter(
        pool: BenchmarkPool, backend: Backend, layout: Layout, texts: Sequence[PreparedText]
    ) -> float:
        is_first = len(texts) not in seen
        seen.add(len(texts))
        return steady(pool, backend, layout, texts) / (10 if is_first else 1)

    assert choose(larger(spec), meter=meter).batch_tokens == 32_768


def test_a_process_that_dies_of_a_large_batch_leaves_the_usual_size(spec: SearchSpec) -> None:
    choice = choose(larger(spec), meter=calls(0.1, 1e-6, died_at=4000))
    assert choice.batch(larger(spec).entry).max_tokens == 2048
    assert choice.is_provisional


def test_a_cross_encoder_gets_a_layout_and_a_batch_size(folder: Path, tmp_path: Path) -> None:
    config = BertConfig.from_pretrained(folder)
    config.num_labels = 1
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    entry = Model.model_validate(
        {
            "name": "tiny",
            "task": "similarity",
            "rerank": "cross-encoder",
            "source": "local:tiny",
            "backend": "torch",
        }
    )
    spec = SearchSpec(entry, tmp_path, None, PLAIN_CPU, "cpu", 0, 0, TEXTS)
    choice = choose(spec, meter=calls(0.001, 1e-6))
    assert choice.backend.name == "torch-fp32"
    assert choice.layout == Layout(2, 1)
    assert choice.batch_tokens == 8192


def test_nothing_within_the_tolerance_is_refused(spec: SearchSpec) -> None:
    entry = spec.entry.model_copy(update={"precision": "int8"})
    with pytest.raises(
        ConfigurationError,
        match=r"no onnx backend with precision int8 "
        r".*coarse: minimum cosine found during optimization is 0\.9",
    ):
        choose(replace(spec, entry=entry))


def with_bf16(spec: SearchSpec, cosine: float) -> SearchSpec:
    """A machine that computes in bf16 with this tolerance and has no artifact."""
    machine = replace(PLAIN_CPU, flags=("avx512_bf16",))
    entry = ENTRY.model_copy(
        update={"tolerance": ENTRY.tolerance.model_copy(update={"cosine": cosine})}
    )
    return replace(spec, entry=entry, artifact=None, machine=machine, processes=1, threads=1)


def test_on_x86_an_exact_graph_spares_measuring_torch_in_fp32(spec: SearchSpec) -> None:
    machine = replace(PLAIN_CPU, flags=("avx2",))
    entry = spec.entry.model_copy(update={"backend": "auto"})
    choice = choose(
        replace(spec, entry=entry, machine=machine, threads=1),
        meter=speeds(exact=50, again=40, torch_fp32=500),
    )
    assert choice.backend.name == "exact"
    reasons = {finding.name: finding.reason for finding in choice.findings}
    assert reasons["torch-fp32"] == "not measured: ONNX Runtime computes fp32 faster on this CPU"


def test_torch_in_bf16_spares_measuring_it_in_fp32(spec: SearchSpec) -> None:
    choice = choose(with_bf16(spec, 0.99), meter=speeds(torch_bf16=100, torch_fp32=500))
    assert choice.backend.name == "torch-bf16"
    narrow, wide = choice.findings
    assert 0.99 < narrow.cosine_min < 1 - 1e-6
    assert (wide.name, wide.reason) == (
        "torch-fp32",
        "not measured: torch is faster with fewer bits",
    )


def test_without_an_artifact_torch_is_compared_with_itself(spec: SearchSpec) -> None:
    choice = choose(with_bf16(spec, 0.999999), meter=speeds(torch_bf16=100, torch_fp32=50))
    assert choice.backend.name == "torch-fp32"
    narrow, wide = choice.findings
    assert "cosine" in narrow.reason
    assert wide.cosine_min == pytest.approx(1.0, abs=1e-6)


def test_a_broken_calibration_set_is_computed_anew(spec: SearchSpec, tmp_path: Path) -> None:
    assert spec.artifact is not None
    copy = tmp_path / "tiny" / DIGEST
    copy.mkdir(parents=True)
    for file in spec.artifact.folder.iterdir():
        (copy / file.name).write_bytes(b"cut" if file.name == CALIBRATION else file.read_bytes())
    artifact = find_artifact(tmp_path, "tiny", DIGEST)
    choice = choose(
        replace(spec, artifact=artifact, processes=1, threads=1),
        meter=speeds(exact=50, again=40, spoiled=90),
    )
    assert choice.backend.name == "exact"


def test_torch_as_it_is_where_nothing_can_be_measured(spec: SearchSpec) -> None:
    wrong = ENTRY.model_copy(update={"dimensions": WIDTH + 1, "backend": "auto"})
    choice = choose(replace(spec, entry=wrong, processes=1, threads=1))
    assert choice.backend == Backend()
    assert choice.layout == Layout(1, 1)
    assert f"vectors have {WIDTH} dimensions; expected {WIDTH + 1}" in choice.reason
