"""Films that hold all that a film can: two sounds, subtitles, chapters, tags and an attached file."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

TAGS = {
    "title": "My film",
    "artist": "Ann",
    "comment": "No comment",
    "location": "+48.1351+011.5820/",
    "date": "2024",
    "genre": "Documentary",
    "copyright": "CC BY",
    "creation_time": "2024-05-01T10:00:00.000000Z",
}
_TEXTS = b"1\n00:00:00,200 --> 00:00:01,000\nHello there\n\n2\n00:00:01,500 --> 00:00:02,500\nA dog barks\n"
_STYLE = b"[Script Info]\nScriptType: v4.00+\n\n[V4+ Styles]\nFormat: Name, Fontname\nStyle: Default,Arial\n"


def film_of_everything(path: Path) -> None:
    """Three seconds of pictures with all of it, in a .mkv, .mp4 or .mov."""
    container = {".mkv": "matroska"}.get(path.suffix, path.suffix[1:])
    is_matroska = container == "matroska"
    with (
        av.open(str(path), "w", format=container) as film,
        av.open(io.BytesIO(_TEXTS), "r", format="srt") as written,
    ):
        film.metadata.update(TAGS)
        film.set_chapters([_chapter(1, 0, "One"), _chapter(2, 1500, "Two")])
        pictures = film.add_stream("libx264", rate=10, options={"bf": "2"})
        pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
        sounds = []
        for language, title in (("eng", "Main"), ("deu", "Kommentar")):
            codec = "flac" if is_matroska and language == "deu" else "aac"
            sound = film.add_stream(codec, rate=16_000)
            sound.layout = "mono"
            code = {"deu": "ger"}.get(language, language) if container == "mov" else language
            sound.metadata.update(language=code, title=title)
            sounds.append(sound)
        if is_matroska:
            texts: Any = film.add_stream_from_template(written.streams[0])
            film.add_attachment("font.ttf", "application/x-truetype-font", b"FONT" * 10)
        else:
            texts = film.add_stream("mov_text")
            texts.codec_context.subtitle_header = _STYLE
        texts.metadata["language"] = "fra"
        for number in range(30):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 8 * number, np.uint8), format="rgb24")
            film.mux(pictures.encode(frame))
        film.mux(pictures.encode(None))
        for number, sound in enumerate(sounds):
            _encode_tone(film, sound, 220.0 * (number + 1))
        for packet in written.demux():
            if packet.size:
                film.mux(_as_text(packet, texts, not is_matroska))


def packets_of(path: Path, kind: str, number: int) -> list[bytes]:
    """The packets of a stream, but for empty ones."""
    with av.open(str(path)) as film:
        stream = [stream for stream in film.streams if stream.type == kind][number]
        return [bytes(packet) for packet in film.demux(stream) if packet.size]


def _chapter(number: int, start_ms: int, title: str) -> Any:
    return {
        "id": number, "start": start_ms, "end": start_ms + 1500, "time_base": Fraction(1, 1000),
        "metadata": {"title": title},
    }  # fmt: skip


def _encode_tone(film: Any, stream: Any, hz: float) -> None:
    samples_CN = 0.3 * np.sin(2 * np.pi * hz * np.arange(48_000) / 16_000, dtype=np.float32)[None]
    frame = av.AudioFrame.from_ndarray(samples_CN.astype(np.float32), format="fltp", layout="mono")
    frame.sample_rate, frame.pts, frame.time_base = 16_000, 0, Fraction(1, 16_000)
    resampler = av.AudioResampler(stream.format, stream.layout, 16_000, stream.frame_size or None)
    for piece in [*resampler.resample(frame), *resampler.resample(None)]:
        film.mux(stream.encode(piece))
    film.mux(stream.encode(None))


def _as_text(packet: Any, stream: Any, has_length: bool) -> Any:
    content = bytes(packet)
    copy = av.Packet(len(content).to_bytes(2, "big") + content if has_length else content)
    copy.pts, copy.dts, copy.duration, copy.time_base = (
        packet.pts,
        packet.dts,
        packet.duration,
        packet.time_base,
    )
    copy.stream = stream
    return copy
