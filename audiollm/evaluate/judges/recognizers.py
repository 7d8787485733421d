"""Speech recognizers that run offline on a CPU and share nothing with our models: judges and annotators.

Shapes: C channels, N samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from audiollm.data.text.forms import comparison_form, recognition_form

if TYPE_CHECKING:
    from torch import Tensor

_SAMPLE_RATE = 16000
_LEVEL_DBFS = -26.0
_MAX_GAIN_DB = 40.0
_DITHER = 1e-3  # standard deviation of the noise: -60 dBFS
_PADDING_S = 0.2
_FRAME_S = 0.01
_MIN_LIKELIHOOD = 1e-300
_MIN_FIT = -10.0
MAX_GRAMMAR_TEXTS = 60
"""Most texts of a closed grammar."""
_FILLERS = ("<", "[", "+")
"""First characters of silence and noise labels in a segmentation."""


class TimedWord(NamedTuple):
    """A word in a clip.

    Args:
        score: in [0, 1]; what it means, the method says that gives it.
        fit: mean log-likelihood per frame over that of the acoustic unit that fits the frame best, in nats, at most 0.
    """

    word: str
    start_s: float
    end_s: float
    score: float
    fit: float


class PocketsphinxRecognizer:
    """CMU Pocketsphinx with its English model, in one thread; the same input gives the same text.

    A clip is brought to -26 dBFS (RMS) at 16 kHz mono, and white noise at -60 dBFS is added and put for 0.2 s
    on either side, because digital silence ruins the features: without it 81 % of the words of synthetic
    speech are wrong in the open vocabulary and 60 % with it, under 1 % with a closed grammar.

    Measured on 300 recordings of digits (8 kHz, cut tightly) with a grammar of the ten: 83 to 84 % right over
    three seeds of the noise, 77 to 80 % without the level. Padding of 0.1 to 1 s, other noise levels and
    colours, cmn, remove_noise, beams, vocal tract warping and mirroring the band above 4 kHz do no better
    beyond chance: what is missing is that band ("six" loses its /s/, 4 of 30). Cost: 0.01 s of CPU a clip.

    Args:
        grammar: the texts of which exactly one is said; None: the open vocabulary of the language model.
        votes: decode with so many seeds of the noise and take the most frequent text (the first on a tie).

    Raises:
        ValueError: an empty grammar, or words of it that are not in the pronunciation dictionary.
    """

    name = "pocketsphinx"

    def __init__(self, grammar: Sequence[str] | None = None, votes: int = 1) -> None:
        from pocketsphinx import Decoder

        if votes < 1:
            raise ValueError(f"votes must be at least 1, not {votes}")
        self._votes = votes
        options: dict[str, Any] = {"samprate": _SAMPLE_RATE, "loglevel": "FATAL"}
        if grammar is None:
            self._decoder = Decoder(**options)
            return
        phrases = sorted({comparison_form(text, "en") for text in grammar} - {""})
        if not phrases:
            raise ValueError("the grammar holds no words")
        self._decoder = Decoder(lm=None, **options)
        unknown = sorted({word for phrase in phrases for word in phrase.split() if not self._knows(word)})
        if unknown:
            raise ValueError(
                f"not in the pronunciation dictionary of pocketsphinx: {', '.join(unknown)}; "
                "take these texts out of the grammar, or recognize with the open vocabulary"
            )
        alternatives = " | ".join(f"( {phrase} )" for phrase in phrases)
        self._decoder.add_jsgf_string(
            "given", f"#JSGF V1.0; grammar given; public <given> = {alternatives} ;"
        )
        self._decoder.activate_search("given")

    def recognize(self, samples_CN: Tensor, sample_rate: int) -> str:
        """The transcript, in `recognition_form`; empty where nothing was recognized.

        Args:
            samples_CN: waveform in [-1, 1], shape [channels, samples].
            sample_rate: hertz.
        """
        from audiollm.audio import resample, rms_dbfs, to_mono

        if samples_CN.shape[1] == 0:
            return ""
        mono_1N = resample(to_mono(samples_CN), sample_rate, _SAMPLE_RATE)
        gain_db = min(_LEVEL_DBFS - rms_dbfs(mono_1N), _MAX_GAIN_DB)
        samples_N = mono_1N[0].numpy() * 10 ** (gain_db / 20)
        transcripts = [self._decode(samples_N, seed) for seed in range(self._votes)]
        return Counter(transcripts).most_common(1)[0][0]

    def recognize_words(self, samples_CN: Tensor, sample_rate: int) -> list[TimedWord]:
        """The recognized words, each with its posterior probability in the decoder's lattice.

        With a grammar the posteriors tell nothing (they are all close to 1).

        Args:
            samples_CN: waveform in [-1, 1], shape [channels, samples].
            sample_rate: hertz.

        Raises:
            ValueError: the recognizer takes several votes, of which none has the times.
        """
        if self._votes != 1:
            raise ValueError("times are those of one decoding: make the recognizer with votes=1")
        transcript = self.recognize(samples_CN, sample_rate)
        duration_s = samples_CN.shape[1] / sample_rate
        return self._segmentation(duration_s, lambda segment: min(segment.prob, 1.0)) if transcript else []

    def align(self, samples_CN: Tensor, sample_rate: int, words: Sequence[str]) -> list[TimedWord]:
        """The times of given words; empty where they cannot be aligned with the sound.

        Args:
            samples_CN: waveform in [-1, 1], shape [channels, samples].
            sample_rate: hertz.
            words: in `recognition_form`, each one of which the dictionary `knows`.

        Returns:
            the words with, as `score`, their likelihood a frame over that of the acoustic unit that fits it best
            (geometric mean).
        """
        search = self._decoder.current_search()
        self._decoder.set_align_text(" ".join(words))
        try:
            self.recognize(samples_CN, sample_rate)
            aligned = self._segmentation(samples_CN.shape[1] / sample_rate, _likelihood_per_frame)
        finally:
            self._decoder.activate_search(search)
        return aligned if [word.word for word in aligned] == list(words) else []

    def knows(self, word: str) -> bool:
        """Whether a word (in `recognition_form`) is in the pronunciation dictionary."""
        return self._knows(word)

    def _segmentation(self, duration_s: float, score: Callable[[Any], float]) -> list[TimedWord]:
        """The words of the last decoding, at their times in the clip."""
        words = []
        for segment in self._decoder.seg() or ():
            if segment.word.startswith(_FILLERS):
                continue
            start_s = min(max(segment.start_frame * _FRAME_S - _PADDING_S, 0.0), duration_s)
            end_s = min(max((segment.end_frame + 1) * _FRAME_S - _PADDING_S, start_s), duration_s)
            word = segment.word.partition("(")[0]
            words.append(TimedWord(word, start_s, end_s, score(segment), _acoustic_fit(segment)))
        return words

    def _decode(self, samples_N: np.ndarray[Any, Any], seed: int) -> str:
        padding = int(_PADDING_S * _SAMPLE_RATE)
        padded_N = np.random.default_rng(seed).normal(0.0, _DITHER, len(samples_N) + 2 * padding)
        padded_N[padding : padding + len(samples_N)] += samples_N
        pcm = (padded_N.clip(-1.0, 1.0) * 32767.0).astype(np.int16).tobytes()
        self._decoder.reinit_feat()  # else its normalization would go on from the clip before
        self._decoder.start_utt()
        self._decoder.process_raw(pcm, full_utt=True)
        try:
            self._decoder.end_utt()
        except RuntimeError:  # no path of its search reaches the end of the sound
            return ""
        hypothesis = self._decoder.hyp()
        return recognition_form(hypothesis.hypstr) if hypothesis is not None else ""

    def _knows(self, word: str) -> bool:
        return self._decoder.lookup_word(word) is not None


def choose_grammar(texts: Sequence[str]) -> tuple[PocketsphinxRecognizer, list[str] | None, str]:
    """The recognizer, its grammar and a note: the asked texts are the grammar if few and of known words."""
    if not 0 < len(texts) <= MAX_GRAMMAR_TEXTS:
        note = f"open vocabulary: {len(texts)} different texts; a grammar holds 1 to {MAX_GRAMMAR_TEXTS}"
        return PocketsphinxRecognizer(None), None, note
    try:
        return PocketsphinxRecognizer(texts), list(texts), ""
    except ValueError as error:
        return PocketsphinxRecognizer(None), None, f"open vocabulary: {error}"


def _likelihood_per_frame(segment: Any) -> float:
    return float(np.exp(_acoustic_fit(segment)))


def _acoustic_fit(segment: Any) -> float:
    """See `TimedWord`. The likelihood underflows in words of some two seconds, which speech does not have."""
    if segment.ascore <= _MIN_LIKELIHOOD:
        return _MIN_FIT
    frames = segment.end_frame - segment.start_frame + 1
    return max(min(float(np.log(segment.ascore)) / frames, 0.0), _MIN_FIT)
