"""Findings that need the whole corpus: outliers among a file's segments, duplicates, speakers of several files.

Near duplicates are found by the fingerprint of their sound, and by their text. The same words said by many are no
duplicates: texts count only within a speaker (or a file), and only where a limit is set. What is found depends on the
rows alone, not on their order. Candidates come from frames' bits that two segments have in common, so the work grows
with the segments and not with their pairs.

Shapes: F frames of a segment, A frames of all segments, H keys, P pairs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from pipelines.steps.results import Place, Row, Spool
from pipelines.steps.rules import Drop

KEY_FRAMES_APART = 4
"""Distance of the two frames in a key, which has the bits of one and half of the other's: 24. A frame has two keys."""
KEYS_PER_SEGMENT = 64
"""Keys that stand for a segment, those of the smallest hashes (a bottom-k sketch): two versions share some."""
NEIGHBOURS_PER_KEY = 12
"""Following segments in the list of a key that a segment is compared with; others meet in the next round."""
MAX_ROUNDS = 20
GLANCE_FRAMES = 8
"""Frames on either side of a common key that are compared first; where they differ too much, the rest is skipped."""
GLANCE_BIT_ERRORS = 0.25
FULL_FRAMES = 125
"""Frames with sound (2 s) from which two segments may differ by the full `max_bit_errors`."""
MIN_COMPARED_FRAMES = 8
"""Fewest frames of segments that are compared approximately; shorter ones count as duplicates only if equal."""


