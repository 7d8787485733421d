"""Prompts and answers in text and speech, as families that speak take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from audiollm.data.chat.conditions import Conditions
from audiollm.data.hearing.features import FeatureShape, PartAudio, no_codes, part_audio
from audiollm.data.records.sample import ContentPart, Message, RatedAnswer, check_without_phrases
from audiollm.data.records.source import LoadedSample

AS_IT_IS = Conditions()


@dataclass(frozen=True)
class AnswerContent:
    """An answer in text, speech or both."""

    content: Sequence[ContentPart]
    codes: Sequence[Tensor] = ()
    """Codes `[K, frames]` of its audio parts, in order."""


@dataclass(frozen=True)
class PromptedContents:
    """A prompt, and the answers to it in text or speech whose log-probabilities are asked for."""

    id: str
    """Of the sample, for errors."""
    prompt: Sequence[Message]
    """All messages before the assistant's answer."""
    audio: Sequence[PartAudio]
    """Codes or features of the prompt's audio parts, in order; varied (`augment_features`) once for all answers."""
    answers: Sequence[AnswerContent]
    place: str = ""
    """Where the sample was read, for errors."""
    conditions: Conditions = AS_IT_IS
    """How the prompt is shown, to all answers alike. Text and speaker are hidden only where all answers are spoken."""
    seed: int = 0
    """Of the codes that are corrupted in the prompt; those of answers never are."""
    language: str | None = None
    """Language of the answer, where it is known."""
    vector_C: Tensor | None = None
    """A speaker encoder's vector of the voice, for models that read one."""
    chunk_frames: int | None = None
    """Code frames of a chunk, where the last message is a recording that is heard as a stream; None: it is none."""

    @property
    def before_stream(self) -> PromptedContents:
        """The messages before the recording of a stream."""
        return replace(self, prompt=self.prompt[:-1], audio=self.audio[:-1])


def prompted_contents(
    prompt: LoadedSample,
    loaded: LoadedSample,
    answers: Sequence[int],
    place: str = "",
    encoder: FeatureShape | None = None,
) -> PromptedContents:
    """Take the messages of a sample, and answers of another or the same one; codes are those of the first encoding.

    Args:
        answers: numbers of the answers of `loaded`.
        place: where the sample was read, for errors.
        encoder: of the model, where recordings are given to it as features; None: as codes.

    Raises:
        BadSample: an audio part without codes.
    """
    question = prompt.without_answers()
    audio = part_audio(question, (question.encodings or [[]])[0], encoder)
    contents = [answer_content(loaded, number) for number in answers]
    return PromptedContents(
        prompt.sample.id, prompt.sample.messages, audio, contents, place, language=prompt.sample.language
    )


def answer_content(loaded: LoadedSample, number: int) -> AnswerContent:
    """Return an answer with the codes of its audio parts.

    Raises:
        BadSample: some of them have no codes.
    """
    content, answered = loaded.sample.answers[number].content, loaded.answered(number)
    codes = (answered.encodings or [[]])[0][loaded.num_asked :]
    if len(codes) < len(loaded.sample.answers[number].audio_parts()):
        raise no_codes(answered.audio[loaded.num_asked + len(codes)])
    return AnswerContent(content, codes)


def with_last_message_as_answer(loaded: LoadedSample) -> LoadedSample:
    """Return the sample with the assistant's last message as its only answer to choose, with that one's sound.

    Raises:
        BadSample: the message has phrases.
    """
    check_without_phrases(loaded.sample, "")
    *before, last = loaded.sample.messages
    recordings = loaded.num_asked
    sample = loaded.sample.model_copy(
        update={"messages": before, "answers": [RatedAnswer(content=last.content)]}
    )
    encodings = [encoding[:recordings] for encoding in loaded.encodings]
    return replace(loaded, sample=sample, encodings=encodings, audio=loaded.audio[:recordings])
