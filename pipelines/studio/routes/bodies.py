"""What the page sends: the bodies of its requests."""

# no `from __future__ import annotations`: FastAPI reads the types of the functions

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from audiollm.data.records.sample import Region
from audiollm.data.records.thoughts import ThoughtRecord
from pipelines.instructions import EditKind
from pipelines.studio.editor import MakeRequest

PageId = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{8,64}$")]
"""The number that a window of a browser draws for itself, and keeps when it is loaded again: its requests are held
while it is closed."""


class StudioBody(BaseModel):
    """A body without unknown fields."""

    model_config = ConfigDict(extra="forbid")


class ThoughtBody(StudioBody):
    record: ThoughtRecord
    known: ThoughtRecord | None = None
    """The one that it replaces, as the page knows it: another tab may have changed it since."""


class MakeBody(StudioBody):
    page: PageId
    caption: str = Field(default="", max_length=1000)
    region: list[Region] = Field(default_factory=list, max_length=5000)
    start_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    end_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, le=2**31)
    steps: int = 24
    """Checked where the sampler's settings are made, in a sentence that says what to do."""

    def to_request(self) -> MakeRequest:
        """The request without the window that made it."""
        return MakeRequest(self.caption, tuple(self.region), self.start_s, self.end_s, self.seed, self.steps)


class EditBody(MakeBody):
    version: int
    kind: EditKind


class PlannedEdit(StudioBody):
    """An edit as words were read."""

    kind: EditKind
    caption: str = Field(default="", max_length=1000)
    start_s: float = Field(ge=0, allow_inf_nan=False)
    end_s: float = Field(gt=0, allow_inf_nan=False)


class EditsBody(StudioBody):
    """Edits in turn, each of the result of the one before it."""

    page: PageId
    version: int
    edits: list[PlannedEdit] = Field(min_length=1, max_length=32)
    region: list[Region] = Field(default_factory=list, max_length=5000)
    """The object in the pictures, for the edits without a caption."""
    seed: int = Field(default=0, ge=0, le=2**31)
    steps: int = 24

    def requests(self) -> list[tuple[EditKind, MakeRequest]]:
        """The operations and what is asked of each."""
        return [
            (edit.kind, MakeRequest(edit.caption, () if edit.caption else tuple(self.region), edit.start_s, edit.end_s,
                                    self.seed, self.steps))
            for edit in self.edits
        ]  # fmt: skip


class PlanBody(StudioBody):
    page: PageId
    version: int
    instruction: str = Field(max_length=1000)
    start_s: float | None = None
    end_s: float | None = None
    has_object: bool = False


class ClickBody(StudioBody):
    at_s: float = Field(ge=0, allow_inf_nan=False)
    x: float = Field(ge=0, allow_inf_nan=False)
    y: float = Field(ge=0, allow_inf_nan=False)
    width: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    height: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class RegionBody(StudioBody):
    clicks: list[ClickBody] = Field(max_length=50)


class RecoverBody(StudioBody):
    key: str = Field(max_length=100)
    projects: list[str] = Field(default_factory=list, max_length=100_000)
    """Those that are to be this browser's; none: they are listed."""


class ThinkBody(StudioBody):
    page: PageId
    region: list[Region] = Field(default_factory=list, max_length=5000)
