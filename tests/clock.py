"""A clock that advances only when the test moves it."""


class Clock:
    """Returns `now_s`, in seconds, when called."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
