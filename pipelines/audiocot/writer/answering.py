"""Questions of `thinking.jsonl` with true answers, and what a model answers to them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.source import LoadedSample
from audiollm.data.records.video_clips import PictureSettings
from audiollm.errors import BadSample, StageError
from audiollm.models.audio_llms.inputs import Pictures
from pipelines.audiocot.writer.scores import QuestionKind
from pipelines.audiocot.writer.settings import EvaluateThoughtsConfig

if TYPE_CHECKING:
    from audiollm.families.rollout import RolloutSettings


@dataclass(frozen=True)
class ThoughtQuestion:
    """A question with its true answer."""

    loaded: LoadedSample
    """The question as the model gets it, after the exchanges of a control."""
    question: QuestionKind
    truth: dict[str, Any]
    duration_s: float
    original: LoadedSample
    """The question as `thinking.jsonl` has it, before any exchange."""

    @property
    def id(self) -> str:
        return self.loaded.sample.id


def read_thought_questions(config: EvaluateThoughtsConfig) -> list[ThoughtQuestion]:
    """Read the questions of the split, as many of each kind as are wanted, in the order of the file.

    Raises:
        StageError: there is none, one without its answer, or too few to exchange their parts.
    """
    source = ManifestSource(str(config.samples))
    by_kind: dict[str, list[ThoughtQuestion]] = {kind: [] for kind in config.questions}
    for number in range(len(source)):
        try:
            loaded = source[number]
        except BadSample:
            continue
        sample, facts = loaded.sample, loaded.sample.metadata
        kind = facts.get("question")
        if kind not in by_kind:
            continue
        if config.split is not None and sample.is_held_out != (config.split == "test"):
            continue
        try:
            truth, duration_s = json.loads(sample.texts("assistant")[-1]), float(facts["duration_s"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise StageError(
                f"evaluate_thoughts: {sample.id} has no record as its answer, or no duration_s ({error!r})",
                "give thinking.jsonl of a run of audiocot",
                2,
            ) from None
        by_kind[kind].append(ThoughtQuestion(loaded, kind, truth, duration_s, loaded))
    questions = [
        question
        for kind in config.questions
        for question in _draw_questions(by_kind[kind], config.max_questions)
    ]
    if not questions:
        raise StageError(
            f"evaluate_thoughts: {config.samples.name} has no question of the split {config.split or 'any'}",
            "give thinking.jsonl of an audiocot run with held-out clips (`--held-out 0.05`), or set split",
            2,
        )
    return exchanged_parts(questions, config.exchange) if config.exchange else questions


def exchanged_parts(questions: Sequence[ThoughtQuestion], parts: Sequence[str]) -> list[ThoughtQuestion]:
    """The questions, each with videos or sounds of the next one of its kind that is about another clip.

    Raises:
        StageError: a kind has questions about one clip alone.
    """
    exchanged = []
    for place, question in enumerate(questions):
        candidates = [*questions[place + 1 :], *questions[:place]]
        lender = next((candidate for candidate in candidates if _may_lend(candidate, question)), None)
        if lender is None:
            raise StageError(
                f"evaluate_thoughts: {question.id} has no other question to exchange {' and '.join(parts)} with",
                "raise max_questions",
                2,
            )
        changes: dict[str, Any] = {}
        if "video" in parts:
            changes["videos"] = lender.original.videos
        if "sound" in parts:
            changes["audio"] = lender.original.audio
        exchanged.append(replace(question, loaded=replace(question.loaded, **changes)))
    return exchanged


class ThoughtWriter:
    """A model that answers questions in batches, greedily.

    Attributes:
        problems: question -> why the model could not take it.

    Raises:
        ConfigError: the folder holds no model, or one that does not see, where pictures are shown.
    """

    def __init__(self, config: EvaluateThoughtsConfig) -> None:
        from audiollm.devices import default_device
        from audiollm.families.policies import load_policy
        from audiollm.models.pretrained import model_folder

        self._config, self.problems = config, dict[str, str]()
        pictures = config.pictures or PictureSettings.beside(model_folder(config.model))
        self._policy = load_policy(config.model, pictures=pictures)
        self._policy.root.eval().to(default_device())
        self._engine = self._policy.rollout_engine(config.batch_size)

    def answers(
        self, questions: Sequence[ThoughtQuestion], advance: Callable[[int], None] = lambda count: None
    ) -> list[str]:
        """Answer the questions in order; a question that the model cannot take has an empty answer."""
        from audiollm.families.rollout import RolloutSettings

        settings = RolloutSettings(
            self._config.seed, 0, temperature=0.0, max_text_tokens=self._config.max_answer_tokens
        )
        answers: list[str] = []
        size = self._config.batch_size
        for first in range(0, len(questions), size):
            batch = questions[first : first + size]
            prompts = [self._prompted(question) for question in batch]
            usable = [place for place, prompt in enumerate(prompts) if prompt is not None]
            generated = self._generate_texts([prompts[place] for place in usable], settings)
            texts = dict(zip(usable, generated, strict=True))
            answers += [texts.get(place, "") for place in range(len(batch))]
            advance(len(batch))
        return answers

    def _generate_texts(self, prompts: Sequence[Any], settings: RolloutSettings) -> list[str]:
        """Answers to a batch; where the model's processor refuses one, they are asked one by one."""
        if not prompts:
            return []
        try:
            return [group[0].text for group in self._engine.sample(prompts, [[0]] * len(prompts), settings)]
        except BadSample as error:
            if len(prompts) > 1:
                return [text for prompt in prompts for text in self._generate_texts([prompt], settings)]
            self.problems[prompts[0].id] = error.reason
            return [""]

    def _prompted(self, question: ThoughtQuestion) -> Any:
        from audiollm.supervised.answers.batches import with_last_message_as_answer

        try:
            prompt = self._policy.take(with_last_message_as_answer(question.loaded), [0])
        except BadSample as error:
            self.problems[question.id] = error.reason
            return None
        if not self._config.shuffle_frames:
            return prompt
        dice = random.Random(f"frames {self._config.seed} {question.id}")
        turns = [
            (role, [_shuffled(content_part, dice) for content_part in parts]) for role, parts in prompt.prompt
        ]
        return replace(prompt, prompt=turns)


# Private


def _draw_questions(questions: Sequence[ThoughtQuestion], max_questions: int) -> list[ThoughtQuestion]:
    """At most so many questions, drawn by their ids: where operations take turns, every fourth one may be a removal."""
    drawn_places = sorted(
        range(len(questions)), key=lambda place: sha256(questions[place].id.encode()).digest()
    )
    return [questions[place] for place in sorted(drawn_places[:max_questions])]


def _may_lend(lender: ThoughtQuestion, question: ThoughtQuestion) -> bool:
    """Whether parts of another question fit: one kind, another clip, as many parts."""
    clips = [candidate.original.sample.metadata.get("clip") for candidate in (question, lender)]
    sizes = [
        (len(candidate.original.videos), len(candidate.original.audio)) for candidate in (question, lender)
    ]
    return lender.question == question.question and clips[0] != clips[1] and sizes[0] == sizes[1]


def _shuffled(content_part: Any, dice: random.Random) -> Any:
    """Pictures in another order; their times stay."""
    if not isinstance(content_part, Pictures):
        return content_part
    frames = list(content_part.frames)
    dice.shuffle(frames)
    return Pictures(tuple(frames), content_part.times_s)
