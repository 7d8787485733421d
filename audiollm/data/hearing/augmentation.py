"""Settings of what `augment.py` does to what is heard in training; apart from it, because they need no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Augmentation(BaseModel):
    """Limits of the augmentation, drawn anew each time a clip is shown. `{}` suits speech and sounds alike."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    time_masks: int = Field(2, ge=0)
    """Stretches of time that are hidden."""
    time_mask_s: float = Field(1.0, ge=0)
    """The length of each, from 0 up to this."""
    time_mask_share: float = Field(0.2, ge=0, lt=1)
    """Largest share of the clip that a time mask covers."""
    mel_masks: int = Field(2, ge=0)
    """Bands of neighbouring mel bins that are hidden."""
    mel_mask_share: float = Field(0.2, ge=0, lt=1)
    """The width of each, from 0 up to this share of the bins."""
    gain_db: float = Field(12.0, ge=0)
    """Louder or softer by up to so much."""
    tilt_db: float = Field(10.0, ge=0)
    """The lowest bin down by up to so much and the highest up, or the reverse, and those between in proportion."""
    shift: float = Field(0.0, ge=0, le=1)
    """Later by up to this share of the clip, with its end moved to its beginning: 1 for sounds that may begin anywhere,
    0 for speech, whose words have an order."""
    frequency_warp: float = Field(0.0, ge=0, lt=1)
    """Frequencies higher or lower by up to this share, as of a shorter or longer vocal tract: other voices from few
    ones. 0.15 to 0.2 for speech; 0 for sounds that are known by their pitch."""
