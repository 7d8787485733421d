"""Kokoro: English in any number of voices, which are mixtures of its style vectors (extra `voices`).

A folder of Kokoro holds one `.onnx` file, `vocab.json` (phoneme -> id, by itself or under `vocab`) and `voices.npz`:
for each style an array of float32, `[P, 1, S]` or `[P, S]`, whose row n is for n + 1 phonemes.

The name of a voice says its mixture in percent: `130jf_alpha-30jm_kumo` is 1.3 of the first and -0.3 of the second
style. Weights add up to 100.

Shapes: N samples, P positions, S style values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiollm.errors import ConfigError
from pipelines.annotate.synthesizers.phonemes import open_hibari, phoneme_pieces
from pipelines.annotate.synthesizers.pieces import join_speech
from pipelines.annotate.synthesizers.synthesizer import (
    SpeechFault,
    SynthesizedSpeech,
    Synthesizer,
    files_digest,
    package_missing,
)

SAMPLE_RATE = 24000
_TERM = re.compile(r"([+-]?)(\d{1,3})([A-Za-z_][A-Za-z0-9_]*)(?=[+-]|$)")
_BEYOND_PERCENT = 30
"""How far beyond a style, away from the others, mixtures lie at most."""
_STEP_PERCENT = 5
_CANDIDATES = 8
"""Mixtures that are drawn for a voice; the one that is farthest from all voices before it is taken."""
_MAX_UNKNOWN_SHARE = 0.05
"""Share of a text's phonemes that may be missing in the vocabulary."""
Mixture = dict[str, int]
"""Style -> percent."""


