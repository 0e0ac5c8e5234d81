"""Classes that compute on a GPU, confined as on any machine. Requires a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.models.custom.classes import compute, entry_of, output_of, write_class
from tests.workers.models.custom.started import StartedClass

pytestmark = [
    pytest.mark.slow(about_s=60),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU"),
]

COMPUTES = """
import torch

def energy(x):
    return torch.nn.functional.gelu(x @ x.T).square().mean()

class Predictor(BasePredictor):
    def setup(self) -> None:
        torch.manual_seed(1)
        self.numbers = torch.randn(64, 32)
        self.on_gpu = self.numbers.to("cuda")
        self.compiled = torch.compile(energy)

    def predict(self, how: str) -> list[float]:
        function = self.compiled if how == "compiled" else energy
        with torch.inference_mode():
            return [function(self.on_gpu).item(), energy(self.numbers).item()]
"""
MEMORY = """
import torch

class Predictor(BasePredictor):
    def predict(self, gib: int) -> str:
        try:
            taken = torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            return "out of memory"
        # A copy to the host and back through pinned memory, which CUDA maps.
        part = torch.arange(1 << 20, dtype=torch.int32).pin_memory()
        taken[: 4 << 20] = part.to("cuda", non_blocking=True).view(torch.uint8)
        torch.cuda.synchronize()
        back = taken[: 4 << 20].view(torch.int32).cpu()
        return "equal" if torch.equal(back, part) else "different"
"""
WRITES = """
import torch

class Predictor(BasePredictor):
    def predict(self, folder: str) -> str:
        torch.zeros(1, device="cuda")
        try:
            open(folder + "/written-by-a-class", "w").close()
        except PermissionError:
            return "refused"
        return "written"
"""


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_it_computes_on_the_gpu_what_the_cpu_does(tmp_path: Path, how: str) -> None:
    folder = write_class(tmp_path, COMPUTES)
    with StartedClass(entry_of(folder), folder, "cuda") as model:
        on_gpu, on_cpu = output_of(compute(model, {"how": how}))
    assert on_gpu == pytest.approx(on_cpu, rel=1e-3)


@pytest.mark.parametrize(("gib", "says"), [(1, "equal"), (4096, "out of memory")])
def test_memory_of_the_gpu_and_of_the_host_work(tmp_path: Path, gib: int, says: str) -> None:
    folder = write_class(tmp_path, MEMORY)
    with StartedClass(entry_of(folder), folder, "cuda") as model:
        assert output_of(compute(model, {"gib": gib})) == says


def test_with_a_gpu_it_still_writes_nowhere_else(tmp_path: Path) -> None:
    """Uses a folder outside /tmp, because a class has its own /tmp."""
    folder, other = write_class(tmp_path, WRITES), Path(__file__).parent
    with StartedClass(entry_of(folder), folder, "cuda") as model:
        assert output_of(compute(model, {"folder": str(other)})) == "refused"
    assert not (other / "written-by-a-class").exists()
