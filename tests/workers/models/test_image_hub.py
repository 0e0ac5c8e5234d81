"""Unmodified pipelines from many families share calls and draw the same images as on their own.

All of them have random weights.
"""

import copy
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from diffusers.pipelines import auto_pipeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workers.models.tiny_families import FAMILIES, LEFT_OUT, SIDE, Family, random
from workers.models.base import OutOfMemory
from workers.models.image.calls import Call, UnsplittableError
from workers.models.image.hub import Batching, Hub, StuckError
from workers.models.image.own_pipeline import Interception, state_of
from workers.models.image.vae import needs_fp32

pytestmark = [pytest.mark.slow(about_s=90), pytest.mark.filterwarnings("ignore")]

TASKS = [(name, kind) for name, family in FAMILIES.items() for kind in family.tasks]
SEPARATE = {"HiDreamImagePipeline", "Flux2KleinKVPipeline", "QwenImage21Pipeline"}
"""Pipelines whose images don't share calls. The first one's prompts put encoder layers first and
rows second, and the others keep an image's keys and values in an object.
"""
TOLERANCE = 1e-5
"""Relative to the largest number, in fp32."""


class Tiny(NamedTuple):
    """A family's pipeline."""

    family: Family
    pipeline: Any
    takes_image: bool

    def arguments(self, seed: int, steps: int, side: int = SIDE) -> dict[str, Any]:
        known = inspect.signature(type(self.pipeline).__call__).parameters
        given: dict[str, Any] = {
            "num_inference_steps": steps,
            "generator": torch.Generator().manual_seed(seed),
            "output_type": "pt",
            "return_dict": False,
            "height": side,
            "width": side,
            "strength": 0.8,
            **self.family.usual,
            **self.family.prompts(seed),
        }
        if self.takes_image:
            given["image"] = (random(seed, 1, 3, side, side) / 5 + 0.5).clamp(0, 1)
        mask = torch.zeros(1, 1, side, side)
        mask[..., side // 4 : -side // 4, side // 4 : -side // 4] = 1
        given["mask_image"] = mask
        dtype: torch.dtype = self.denoiser.dtype
        return {
            name: value.to(dtype)
            if "embeds" in name and isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in given.items()
            if name in known
        }

    @property
    def denoiser(self) -> Any:
        return getattr(self.pipeline, "unet", None) or self.pipeline.transformer

    def drawer(self, own: Any, seed: int, steps: int, side: int = SIDE) -> Callable[[], Any]:
        """Draws with one of the pipelines in a hub."""
        return lambda: own(self.pipeline)(**self.arguments(seed, steps, side))[0]

    def alone(self, seed: int, steps: int, side: int = SIDE) -> torch.Tensor:
        """The latents that the pipeline draws by itself."""
        mine = copy.copy(self.pipeline)
        scheduler = self.pipeline.scheduler
        object.__setattr__(mine, "scheduler", type(scheduler).from_config(scheduler.config))
        drawn: torch.Tensor = mine(**self.arguments(seed, steps, side))[0]
        return drawn


def make(name: str, kind: str, dtype: torch.dtype = torch.float32) -> Tiny:
    torch.manual_seed(1)
    family, made = FAMILIES[name], getattr(diffusers, kind)
    known = inspect.signature(made.__init__).parameters
    parts = {part: value for part, value in family.parts().items() if part in known}
    pipeline = made(**parts)
    if dtype != torch.float32:
        pipeline.to(dtype)
    pipeline.set_progress_bar_config(disable=True)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    takes_image = kind != family.tasks[0] or family.takes_image
    return Tiny(family, pipeline, takes_image)


def run(hub: Hub, arrivals: Mapping[int, tuple[int, Callable[[], Any]]]) -> dict[int, Any]:
    """Adds each item before its step, and runs until all of them have finished."""
    ended: dict[int, Any] = {}
    for step in range(200):
        for name, (joins, draw) in arrivals.items():
            if joins == step:
                hub.add(name, draw)
        ended |= hub.step()
        if not len(hub) and step >= max(joins for joins, _ in arrivals.values()):
            return ended
    raise AssertionError("the items never ended")


def difference(one: Any, other: torch.Tensor) -> float:
    assert isinstance(one, torch.Tensor), one
    assert other.std() > 0.001, "the image is empty"
    return float((one.float() - other.float()).abs().max() / other.float().abs().max())


@pytest.fixture(autouse=True)
def inference() -> Any:
    """Runs as in a model process: on one torch thread, without gradients."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "kind"), TASKS, ids=[kind for _, kind in TASKS])
def test_items_draw_together_what_they_draw_alone(name: str, kind: str) -> None:
    """Items have different seeds, prompts and step counts, and join at different steps."""
    tiny = make(name, kind)
    counter = Counting()
    hub = Hub(counter)
    own = Interception(hub).own
    plan = {0: (0, 5), 1: (0, 4), 2: (1, 6), 3: (2, 3)}
    results = run(
        hub,
        {seed: (joins, tiny.drawer(own, seed, steps)) for seed, (joins, steps) in plan.items()},
    )
    for seed, (_, steps) in plan.items():
        assert difference(results[seed], tiny.alone(seed, steps)) <= TOLERANCE
    assert counter.most >= 3 or kind in SEPARATE, "calls were not shared"


def test_every_other_pipeline_is_left_out_for_a_reason() -> None:
    mappings = (
        auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING,
        auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
        auto_pipeline.AUTO_INPAINT_PIPELINES_MAPPING,
    )
    tested = {kind for _, kind in TASKS}
    known = {kind.__name__ for mapping in mappings for kind in mapping.values()}
    for kind in tested:
        ways = (kind.replace("Pipeline", f"{way}Pipeline") for way in ("Img2Img", "Inpaint"))
        known |= {way for way in ways if hasattr(diffusers, way)}
    left_out = [kind for kinds in LEFT_OUT.values() for kind in kinds]
    assert known - tested - set(left_out) == set()
    assert not tested & set(left_out)
    assert all(hasattr(diffusers, kind) for kind in left_out)


class Weighted(diffusers.ModelMixin):  # type: ignore[misc]
    """A denoiser with one weight, like the denoisers in diffusers.

    The weight determines the denoiser's dtype.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))


class Bare:
    """A pipeline with only these components."""

    device = torch.device("cpu")

    def __init__(self, components: Mapping[str, Any]) -> None:
        self.components = components


class Counting(Batching):
    """Counts the calls of a batch's denoiser."""

    most = 0

    def compute(self, calls: Any) -> Any:
        if calls[0].part.is_denoiser:
            self.most = max(self.most, len(calls))
        return super().compute(calls)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "") for name in ("stable-diffusion", "sdxl", "sd3", "flux", "qwen-image")),
        ("sdxl", "Img2Img"),
    ],
)
def test_in_16_bits_company_changes_no_more_than_the_size_of_a_batch_does(
    name: str, way: str, dtype: torch.dtype
) -> None:
    """Covers two sizes, encoding and decoding between other items' steps, and a VAE in fp32 if it
    overflows.
    """
    kind = FAMILIES[name].tasks[0].replace("Pipeline", f"{way}Pipeline")
    tiny = make(name, kind, dtype)
    overflows = needs_fp32(tiny.pipeline)
    assert overflows == (name == "sdxl" and dtype == torch.float16)
    if overflows:
        tiny.pipeline.vae.to(torch.float32)
    hub = Hub()
    own = Interception(hub).own
    plan = {0: (0, 5, SIDE), 1: (0, 3, 2 * SIDE), 2: (1, 4, SIDE), 3: (2, 4, 2 * SIDE)}
    results = run(
        hub,
        {
            seed: (joins, tiny.drawer(own, seed, steps, side))
            for seed, (joins, steps, side) in plan.items()
        },
    )
    for seed, (_, steps, side) in plan.items():
        draw = partial(draw_copies, tiny, seed, steps, side)
        alone = draw(1)
        bound = max(mean_difference(draw(count), alone) for count in (2, 4))
        error = mean_difference(results[seed], alone)
        assert error <= 2 * bound + LEAST_16, (seed, error, bound)


