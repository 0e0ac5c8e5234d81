"""The compiler itself, on networks of a few layers: real Inductor, real cache folder."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from workers.models.image.compilation import compile_parts, keep_compiled_in, only_what_is_compiled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    folder = tmp_path / "compiled"
    keep_compiled_in(folder)
    return folder


def networks(seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    unet = diffusers.UNet2DConditionModel(
        sample_size=4,
        block_out_channels=(4,),
        layers_per_block=1,
        norm_num_groups=2,
        cross_attention_dim=4,
        down_block_types=("DownBlock2D",),
        mid_block_type=None,
        up_block_types=("UpBlock2D",),
    ).eval()
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4,),
        norm_num_groups=2,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        mid_block_add_attention=False,
    ).eval()
    return unet, vae


def run(unet: Any, vae: Any, count: int, timestep: float) -> list[torch.Tensor]:
    """Calls both networks the way the hub does: by name, with a timestep for each row."""
    random = torch.Generator().manual_seed(count)
    latents = torch.randn(count, 4, 4, 4, generator=random)
    with torch.inference_mode():
        noise = unet(
            sample=latents,
            timestep=torch.full((count,), timestep),
            encoder_hidden_states=torch.ones(count, 3, 4),
            return_dict=False,
        )[0]
        return [noise, vae.decode(latents, return_dict=False)[0]]


def test_shapes_of_warm_up_are_compiled_and_no_others() -> None:
    """Dynamo and its guards are real, but the C++ compiler, which takes a minute, is left out."""
    torch._dynamo.reset()
    plain, (unet, vae) = networks(), networks()
    compile_parts(unet, vae, shapes=1, backend="aot_eager")
    run(unet, vae, 2, 7.0)
    calls: list[str] = []
    for name, part in (("unet", unet.conv_in), ("vae", vae.decoder.conv_in)):
        # A compiled graph has no modules for a hook to see, so only eager calls get here.
        part.register_forward_hook(lambda module, args, output, name=name: calls.append(name))
    with only_what_is_compiled():
        for count, timestep, eager in (
            (2, 7.0, False),
            (2, 7.5, False),
            (3, 7.0, True),
        ):
            calls.clear()
            kept = run(unet, vae, count, timestep)
            # The VAE processes images one at a time, so it sees no new shapes.
            assert calls == (["unet"] if eager else []), (count, timestep)
            run(unet, vae, count, 400.0)  # the returned result is a copy
            for ours, other in zip(kept, run(*plain, count, timestep), strict=True):
                torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


def test_the_next_start_finds_what_was_compiled(cache: Path) -> None:
    """A compiler with a cleared cache acts like one in a new process.

    A matrix product needs no C++.
    """
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        torch.compile(torch.mm)(torch.ones(3, 4), torch.ones(4, 5))
        found.append(counters["inductor"]["fxgraph_cache_hit"])
    assert found == [0, 1]
    assert any(path.is_file() for path in cache.rglob("*"))


def test_an_operators_folder_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "given"))
    keep_compiled_in(tmp_path / "other")
    assert not (tmp_path / "other").exists()
