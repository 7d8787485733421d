"""Prompts of Higgs Audio v3 TTS: no turns, marks before each text and each recording, and delayed rows of codes.

    <|tts|> <|ref_text|> words <|ref_audio|> rows  <|text|> words <|audio|> rows

References stand before the text; one without its words begins with `<|ref_audio|>`. The row of `<|audio|>` chooses the
first row of codes. Words may hold controls of the model's own (`<|emotion:amusement|>`).

Source: `HiggsAudioV3PromptBuilder` of the package mlx-audio 0.6.2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from audiollm.data.text.tokenizer import read_text_tokenizer
from audiollm.errors import ConfigError
from audiollm.families.higgs_v3_tts.model import (
    CODE_HEAD,
    CODE_TABLE,
    MARKED_CODES,
    TEXT_HEAD,
    TEXT_TABLE,
    HiggsV3Talker,
)
from audiollm.families.talkers.delayed import DelayedKind
from audiollm.families.talkers.kind import PromptRows, SpeakingText, TalkerSampling
from audiollm.families.talkers.rows import SpeechRows, join_rows, text_rows
from audiollm.families.talkers.turns import SpeechPrompt
from audiollm.files.json_files import read_json_file
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.hub_models.needed_files import CODEC_FOLDER
from audiollm.models.pretrained import StoredWeights

MODEL_TYPE = "higgs_multimodal_qwen3"
PROMPT_MARKS = ("<|tts|>", "<|ref_text|>", "<|ref_audio|>", "<|text|>", "<|audio|>")
CODEC_PREFIX = "tied.embedding.modality_embeddings.0.model."
"""Prefix of the names of the codec's weights."""
ROPE_THETA = 1e6
"""Base of the rotary angles where config.json has null: Qwen3's, with which the models were trained."""
CONTROL = re.compile(r"<\|\w+:\w+\|>")
"""A mark that a text may hold: a manner, or a sound."""
DOWNLOAD = "download config.json again, or give another model"


