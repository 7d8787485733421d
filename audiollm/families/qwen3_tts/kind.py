"""What is told of Qwen3-TTS: two streams that are added, a word and a code or mark in a row.

    words    <|im_start|> assistant \\n   pad   pad       pad     (pad)     bos    | form of the text ...
    codes                                nothink think_bos think_eos (voice)  pad  |

The form of the text is `whole` (all words beside the mark pad, then the frames beside the word pad; the default of
named voices) or `interleaved` (word n beside frame n - 1; the default of cloning). With a language, the first marks are
think, think_bos, LANGUAGE, think_eos. A voice is a row of the table of codes, or the vector of the speaker encoder.
A recording with its words stands before the text, in either form; an instruction before all.

Source: `Qwen3TTSForConditionalGeneration.generate` of the package `qwen-tts` 0.1.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from audiollm.audio import Waveform
from audiollm.data.text.tokenizer import FILE_NAME, read_text_tokenizer
from audiollm.errors import ConfigError, suggestion
from audiollm.families.qwen3_tts.model import Qwen3TTSTalker
from audiollm.families.talkers.kind import PromptRows, SpeakingText, TalkerKind, TalkerSampling
from audiollm.families.talkers.rows import NONE, SpeechRows, frame_rows, join_rows, text_rows
from audiollm.families.talkers.turns import SpeechPrompt, draw_shares
from audiollm.files.json_files import OFFLINE, read_json_file
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.models.generation_config import FILE_NAME as GENERATION_FILE
from audiollm.train.settings import PromptMix

if TYPE_CHECKING:
    from audiollm.families.qwen3_tts.speaker_encoder import SpeakerEncoder

LANGUAGES = {
    "zh": "chinese", "en": "english", "de": "german", "it": "italian", "pt": "portuguese", "es": "spanish",
    "ja": "japanese", "ko": "korean", "fr": "french", "ru": "russian",
}  # fmt: skip
"""Names of languages in config.json by their codes (ISO 639-1)."""
AUTO = "auto"
"""The language of a text whose prompt names none."""
CODEC_12HZ = "qwen3_tts_tokenizer_12hz"
HEAD_TOKENS, TAIL_TOKENS, REFERENCE_TAIL = 3, 5, 2
"""Tokens of a turn before its words, and behind them."""
MIN_FRAMES = 2
"""Fewest frames of speech that the published package draws."""
MARK_FIELDS = (
    "codec_eos_token_id", "codec_think_id", "codec_nothink_id", "codec_think_bos_id", "codec_think_eos_id",
    "codec_pad_id", "codec_bos_id",
)  # fmt: skip


class Qwen3TTSKind(TalkerKind):
    """See `TalkerKind`."""

    model_type = "qwen3_tts"
    depth_weight = 0.3
    max_turns = 1
    groups: ClassVar[Mapping[str, str]] = {
        "talker": r"talker\.model\.layers\..*",
        "code_predictor": r"talker\.code_predictor\.model\.layers\..*",
        "text_projection": r"talker\.text_projection\..*",
    }

    def __init__(self, folder: Path) -> None:
        """Read config.json.

        Raises:
            ConfigError: it is damaged, or of a model with another codec.
        """
        super().__init__(folder)
        self._where = str(folder / "config.json")
        self.config = read_json_file(folder / "config.json", dict)
        kind = self.config.get("tokenizer_type")
        if kind != CODEC_12HZ:
            raise ConfigError(
                f"tokenizer_type: {kind!r}, and models of {CODEC_12HZ} alone are read",
                self._where,
                "give a model whose name has 12Hz in it",
            )
        talker = self.config.get("talker_config")
        if not isinstance(talker, dict) or not isinstance(talker.get("code_predictor_config"), dict):
            raise ConfigError("talker_config: not given", self._where, "download config.json again")
        lacking = [
            name for name in (*MARK_FIELDS, "vocab_size", "num_code_groups") if talker.get(name) is None
        ]
        if lacking:
            raise ConfigError(
                f"talker_config.{lacking[0]}: not given", self._where, "download config.json again"
            )
        self.talker_config: Mapping[str, Any] = talker
        self.end = int(talker["codec_eos_token_id"])
        self.num_codes = int(talker["code_predictor_config"]["vocab_size"])
        """Codes of a codebook; entries of the first table from here on are marks and voices."""
        self.suppressed = [
            entry for entry in range(self.num_codes, int(talker["vocab_size"])) if entry != self.end
        ]
        self.reads_vectors = self.is_base
        self.speakers = sorted(talker.get("spk_id") or {})

    @property
    def is_base(self) -> bool:
        """Whether the model clones voices: it has a speaker encoder."""
        return bool(self.config.get("tts_model_type") == "base")

    def new_talker(self) -> Qwen3TTSTalker:
        """See `TalkerKind.new_talker`."""
        return Qwen3TTSTalker(self.talker_config, self._where)

    def prompt_rows(self, prompt: SpeechPrompt) -> PromptRows:
        """See `TalkerKind.prompt_rows`."""
        if prompt.reference_KT is not None and prompt.vector_C is None:
            raise ValueError(
                "a reference without its words: this model hears it through its speaker encoder, and has none"
            )
        if len(prompt.before) > 1:
            raise ValueError(f"{len(prompt.before)} turns before the text, and this model's prompt holds one")
        head, words = self._prompt_head(prompt), self._turn_words(prompt.text)
        reference = prompt.before[0] if prompt.before else None
        if reference is not None:
            words = [*self._reference_words(reference.text), *words]
        form = prompt.form or ("interleaved" if self.is_base else "whole")
        codes_KT = None if reference is None else reference.codes_KT
        behind = [*words, self._word_mark("eos")]
        return (
            self._lay_out_whole(head, behind, codes_KT)
            if form == "whole"
            else self._lay_out_interleaved(head, behind, codes_KT)
        )

    def complete(
        self, prompt: SpeechPrompt, vector_C: Tensor | None, mix: PromptMix | None, id: str
    ) -> SpeechPrompt:
        """See `TalkerKind.complete`. Without a name that the model knows, the voice is the vector."""
        mix, draws = mix or PromptMix(), draw_shares(id)
        if mix.learned_turns:
            raise ValueError("prompt_mix: learned_turns is for models whose prompts are conversations (CSM)")
        named = (prompt.speaker or "").lower() in (self.talker_config.get("spk_id") or {})
        if vector_C is not None and (not named or draws[0] < mix.vector):
            prompt = replace(prompt, speaker=None, vector_C=vector_C, reference_KT=None)
        if draws[1] < mix.no_voice:
            prompt = replace(prompt, speaker=None, vector_C=None, reference_KT=None)
        if draws[2] < mix.no_language:
            prompt = replace(prompt, language=None)
        if draws[3] < mix.no_instruction:
            prompt = replace(prompt, instruction="")
        if mix.interleaved is not None:
            prompt = replace(prompt, form="interleaved" if draws[4] < mix.interleaved else "whole")
        return prompt

    def vector_of(self, recording: Waveform) -> Tensor:
        """See `TalkerKind.vector_of`."""
        from audiollm.families.qwen3_tts.speaker_encoder import SAMPLE_RATE

        return self._speaker_encoder.encode(recording.mono().resample(SAMPLE_RATE).samples_CN)

    @cached_property
    def _speaker_encoder(self) -> SpeakerEncoder:
        from audiollm.families.qwen3_tts.speaker_encoder import load_speaker_encoder

        return load_speaker_encoder(self.folder, self.config["speaker_encoder_config"])

    def sampling(self, first: SamplingConfig) -> TalkerSampling:
        """See `TalkerKind.sampling`: the code predictor's settings, and the penalty, are those of
        generation_config.json, else as published (temperature 0.9, the 50 likeliest; 1.05)."""
        path = self.folder / GENERATION_FILE
        data: Mapping[str, Any] = read_json_file(path, dict) if path.exists() else {}
        penalty = float(data.get("repetition_penalty", 1.05))
        if first.temperature == 0 or data.get("subtalker_dosample") is False:
            return TalkerSampling(first, SamplingConfig(temperature=0.0), penalty, MIN_FRAMES)
        depth = SamplingConfig(
            temperature=float(data.get("subtalker_temperature", 0.9)),
            top_k=int(data.get("subtalker_top_k", 50)),
            top_p=float(data.get("subtalker_top_p", 1.0)),
        )
        return TalkerSampling(first, depth, penalty, MIN_FRAMES)

    @property
    def codec_folder(self) -> Path:
        """See `TalkerKind.codec_folder`."""
        return self.folder / "speech_tokenizer"

    @cached_property
    def text(self) -> SpeakingText:
        """See `TalkerKind.text`."""
        if (self.folder / FILE_NAME).exists():
            return SpeakingText.of(read_text_tokenizer(self.folder))
        from transformers import AutoTokenizer  # of vocab.json and merges.txt, as published

        return SpeakingText.of(AutoTokenizer.from_pretrained(str(self.folder), **OFFLINE)._tokenizer)

    @property
    def marks(self) -> Mapping[int, str]:
        """See `TalkerKind.marks`."""
        names = {int(self.talker_config[name]): _short(name) for name in MARK_FIELDS}
        voices = {int(row): f"voice {name}" for name, row in (self.talker_config.get("spk_id") or {}).items()}
        return names | voices | {row: name for name, row in self._language_ids.items()}

    @property
    def _language_ids(self) -> dict[str, int]:
        return {name: int(row) for name, row in (self.talker_config.get("codec_language_id") or {}).items()}

    def _prompt_head(self, prompt: SpeechPrompt) -> SpeechRows:
        """Rows before the text: an instruction, the role, marks, language and voice."""
        books, mark = int(self.talker_config["num_code_groups"]), self._code_mark
        language = self._language_row(prompt)
        before = [mark("nothink")] if language is None else [mark("think")]
        middle = [mark("think_bos"), *([] if language is None else [language]), mark("think_eos")]
        voice = self._voice_row(prompt)
        codes = [*before, *middle, *([] if voice is None else [voice]), mark("pad")]
        words = [self._word_mark("pad")] * (len(codes) - 1) + [self._word_mark("bos")]
        marks = text_rows(words, books)
        vectors: tuple[tuple[int, Tensor], ...] = ()
        if prompt.vector_C is not None:
            vectors = ((len(codes) - 2, prompt.vector_C),)
        marks = SpeechRows(marks.text_L, torch.tensor(codes), marks.rest_LJ, vectors)
        blocks = [text_rows(self._marked_ids("<|im_start|>assistant\n"), books), marks]
        if prompt.instruction:
            self.text.ids(prompt.instruction)
            instruction = self._marked_ids(f"<|im_start|>user\n{prompt.instruction}<|im_end|>\n")
            blocks.insert(0, text_rows(instruction, books))
        return join_rows(blocks)

    def _lay_out_whole(self, head: SpeechRows, words: list[int], codes_KT: Tensor | None) -> PromptRows:
        """All words beside the mark pad, then the mark bos and the frames beside the word pad."""
        books, pad = int(self.talker_config["num_code_groups"]), self._word_mark("pad")
        blocks = [
            head,
            text_rows(words, books, self._code_mark("pad")),
            text_rows([pad], books, self._code_mark("bos")),
        ]
        if codes_KT is not None:
            blocks.append(frame_rows(codes_KT, pad))
        return PromptRows(join_rows(blocks), after=pad)

    def _lay_out_interleaved(self, head: SpeechRows, words: list[int], codes_KT: Tensor | None) -> PromptRows:
        """A word beside the mark bos and beside each frame, the word pad behind them."""
        books, pad = int(self.talker_config["num_code_groups"]), self._word_mark("pad")
        frames = 0 if codes_KT is None else codes_KT.shape[1]
        words_L = torch.tensor([*words, *[pad] * (1 + frames - len(words))])
        blocks = [head, text_rows(words_L[:1], books, self._code_mark("bos"))]
        if codes_KT is not None:
            rows = frame_rows(codes_KT)
            blocks.append(SpeechRows(words_L[1 : 1 + frames], rows.first_L, rows.rest_LJ))
        return PromptRows(join_rows(blocks), words_L[1 + frames :], pad)

    def _language_row(self, prompt: SpeechPrompt) -> int | None:
        """The row of the language's mark; None where the prompt names none.

        Raises:
            ValueError: a language that the model does not know.
        """
        named = (prompt.language or AUTO).lower()
        named = LANGUAGES.get(named.partition("-")[0], named)
        known = self._language_ids
        dialect = (self.talker_config.get("spk_is_dialect") or {}).get((prompt.speaker or "").lower(), False)
        if dialect and named in ("chinese", AUTO):
            named = str(dialect)
        if named == AUTO:
            return None
        if named not in known:
            raise ValueError(f"language {prompt.language!r}: {suggestion(named, known)}")
        return known[named]

    def _voice_row(self, prompt: SpeechPrompt) -> int | None:
        """The entry of the voice's row: `NONE` for a vector, which stands there by itself; None for no voice.

        Raises:
            ValueError: a name that the model does not know.
        """
        if prompt.vector_C is not None:
            return NONE
        if prompt.speaker is None:
            return None
        rows = self.talker_config.get("spk_id") or {}
        name = prompt.speaker.lower()
        if name not in rows:
            known = (
                suggestion(name, rows)
                if rows
                else "the model has no named voices: add some by the stage add_voices"
            )
            raise ValueError(f"speaker {prompt.speaker!r}: {known}")
        return int(rows[name])

    def _turn_words(self, text: str) -> list[int]:
        self.text.ids(text)
        turn = self._marked_ids(f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n")
        return turn[HEAD_TOKENS:-TAIL_TOKENS]

    def _reference_words(self, text: str) -> list[int]:
        self.text.ids(text)
        return self._marked_ids(f"<|im_start|>assistant\n{text}<|im_end|>\n")[HEAD_TOKENS:-REFERENCE_TAIL]

    def _marked_ids(self, text: str) -> list[int]:
        return self.text.marked_ids(text)

    def _code_mark(self, name: str) -> int:
        """Entry of a mark in the table of codes."""
        return int(
            self.talker_config.get(f"codec_{name}_id", self.talker_config.get(f"codec_{name}_token_id"))
        )

    def _word_mark(self, name: str) -> int:
        """Id of one of the words that stand for no text."""
        return int(self.config[f"tts_{name}_token_id"])


def _short(field: str) -> str:
    return f"<{field.removeprefix('codec_').removesuffix('_id').removesuffix('_token')}>"