class DuplicateConfig(BaseModel):
    """Criteria by which a segment counts as a duplicate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_bit_errors: float | None = Field(0.18, ge=0, lt=0.5)
    """The largest share of bits that differ between the fingerprints of the same sound, of 2 s or more; of shorter ones
    down to half of that: two takes of a short word may differ in as few as 0.11. null: sounds are not compared."""
    min_overlap: float = Field(0.8, gt=0.5, le=1)
    """Smallest overlap, as a share of the longer segment: cut edges are allowed, a small excerpt is no duplicate."""
    max_same_text: int | None = Field(None, ge=1)
    """Segments with the same text that are kept; null: all."""
    text_within: Literal["speaker", "file", "corpus"] = "speaker"
    """Scope of the comparison of texts: the segments of a speaker, of a file, or of the corpus."""


class ComparedSegment(NamedTuple):
    """Columns of a segment's row that decide on duplicates.

    Args:
        bits_F: fingerprint (step `fingerprint`); empty: not comparable by sound.
        quality: numbers of which larger is better, compared one after the other.
    """

    id: str
    bits_F: NDArray[np.uint16]
    duration_s: float
    quality: tuple[float, ...]
    speaker: str
    file: str
    text: str


def find_duplicates(
    rows: Sequence[Mapping[str, Any]], config: DuplicateConfig | None = None
) -> dict[str, str]:
    """The segments that repeat another, each with the one that stays in their place.

    Of those that are alike the one of the best quality stays (DNSMOS, then the ratio of signal to noise), then the
    longest, then the first by id.

    Args:
        rows: as in `segments.jsonl`, with `measured.fingerprint.bits`; ids are unique.

    Returns:
        id -> id; the latter is never a key.
    """
    config = config or DuplicateConfig()
    items = sorted((item_of(row) for row in rows), key=_segment_preference)
    duplicates = (
        {} if config.max_bit_errors is None else same_sound(items, config.max_bit_errors, config.min_overlap)
    )
    if config.max_same_text is not None:
        remaining = [item for item in items if item.id not in duplicates]
        duplicates |= same_text(remaining, config.max_same_text, config.text_within)
    return {id: _follow_duplicates(duplicates, id) for id in sorted(duplicates)}


def item_of(row: Mapping[str, Any]) -> ComparedSegment:
    """The columns of a row that are compared; those that it lacks say nothing."""
    measured = row.get("measured") or {}
    quality = measured.get("quality") or {}
    scores = [(quality.get("dnsmos") or {}).get("ovr"), quality.get("snr_db")]
    bits = (measured.get("fingerprint") or {}).get("bits") or ""
    return ComparedSegment(
        str(row["id"]),
        np.frombuffer(bytes.fromhex(bits), ">u2").astype(np.uint16),
        float(row["duration_s"]),
        tuple(-np.inf if value is None else float(value) for value in scores),
        str(row.get("speaker") or ""),
        str(row.get("file") or row.get("path") or ""),
        str(row.get("text") or ""),
    )


def same_sound(items: Sequence[ComparedSegment], max_bit_errors: float, min_overlap: float) -> dict[str, str]:
    """Map each item that sounds like an earlier one to the latter; items come in the order of preference."""
    duplicates, remaining = _equal_bits(items)
    if len(remaining) < 2:
        return duplicates
    table = _make_hash_table(remaining)
    for _ in range(MAX_ROUNDS):
        pairs_P2, more = _alike(remaining, table, max_bit_errors, min_overlap)
        dropped = _dropped(pairs_P2)
        duplicates |= {remaining[worse].id: remaining[better].id for worse, better in dropped.items()}
        if not (dropped and more):
            break
        stays_H = ~np.isin(table.item_H, list(dropped))
        table = _Table(table.key_H[stays_H], table.item_H[stays_H], table.place_H[stays_H])
    return duplicates


def same_text(
    items: Sequence[ComparedSegment], max_copies: int, within: Literal["speaker", "file", "corpus"]
) -> dict[str, str]:
    """Map each item whose text `max_copies` earlier items have to the first of these."""
    from audiollm.data.text.forms import recognition_form

    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for item in items:
        text = recognition_form(item.text)
        if text:
            place = {"speaker": item.speaker, "file": item.file, "corpus": ""}[within]
            groups[place, text].append(item.id)
    return {id: group[0] for group in groups.values() for id in group[max_copies:]}


def bit_errors(
    one_F: NDArray[np.uint16], other_F: NDArray[np.uint16], farthest: int = 16, min_overlap: float = 0.8
) -> float:
    """The share of bits in which two fingerprints differ where they fit best, by trying all shifts; 1: nowhere.

    Frames that are silent in both are left out.
    """
    best = 1.0
    for shift in range(-farthest, farthest + 1):
        first_F, second_F = one_F[max(shift, 0) :], other_F[max(-shift, 0) :]
        count = min(len(first_F), len(second_F))
        if count < min_overlap * max(len(one_F), len(other_F)):
            continue
        first_F, second_F = first_F[:count], second_F[:count]
        num_audible = np.count_nonzero(first_F | second_F)
        if num_audible:
            best = min(best, float(np.bitwise_count(first_F ^ second_F).sum()) / (16 * num_audible))
    return best


# ------------------------------------------------------------------------------------------------ order


def _segment_preference(item: ComparedSegment) -> tuple[Any, ...]:
    return (*(-value for value in item.quality), -item.duration_s, item.id)


def _follow_duplicates(duplicates: Mapping[str, str], id: str) -> str:
    while id in duplicates:
        id = duplicates[id]
    return id


def _equal_bits(items: Sequence[ComparedSegment]) -> tuple[dict[str, str], list[ComparedSegment]]:
    """Items whose bits an earlier one has, and the others that can be compared further."""
    first: dict[bytes, str] = {}
    duplicates: dict[str, str] = {}
    remaining = []
    for item in items:
        if not len(item.bits_F):
            continue
        stays = first.setdefault(item.bits_F.tobytes(), item.id)
        if stays == item.id:
            remaining.append(item)
        else:
            duplicates[item.id] = stays
    return duplicates, remaining


def _dropped(pairs_P2: NDArray[np.int64]) -> dict[int, int]:
    """The best stays and what is like it goes; then the best of the rest, and so on."""
    followers: dict[int, list[int]] = defaultdict(list)
    for better, worse in pairs_P2.tolist():
        followers[better].append(worse)
    dropped: dict[int, int] = {}
    for better in sorted(followers):
        if better not in dropped:
            for worse in followers[better]:
                dropped.setdefault(worse, better)
    return dropped


# ------------------------------------------------------------------------------------- pairs that are alike


class _Table(NamedTuple):
    """The keys of all items in order, the items that they are of, and the frames where they are."""

    key_H: NDArray[np.uint32]
    item_H: NDArray[np.int64]
    place_H: NDArray[np.int64]


def _make_hash_table(items: Sequence[ComparedSegment]) -> _Table:
    sketches = [_sketch(item.bits_F) for item in items]
    key_H = np.concatenate([keys for keys, _ in sketches])
    place_H = np.concatenate([places for _, places in sketches])
    item_H = np.repeat(np.arange(len(items)), [len(keys) for keys, _ in sketches])
    order_H = np.lexsort((place_H, item_H, key_H))
    return _Table(key_H[order_H], item_H[order_H], place_H[order_H])


def _sketch(bits_F: NDArray[np.uint16]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The keys of an item whose hashes are smallest, and the frames where they are."""
    first_F, second_F = bits_F[:-KEY_FRAMES_APART], bits_F[KEY_FRAMES_APART:]
    places_H = np.flatnonzero((first_F != 0) & (second_F != 0))
    first_H = first_F[places_H].astype(np.uint32) << np.uint32(8)
    second_H = second_F[places_H]
    lower = np.uint32(1 << 24)
    keys_H = np.concatenate([first_H | second_H >> 8, first_H | second_H & 255 | lower]).astype(np.uint32)
    places_H = np.concatenate([places_H, places_H])
    if len(keys_H) > KEYS_PER_SEGMENT:
        # a multiplicative hash, so that which keys are kept has nothing to do with what they mean
        hashes_H = (keys_H * np.uint32(2654435761)).astype(np.uint64) << np.uint64(32) | places_H.astype(
            np.uint64
        )
        smallest = np.argpartition(hashes_H, KEYS_PER_SEGMENT)[:KEYS_PER_SEGMENT]
        keys_H, places_H = keys_H[smallest], places_H[smallest]
    return keys_H, places_H