class HiggsV3Kind(DelayedKind):
    """See `TalkerKind`."""

    model_type = MODEL_TYPE
    max_turns = 1
    has_tied_heads = True
    groups: ClassVar[Mapping[str, str]] = {
        "backbone": r"body\.layers\..*",
        "attention": r"body\.layers\.\d+\.self_attn\..*",
        "feed_forward": r"body\.layers\.\d+\.mlp\..*",
    }

    def __init__(self, folder: Path) -> None:
        """Read config.json.

        Raises:
            ConfigError: it is damaged, or says what this model is not.
        """
        super().__init__(folder)
        self._where = str(folder / "config.json")
        config = read_json_file(folder / "config.json", dict)
        text, codes = (self._part(config, name) for name in ("text_config", "audio_encoder_config"))
        self._check_fields("text_config", text, {"model_type": "qwen3", "use_sliding_window": False})
        self._check_fields(
            "audio_encoder_config",
            codes,
            {
                "encoder_type": "discrete",
                "use_delay_pattern": True,
                "tie_word_embeddings": True,
                "out_dim": text.get("hidden_size"),
            },
        )
        self.num_codebooks, entries = (self._number(codes, name) for name in ("num_codebooks", "vocab_size"))
        self._number(text, "vocab_size")
        self._entries, self.begin, self.end = entries, entries - MARKED_CODES, entries - 1
        self.suppressed, self.suppressed_depth = (self.begin,), (self.begin, self.end)
        theta = text.get("rope_theta") or (text.get("rope_parameters") or {}).get("rope_theta")
        self._text_config = {**text, "rope_theta": theta or ROPE_THETA}

    def new_talker(self) -> HiggsV3Talker:
        """See `TalkerKind.new_talker`."""
        return HiggsV3Talker(self._text_config, self.num_codebooks, self._entries, self._where)

    def tied(self) -> Mapping[str, str]:
        """See `TalkerKind.tied`. A head of words that is not tied goes on unchanged: nothing reads it."""
        is_tied = self._text_config.get("tie_word_embeddings", True)
        return {CODE_HEAD: CODE_TABLE, **({TEXT_HEAD: TEXT_TABLE} if is_tied else {})}

    def unknown_weights(self, names: Sequence[str]) -> Sequence[str]:
        """See `TalkerKind.unknown_weights`."""
        tables = (TEXT_TABLE, CODE_TABLE, TEXT_HEAD, CODE_HEAD)
        return [name for name in names if name not in tables and not name.startswith(("body.", CODEC_PREFIX))]

    def prompt_rows(self, prompt: SpeechPrompt) -> PromptRows:
        """See `TalkerKind.prompt_rows`."""
        if prompt.instruction:
            raise ValueError(
                f"an instruction ({prompt.instruction:.40}), and this model's prompt has no place for one"
            )
        has_voice = bool(prompt.before) or prompt.reference_KT is not None
        if prompt.speaker is not None and not has_voice:
            raise ValueError(
                f"speaker {prompt.speaker!r}: this model knows voices by recordings alone. Show one before the text "
                "(task clone_by_turn, --reference), or leave the name out where all recordings are of one voice"
            )
        blocks = [self._words("<|tts|>")]
        if prompt.reference_KT is not None:
            blocks += [self._words("<|ref_audio|>"), self.delayed_rows(prompt.reference_KT)]
        for turn in prompt.before:
            self.text.ids(turn.text)
            blocks += [
                self._words(f"<|ref_text|>{turn.text}<|ref_audio|>"),
                self.delayed_rows(turn.codes_KT),
            ]
        self.text.ids(prompt.text)
        return PromptRows(join_rows([*blocks, self._words(f"<|text|>{prompt.text}<|audio|>")]))

    def sampling(self, first: SamplingConfig) -> TalkerSampling:
        """See `TalkerKind.sampling`: all codebooks alike, and one frame or more."""
        return TalkerSampling(first, first, min_frames=1)

    @property
    def codec_folder(self) -> Path:
        """See `TalkerKind.codec_folder`: among the weights, or in a folder beside them."""
        beside = self.folder / CODEC_FOLDER
        return beside if beside.is_dir() else self.folder

    @property
    def has_codec(self) -> bool:
        """See `TalkerKind.has_codec`."""
        return self.codec_folder != self.folder or any(
            name.startswith(CODEC_PREFIX) for name in StoredWeights(self.folder).names
        )

    @cached_property
    def text(self) -> SpeakingText:
        """See `TalkerKind.text`.

        Raises:
            ConfigError: the tokenizer lacks a mark of the prompt.
        """
        read = SpeakingText.of(read_text_tokenizer(self.folder))
        lacking = [mark for mark in PROMPT_MARKS if read.tokenizer.token_to_id(mark) is None]
        if lacking:
            raise ConfigError(
                f"{lacking[0]}: no token of this tokenizer",
                str(self.folder / "tokenizer.json"),
                "download the model's tokenizer again",
            )
        forbidden = {mark for mark in read.marks if not CONTROL.fullmatch(mark)}
        return SpeakingText(read.tokenizer, frozenset(forbidden | set(PROMPT_MARKS)))

    @property
    def marks(self) -> Mapping[int, str]:
        """See `TalkerKind.marks`."""
        return {self.begin: "BOC", self.end: "EOC"}

    def _words(self, text: str) -> SpeechRows:
        return text_rows(self.text.marked_ids(text), self.num_codebooks)

    def _part(self, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        data = config.get(name)
        if not isinstance(data, dict):
            raise ConfigError(f"{name}: not given", self._where, DOWNLOAD)
        return data

    def _number(self, data: Mapping[str, Any], name: str) -> int:
        value = data.get(name)
        if not isinstance(value, int) or value < 1 + MARKED_CODES * (name == "vocab_size"):
            raise ConfigError(f"{name}: {value!r} is no size of a model", self._where, DOWNLOAD)
        return value

    def _check_fields(self, part: str, data: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        """Refuse a field that says another value than this model has; one that is left out says nothing."""
        for name, value in expected.items():
            if data.get(name, value) not in (value, None):
                raise ConfigError(
                    f"{part}.{name}: {data[name]!r}, and models with {value!r} alone are read",
                    self._where,
                    DOWNLOAD,
                )
