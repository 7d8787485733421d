"""Clips for the page: sound as a data URI that every browser plays, and its spectrogram."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from audiollm.pages.formats import without_home
from audiollm.pages.spectrograms import DYNAMIC_RANGE_DB, Spectrogram, draw_spectrogram, mel_decibels

if TYPE_CHECKING:
    from audiollm.audio import Waveform

PAGE_RATE = 24_000
_MP3_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000)
_MAX_CLIP_S = 30.0


@dataclass(frozen=True)
class PageClip:
    """A sound on the page. Without a player `audio` is empty; `problem` says why there is nothing at all."""

    duration_s: float = 0.0
    audio: str = ""
    spectrogram: Spectrogram | None = None
    problem: str = ""
    cut: bool = False
    """Whether the sound is cut to its first half minute."""
    span: tuple[float, float] | None = None
    """Beginning and length of a span that is drawn in, in percent of the clip."""


@dataclass
class Gallery:
    """Makes clips, up to the page's limit of sound.

    Args:
        players: put the sound into the page.
        most_bytes: of sound (as it stands in the page); what comes later is silent.
        lossless: FLAC at the sound's own rate in place of MP3: nothing that is heard is the page's.
    """

    players: bool = True
    most_bytes: int = 8_000_000
    lossless: bool = False
    num_clips: int = field(default=0, init=False)
    num_silent: int = field(default=0, init=False)
    _bytes: int = field(default=0, init=False)

    def clip(self, path: Path, start_s: float = 0.0, end_s: float | None = None) -> PageClip:
        """The sound of a file or a span of it, mono, at most half a minute; never raises for a bad file."""
        from audiollm.audio import AudioError, load

        last_s = start_s + _MAX_CLIP_S
        cut = end_s is not None and end_s > last_s
        try:
            waveform = load(path, start_s, last_s if end_s is None or cut else end_s, mono=True)
            waveform = self._at_page_rate(waveform)
        except AudioError as error:
            return PageClip(problem=without_home(f"{Path(error.path).name}: {error.reason}"))
        return self._clip(waveform, cut or (end_s is None and waveform.duration_s > _MAX_CLIP_S - 0.01))

    def clip_of(self, waveform: Waveform, loudest_db: float | None = None) -> PageClip:
        """Sound that is in no file, mono, at most half a minute.

        Args:
            loudest_db: see `draw_spectrogram`.
        """
        cut = waveform.duration_s > _MAX_CLIP_S
        samples_CN = waveform.samples_CN[:, : round(_MAX_CLIP_S * waveform.sample_rate)]
        mono = type(waveform)(samples_CN, waveform.sample_rate).mono()
        return self._clip(self._at_page_rate(mono), cut, loudest_db)

    def about_spectrograms(self, of: str = "", silent: str = "are without sound") -> str:
        """A sentence on the spectrograms, and one on the clips that are silent, where there are some.

        Args:
            of: whose loudest point it is: ` of each sound`.
        """
        left_out = f" {self.num_silent} {silent}, to keep the page small." if self.num_silent else ""
        return f"Spectrograms: mel, {DYNAMIC_RANGE_DB:g} dB below the loudest point{of}.{left_out}"

    def _at_page_rate(self, waveform: Waveform) -> Waveform:
        fits = self.lossless or waveform.sample_rate in _MP3_RATES
        return waveform if fits else waveform.resample(PAGE_RATE)

    def _clip(self, waveform: Waveform, cut: bool, loudest_db: float | None = None) -> PageClip:
        samples_N, rate = waveform.samples_CN[0].numpy(), waveform.sample_rate
        decibels_MT = mel_decibels(samples_N, rate)
        picture = draw_spectrogram(decibels_MT, rate, waveform.duration_s, loudest_db)
        self.num_clips += 1
        return PageClip(waveform.duration_s, self._audio(waveform), picture, cut=cut)

    def _audio(self, waveform: Waveform) -> str:
        from audiollm.audio import AudioError, encode_bytes

        if not self.players:
            return ""
        kind, container = ("flac", "flac") if self.lossless else ("mpeg", "mp3")
        try:
            content = encode_bytes(waveform.samples_CN, waveform.sample_rate, container)
        except AudioError:  # a libsndfile of before 1.1 writes no MP3
            kind, content = "wav", encode_bytes(waveform.samples_CN, waveform.sample_rate, "wav")
        uri = f"data:audio/{kind};base64,{base64.b64encode(content).decode()}"
        if self._bytes + len(uri) > self.most_bytes:
            self.num_silent += 1
            return ""
        self._bytes += len(uri)
        return uri


def shares(total: int, count: int) -> list[int]:
    """Clips that each of `count` stages shows of `total`: equal shares, the remainder to the last stages."""
    share, over = divmod(total, count) if count else (0, 0)
    return [share + (place >= count - over) for place in range(count)]
