"""What a family tells of its talkers: how prompts are laid out, what ends speech, how it is sampled.

Shapes: K codebooks, T frames, L rows.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from audiollm.audio import Waveform
from audiollm.families.talkers.rows import (
    NONE,
    SpeechRows,
    SpeechTargets,
    frame_rows,
    join_rows,
    with_targets,
)
from audiollm.families.talkers.talker import Talker
from audiollm.families.talkers.turns import SpeechPrompt
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.train.settings import PromptMix


@dataclass(frozen=True)
class TalkerSampling:
    """How codes are drawn: those of the first codebook, and those of the others."""

    first: SamplingConfig
    depth: SamplingConfig
    repetition_penalty: float = 1.0
    """Logits of first codes that were said before are divided by it, or multiplied where they are negative (CTRL,
    arXiv 1909.05858); 1: none."""
    min_frames: int = 0
    """Frames before which the end is left out."""

    @classmethod
    def plain(cls, temperature: float) -> TalkerSampling:
        """Temperature alone, in both."""
        config = SamplingConfig(temperature=temperature, top_p=1.0)
        return cls(config, config)


@dataclass(frozen=True)
class PromptRows:
    """A prompt as rows, and the words that stand beside the frames behind it."""

    rows: SpeechRows
    beside: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """Words of the frames' rows, one a frame from the first on."""
    after: int = NONE
    """The word beside every frame behind those."""
    turns: tuple[SpeechTargets, ...] = ()
    """Earlier turns that are learned, too."""

    def frames(self, codes_KT: Tensor, first: int = 0) -> SpeechRows:
        """Rows of frames behind the prompt.

        Args:
            first: the number of the first of them.
        """
        rows = frame_rows(codes_KT)
        count = rows.num_rows
        words_T = torch.full((count,), self.after)
        beside = self.beside[first : first + count]
        words_T[: len(beside)] = beside
        return replace(rows, text_L=words_T)


