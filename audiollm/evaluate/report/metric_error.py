"""The error of a metric; by itself, for those who count words and load no model."""


class MetricError(ValueError):
    """A metric that has no value for this clip; `reason` is what a table shows."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
