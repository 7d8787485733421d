"""Recognizers of transformers that write token by token: Whisper, Moonshine and their like.

Shapes: B clips, S tokens, V tokens of the vocabulary, L languages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audiollm.files.json_files import OFFLINE
from audiollm.files.transformers_folders import fit_inputs, open_model, opening
from audiollm.models.recognition.ctc import SPACES
from audiollm.models.recognition.cutting import cut_points
from audiollm.models.recognition.transcript import RecognizedSpeech, SpokenWord, join_transcripts

LONGEST_S = 30.0
"""Longest piece, in seconds, where the feature extractor names none."""
_PROMPT_TOKENS = 8
"""Places that a decoder's prompt may take: start, language, task, no timestamps."""
_FIRST_TASK, _LAST_BEFORE_TASKS = "<|translate|>", "<|startoftranscript|>"
REMEDY = "give a speech recognizer of transformers with safetensors weights, saved with its processor"


def _is_for_users(record: logging.LogRecord) -> bool:
    """Return whether a user can act on a record: transformers warns of arguments that its own Whisper passes."""
    return "Passing `generation_config` together with" not in record.getMessage()


class _FirstStep(NamedTuple):
    """Whisper's answers at its first token, of each clip."""

    languages: list[str | None]
    language_probabilities: list[float | None]
    no_speech_probabilities: list[float | None]


