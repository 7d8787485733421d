"""The report of an AudioCoT run: `report.html`, one page that needs nothing beside itself."""

from pipelines.audiocot.report.page import write_audiocot_report

__all__ = ["write_audiocot_report"]
