"""What a film holds beside its pictures and the sound that is replaced: other sounds, subtitles, chapters, tags, files.

All of it is copied where the container takes it, texts of subtitles in the container's own form. What remains is
named. Runs in the process that a crash may cost, without torch.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import av

from audiollm.video.decoders import shown_stream

_TECHNICAL = re.compile(
    r"major_brand|minor_version|compatible_brands|encoder|handler_name|vendor_id|duration|bps|number_of_.*"
    r"|_statistics_.*|source_id|filename|mimetype",
    re.IGNORECASE,
)
"""Tags that tell of the file and not of the film."""
_LANGUAGE = re.compile(r"-[a-z]{3}$")
"""MP4's tags in a language: "location-eng" stands beside "location"."""
_TITLES = {"name": "title"}
"""MP4 calls the title of a stream its name."""
_QUICKTIME = {
    "bod": "tib", "cym": "wel", "cze": "ces", "deu": "ger", "ell": "gre", "eus": "baq", "fre": "fra", "hye": "arm",
    "isl": "ice", "kat": "geo", "mkd": "mac", "msa": "may", "mya": "bur", "nld": "dut", "rum": "ron", "slo": "slk",
    "sqi": "alb", "zho": "chi",
}  # fmt: skip
"""Codes of languages (ISO 639-2 has two for some) in place of which QuickTime has the other one."""
_TEXT_CODECS = {"matroska": "srt", "mp4": "mov_text", "mov": "mov_text"}
_ASS_HEADER = b"""[Script Info]
ScriptType: v4.00+

[V4+ Styles]
Format: Name, Fontname, Fontsize, PrimaryColour, SecondaryColour, OutlineColour, BackColour, Bold, Italic, Underline, \
StrikeOut, ScaleX, ScaleY, Spacing, Angle, BorderStyle, Outline, Shadow, Alignment, MarginL, MarginR, MarginV, Encoding
Style: Default,Arial,16,&Hffffff,&Hffffff,&H0,&H0,0,0,0,0,100,100,0,0,1,1,0,2,10,10,10,0

[Events]
Format: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text
"""
"""A style for encoders of subtitles, which do not open without one."""


@dataclass
class Companions:
    """Streams of a new film: the pictures and what goes with them, by the index of the old film's stream."""

    streams: dict[int, Any] = field(default_factory=dict)
    convert: dict[int, Callable[[bytes], bytes]] = field(default_factory=dict)
    """Conversions of packets of subtitles."""
    lost: list[str] = field(default_factory=list)
    """What cannot be taken over, in words."""

    def copied(self, old: Any) -> set[int]:
        """The old film's streams that have one in the new film: the first sound has another in its place."""
        return {*self.streams, *(stream.index for stream in old.streams.audio[:1])}


def add_companions(old: Any, new: Any, add_sound: Callable[[Any | None], None]) -> Companions:
    """Add the streams, chapters and tags of one film to another one, in their order.

    Args:
        add_sound: adds the new sound in the place of the first old one, which it is called with; None: there is none.
    """
    companions, container = Companions(), new.format.name
    pictures = shown_stream(old, "")
    first_sound = next(iter(old.streams.audio), None)
    for stream in old.streams:
        if stream is first_sound:
            add_sound(stream)
            continue
        if stream is pictures:
            companions.streams[stream.index] = new.add_stream_from_template(stream)
        else:
            _add_companion(stream, new, container, companions, bool(old.chapters()))
        if stream.index in companions.streams:
            copy_facts(stream, companions.streams[stream.index], container)
        if stream is pictures and first_sound is None:
            add_sound(None)
    for key, text in old.metadata.items():
        is_repeated = _LANGUAGE.search(key) and _LANGUAGE.sub("", key) in old.metadata
        if not (_TECHNICAL.fullmatch(key) or is_repeated):
            new.metadata[key] = text
    origin = (old.start_time or 0) / av.time_base
    new.set_chapters(
        [
            {
                **chapter,
                **{key: chapter[key] - round(origin / chapter["time_base"]) for key in ("start", "end")},
            }
            for chapter in old.chapters()
        ]
    )
    return companions


def copy_facts(old: Any, new: Any, container: str) -> None:
    """Copy title, language and disposition of a stream."""
    facts = {
        _TITLES.get(key, key): text for key, text in old.metadata.items() if not _TECHNICAL.fullmatch(key)
    }
    if container == "mov" and "language" in facts:
        facts["language"] = _QUICKTIME.get(facts["language"], facts["language"])
    new.metadata.update(facts)
    new.disposition = old.disposition


