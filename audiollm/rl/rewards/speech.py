"""Rewards of answers in speech."""

from __future__ import annotations

from collections.abc import Callable
from importlib import util
from pathlib import Path
from statistics import mean

from audiollm.audio import Waveform
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Sample
from audiollm.data.text.forms import comparison_form
from audiollm.data.text.words import words_of
from audiollm.errors import ConfigError
from audiollm.evaluate.judges.choosing import choose_recognizer, choose_speaker_judge
from audiollm.evaluate.judges.judging import Recognizer, load_clip, voice_score, words_score
from audiollm.evaluate.judges.recognizers import choose_grammar
from audiollm.evaluate.report.text_errors import choose_form
from audiollm.rl.rewards import settings as s
from audiollm.rl.rewards.batch import SampledAnswer

DNSMOS_RATE = 16_000
MIN_MOS, MAX_MOS = 1.0, 5.0


def text_to_say(answer: SampledAnswer) -> str:
    """The text that is to be spoken: `metadata.text`, else the key's text, else the user's last."""
    return requested_text(answer.sample, answer.key)


def requested_text(sample: Sample, key: str | None = None) -> str:
    """The text that a sample asks to be spoken: `metadata.text`, else the key's text, else the user's last."""
    text = sample.metadata.get("text")
    if isinstance(text, str) and text.strip():
        return text
    return key or (sample.texts("user") or [""])[-1]


def words_reward(settings: s.WordsSettings) -> Callable[[SampledAnswer], float | None]:
    """The reward `words`.

    Raises:
        ConfigError: no recognizer there, or no samples where their texts are to be read.
    """
    if settings.texts is not None and s.POCKETSPHINX not in settings.recognizers:
        raise ConfigError(
            "words.texts: a grammar is for pocketsphinx alone",
            ", ".join(settings.recognizers),
            "leave out texts, or recognizer",
        )
    recognizers = [_choose_words_recognizer(spec, settings) for spec in settings.recognizers]
    choose_form(settings.form, settings.language)  # refuses a wrong name before anything is sampled

    def score(answer: SampledAnswer) -> float | None:
        if answer.recording is None:
            return None
        if not answer.recording.num_samples:
            return 0.0
        form, text = (
            choose_form(settings.form, answer.sample.language or settings.language),
            text_to_say(answer),
        )
        return mean(words_score(recognizer, form, answer.recording, text)[0] for recognizer in recognizers)

    return score


def _choose_words_recognizer(spec: str, settings: s.WordsSettings) -> Recognizer:
    if settings.texts is None or spec != s.POCKETSPHINX:
        choice = choose_recognizer(spec, settings.language)
        assert choice is not None
        return choice.judge
    samples, _ = read_samples(settings.texts)
    texts = {
        comparison_form(requested_text(sample), sample.language or settings.language) for sample in samples
    }
    judge, _, _ = choose_grammar(sorted(texts - {""}))
    return judge


def voice_reward(settings: s.VoiceSettings) -> Callable[[SampledAnswer], float | None]:
    """The reward `voice`: the voice asked for is the prompt's first recording, else that of the answer key.

    Raises:
        ConfigError: no judge there.
    """
    choice = choose_speaker_judge(settings.judge)
    assert choice is not None
    judge = choice.judge

    def score(answer: SampledAnswer) -> float | None:
        if answer.recording is None:
            return None
        if answer.question is not None and answer.question.audio:
            wave: Waveform | None = answer.question.audio[0].load()
        else:
            wave = _voice_of(answer)
        if wave is None:
            return None
        return voice_score(judge, answer.recording, wave) if answer.recording.num_samples else -1.0

    return score


def length_score(answer: SampledAnswer, settings: s.LengthSettings) -> float | None:
    """max(0, 1 - |d / wanted - 1| / tolerance) for a duration d; wanted = words of the text / words_per_second."""
    words = len(words_of(text_to_say(answer)))
    if answer.recording is None or not words:
        return None
    expected_s = words / settings.words_per_second
    return max(0.0, 1 - abs(answer.recording.duration_s / expected_s - 1) / settings.tolerance)


def quality_reward() -> Callable[[SampledAnswer], float | None]:
    """The reward `quality`: DNSMOS P.835 overall (arXiv 2110.01763), from 1..5 to 0..1.

    Raises:
        ConfigError: speechmos is not installed.
    """
    if util.find_spec("speechmos") is None:
        raise ConfigError("quality: speechmos is not installed", "rewards", "pip install speechmos")
    from speechmos import dnsmos

    def score(answer: SampledAnswer) -> float | None:
        if answer.recording is None:
            return None
        if not answer.recording.num_samples:
            return 0.0
        samples_N = answer.recording.mono().resample(DNSMOS_RATE).samples_CN[0].numpy()
        mos = float(dnsmos.run(samples_N, sr=DNSMOS_RATE)["ovrl_mos"])
        return min(1.0, max(0.0, (mos - MIN_MOS) / (MAX_MOS - MIN_MOS)))

    return score


def ends_by_itself(answer: SampledAnswer) -> float | None:
    """1 where the speech ended before its longest length, else 0; None for an answer in words."""
    if answer.codes_KT is None and answer.recording is None:
        return None
    return float(not answer.is_truncated)


def _voice_of(answer: SampledAnswer) -> Waveform | None:
    sample = answer.sample
    recordings = sample.audio("system") + sample.audio("user") + sample.audio("assistant")
    return (
        load_clip(Path(recordings[0].path), recordings[0].start_s, recordings[0].end_s)
        if recordings
        else None
    )
