from penstock_planning.task_samples import SAMPLES
from shared.models.tasks import TASKS


def test_each_task_has_samples() -> None:
    assert list(SAMPLES) == list(TASKS)
