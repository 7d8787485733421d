"""The report of an annotation: `report.html`, one page that needs nothing beside itself."""

from pipelines.annotate.report.page import write_annotation_report

__all__ = ["write_annotation_report"]