LEAST_16 = 2e-5
"""The mean difference caused by a single 16-bit rounding error."""


def draw_copies(tiny: Tiny, seed: int, steps: int, side: int, count: int) -> torch.Tensor:
    """Draws an item in a batch with copies of itself."""
    hub = Hub()
    drawer = tiny.drawer(Interception(hub).own, seed, steps, side)
    drawn: torch.Tensor = run(hub, dict.fromkeys(range(count), (0, drawer)))[0]
    return drawn


def mean_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().mean())


@pytest.fixture(scope="module")
def sd() -> Tiny:
    return make("stable-diffusion", "StableDiffusionPipeline")


@pytest.fixture(scope="module")
def references(sd: Tiny) -> dict[tuple[int, int], torch.Tensor]:
    """Results of items drawn individually, keyed by seed and steps."""
    with torch.inference_mode():
        return {(seed, steps): sd.alone(seed, steps) for seed in range(6) for steps in (2, 3, 5)}


class Fault(NamedTuple):
    """An event that affects an item, and the step at which it happens."""

    kind: str
    step: int


class Scarce(Batching):
    """A device that has room for only `rows` rows, and where some items' calls fail."""

    def __init__(self, rows: int, failing: set[int]) -> None:
        self.rows = rows
        self.failing = failing

    def compute(self, calls: Any) -> Any:
        if sum(call.rows for call in calls) > self.rows:
            raise torch.OutOfMemoryError("out of memory")
        if any(call.owner in self.failing for call in calls):
            raise RuntimeError("this item breaks its batch")
        return super().compute(calls)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    plan=st.lists(
        st.tuples(
            st.integers(0, 5),
            st.sampled_from([2, 3, 5]),
            st.sampled_from(["none", "none", "none", "drop", "raise", "break", "again", "nan"]),
            st.integers(0, 4),
        ),
        min_size=1,
        max_size=6,
    ),
    rows=st.sampled_from([1, 2, 4, 100]),
)
def test_any_schedule_leaves_the_other_items_as_they_are(
    sd: Tiny,
    references: dict[tuple[int, int], torch.Tensor],
    plan: list[tuple[int, int, str, int]],
    rows: int,
) -> None:
    """Items join, are canceled, start over, raise, break their batch, or run out of memory."""
    failing: set[int] = set()
    hub = Hub(Scarce(rows, failing))
    own = Interception(hub).own

    def draw(slot: int, fault: Fault) -> Any:
        def after_step(pipeline: Any, step: int, time: Any, tensors: Any) -> Any:
            if step == fault.step and fault.kind == "raise":
                raise ValueError("this item raises")
            if step == fault.step and fault.kind == "nan":
                return {"latents": tensors["latents"] * float("nan")}
            return {}

        steps = plan[slot][1]
        return own(sd.pipeline)(**sd.arguments(slot, steps) | {"callback_on_step_end": after_step})[
            0
        ]

    ended = run_with_faults(hub, draw, plan, failing)
    for slot, (_, steps, kind, at) in enumerate(plan):
        check(ended.get(slot), references[slot, steps], kind, is_late=at >= steps, rows=rows)


