"""Inputs of Higgs Audio v3 STT: chunks of recordings as log-mel frames, and prompts in its chat form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BatchFeature,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    WhisperFeatureExtractor,
)

from audiollm.files.json_files import OFFLINE
from audiollm.models.audio_llms.higgs_v3_stt.config import SAMPLE_RATE, HiggsAudio3Config

DEFAULT_PROMPT = "Transcribe the speech. Output only the spoken words in lowercase with no punctuation."
AUDIO_BOS, AUDIO, AUDIO_EOS = "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"
TURN_END = "<|im_end|>"
EMPTY_THINK = "<think>\n\n</think>\n"
ROWS_PER_SECOND = 12.5
_MIN_SAMPLES = 480
"""Three mel frames, the fewest that make a row."""
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{{ THINK }}{% endif %}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% set sounds = m['content'] | selectattr('type', 'equalto', 'audio') | list %}"
    "{% set texts = m['content'] | rejectattr('type', 'equalto', 'audio') | list %}"
    "{% if sounds and not texts %}{{ PROMPT }}{% endif %}"
    "{% for c in (texts + sounds if sounds | length == 1 else m['content']) %}"
    "{% if c['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ THINK }}{% endif %}"
)
"""A turn's single recording stands behind its texts; one without a text gets the published prompt."""


class HiggsAudio3Processor(ProcessorMixin):
    """Feature extractor of whisper-large-v3, the folder's tokenizer, and the published form of prompts.

    The published folder has no preprocessor_config.json, and a chat template for text alone.
    """

    def __init__(
        self, feature_extractor: Any, tokenizer: Any, chat_template: str, config: HiggsAudio3Config
    ) -> None:
        super().__init__(feature_extractor, tokenizer, chat_template=chat_template)
        self.audio_token, self.audio_kwargs = AUDIO, {"truncation": False}
        self.turn_end_id = int(tokenizer.convert_tokens_to_ids(TURN_END))
        """The token that ends a turn: the folder's generation_config.json may name another one alone."""
        self.max_audio_len = config.max_position_embeddings / ROWS_PER_SECOND
        self._chunk_samples, self._max_positions = config.chunk_samples, config.max_position_embeddings

    @classmethod
    def from_pretrained(cls, folder: Any, **options: Any) -> HiggsAudio3Processor:
        """Open a folder's tokenizer and config.json.

        Raises:
            ValueError: the tokenizer lacks a mark of the model, or has another id for it than config.json.
        """
        config = AutoConfig.from_pretrained(folder, **OFFLINE)
        tokenizer = AutoTokenizer.from_pretrained(folder, **OFFLINE)
        _check_marks(tokenizer, config)
        template = _TEMPLATE.replace("{{ THINK }}", EMPTY_THINK if config.answer_after_think else "")
        extractor = WhisperFeatureExtractor(
            feature_size=config.encoder.num_mel_bins, sampling_rate=SAMPLE_RATE
        )
        return cls(extractor, tokenizer, template.replace("{{ PROMPT }}", DEFAULT_PROMPT), config)

    def __call__(
        self, text: str | Sequence[str], audio: Sequence[NDArray[np.float32]] | None = None, **options: Any
    ) -> BatchFeature:
        """Make the inputs of one conversation: `input_ids` and `attention_mask` `[1, L]`, and the chunks of recordings
        as `input_features` `[R, M, F]` with their `input_features_mask` `[R, F]`.

        Args:
            audio: mono at 16 kHz, one for each placeholder of the text.

        Raises:
            ValueError: as many recordings as placeholders are not there, or the model's context is exceeded.
        """
        prompt = text if isinstance(text, str) else text[0]
        recordings = list(audio or ())
        before, *rest = prompt.split(AUDIO)
        if len(rest) != len(recordings):
            raise ValueError(f"{len(recordings)} recordings for {len(rest)} places in the text")
        mels, pieces = [], [before]
        for recording, behind in zip(recordings, rest, strict=True):
            chunks = [self._mel(chunk) for chunk in self._chunks(recording)]
            mels += chunks
            pieces += [AUDIO * sum(rows_of_frames(mel_MF.shape[1]) for mel_MF in chunks), behind]
        tokens = self.tokenizer("".join(pieces), add_special_tokens=False, return_tensors="pt")
        length = tokens["input_ids"].shape[1]
        if length > self._max_positions:
            raise ValueError(
                f"{length} tokens, {ROWS_PER_SECOND:g} of them per second of sound, and the model's context has "
                f"{self._max_positions} (max_position_embeddings): cut the recordings into spans"
            )
        inputs = {key: tokens[key] for key in ("input_ids", "attention_mask")}
        return BatchFeature({**inputs, **(_pad(mels) if mels else {})})

    def decode(self, token_ids: Any, **options: Any) -> str:
        """Decode an answer, without its block of thoughts; of one that was not closed, what it holds."""
        answer = str(self.tokenizer.decode(token_ids, **options))
        return re.sub(r"<think>.*?</think>", "", answer, flags=re.DOTALL).replace("<think>", "")

    def _chunks(self, recording_N: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        starts = range(0, len(recording_N), self._chunk_samples)
        chunks = [recording_N[start : start + self._chunk_samples] for start in starts]
        return [np.pad(chunk_N, (0, max(0, _MIN_SAMPLES - len(chunk_N)))) for chunk_N in chunks]

    def _mel(self, chunk_N: NDArray[np.float32]) -> torch.Tensor:
        features = self.feature_extractor(
            chunk_N, sampling_rate=SAMPLE_RATE, padding="do_not_pad", truncation=False, return_tensors="pt"
        )
        return torch.as_tensor(features["input_features"][0])


def rows_of_frames(frames: int) -> int:
    """Rows of the decoder that a chunk of mel frames becomes."""
    return ((frames + 1) // 2 // 2 + 1) // 2


def _pad(mels: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    longest = max(mel_MF.shape[1] for mel_MF in mels)
    padded = [torch.nn.functional.pad(mel_MF, (0, longest - mel_MF.shape[1])) for mel_MF in mels]
    frames_R = torch.tensor([mel_MF.shape[1] for mel_MF in mels])
    mask_RF = (torch.arange(longest) < frames_R[:, None]).long()
    return {"input_features": torch.stack(padded), "input_features_mask": mask_RF}


def _check_marks(tokenizer: PreTrainedTokenizerBase, config: HiggsAudio3Config) -> None:
    vocabulary = tokenizer.get_vocab()
    absent = [
        mark for mark in (AUDIO_BOS, AUDIO, AUDIO_EOS, "<|im_start|>", TURN_END) if mark not in vocabulary
    ]
    if absent:
        raise ValueError(f"the tokenizer has no {absent[0]}: it is that of another model")
    if vocabulary[AUDIO] != config.audio_token_id:
        raise ValueError(
            f"audio_in_token_idx is {config.audio_token_id}, and {AUDIO} is {vocabulary[AUDIO]} in the tokenizer"
        )
