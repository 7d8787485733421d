"""The error of a metric, in a module of its own: counting words must not load a model."""


class MetricError(ValueError):
    """A metric that has no value for this clip; `reason` is what a table shows."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