def run_with_faults(
    hub: Hub,
    draw: Callable[[int, Fault], Any],
    plan: list[tuple[int, int, str, int]],
    failing: set[int],
) -> dict[int, Any]:
    ended: dict[int, Any] = {}
    for step in range(60):
        for slot, (joins, _, kind, at) in enumerate(plan):
            fault = partial(draw, slot, Fault(kind, at))
            if joins == step:
                hub.add(slot, fault, slot)
            if kind == "break" and step == joins + at:
                failing.add(slot)
            if kind in ("drop", "again") and step == joins + at + 1 and slot in hub.names:
                hub.drop(slot)
                if kind == "again":
                    hub.add(slot, fault, slot)
        for slot, outcome in hub.step().items():
            assert slot not in ended
            ended[slot] = outcome
        if not len(hub) and step > 12:
            return ended
    raise AssertionError("the items never ended")


def check(outcome: Any, alone: torch.Tensor, kind: str, *, is_late: bool, rows: int) -> None:
    """Checks the outcome of an item with a planned fault; the item may have finished before it."""
    if outcome is None:
        assert kind == "drop"
    elif rows < 2:
        assert isinstance(outcome, OutOfMemory | ValueError | RuntimeError), outcome
    elif isinstance(outcome, Exception):
        assert kind in ("raise", "break")
        assert not is_late or kind == "break"
    elif kind == "nan" and not is_late:
        assert outcome.isnan().any()
    else:
        assert difference(outcome, alone) <= TOLERANCE


