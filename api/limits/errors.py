"""Refusals because of a plan, in the words and with the codes of OpenAI's API."""

from __future__ import annotations

from shared.errors import Overloaded


class RateLimited(Overloaded):
    """A limit of the plan is reached.

    Args:
        message: which limit, of what, and when to try again.
        unit: what it counts: requests, tokens, pixel_steps or items.
        retry_after_s: when there is room again.
        is_final: whether the same request can never get through.
    """

    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, unit: str = "requests", retry_after_s: float, is_final: bool = False
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.unit = unit
        self.is_final = is_final


class BudgetExceeded(RateLimited):
    """The budget of the month is spent."""

    code = "insufficient_quota"