def _alike(
    items: Sequence[ComparedSegment], table: _Table, max_bit_errors: float, min_overlap: float
) -> tuple[NDArray[np.int64], bool]:
    """Pairs (earlier, later) of items that sound the same, and whether a list was too long to compare all in it."""
    key_H, item_H, place_H = table
    lengths = np.array([len(item.bits_F) for item in items])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    bits_A = np.concatenate([item.bits_F for item in items])
    pairs_P2 = np.zeros((0, 2), np.int64)
    for step in range(1, min(NEIGHBOURS_PER_KEY, len(key_H) - 1) + 1):
        same_P = np.flatnonzero((key_H[step:] == key_H[:-step]) & (item_H[step:] != item_H[:-step]))
        first_P, second_P = item_H[same_P], item_H[same_P + step]
        shift_P = place_H[same_P + step] - place_H[same_P]
        fits = _overlap(lengths[first_P], lengths[second_P], shift_P) >= min_overlap
        first_P, second_P, shift_P, place_P = (
            values_P[fits] for values_P in (first_P, second_P, shift_P, place_H[same_P])
        )
        similar = _glance(bits_A, starts, first_P, second_P, place_P, shift_P)
        triples_P3 = np.unique(np.stack([first_P, second_P, shift_P], axis=1)[similar], axis=0)
        alike = [
            _is_alike(items[first].bits_F, items[second].bits_F, shift, max_bit_errors)
            for first, second, shift in triples_P3.tolist()
        ]
        pairs_P2 = np.concatenate([pairs_P2, triples_P3[np.array(alike, bool), :2]])
    more = bool((key_H[NEIGHBOURS_PER_KEY + 1 :] == key_H[: -NEIGHBOURS_PER_KEY - 1]).any())
    return np.unique(pairs_P2, axis=0), more