def test_a_pipeline_that_computes_without_end_is_interrupted(
    sd: Tiny, references: dict[tuple[int, int], torch.Tensor]
) -> None:
    hub = Hub(python_limit_s=0.4)
    own = Interception(hub).own

    def loop() -> None:
        own(sd.pipeline).check_inputs("a", 8, 8, 1)
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            pass

    hub.add(0, loop)
    hub.add(1, lambda: own(sd.pipeline)(**sd.arguments(1, 3))[0])
    ended: dict[int, Any] = {}
    while len(hub):
        ended |= hub.step()
    assert isinstance(ended[0], StuckError)
    assert difference(ended[1], references[1, 3]) <= TOLERANCE


def test_what_one_pipeline_sets_around_its_calls_reaches_no_other(
    sd: Tiny, references: dict[tuple[int, int], torch.Tensor]
) -> None:
    """Autocast and gradients belong to the thread, and moving a module would move it for all
    pipelines.
    """
    hub = Hub()
    own = Interception(hub).own

    def cast() -> Any:
        mine = own(sd.pipeline)
        mine.vae.to(torch.float16)
        mine.unet.half()
        with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            drawn = mine(**sd.arguments(0, 5))[0]
            assert torch.is_autocast_enabled("cpu")
            return drawn

    hub.add(0, cast)
    hub.add(1, lambda: own(sd.pipeline)(**sd.arguments(1, 3))[0])
    ended: dict[int, Any] = {}
    for step in range(20):
        ended |= hub.step()
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
        if step == 1:
            hub.add(2, lambda: own(sd.pipeline)(**sd.arguments(2, 3))[0])
        if not len(hub) and step > 1:
            break
    for seed in (1, 2):
        assert difference(ended[seed], references[seed, 3]) <= TOLERANCE
    assert difference(ended[0], references[0, 5]) > TOLERANCE, "autocast had no effect"
    assert {one.dtype for one in sd.pipeline.components.values() if hasattr(one, "dtype")} == {
        torch.float32
    }


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("StableDiffusionPAGPipeline", True), ("StableDiffusionPipeline", False)],
)
def test_pipelines_that_change_modules_around_their_calls_are_known(
    kind: str, changes: bool
) -> None:
    tiny = make("stable-diffusion", kind)
    hub = Hub()
    before = state_of(tiny.pipeline)
    hub.add(0, tiny.drawer(Interception(hub).own, 0, 4))
    hub.step()
    assert (state_of(tiny.pipeline) != before) == changes
    hub.drop(0)


def test_a_hook_around_an_encoders_call_sees_only_its_own_rows() -> None:
    """JoyImage reads a text encoder's last layer with a hook."""

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Identity()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            seen.append(len(tokens))
            hidden: torch.Tensor = self.layer(tokens)
            return hidden + 1

    seen: list[int] = []
    hub = Hub()
    interception = Interception(hub)
    pipeline = Bare({"text_encoder": Encoder()})

    def draw(at: int, *, hooks: bool) -> list[float]:
        encoder = interception.own(pipeline).text_encoder
        read: list[torch.Tensor] = []
        handle = encoder.layer.register_forward_hook(lambda *given: read.append(given[2]))
        if not hooks:
            handle.remove()
        read.append(encoder(torch.full((1, 1), float(at))))
        handle.remove()
        return read[-2 if hooks else -1].flatten().tolist()

    results = run(hub, {at: (0, partial(draw, at, hooks=True)) for at in range(2)})
    assert results == {0: [0.0], 1: [1.0]}
    results = run(hub, {at: (0, partial(draw, at, hooks=False)) for at in range(2)})
    assert results == {0: [1.0], 1: [2.0]}
    assert seen == [1, 1, 2]


def test_results_that_can_not_be_split_are_computed_one_by_one() -> None:
    class Opaque:
        pass

    class Remembering(Weighted):
        def forward(self, sample: torch.Tensor) -> Any:
            seen.append(len(sample))
            return sample + 1, Opaque()

    seen: list[int] = []
    hub = Hub()
    interception = Interception(hub)
    module = Remembering()

    pipeline = Bare({"unet": module})

    def draw(at: int) -> Any:
        mine = interception.own(pipeline)
        sample = torch.full((1, 2), float(at))
        for _ in range(2):
            sample, _ = mine.unet(sample)
        return float(sample[0, 0])

    results = run(hub, {at: (0, partial(draw, at)) for at in range(2)})
    assert results == {0: 2.0, 1: 3.0}
    assert seen == [2, 1, 1, 1, 1]


class Repeating(Weighted):
    """A denoiser whose output has two entries for each row."""

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        return sample.repeat_interleave(2, 0)