class KokoroSynthesizer(Synthesizer):
    """A folder of Kokoro.

    Args:
        folder: see the top of the module.
    """

    language = "en"
    characters_per_cpu_s = 22.0
    memory_mb = 800.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hibari: Any = None
        self._session: Any = None

    @property
    def inputs(self) -> list[Path]:
        return [self.folder]

    def missing(self) -> str | None:
        if reason := package_missing("hibari", "voices"):
            return f"Kokoro's phonemes are hibari's: {reason}"
        try:
            self._check_folder()
        except ConfigError as error:
            return f"{error.where}: {error.message}: {error.remedy}"
        return None

    def pick_voices(self, voices: int | Sequence[str] | None, seed: int) -> list[str]:
        styles = {name: style_PS[len(style_PS) // 4] for name, style_PS in self._styles.items()}
        if voices is None:
            return list(styles)
        if isinstance(voices, int):
            return draw_mixtures(styles, voices, seed)
        for name in voices:
            parse_mixture(name, styles)
        return list(voices)

    def fingerprint(self) -> str:
        return f"kokoro {files_digest(self._files())}"

    def speak(self, text: str, voice: str, *, rate: float, seed: int) -> SynthesizedSpeech:
        if self._session is None:
            from audiollm.onnx_models import single_thread_session

            self._hibari, self._session = open_hibari(), single_thread_session(self._files()[0])
        mixture = parse_mixture(voice, self._styles)
        style_PS = _mix_styles(self._styles, mixture)
        pieces = phoneme_pieces(self._hibari, text, len(style_PS))
        return join_speech([self._speak_piece(piece, style_PS, rate) for piece in pieces], SAMPLE_RATE)

    def _speak_piece(self, phonemes: str, style_PS: NDArray[np.float32], rate: float) -> NDArray[np.float32]:
        ids = [self._vocabulary[phoneme] for phoneme in phonemes if phoneme in self._vocabulary]
        unknown_phonemes = sorted({phoneme for phoneme in phonemes if phoneme not in self._vocabulary})
        if not ids or len(phonemes) - len(ids) > _MAX_UNKNOWN_SHARE * len(phonemes):
            raise SpeechFault("unknown phonemes", f"not in vocab.json: {' '.join(unknown_phonemes)}")
        feeds = {
            "tokens": np.array([[0, *ids, 0]], np.int64),
            "style": style_PS[len(ids) - 1][None].astype(np.float32),
            "speed": np.array([rate], np.float32),
        }
        (samples_N,) = self._session.run(None, feeds)[:1]
        return np.asarray(samples_N, np.float32).reshape(-1)

    @cached_property
    def _vocabulary(self) -> Mapping[str, int]:
        from audiollm.files.atomic import read_json

        content = read_json(self.folder / "vocab.json")
        vocabulary: Mapping[str, int] = content.get("vocab", content)
        return vocabulary

    @cached_property
    def _styles(self) -> dict[str, NDArray[np.float32]]:
        """The styles `[P, S]` by name, in the order of their names."""
        with np.load(self.folder / "voices.npz") as stored:
            return {name: stored[name].reshape(len(stored[name]), -1) for name in sorted(stored.files)}

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_hibari": None, "_session": None}

    def _files(self) -> list[Path]:
        return [*sorted(self.folder.glob("*.onnx")), self.folder / "vocab.json", self.folder / "voices.npz"]

    def _check_folder(self) -> None:
        """
        Raises:
            ConfigError: it does not hold what the top of the module says.
        """
        remedy = "docs/models.md says what a folder of Kokoro holds"
        if not self.folder.is_dir():
            raise ConfigError("no such folder", str(self.folder), remedy)
        models = [path.name for path in self.folder.glob("*.onnx")]
        if len(models) != 1:
            content = (
                f"{len(models)} .onnx files ({', '.join(sorted(models))})" if models else "no .onnx file"
            )
            raise ConfigError(f"{content}, where one is the model", str(self.folder), remedy)
        for name in ("vocab.json", "voices.npz"):
            if not (self.folder / name).is_file():
                raise ConfigError(f"no {name}", str(self.folder), remedy)
        try:
            shapes = {style_PS.shape for style_PS in self._styles.values()}
        except (OSError, ValueError) as error:
            raise ConfigError(f"voices.npz cannot be read ({error})", str(self.folder), remedy) from None
        if len(shapes) != 1:
            raise ConfigError(
                f"styles of the shapes {sorted(shapes)}", str(self.folder), "give styles of one shape"
            )


def parse_mixture(name: str, styles: Mapping[str, Any]) -> Mixture:
    """The mixture that a voice's name says; the name of a style is that style alone.

    Raises:
        ValueError: it says none, of such styles.
    """
    if name in styles:
        return {name: 100}
    terms = list(_TERM.finditer(name))
    example = "as in 70af_heart+30am_adam"
    if not terms or "".join(term[0] for term in terms) != name:
        raise ValueError(
            f"the voice {name!r} is neither a style nor a mixture {example}; styles: {', '.join(styles)}"
        )
    mixture: Mixture = {}
    for sign, percent, style in (term.groups() for term in terms):
        if style not in styles:
            raise ValueError(f"the voice {name!r}: no style {style!r}; known: {', '.join(styles)}")
        mixture[style] = mixture.get(style, 0) + int(f"{sign}{percent}")
    if sum(mixture.values()) != 100:
        raise ValueError(f"the voice {name!r}: {sum(mixture.values())} percent in all; weights add up to 100")
    return mixture


def draw_mixtures(styles: Mapping[str, NDArray[np.float32]], count: int, seed: int) -> list[str]:
    """Names of different mixtures of two or three styles, spread over the styles' space and a little beyond it.

    The first ones are the same for any larger count.

    Args:
        styles: style -> `[S]`.

    Raises:
        ValueError: one style has no mixture.
    """
    if len(styles) < 2:
        raise ValueError(
            f"{count} voices of {len(styles)} style: mixtures need two styles; name the voice instead"
        )
    random = np.random.default_rng(seed)
    names: list[str] = []
    voices_VS = np.zeros((0, len(next(iter(styles.values())))))
    misses = 0
    while len(names) < count:
        candidates = [_draw_mixture(list(styles), random) for _ in range(_CANDIDATES)]
        fresh = [mixture for mixture in candidates if _mixture_name(mixture) not in names]
        if not fresh:
            misses += 1
            if misses > 1000:
                raise ValueError(
                    f"{count} voices of {len(styles)} styles: there are only {len(names)} mixtures"
                )
            continue
        vectors = [_mix_styles(styles, mixture) for mixture in fresh]
        nearest = [np.square(voices_VS - vector).sum(axis=1).min(initial=np.inf) for vector in vectors]
        best = int(np.argmax(nearest))
        names.append(_mixture_name(fresh[best]))
        voices_VS = np.vstack([voices_VS, vectors[best]])
    return names


def _mix_styles(styles: Mapping[str, NDArray[np.float32]], mixture: Mixture) -> NDArray[np.float32]:
    """The mixture of the styles' arrays."""
    weighted = [np.float32(percent / 100) * styles[name] for name, percent in mixture.items()]
    total: NDArray[np.float32] = np.sum(weighted, axis=0, dtype=np.float32)
    return total


def _draw_mixture(styles: Sequence[str], random: np.random.Generator) -> Mixture:
    size = int(random.integers(2, min(3, len(styles)) + 1))
    selected = [styles[index] for index in sorted(random.choice(len(styles), size, replace=False))]
    beyond = _BEYOND_PERCENT / 100
    weights = (1 + size * beyond) * random.dirichlet(np.ones(size)) - beyond
    percents = [_STEP_PERCENT * round(100 * weight / _STEP_PERCENT) for weight in weights[:-1]]
    mixture = dict(zip(selected, [*percents, 100 - sum(percents)], strict=True))
    return {name: percent for name, percent in mixture.items() if percent}


def _mixture_name(mixture: Mixture) -> str:
    """The name from which `parse_mixture` reads the mixture: the largest weight first."""
    ordered = sorted(mixture.items(), key=lambda item: (-item[1], item[0]))
    if len(ordered) == 1:
        return ordered[0][0]
    return "".join(f"{percent:+d}{name}" for name, percent in ordered).removeprefix("+")