class TalkerKind(ABC):
    """A family's knowledge of a talker's folder, without its weights.

    Args:
        folder: with `config.json`.
    """

    model_type: str
    depth_weight: float | None
    """Weight of the depth decoder's mean loss beside the backbone's, as the authors have it; None: there is none, and
    the loss is one mean over all targets."""
    delay: int = 0
    """Rows by which a code of a frame stands behind that of the codebook before."""
    default_targets: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    groups: ClassVar[Mapping[str, str]]
    """Parts of the model by the names that `lora.target_modules` may give, and the module that holds each."""
    suppressed: Sequence[int] = ()
    """Entries of the first codebook that sampling leaves out."""
    suppressed_depth: Sequence[int] = ()
    """Entries of the other codebooks that sampling leaves out."""
    end: int
    """Entry of the first codebook that ends the speech."""
    end_codes: Sequence[int] | None = None
    """The other codes of the end, where it is a frame; None: the first code alone ends it."""
    speakers: Sequence[str] = ()
    """Names of voices that the model knows; none: any name, or none at all."""
    has_tied_heads: bool = False
    """Whether the heads are the tables by which codes are read."""
    reads_vectors: bool = False
    """Whether a voice can be given as a vector of a recording."""
    max_turns: int | None = None
    """Most turns that a prompt shows before the text; None: as many as there are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def new_talker(self) -> Talker:
        """Make the model of the folder's config; under `torch.device("meta")`, without memory."""

    @abstractmethod
    def prompt_rows(self, prompt: SpeechPrompt) -> PromptRows:
        """Lay out a prompt.

        Raises:
            ValueError: the model takes no such prompt.
        """

    @abstractmethod
    def sampling(self, first: SamplingConfig) -> TalkerSampling:
        """How speech is drawn, where the first codebook's codes are drawn so."""

    @property
    @abstractmethod
    def codec_folder(self) -> Path:
        """The folder of the codec that the model speaks in."""

    @property
    def has_codec(self) -> bool:
        """Whether the codec is there; a small model of one's own speaks in another's."""
        return self.codec_folder.is_dir()

    @property
    @abstractmethod
    def text(self) -> SpeakingText:
        """The tokenizer of its texts."""

    @property
    def marks(self) -> Mapping[int, str]:
        """Names of the entries of the first codebook's table that are no codes, for a person."""
        return {}

    def readable(self, text: int, first: int) -> tuple[str, str]:
        """A row's word, and its mark or first code, for a person; empty where there is none."""
        word = "" if text == NONE else json.dumps(self.text.decode(text), ensure_ascii=False)[1:-1]
        return word, "" if first == NONE else self.marks.get(first, str(first))

    def complete(
        self, prompt: SpeechPrompt, vector_C: Tensor | None, mix: PromptMix | None, id: str
    ) -> SpeechPrompt:
        """Return a prompt as it is shown.

        Args:
            vector_C: of a recording of the voice, where the model reads vectors.
            mix: how often it is shown in another form.
            id: of the sample, by which that is drawn.

        Raises:
            ValueError: the model knows no other forms.
        """
        if mix is not None:
            raise ValueError("prompt_mix: this model's prompts have one form; leave it out")
        return prompt

    def vector_of(self, recording: Waveform) -> Tensor:
        """Compute the vector `[C]` of a recording of a voice.

        Raises:
            ValueError: it is too short, or the model reads no vectors.
        """
        raise ValueError(f"models of {self.model_type} read no vectors of voices")

    def check_text(self, text: str) -> None:
        """Check that a text can be said.

        Raises:
            ValueError: it holds a mark of the model's own.
        """
        self.text.ids(text)

    def tied(self) -> Mapping[str, str]:
        """Names of weights that are the same tensor as others: name -> the other's name. The model has both, or the
        other alone."""
        return {}

    def unknown_weights(self, names: Sequence[str]) -> Sequence[str]:
        """Names, among those of all stored weights, of what would be neither read nor right to carry on unchanged."""
        return ()

    def answer_rows(
        self, prompt: SpeechPrompt, codes_KT: Tensor, ended: bool = True, is_sampled: bool = False
    ) -> SpeechRows:
        """Lay out a prompt and the speech behind it, whose codes are the targets.

        Args:
            ended: whether the end is a target, too; a drawn answer that a limit cut has none.

        Raises:
            ValueError: the model takes no such prompt.
        """
        laid_out = self.prompt_rows(prompt)
        rows = join_rows([laid_out.rows, laid_out.frames(codes_KT)])
        end = self.end if ended else None
        span = SpeechTargets.of(laid_out.rows.num_rows, codes_KT, end, self.end_codes)
        return with_targets(rows, [*laid_out.turns, span], is_sampled)

    def is_end(self, codes_K: Tensor) -> bool:
        """Whether drawn codes are the end, and no frame."""
        if self.end_codes is None:
            return int(codes_K[0]) == self.end
        return codes_K.tolist() == [self.end, *self.end_codes]


@dataclass(frozen=True)
class SpeakingText:
    """A text tokenizer and the marks that no text may hold."""

    tokenizer: Any
    """Of the package tokenizers."""
    marks: frozenset[str]

    @classmethod
    def of(cls, tokenizer: Any) -> SpeakingText:
        """Take the special tokens of a tokenizer as marks."""
        added = tokenizer.get_added_tokens_decoder().values()
        return cls(tokenizer, frozenset(token.content for token in added if token.special))

    def ids(self, text: str) -> list[int]:
        """Encode a text.

        Raises:
            ValueError: it holds a mark of the model's own.
        """
        mark = next((mark for mark in sorted(self.marks) if mark in text), None)
        if mark is not None:
            raise ValueError(f"the text holds {mark}, a mark of the model's own; leave it out")
        return self.marked_ids(text)

    def marked_ids(self, text: str) -> list[int]:
        """Encode a text in which marks are meant."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token: int) -> str:
        """The text of a token, marks included."""
        text: str = self.tokenizer.decode([token], skip_special_tokens=False)
        return text
