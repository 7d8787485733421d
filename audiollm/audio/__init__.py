"""Sound: found, probed, loaded, saved, resampled and measured.

The public names are imported when they are first used, so that what needs no tensors (`discovery`) loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from audiollm.audio.decoding import AudioInfo as AudioInfo
    from audiollm.audio.discovery import AUDIO_EXTENSIONS as AUDIO_EXTENSIONS
    from audiollm.audio.discovery import HEADERLESS_EXTENSIONS as HEADERLESS_EXTENSIONS
    from audiollm.audio.discovery import AudioError as AudioError
    from audiollm.audio.discovery import find_audio as find_audio
    from audiollm.audio.discovery import looks_like_audio as looks_like_audio
    from audiollm.audio.files import SOUND_ENDINGS as SOUND_ENDINGS
    from audiollm.audio.files import encode_bytes as encode_bytes
    from audiollm.audio.files import load as load
    from audiollm.audio.files import load_bytes as load_bytes
    from audiollm.audio.files import probe as probe
    from audiollm.audio.files import save as save
    from audiollm.audio.mixing import to_mono as to_mono
    from audiollm.audio.samples import LevelMeter as LevelMeter
    from audiollm.audio.samples import Waveform as Waveform
    from audiollm.audio.samples import integrated_loudness_lufs as integrated_loudness_lufs
    from audiollm.audio.samples import normalize_rms as normalize_rms
    from audiollm.audio.samples import peak_dbfs as peak_dbfs
    from audiollm.audio.samples import resample as resample
    from audiollm.audio.samples import rms_dbfs as rms_dbfs
    from audiollm.audio.samples import set_channels as set_channels

_NAMES = {
    "decoding": ("AudioInfo",),
    "discovery": (
        "AUDIO_EXTENSIONS",
        "HEADERLESS_EXTENSIONS",
        "AudioError",
        "find_audio",
        "looks_like_audio",
    ),
    "files": ("SOUND_ENDINGS", "encode_bytes", "load", "load_bytes", "probe", "save"),
    "samples": (
        "LevelMeter",
        "Waveform",
        "integrated_loudness_lufs",
        "normalize_rms",
        "peak_dbfs",
        "resample",
        "rms_dbfs",
        "set_channels",
    ),
    "mixing": ("to_mono",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """The public name, from the module that defines it."""
    if name in _MODULES:
        return getattr(import_module(f"audiollm.audio.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'audiollm.audio' has no attribute {name!r}")