def lost_facts(old: Any, new: Any, companions: Companions) -> list[str]:
    """Tags, languages and chapters of one film that another one does not hold, in words."""
    lost = [
        f"the tag {key}" for key in sorted(_film_tags(old.metadata).keys() - _film_tags(new.metadata).keys())
    ]
    if len(old.chapters()) != len(new.chapters()):
        lost.append(f"{len(old.chapters())} chapters")
    for kind in ("video", "audio", "subtitle"):
        copied = [s for s in old.streams if s.type == kind and s.index in companions.copied(old)]
        streams = zip(copied, [s for s in new.streams if s.type == kind], strict=False)
        for number, (before, after) in enumerate(streams):
            missing = (
                _film_tags(before.metadata).keys() - _film_tags(after.metadata).keys() - {"creation_time"}
            )
            lost += [f"the {key} of {kind} {number + 1}" for key in sorted(missing)]
    return lost


def packets(old: Any, companions: Companions) -> Iterator[Any]:
    """The old film's packets of those streams, with the new streams as theirs, counted from 0 s."""
    indices = sorted(companions.streams)
    for packet in old.demux([old.streams[index] for index in indices]):
        index = packet.stream.index
        if not packet.size:
            continue
        origin = round((old.start_time or 0) / av.time_base / packet.time_base)
        if packet.dts is None:  # a cover
            packet.dts = packet.pts = origin
        if index in companions.convert:
            packet = _convert_subtitle(packet, companions.convert[index])
            if packet is None:
                continue
        packet.stream = companions.streams[index]
        packet.dts -= origin
        packet.pts = None if packet.pts is None else packet.pts - origin
        yield packet


# Private


def _convert_subtitle(packet: Any, convert: Callable[[bytes], bytes]) -> Any | None:
    """A packet of subtitles in another form; None: it holds no text."""
    content = convert(bytes(packet))
    if not content.strip(b"\0"):
        return None
    copy = av.Packet(content)
    copy.pts, copy.dts, copy.duration, copy.time_base = (
        packet.pts,
        packet.dts,
        packet.duration,
        packet.time_base,
    )
    return copy


def _add_companion(stream: Any, new: Any, container: str, companions: Companions, has_chapters: bool) -> None:
    """Add a stream as it is, or its texts; else it is named."""
    codec = None if stream.codec_context is None else stream.codec_context.name
    if _can_hold_stream(stream, container):
        companions.streams[stream.index] = new.add_stream_from_template(stream)
    elif codec is not None and codec in _TEXTS and container in _TEXT_CODECS:
        texts = new.add_stream(_TEXT_CODECS[container])
        texts.codec_context.subtitle_header = _ASS_HEADER
        companions.streams[stream.index] = texts
        read, write = _TEXTS[codec], _prefix_length if container != "matroska" else str.encode
        companions.convert[stream.index] = lambda content: write(read(content))
        if codec == "ass":
            companions.lost.append(f"the styles of {_describe_stream(stream, codec)}")
    elif stream.type == "data" and has_chapters and codec is None:
        return  # the titles of chapters in MP4, which are written with the chapters
    else:
        companions.lost.append(_describe_stream(stream, codec))


def _can_hold_stream(stream: Any, container: str) -> bool:
    """Whether a container takes a stream as it is."""
    try:
        with av.open(io.BytesIO(), "w", format=container) as trial:
            trial.add_stream_from_template(stream)
            trial.start_encoding()
    except (av.error.FFmpegError, ValueError):
        return False
    return True


def _describe_stream(stream: Any, codec: str | None) -> str:
    facts = [
        fact for fact in (codec, stream.metadata.get("language"), stream.metadata.get("filename")) if fact
    ]
    names = {
        "audio": "sound",
        "subtitle": "subtitles",
        "attachment": "the attached file",
        "video": "pictures",
    }
    return f"{names.get(stream.type, stream.type)} ({', '.join(facts) or f'stream {stream.index}'})"


def _film_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags that tell of the film, by their names in small letters and without the language of an MP4's."""
    facts = {
        _LANGUAGE.sub("", key.lower()): text for key, text in tags.items() if not _TECHNICAL.fullmatch(key)
    }
    facts = {_TITLES.get(key, key): text for key, text in facts.items()}
    return {key: text for key, text in facts.items() if (key, text) != ("language", "und")}


def _strip_markup(content: bytes) -> str:
    return re.sub(r"</?[a-z][^>]*>|\{\\[^}]*\}", "", content.decode("utf-8", "replace"))


def _from_mp4(content: bytes) -> str:
    return content[2 : 2 + int.from_bytes(content[:2], "big")].decode("utf-8", "replace")


def _from_ass(content: bytes) -> str:
    text = content.decode("utf-8", "replace").split(",", 8)[-1]
    return re.sub(r"\{[^}]*\}", "", text).replace("\\N", "\n").replace("\\n", "\n").replace("\\h", " ")


def _prefix_length(text: str) -> bytes:
    content = text.encode()[:0xFFFF]
    return struct.pack(">H", len(content)) + content


_TEXTS: Mapping[str, Callable[[bytes], str]] = {
    "srt": _strip_markup,
    "subrip": _strip_markup,
    "text": _strip_markup,
    "webvtt": _strip_markup,
    "mov_text": _from_mp4,
    "ass": _from_ass,
}
"""Codecs of subtitles, and the text of a packet."""