class DecoderRecognizer:
    """Greedy decoding, of longer clips in pieces that are cut where it is quiet. Words have confidences and no times.

    A multilingual Whisper is given its task, `transcribe`, and a language, which it detects where none is given; an
    English-only one takes neither. Left to its defaults, transformers 5 may repeat one word up to the longest length.

    Args:
        language: of the speech: a code (`en`, `pt-BR`) or an English name (`french`).
        max_tokens: most tokens per piece.

    Raises:
        ConfigError: the folder holds no such model, or pickled weights only.
    """

    def __init__(self, folder: Path, language: str | None, device: str, max_tokens: int) -> None:
        from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor

        with opening(folder, "speech recognizer", REMEDY):
            self._processor = AutoProcessor.from_pretrained(str(folder), **OFFLINE)
            self._model: Any = open_model(AutoModelForSpeechSeq2Seq, folder, device)
            self._tokenizer = self._processor.tokenizer
            self._extractor = self._processor.feature_extractor
        self.sample_rate = int(self._extractor.sampling_rate)
        self._longest_s = float(getattr(self._extractor, "chunk_length", None) or LONGEST_S)
        places = getattr(self._model.config, "max_target_positions", None) or max_tokens + _PROMPT_TOKENS
        self._max_tokens = min(max_tokens, places - _PROMPT_TOKENS)
        self._is_whisper = self._model.config.model_type == "whisper"
        logging.getLogger("transformers.generation.utils").addFilter(_is_for_users)
        # Whisper adds the length of its prompt; any other prompt is one token
        length = self._max_tokens if self._is_whisper else self._max_tokens + 1
        greedy = {"do_sample": False, "num_beams": 1, "return_dict_in_generate": True, "output_scores": True}
        self._model.generation_config.update(max_length=length, max_new_tokens=None, **greedy)
        self._languages = self._prepare_whisper() if self._is_whisper else {}
        is_english = self._is_whisper and not self._languages
        self._language = language or ("en" if is_english else None)
        self._prompt_language = self._known_language(language)

    def transcribe(self, clips: Sequence[NDArray[np.float32]]) -> list[RecognizedSpeech]:
        """Recognize mono clips at `sample_rate`."""
        cuts = [cut_points(clip_N, self.sample_rate, self._longest_s) for clip_N in clips]
        pieces = [clip_N[a:b] for clip_N, at in zip(clips, cuts, strict=True) for a, b in pairwise(at)]
        with torch.inference_mode():
            transcripts = iter(self._write(pieces))
        return [join_transcripts([next(transcripts) for _ in at[1:]]) for at in cuts]

    def _prepare_whisper(self) -> dict[str, int]:
        """Complete the generation config of a multilingual Whisper, and return the ids of its languages' tokens.

        Folders from before 2023 lack `lang_to_id` and `task_to_id`: the tokenizer has both.
        """
        settings, ids = self._model.generation_config, self._tokenizer.get_vocab()
        settings.forced_decoder_ids = (
            None  # an older way to give language and task, which would win over ours
        )
        start = ids.get(_LAST_BEFORE_TASKS)
        is_multilingual = getattr(settings, "is_multilingual", None)
        if is_multilingual is None:
            is_multilingual = start is not None and ids.get(_FIRST_TASK, 0) - start > 1
        settings.is_multilingual = bool(is_multilingual)
        if not is_multilingual:
            return {}
        if not getattr(settings, "lang_to_id", None):
            first, end = start or 0, ids.get(_FIRST_TASK, 0)
            settings.lang_to_id = {token: id for token, id in ids.items() if first < id < end}
        if not getattr(settings, "task_to_id", None):
            settings.task_to_id = {task: ids[f"<|{task}|>"] for task in ("translate", "transcribe")}
        if getattr(settings, "no_timestamps_token_id", None) is None:
            settings.no_timestamps_token_id = ids["<|notimestamps|>"]
        languages: dict[str, int] = settings.lang_to_id
        return languages

    def _known_language(self, language: str | None) -> str | None:
        """The code of a language that this model knows; None: the model detects it."""
        if language is None or not self._languages:
            return None
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        code = TO_LANGUAGE_CODE.get(language.lower(), language.lower())
        codes = (code, code.replace("_", "-").split("-")[0])
        return next((code for code in codes if f"<|{code}|>" in self._languages), None)

    def _write(self, pieces: Sequence[NDArray[np.float32]]) -> list[RecognizedSpeech]:
        features = self._extractor(
            list(pieces), sampling_rate=self.sample_rate, return_tensors="pt", return_attention_mask=True
        )
        inputs = fit_inputs(self._model, features)
        first = _FirstStep([self._language] * len(pieces), [None] * len(pieces), [None] * len(pieces))
        prompt: dict[str, Any] = {}
        if self._is_whisper:
            inputs["encoder_outputs"] = self._model.get_encoder()(inputs.pop("input_features"))
            first = self._hear_first_step(inputs["encoder_outputs"])
        if self._languages:
            prompt = {"task": "transcribe", "language": first.languages}
        output = self._model.generate(**inputs, **prompt)
        scores_BS = self._model.compute_transition_scores(
            output.sequences, output.scores, normalize_logits=True
        )
        tokens_BS = output.sequences[:, -scores_BS.shape[1] :]
        rows = zip(tokens_BS.tolist(), scores_BS.float().tolist(), *first, strict=True)
        return [self._transcript(*row) for row in rows]

    def _transcript(
        self,
        tokens_S: list[int],
        scores_S: list[float],
        language: str | None,
        language_probability: float | None,
        no_speech_probability: float | None,
    ) -> RecognizedSpeech:
        text, words = self._text(tokens_S, np.exp(scores_S).tolist())
        end = self._model.generation_config.eos_token_id
        count = tokens_S.index(end) + 1 if end in tokens_S else len(tokens_S)
        mean = sum(scores_S[:count]) / count if count else None
        return RecognizedSpeech(
            text, tuple(words), language, language_probability, mean, count, no_speech_probability
        )

    def _text(self, tokens_S: Sequence[int], confidences_S: Sequence[float]) -> tuple[str, list[SpokenWord]]:
        """The text, and its words: cut before tokens that begin with a space."""
        special = set(self._tokenizer.all_special_ids)
        text_tokens = [pair for pair in zip(tokens_S, confidences_S, strict=True) if pair[0] not in special]
        pieces = self._tokenizer.convert_ids_to_tokens([token for token, _ in text_tokens])
        groups: list[list[tuple[int, float]]] = []
        for pair, piece in zip(text_tokens, pieces, strict=True):
            if not groups or piece[:1] in SPACES:
                groups.append([])
            groups[-1].append(pair)
        words = [
            SpokenWord(spelled, None, None, sum(confidence for _, confidence in group) / len(group))
            for group in groups
            if (spelled := self._tokenizer.decode([token for token, _ in group]).strip())
        ]
        return self._tokenizer.decode([token for token, _ in text_tokens]), words

    def _hear_first_step(self, encoded: Any) -> _FirstStep:
        """The language of each piece, given or detected, and the probability that nobody speaks in it."""
        settings = self._model.generation_config
        count = len(encoded.last_hidden_state)
        device = encoded.last_hidden_state.device
        start_B1 = torch.full((count, 1), settings.decoder_start_token_id, device=device)
        output = self._model(encoder_outputs=encoded, decoder_input_ids=start_B1)
        logits_BV: Tensor = output.logits[:, -1].float()
        silent_B = logits_BV.softmax(dim=-1)[:, settings.no_timestamps_token_id - 1]
        silences: list[float | None] = silent_B.tolist()
        if self._prompt_language is not None or not self._languages:
            return _FirstStep([self._prompt_language or self._language] * count, [None] * count, silences)
        names = sorted(self._languages)
        shares_BL = logits_BV[:, [self._languages[name] for name in names]].softmax(dim=-1)
        best_B, index_B = shares_BL.max(dim=-1)
        return _FirstStep(
            [names[index].strip("<|>") for index in index_B.tolist()], best_B.tolist(), silences
        )
