"""The folder of the Emotional Speech Dataset (ESD; Zhou et al., arXiv 2105.14762), and the requests made from it.

`0011/0011.txt` holds lines `0011_000351<tab>text<tab>Angry`; the recordings are `0011/Angry/0011_000351.wav`, in some
releases one folder deeper (`evaluation`, `test`, `train`). Speakers 0001 to 0010 speak Mandarin, 0011 to 0020 English.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from audiollm.errors import ConfigError
from audiollm.evaluate.speech.clips import SpeechRequest

EMOTIONS = ("Neutral", "Happy", "Angry", "Sad", "Surprise")
SPLITS = ("evaluation", "test", "train")
_ENCODINGS = ("utf-8-sig", "utf-16", "gb18030")
"""Encodings of the lists of texts, which differ from speaker to speaker."""


@dataclass(frozen=True)
class Utterance:
    """A recording with its text and emotion, and the prompt that a model is given in its place."""

    id: str
    speaker: str
    emotion: str
    text: str
    path: Path
    prompt: Path | None = None
    prompt_text: str | None = None

    def request(self) -> SpeechRequest:
        return SpeechRequest(self.id, self.text, self.prompt, self.prompt_text)


def read_esd(folder: Path, language: str, split: str | None = None) -> list[Utterance]:
    """The utterances of a language's speakers, each with a prompt: the next one of the same speaker and emotion.

    The prompt says another text in the emotion that is asked for. It wraps around at the end, and never is of
    another split where the folder has them.

    Args:
        language: `en` or `zh`.
        split: one of `SPLITS`; None: all.

    Raises:
        ConfigError: no folder of this form, a list of texts that cannot be read, or nothing of what is asked for.
    """
    if language not in ("en", "zh"):
        raise ConfigError(f"{language}: ESD holds en and zh", "--language", "give one of them")
    if split is not None and split not in SPLITS:
        raise ConfigError(f"{split}: no such split", "--split", f"give one of {', '.join(SPLITS)}")
    speakers = (
        sorted(path for path in folder.iterdir() if _is_speaker(path, language)) if folder.is_dir() else []
    )
    utterances = [utterance for path in speakers for utterance in _read_speaker(path, split)]
    if not utterances:
        raise ConfigError(
            f"no recordings of ESD ({language}{f', {split}' if split else ''})",
            str(folder),
            "give the folder that holds 0001 to 0020, each with its emotions and its list of texts",
        )
    return _assign_prompts(utterances)


def _is_speaker(path: Path, language: str) -> bool:
    name = path.name
    return path.is_dir() and len(name) == 4 and name.isdigit() and (int(name) <= 10) == (language == "zh")


def _read_speaker(folder: Path, split: str | None) -> Iterator[Utterance]:
    texts = _read_esd_texts(folder / f"{folder.name}.txt")
    for emotion in EMOTIONS:
        for path in sorted((folder / emotion).rglob("*.wav")):
            if split is not None and path.parent.name != split:
                continue
            text = texts.get(path.stem)
            if text is None:
                where = str(folder / f"{folder.name}.txt")
                raise ConfigError(
                    f"no text of {path.stem}", where, "a line is id, text, emotion with tabs between"
                )
            yield Utterance(path.stem, folder.name, emotion, text, path)


def _read_esd_texts(path: Path) -> dict[str, str]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error}", str(path), "ESD has a list of texts a speaker"
        ) from None
    for encoding in _ENCODINGS:
        try:
            lines = content.decode(encoding).splitlines()
        except UnicodeError:
            continue
        fields = [line.strip().split("\t") for line in lines]
        texts = {row[0].strip(): row[1].strip() for row in fields if len(row) >= 2 and row[1].strip()}
        if texts:
            return texts
    raise ConfigError("holds no texts", str(path), "a line is id, text, emotion with tabs between")


def _assign_prompts(utterances: Sequence[Utterance]) -> list[Utterance]:
    from dataclasses import replace

    groups: dict[tuple[str, str, str], list[Utterance]] = {}
    for utterance in utterances:
        groups.setdefault((utterance.speaker, utterance.emotion, utterance.path.parent.name), []).append(
            utterance
        )
    prompted = []
    for group in groups.values():
        for place, utterance in enumerate(group):
            candidates = [
                candidate
                for candidate in group[place + 1 :] + group[:place]
                if candidate.text != utterance.text
            ]
            prompt = candidates[0] if candidates else None
            prompted.append(
                replace(
                    utterance,
                    prompt=prompt.path if prompt else None,
                    prompt_text=prompt.text if prompt else None,
                )
            )
    return prompted
