"""Scores of answers to a prompt, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from audiollm.data.chat.question_prompts import answer_form
from audiollm.data.records.part_codes import load_encodings
from audiollm.data.records.sample import AudioPart, RatedAnswer, Sample, refuse_video
from audiollm.data.records.source import AudioClip, LoadedSample
from audiollm.data.text.forms import comparison_form
from audiollm.devices import default_device
from audiollm.errors import BadSample, ConfigError
from audiollm.evaluate.judges.choosing import (
    POCKETSPHINX,
    ChosenJudge,
    choose_recognizer,
    choose_speaker_judge,
)
from audiollm.evaluate.judges.judging import Recognizer, VoiceJudge, cosine, embed, load_clip, words_score
from audiollm.evaluate.judges.recognizers import choose_grammar
from audiollm.evaluate.listening.answer_parts import answer_in_form, read_answer
from audiollm.evaluate.listening.choices import read_choice
from audiollm.evaluate.listening.stage import choices_of
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.store import RowStore
from audiollm.evaluate.report.suite import spread_items
from audiollm.evaluate.report.text_errors import TextForm, choose_form
from audiollm.files.atomic import folder_digest
from audiollm.models.pretrained import model_folder
from audiollm.rl.reward_models.model import RewardModel, load_reward_model
from audiollm.synthesis.run import text_and_speaker
from pipelines.answers.judge import (
    DEFAULT_PROMPT,
    JudgeError,
    LanguageJudge,
    judge_message,
    load_judge,
    read_score,
)
from pipelines.answers.score_store import content_of, conversation_content
from pipelines.answers.select import text_of
from pipelines.answers.voices import STEPS, recordings_of_speakers, trained_voice_judge

if TYPE_CHECKING:
    from audiollm.recipe.runner import Context
    from pipelines.answers.settings import SampleAnswersConfig

VERSION = 1
"""Version of stored scores: raise it when a definition changes."""
MAX_REFERENCES = 8
"""Recordings of a speaker that the voice of an answer is compared with."""
MAX_NOTE_CHARACTERS = 500


@dataclass(frozen=True)
class Score:
    """The score of an answer."""

    value: float | None
    """None: it could not be scored, and `note` says why."""
    note: str = ""
    """What a person may read beside it: what was heard, the verdict."""
    is_final: bool = True
    """Whether asking again would give the same: an endpoint that could not be reached may answer the next time."""


class AnswerJudge(Protocol):
    """Scores answers; by what identifies it and by content, each is scored once."""

    @property
    def fingerprint(self) -> str | None:
        """Changes when scores may change; None: scores cost nothing and are not stored."""

    def about(self, sample: Sample) -> Any:
        """What scores depend on beside the answer, as plain data.

        Raises:
            BadSample: something that the judge compares with is missing.
        """

    def score(self, sample: Sample, numbers: Sequence[int]) -> list[Score]:
        """Score the answers of these numbers.

        Raises:
            BadSample: something that the judge compares with is missing.
        """


class AnswerRater:
    """Scores answers by several judges, and keeps what they said.

    Args:
        judges: by the names of scores.
        weights: of their scores in the sum.
    """

    def __init__(
        self, judges: Mapping[str, AnswerJudge], weights: Mapping[str, float], store: RowStore
    ) -> None:
        self._judges, self._weights, self._store = judges, weights, store

    def rate(self, sample: Sample) -> tuple[Sample, list[str]]:
        """Score all answers of a sample.

        Returns:
            The sample with the answers that every judge scored, and of each other one why it was not.

        Raises:
            BadSample: something that a judge compares with is missing, or no answer has a score.
        """
        scores_by_judge = {name: self._scores(name, judge, sample) for name, judge in self._judges.items()}
        rated: list[RatedAnswer] = []
        reasons: list[str] = []
        for number, answer in enumerate(sample.answers):
            answer_scores = {name: scores[number] for name, scores in scores_by_judge.items()}
            missing = [
                f"{name}: {score.note}" for name, score in answer_scores.items() if score.value is None
            ]
            if missing:
                reasons.append(missing[0])
                continue
            rated.append(self._rated(answer, answer_scores))
        if not rated:
            raise BadSample("", sample.id, f"no answer has a score: {reasons[0]}", "no score")
        return sample.model_copy(update={"answers": rated}), reasons

    def _rated(self, answer: RatedAnswer, scores: Mapping[str, Score]) -> RatedAnswer:
        values = {name: score.value for name, score in scores.items() if score.value is not None}
        notes = {name: score.note for name, score in scores.items() if score.note}
        total = sum(self._weights[name] * value for name, value in values.items())
        metadata = {**answer.metadata, "scores": values, **({"notes": notes} if notes else {})}
        return answer.model_copy(update={"score": total, "metadata": metadata})

    def _scores(self, name: str, judge: AnswerJudge, sample: Sample) -> list[Score]:
        numbers = list(range(len(sample.answers)))
        if judge.fingerprint is None:
            return judge.score(sample, numbers)
        about = [name, VERSION, judge.fingerprint, judge.about(sample)]
        keys = [[*about, content_of(answer.content, sample.id)] for answer in sample.answers]
        rows = {number: self._store.get(*keys[number]) for number in numbers}
        missing = [number for number in numbers if rows[number] is None]
        new = dict(zip(missing, judge.score(sample, missing) if missing else [], strict=True))
        for number, score in new.items():
            if score.is_final:
                self._store.add({"score": score.value, "note": score.note}, *keys[number])
        stored = {number: Score(row["score"], row["note"]) for number, row in rows.items() if row}
        return [new.get(number) or stored[number] for number in numbers]


def make_judges(
    config: SampleAnswersConfig, samples: Sequence[Sample], context: Context
) -> dict[str, AnswerJudge]:
    """The judges that a stage asks for, by the names of their scores.

    Args:
        samples: all of the stage. Their answers to the same question are its choices where a sample names none; their
            texts are what the recognizer can write, where they are few; recordings of the training split are the
            voices of its speakers.

    Raises:
        ConfigError: a judge cannot be loaded.
    """
    make: dict[str, Callable[[], AnswerJudge]] = {
        "choice": lambda: ChoiceJudge(samples),
        "exact": ExactJudge,
        "reward_model": lambda: RewardJudge(_require(config.reward_model)),
        "words": lambda: WordsJudge(_choose_answer_recognizer(config, samples), config.language),
        "voice": lambda: LikenessJudge(_voices(config, samples, context), samples),
        "judge": lambda: VerdictJudge(
            load_judge(_require(config.judge), config.codec, config.judge_tokens),
            config.judge_prompt or DEFAULT_PROMPT,
        ),
    }
    return {name: make[name]() for name in config.score}


def check_labels(names: Sequence[str], samples: Sequence[Sample], where: str) -> None:
    """Check, before any answer is sampled, that some sample has what the scorers compare with.

    Raises:
        ConfigError: none has a right answer.
    """
    compared = sorted({"choice", "exact"}.intersection(names))
    if compared and not any(sample.messages[-1].role == "assistant" for sample in samples):
        raise ConfigError(
            f"score.{compared[0]}: no sample has a right answer",
            where,
            "end the messages of each with the assistant's right answer, or score by a reward_model or a judge",
        )


class ChoiceJudge:
    """1 where an answer names the right one of the choices where the prompt wants the answer, else 0."""

    fingerprint = None

    def __init__(self, samples: Sequence[Sample]) -> None:
        answered = [s for s in samples if s.messages[-1].role == "assistant" and s.texts("assistant")]
        self._choices_by_question = choices_of(answered)

    def about(self, sample: Sample) -> Any:
        """See `AnswerJudge.about`."""
        return None

    def score(self, sample: Sample, numbers: Sequence[int]) -> list[Score]:
        """See `AnswerJudge.score`."""
        right, choices = self._key_and_choices(sample, _right_answer_of(sample))
        right_place, form = list(choices).index(right), answer_form(sample)
        replies = [answer_in_form(text_of(sample.answers[number]), form) for number in numbers]
        named = [None if reply is None else read_choice(reply, choices, form == "free") for reply in replies]
        return [Score(float(choice == right_place)) for choice in named]

    def check_key(self, sample: Sample, right: str) -> None:
        """Check, before a sample is answered, that its right answer would be right.

        Raises:
            BadSample: it is none of the choices, or not read as the one that it is.
        """
        key, choices = self._key_and_choices(sample, right)
        place = read_choice(key, choices)
        if place is None or choices[place] != key:
            raise BadSample("", sample.id, f"the right answer {key!r} is not read as itself", "key not read")

    def _key_and_choices(self, sample: Sample, right: str) -> tuple[str, list[str]]:
        key = read_answer(right).answer
        question = " ".join(" ".join(sample.texts("user")).split())
        choices = [
            str(choice)
            for choice in sample.metadata.get("choices") or self._choices_by_question.get(question, ())
        ]
        if key not in choices:
            raise BadSample(
                "", sample.id, "the right answer is none of the choices: give metadata.choices", "no choices"
            )
        return key, choices


class ExactJudge:
    """1 where an answer is the right one, word by word, else 0."""

    fingerprint = None

    def about(self, sample: Sample) -> Any:
        """See `AnswerJudge.about`."""
        return None

    def score(self, sample: Sample, numbers: Sequence[int]) -> list[Score]:
        """See `AnswerJudge.score`."""
        right = _right_answer_of(sample)
        return [Score(float(text_of(sample.answers[number]) == right)) for number in numbers]


class RewardJudge:
    """The score of a reward model.

    Raises:
        ConfigError: the folder holds none.
    """

    def __init__(self, folder: Path) -> None:
        self._model: RewardModel = load_reward_model(folder, default_device())
        self.fingerprint: str | None = folder_digest(model_folder(folder))

    def about(self, sample: Sample) -> Any:
        """See `AnswerJudge.about`."""
        return conversation_content(sample.messages, sample.id)

    def score(self, sample: Sample, numbers: Sequence[int]) -> list[Score]:
        """See `AnswerJudge.score`."""
        parts = sample.audio_parts()
        clips = tuple(
            AudioClip(audio_part.path, sample.id, audio_part.path, audio_part.start_s, audio_part.end_s)
            for audio_part in parts
        )
        loaded = LoadedSample(sample, load_encodings(parts, sample.id, ""), clips)
        return [Score(value) for value in self._model.score(loaded, numbers)]


class WordsJudge:
    """The reward `words_score` of a spoken answer, with the recognizer's transcript.

    Args:
        language: of samples that name none.
    """

    def __init__(self, recognizer: ChosenJudge[Recognizer], language: str) -> None:
        self._recognizer, self._language = recognizer.judge, language
        self.fingerprint: str | None = f"{recognizer.fingerprint} spoken {language}"

    def _form(self, sample: Sample) -> TextForm:
        return choose_form("spoken", sample.language or self._language)

    def about(self, sample: Sample) -> Any:
        """The text to be said."""
        text = self._form(sample).apply(text_and_speaker(sample)[0])
        if not text:
            raise BadSample("", sample.id, "has no text to be said: give metadata.text", "no text")
        return text

    def score(self, sample: Sample, numbers: Sequence[int]) -> list[Score]:
        """See `AnswerJudge.score`."""
        self.about(sample)  # raises where there is no text
        text, form = text_and_speaker(sample)[0], self._form(sample)
        return [self._score(text, form, spoken_part(sample.answers[number])) for number in numbers]

    def _score(self, text: str, form: TextForm, audio_part: AudioPart) -> Score:
        try:
            wave = load_clip(Path(audio_part.path), audio_part.start_s, audio_part.end_s)
            return Score(*words_score(self._recognizer, form, wave, text))
        except MetricError as error:
            return Score(None, error.reason)


class LikenessJudge:
    """Cosine of a voice judge's embeddings of a spoken answer and of the voice that was asked for, -1 to 1.

    That voice is the first recording of the prompt; without one, the mean of recordings of the same speaker in the
    samples' training split.
    """

    def __init__(self, voices: ChosenJudge[VoiceJudge], samples: Sequence[Sample]) -> None:
        self._voices = voices.judge
        self.fingerprint: str | None = voices.fingerprint
        self._of_speaker = recordings_of_speakers(samples)
        self._reference_by_parts: dict[tuple[AudioPart, ...], Tensor] = {}

    def about(self, sample: Sample) -> Any:
        """Digests and spans of the reference recordings."""
        return content_of(self._references(sample), sample.id)

    def score(self, sample: Sample, numbers: Sequence[int]) -> list[Score]:
        """See `AnswerJudge.score`."""
        try:
            reference_D = self._reference(self._references(sample))
        except MetricError as error:
            reason = f"the voice that was asked for: {error.reason}"
            raise BadSample("", sample.id, reason, "no voice to compare with") from error
        return [self._score(reference_D, spoken_part(sample.answers[number])) for number in numbers]

    def _score(self, reference_D: Tensor, audio_part: AudioPart) -> Score:
        try:
            return Score(cosine(reference_D, self._embedding(audio_part)))
        except MetricError as error:
            return Score(None, error.reason)

    def _references(self, sample: Sample) -> tuple[AudioPart, ...]:
        prompt_audio = sample.audio("system") + sample.audio("user")
        speaker_audio = self._of_speaker.get(text_and_speaker(sample)[1], [])
        references = prompt_audio[:1] or spread_items(speaker_audio, MAX_REFERENCES)
        if not references:
            reason = "has no voice to compare with: no recording in its prompt, and none of its speaker"
            raise BadSample("", sample.id, reason, "no voice to compare with")
        return tuple(references)

    def _reference(self, parts: tuple[AudioPart, ...]) -> Tensor:
        if parts not in self._reference_by_parts:
            embeddings = [self._embedding(audio_part) for audio_part in parts]
            self._reference_by_parts[parts] = torch.stack(
                [one_D / one_D.norm() for one_D in embeddings]
            ).mean(dim=0)
        return self._reference_by_parts[parts]

    def _embedding(self, audio_part: AudioPart) -> Tensor:
        return embed(self._voices, load_clip(Path(audio_part.path), audio_part.start_s, audio_part.end_s))


class VerdictJudge:
    """The points that a language model gives an answer, 0 to 5."""

    def __init__(self, judge: LanguageJudge, prompt: str) -> None:
        self._judge, self._prompt = judge, prompt

    @cached_property
    def fingerprint(self) -> str | None:
        """See `AnswerJudge.fingerprint`."""
        return f"{self._judge.fingerprint}\n{self._prompt}"

    def about(self, sample: Sample) -> Any:
        """The conversation."""
        return conversation_content(sample.messages, sample.id)

    def score(self, sample: Sample, numbers: Sequence[int]) -> list[Score]:
        """See `AnswerJudge.score`."""
        answers = [sample.answers[number] for number in numbers]
        if self._judge.at_once == 1:
            return [self._score(sample, answer) for answer in answers]
        with ThreadPoolExecutor(self._judge.at_once) as pool:
            return list(pool.map(lambda answer: self._score(sample, answer), answers))

    def _score(self, sample: Sample, answer: RatedAnswer) -> Score:
        try:
            refuse_video(sample.messages)
            verdict = self._judge.reply(judge_message(self._prompt, sample.messages, answer))
        except (JudgeError, ValueError) as error:
            return Score(None, str(error), is_final=False)
        note = " ".join(verdict.split())[-MAX_NOTE_CHARACTERS:]
        points = read_score(verdict)
        return Score(None, f"no score in the verdict: {note}") if points is None else Score(points, note)


def spoken_part(answer: RatedAnswer) -> AudioPart:
    """The first recording of a spoken answer."""
    return answer.audio_parts()[0]


def _choose_answer_recognizer(
    config: SampleAnswersConfig, samples: Sequence[Sample]
) -> ChosenJudge[Recognizer]:
    """The recognizer; pocketsphinx is given a closed grammar where few texts are asked for, as in `evaluate`."""
    if config.recognizer != POCKETSPHINX:
        recognizer = choose_recognizer(config.recognizer, config.language)
        assert recognizer is not None
        return recognizer
    texts = {comparison_form(text_and_speaker(sample)[0], sample.language) for sample in samples}
    judge, grammar, _ = choose_grammar(sorted(texts - {""}))
    return ChosenJudge(judge, f"{POCKETSPHINX} {grammar}")


def _voices(
    config: SampleAnswersConfig, samples: Sequence[Sample], context: Context
) -> ChosenJudge[VoiceJudge]:
    """The given judge of voices; else one that is trained on the samples' speakers, kept in the stage's folder."""
    judge_name = config.voice_judge
    if judge_name is None:
        with context.progress("training a judge of voices", STEPS) as bar:
            # another seed than the recipe's: the stage `evaluate` trains its judge with that
            folder = trained_voice_judge(
                samples,
                context.folder / "judges" / "speaker",
                config.seed + 1,
                lambda step, loss: bar.advance(bar.task_ids[0]),
            )
        judge_name = str(folder)
    judge = choose_speaker_judge(judge_name)
    assert judge is not None
    return judge


def _require(value: Any) -> Any:
    assert value is not None  # `SampleAnswersConfig` refuses a score without its judge
    return value


def _right_answer_of(sample: Sample) -> str:
    right = sample.metadata.get("right")
    if not isinstance(right, str):
        raise BadSample(
            "", sample.id, "has no right answer: its last message must be the assistant's", "no right answer"
        )
    return right
