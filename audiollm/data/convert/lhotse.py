"""Cuts of lhotse, as it writes them to JSON lines: one sample for each supervision, its span and its channel."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from audiollm.audio import AudioError, load, probe, save
from audiollm.data.chat.tasks import FieldValue
from audiollm.data.convert.request import ConversionRequest, SourceRows, bad_row
from audiollm.data.convert.tables import first_line
from audiollm.data.records.sample import AudioPart, Sample
from audiollm.data.tables.columns import is_missing
from audiollm.errors import BadSample, ConfigError
from audiollm.files.atomic import safe_name

_EDGE_S = 1e-3
"""A span that ends this near to its recording's end is said to end with it."""


def lhotse(request: ConversionRequest) -> SourceRows:
    """The supervisions of lhotse's cuts (JSONL, also gzipped), a sample each: the words of a span, from its channel.

    A channel of a recording with several is written as a file beside the manifest.
    """
    opened = gzip.open if request.source.suffix == ".gz" else open
    try:
        with opened(request.source, "rb") as file:
            lines = [line for line in file if line.strip()]
    except (OSError, EOFError) as error:
        raise ConfigError(f"cannot be read ({error})", str(request.source), "give cuts.jsonl(.gz)") from error
    return SourceRows(len(lines), _cuts(request, lines))


# Private


def _cuts(request: ConversionRequest, lines: Sequence[bytes]) -> Iterator[Sample | BadSample]:
    files = _ChannelFiles(request)
    for number, line in enumerate(lines, start=1):
        place, cut_id = f"{request.source}:{number}", ""
        try:
            cut = json.loads(line.decode("utf-8"))
            cut_id = str(cut["id"])
            yield from _convert_cut(request, files, place, cut)
        except UnicodeDecodeError:
            yield BadSample(place, cut_id, "is not UTF-8", "text encoding")
        except json.JSONDecodeError as error:
            yield BadSample(place, cut_id, f"wrong JSON: {error}", "wrong JSON")
        except KeyError as error:
            yield bad_row(place, cut_id, f"no cut of lhotse: it has no {error}")
        except (TypeError, AttributeError) as error:
            yield bad_row(place, cut_id, f"no cut of lhotse ({error})")
        except AudioError as error:
            yield bad_row(place, cut_id, error.reason)
        except ValueError as error:
            yield bad_row(place, cut_id, first_line(error))


def _convert_cut(
    request: ConversionRequest, files: _ChannelFiles, place: str, cut: Mapping[str, Any]
) -> Iterator[Sample | BadSample]:
    kind = cut.get("type", "MonoCut")
    if kind not in ("MonoCut", "MultiCut"):
        raise ValueError(f"a {kind}: save its audio first (cut.save_audio)")
    supervisions = cut.get("supervisions") or []
    if not supervisions:
        raise ValueError("has no supervision, so no text")
    for supervision in supervisions:
        id = str(cut["id"] if len(supervisions) == 1 else f"{cut['id']}/{supervision['id']}")
        try:
            fields = _read_supervision_fields(supervision)
            speaker = fields.get("speaker")
            audio = _recording(request, files, cut, supervision)
            fields["audio"] = audio.model_copy(update={"speaker": speaker})
        except ValueError as error:  # the other supervisions go on
            yield bad_row(place, id, first_line(error))
            continue
        yield request.sample(place, id, fields)


def _read_supervision_fields(supervision: Mapping[str, Any]) -> dict[str, FieldValue]:
    named = {key: supervision.get(key) for key in ("text", "speaker", "language", "gender")}
    values = {**(supervision.get("custom") or {}), **named}
    return {
        key: str(value) for key, value in values.items() if value and not is_missing(value, key != "text")
    }


def _recording(
    request: ConversionRequest,
    files: _ChannelFiles,
    cut: Mapping[str, Any],
    supervision: Mapping[str, Any],
) -> AudioPart:
    """The supervision's span of the recording, which is counted from the cut's beginning, in its channel."""
    recording, channel = cut["recording"], _channel(cut, supervision)
    source = _source(recording, channel)
    length_s = float(recording["duration"])
    start_s = max(0.0, float(cut["start"]) + float(supervision["start"]))
    end_s = float(cut["start"]) + float(supervision["start"]) + float(supervision["duration"])
    if start_s >= length_s or end_s <= 0:
        raise ValueError(f"the supervision begins at {start_s:g} s of a recording of {length_s:g} s")
    path = request.audio_part(str(source["source"])).path
    channel_path = files.file_of(path, channel, [int(number) for number in source.get("channels") or [0]])
    return AudioPart(path=channel_path, start_s=start_s, end_s=None if end_s > length_s - _EDGE_S else end_s)


def _channel(cut: Mapping[str, Any], supervision: Mapping[str, Any]) -> int:
    """
    Raises:
        ValueError: the supervision is about several channels at once.
    """
    default = cut.get("channel", 0)
    named = supervision.get("channel", default) if cut.get("type") == "MultiCut" else default
    numbers = named if isinstance(named, list) else [named]
    if len(numbers) != 1:
        raise ValueError(f"is about the channels {numbers} at once: save one of them first (cut.save_audio)")
    return int(numbers[0])


def _source(recording: Mapping[str, Any], channel: int) -> Mapping[str, Any]:
    """The file that holds a channel of a recording.

    Raises:
        ValueError: no file does.
    """
    if recording.get("transforms"):
        raise ValueError("its recording is transformed: save its audio first (cut.save_audio)")
    sources: list[Mapping[str, Any]] = recording["sources"]
    holding = [source for source in sources if channel in (source.get("channels") or [0])]
    if not holding:
        raise ValueError(f"its recording has no channel {channel}")
    if holding[0]["type"] != "file":
        raise ValueError(
            f"its recording comes from a {holding[0]['type']}, and not from a file: save its audio first"
        )
    return holding[0]


class _ChannelFiles:
    """Files of single channels of recordings with several, beside the manifest, each written once."""

    def __init__(self, request: ConversionRequest) -> None:
        self._request = request
        self._num_channels: dict[str, int] = {}
        self._saved_names: set[str] = set()

    def file_of(self, listed_path: str, channel: int, channels: Sequence[int]) -> str:
        """The file itself where it has one channel, or else the one that holds the channel alone.

        Args:
            listed_path: the file as the manifest names it.
            channels: the numbers that lhotse gives the file's channels, in their order.
        """
        folder = self._request.out.parent
        path = Path(listed_path) if Path(listed_path).is_absolute() else folder / listed_path
        if listed_path not in self._num_channels:
            self._num_channels[listed_path] = probe(path).num_channels
        num_channels = self._num_channels[listed_path]
        if num_channels == 1:
            return listed_path
        # a file of two channels may be listed by the one that its cuts are about
        place = channels.index(channel) if len(channels) == num_channels else channel
        if place >= num_channels:
            raise ValueError(f"{path.name} has {num_channels} channels, and no channel {channel}")
        stem = safe_name(Path(listed_path).with_suffix("").as_posix())
        name = f"{self._request.out.stem}_audio/{stem}.channel{channel}.flac"
        if name not in self._saved_names:
            sound = load(path)
            save(folder / name, sound.samples_CN[place : place + 1], sound.sample_rate)
            self._saved_names.add(name)
        return name
