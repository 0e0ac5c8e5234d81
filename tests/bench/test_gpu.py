import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu.images import full_width_parts
from bench.gpu.scale import TINY

# Some of diffusers' schedulers use a deprecated conversion between torch and numpy 2, and the FLOP
# counter loads deprecated modules.
pytestmark = [pytest.mark.slow(about_s=100), pytest.mark.filterwarnings("default")]


def test_the_whole_benchmark_runs_small(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--tiny"]) == 0
    reported = capsys.readouterr().out
    for count in TINY.batches:
        for task in ("text-to-image", "image-to-image"):
            for who in ("plain", "ours, eager", "ours", "ours over plain"):
                assert f"{task}, batch {count}, {who} " in reported
    for what in (
        "matrix product",
        "tiny, batches of 64 tokens, ours over bare",
        "served tiny, 1 APIs and workers, 64 a request, 1 in flight, p95",
        "served tiny, 2 APIs and workers, 1 a request, 8 in flight",
        "text-to-image, batch 2, bare",
        "images kept while sharing",
        "FLUX.1, ours over plain",
        "four images, four adapters, over none",
        "joined, fp32, control, adapter, max",
        "served images, 4 in flight, through the stack",
    ):
        assert what in reported
    apart = [line for line in reported.splitlines() if " joined, " in line and ", max " in line]
    assert len(apart) == 7
    for line in apart:
        assert float(line.split()[-2]) <= 1, "an image of a mixed batch is as alone"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 1
    reported = capsys.readouterr().out
    assert "no CUDA device" in reported
    assert reported.count("\n") == 1


def test_the_full_width_is_that_of_stable_diffusion() -> None:
    """Parameters in millions, as counted in the published checkpoints
    (runwayml/stable-diffusion-v1-5).
    """
    with torch.device("meta"):
        parts = full_width_parts(0, 1)
    millions = {
        name: sum(one.numel() for one in part.parameters()) / 1e6 for name, part in parts.items()
    }
    assert millions == pytest.approx(
        {"unet": 859.52, "vae": 83.65, "text_encoder": 123.06}, rel=1e-4
    )