def _overlap(
    one_P: NDArray[np.int64], other_P: NDArray[np.int64], shift_P: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The share of the longer one that both have, when the second begins `shift` frames before the first."""
    common_P = np.minimum(one_P, other_P - shift_P) - np.maximum(0, -shift_P)
    share_P: NDArray[np.float64] = common_P / np.maximum(one_P, other_P)
    return share_P


def _glance(
    bits_A: NDArray[np.uint16],
    starts: NDArray[np.int64],
    one_P: NDArray[np.int64],
    other_P: NDArray[np.int64],
    place_P: NDArray[np.int64],
    shift_P: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Whether the frames around the common key are alike; near the edges of a segment there are fewer."""
    errors_P, heard_P = np.zeros(len(one_P), np.int64), np.zeros(len(one_P), np.int64)
    for step in range(-GLANCE_FRAMES, GLANCE_FRAMES + KEY_FRAMES_APART + 1):
        first_P, second_P = starts[one_P] + place_P + step, starts[other_P] + place_P + shift_P + step
        inside_P = (
            (first_P >= starts[one_P]) & (first_P < starts[one_P + 1])
            & (second_P >= starts[other_P]) & (second_P < starts[other_P + 1])
        )  # fmt: skip
        bits_P = bits_A[np.where(inside_P, first_P, 0)]
        others_P = bits_A[np.where(inside_P, second_P, 0)]
        errors_P += np.where(inside_P, np.bitwise_count(bits_P ^ others_P), 0)
        heard_P += inside_P & ((bits_P | others_P) != 0)
    similar: NDArray[np.bool_] = errors_P <= GLANCE_BIT_ERRORS * 16 * heard_P
    return similar


def _is_alike(
    one_F: NDArray[np.uint16], other_F: NDArray[np.uint16], shift: int, max_bit_errors: float
) -> bool:
    """Whether few enough bits differ, when the second begins `shift` frames before the first."""
    first_F, second_F = one_F[max(-shift, 0) :], other_F[max(shift, 0) :]
    count = min(len(first_F), len(second_F))
    first_F, second_F = first_F[:count], second_F[:count]
    num_audible = int(np.count_nonzero(first_F | second_F))
    if num_audible < MIN_COMPARED_FRAMES:
        return False
    allowed = max_bit_errors * min(1.0, 0.5 + 0.5 * num_audible / FULL_FRAMES)
    return float(np.bitwise_count(first_F ^ second_F).sum()) <= allowed * 16 * num_audible


_MIN_SEGMENTS_FOR_OUTLIERS = 4
_COMPARED = ("duration_s", "text", "speaker", "file")
"""Columns of a row that the search for duplicates reads."""


@dataclass
class Verdicts:
    """Findings about the segments of a corpus: their ids, drops and speakers."""

    ids: dict[Place, str] = field(default_factory=dict)
    drops: dict[Place, Drop] = field(default_factory=dict)
    speakers: dict[str, str] = field(default_factory=dict)
    """The voice of a file as `file#name` -> the voice in all files."""


def judge_segments(
    spool: Spool,
    segment_ids: Mapping[Place, str],
    outlier_iqr: float | None,
    duplicates: DuplicateConfig | None,
    link_threshold: float | None,
) -> Verdicts:
    """Find outliers, duplicates and speakers across files: all that needs more than one segment.

    Args:
        outlier_iqr: see `presets.Preset`; null: no outliers.
        duplicates: what counts as one; null: they stay.
        link_threshold: cosine from which two voices of different files are one; null: voices stay apart.
    """
    verdicts = Verdicts(ids=dict(segment_ids))
    if link_threshold is not None:
        verdicts.speakers = _linked(spool, link_threshold)
    if outlier_iqr is not None:
        verdicts.drops |= _outliers(spool, outlier_iqr)
    if duplicates is not None:
        verdicts.drops |= _repeated(spool, verdicts, duplicates)
    return verdicts


def kept_rows(spool: Spool, verdicts: Verdicts) -> Iterator[tuple[Place, Row]]:
    """Yield the segments that no rule has dropped so far."""
    for file, number, row in spool.parts():
        if row["dropped"] is None and (file, number) not in verdicts.drops:
            yield (file, number), row


def _linked(spool: Spool, threshold: float) -> dict[str, str]:
    from pipelines.annotate.voice.linking import FileSpeaker, link

    voices = [
        FileSpeaker(file["name"], name, voice["embedding"], voice["seconds"])
        for file in spool.files()
        for name, voice in (file.get("voices") or {}).items()
    ]
    return {f"{file}#{name}": speaker for (file, name), speaker in link(voices, threshold).items()}


def _outliers(spool: Spool, width: float) -> dict[Place, Drop]:
    """Segments whose seconds a character lie so many interquartile ranges beside the quartiles of their file
    (Tukey's fences, as Emilia-Pipe has them)."""
    rates: dict[int, list[tuple[Place, float]]] = defaultdict(list)
    for file, number, row in spool.parts():
        if row["dropped"] is None and row["kind"] == "speech" and row["text"]:
            rates[file].append(((file, number), row["duration_s"] / len(row["text"])))
    drops = {}
    for file_rates in rates.values():
        if len(file_rates) < _MIN_SEGMENTS_FOR_OUTLIERS:
            continue
        low, _, high = quantiles((rate for _, rate in file_rates), n=4, method="inclusive")
        floor, ceiling = low - width * (high - low), high + width * (high - low)
        for place, rate in file_rates:
            if not floor <= rate <= ceiling:
                reason = f"{rate:.3g} s a character, the others of the file from {floor:.3g} to {ceiling:.3g}"
                limit = ceiling if rate > ceiling else floor
                drops[place] = Drop(
                    "corpus", "outlier_iqr", "unlike the rest", reason, round(rate, 4), round(limit, 4)
                )
    return drops


def _repeated(spool: Spool, verdicts: Verdicts, config: DuplicateConfig) -> dict[Place, Drop]:
    rows, places = [], {}
    for place, row in kept_rows(spool, verdicts):
        name = verdicts.ids[place]
        places[name] = place
        measured = {key: row["measured"][key] for key in ("fingerprint", "quality") if key in row["measured"]}
        speaker = verdicts.speakers.get(row["speaker"], row["speaker"])
        rows.append({"id": name, "measured": measured, **{k: row[k] for k in _COMPARED}, "speaker": speaker})
    return {
        places[name]: Drop("corpus", "duplicates", "duplicate", f"the same as {original_id}", original_id)
        for name, original_id in find_duplicates(rows, config).items()
    }
