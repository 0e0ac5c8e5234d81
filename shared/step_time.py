"""The fixed part of a step's time, for workers and the simulation.

Pure: no clock, no I/O. A step of a model that items join between steps takes a fixed time (reading
the weights) and a time for its work (tokens, pixels). The fixed time is paid once for all items, so
where only a part of the room is taken, the rest of it could be used by others for nothing. This
part of a step is spare: the autoscaler must not take it for work (decision 73).
"""

from __future__ import annotations

from dataclasses import dataclass

LOW = 0.25
"""The share of similar steps that are shorter than what counts as usual. Slow ones had a reason,
such as other work on the same cores, that says nothing of the model."""
MIN_RATE = 0.02
"""The rate at which the usual time follows new steps, once there were many."""
MIN_STEPS = 3
"""The minimum number of steps with like work for an estimate."""
SLOWED = 2.0
"""A step that takes up to this multiple of what is usual was slowed by others on the same device,
and its spare part with it. What it takes beyond that is work that nothing reports."""
MIN_WORK_RATIO = 4
"""A line is drawn through steps if the work of one is this multiple of the other's."""


@dataclass(slots=True)
class _Usual:
    """Steps whose work is alike, within a factor of 2."""

    work: float
    seconds: float
    steps: int = 1

    def observe(self, work: float, seconds: float) -> None:
        """Moves by a quantile's step, and never beyond what was observed."""
        rate = max(MIN_RATE, 1 / (self.steps + 1))
        self.work += rate * (work - self.work)
        if seconds < self.seconds:
            self.seconds = max(seconds, self.seconds * (1 - rate * (1 - LOW)))
        else:
            self.seconds = min(seconds, self.seconds * (1 + rate * LOW))
        self.steps += 1


class StepTime:
    """The fixed time of the steps of one model, by lines through steps of different work.

    Args:
        fixed_share: of the time of a full step, the guess for the fixed time while all steps were
            alike.
        full_work: of a full step. Only that guess needs it.
    """

    def __init__(self, fixed_share: float, full_work: float) -> None:
        self._fixed_share = fixed_share
        self._full_work = full_work
        self._usual: dict[int, _Usual] = {}

    def observe(self, work: int, seconds: float) -> None:
        """Takes note of a step. `work` is at least 1."""
        like = work.bit_length()
        if (usual := self._usual.get(like)) is None:
            self._usual[like] = _Usual(work, seconds)
        else:
            usual.observe(work, seconds)

    def spare_s(self, fill: float, work: int, seconds: float) -> float:
        """Returns the seconds of a step that other items could have used at no cost.

        Never more than the part of the room that is free, so a full step has none.

        Args:
            fill: the part of the room that is taken, from 0 to 1.
            work: that the step computed.
            seconds: that the step took.
        """
        usual = self._usual.get(work.bit_length())
        usual_s = max(1e-9, seconds if usual is None else usual.seconds)
        fixed_part = min(1.0, self.fixed_s / usual_s)
        return min(seconds, SLOWED * usual_s) * fixed_part * (1 - fill)

    @property
    def fixed_s(self) -> float:
        """Seconds of a step that its work does not change. 0 before the first."""
        known = [one for one in self._usual.values() if one.steps >= MIN_STEPS]
        known = known or list(self._usual.values())
        if not known:
            return 0.0
        least = min(known, key=lambda one: one.work)
        slopes = [
            (one.seconds - least.seconds) / (one.work - least.work)
            for one in known
            if one.work >= MIN_WORK_RATIO * least.work
        ]
        # The steepest: a token of a prompt takes less than one that is written.
        fixed_s = least.seconds - max(slopes) * least.work if slopes else self._guessed_s(least)
        return min([max(0.0, fixed_s), *(one.seconds for one in known)])

    def _guessed_s(self, usual: _Usual) -> float:
        fixed = self._fixed_share
        return usual.seconds * fixed / (fixed + (1 - fixed) * usual.work / self._full_work)