def test_several_entries_for_each_row_are_not_taken_for_a_constant() -> None:
    hub = Hub()
    interception = Interception(hub)
    pipeline = Bare({"unet": Repeating()})

    def draw(at: int) -> list[float]:
        sample = torch.full((1, 1), float(at))
        entries: list[float] = interception.own(pipeline).unet(sample).flatten().tolist()
        return entries

    results = run(hub, {at: (0, partial(draw, at)) for at in range(2)})
    assert results == {0: [0.0, 0.0], 1: [1.0, 1.0]}


def test_a_result_that_can_not_be_split_even_alone_fails_its_item() -> None:
    """A batch padded to a compiled size is an example."""

    class Unsplittable(Batching):
        def compute(self, calls: Sequence[Call]) -> Sequence[Any]:
            raise UnsplittableError("a filled batch")

    hub = Hub(Unsplittable())
    interception = Interception(hub)
    pipeline = Bare({"unet": Weighted()})
    results = run(hub, {0: (0, lambda: interception.own(pipeline).unet(torch.ones(1, 1)))})
    assert isinstance(results[0], UnsplittableError)


def test_a_pipeline_that_exits_ends_alone(sd: Tiny) -> None:
    hub = Hub()
    own = Interception(hub).own

    def leave() -> None:
        raise SystemExit(3)

    hub.add(0, leave)
    hub.add(1, lambda: own(sd.pipeline)(**sd.arguments(1, 2))[0])
    ended = run(hub, {2: (1, lambda: 5)})
    assert isinstance(ended[0], Exception)
    assert isinstance(ended[1], torch.Tensor)
    assert ended[2] == 5


def test_a_canceled_pipeline_cleans_up(sd: Tiny) -> None:
    hub = Hub()
    own = Interception(hub).own
    closed: list[int] = []

    def draw() -> Any:
        try:
            return own(sd.pipeline)(**sd.arguments(0, 5))[0]
        finally:
            closed.append(1)

    hub.add(0, draw)
    hub.step()
    hub.drop(0)
    assert closed == [1]
    hub.add(1, draw)
    hub.drop(1)
    assert closed == [1], "it never began"
    assert hub.step() == {}


def test_calls_of_different_constants_are_not_joined() -> None:
    """If a tensor is not a row, its contents are part of the key."""
    seen: list[int] = []

    class Adding(Weighted):
        def forward(self, sample: torch.Tensor, grid: torch.Tensor, factor: float = 1) -> Any:
            seen.append(len(sample))
            return sample * factor + grid.sum()

    hub = Hub()
    interception = Interception(hub)
    pipeline = Bare({"unet": Adding()})
    grids = [torch.ones(3), torch.ones(3), torch.zeros(3)]

    def draw(at: int) -> Callable[[], Any]:
        mine = interception.own(pipeline)
        return lambda: mine.unet(torch.full((1, 2), float(at)), grid=grids[at])

    results = run(hub, {at: (0, draw(at)) for at in range(3)})
    assert [float(results[at][0, 0]) for at in range(3)] == [3.0, 4.0, 2.0]
    assert sorted(seen) == [1, 2]


def test_a_constant_that_is_as_long_as_there_are_rows_is_known_from_other_calls() -> None:
    class Scaling(Weighted):
        def forward(self, sample: torch.Tensor, factors: torch.Tensor) -> Any:
            return sample * factors.sum()

    hub = Hub()
    interception = Interception(hub)
    pipeline = Bare({"unet": Scaling()})

    def draw(rows: int, factor: float) -> Any:
        mine = interception.own(pipeline)
        return mine.unet(torch.ones(rows, 1), torch.full((2,), factor)).sum()

    results = run(
        hub,
        {
            0: (0, partial(draw, 1, 1.0)),
            1: (1, partial(draw, 2, 1.0)),
            2: (1, partial(draw, 2, 3.0)),
        },
    )
    assert [float(results[at]) for at in range(3)] == [2.0, 4.0, 12.0]


def test_a_call_of_the_hub_itself_is_computed_at_once(sd: Tiny) -> None:
    """This is how previews call the VAE."""
    own = Interception(Hub()).own(sd.pipeline)
    latents = torch.randn(1, 4, SIDE, SIDE)
    assert torch.equal(own.vae.decode(latents)[0], sd.pipeline.vae.decode(latents)[0])
    assert isinstance(own.vae, diffusers.AutoencoderKL)
