"""Whisper's signals of doubt against its logits, token by token, in transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from audiollm.models.recognition.recognizer import SpeechRecognizer
from tests.pipelines.annotate.steps.tiny_recognizers import whisper_folder

MAX_TOKENS = 5


@torch.no_grad()
def test_the_signals_of_a_clip_are_those_of_its_logits(tmp_path: Path) -> None:
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    folder = whisper_folder(tmp_path / "w")
    clip_N = np.random.default_rng(0).normal(0, 0.1, 16_000).astype(np.float32)
    transcript = SpeechRecognizer(folder, max_tokens=MAX_TOKENS).transcribe([clip_N])[0]
    processor = WhisperProcessor.from_pretrained(folder)
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    ids = processor.tokenizer.get_vocab()
    features = processor(clip_N, sampling_rate=16_000, return_tensors="pt").input_features

    def logits(prompt: list[int]) -> torch.Tensor:
        output = model(features, decoder_input_ids=torch.tensor([prompt]))
        last_V: torch.Tensor = output.logits[0, -1].double()
        return last_V

    start = ids["<|startoftranscript|>"]
    first_V = logits([start])
    assert transcript.no_speech_probability == pytest.approx(
        float(first_V.softmax(0)[ids["<|nospeech|>"]]), rel=1e-5
    )
    languages = model.generation_config.lang_to_id
    shares_L = torch.stack([first_V[id] for id in languages.values()]).softmax(0)
    language = list(languages)[int(shares_L.argmax())]
    assert transcript.language == language.strip("<|>")
    assert transcript.language_probability == pytest.approx(float(shares_L.max()), rel=1e-5)
    prompt, scores = [start, languages[language], ids["<|transcribe|>"], ids["<|notimestamps|>"]], []
    for _ in range(MAX_TOKENS):
        last_V = logits(prompt)
        if not scores:  # a text does not begin with its end
            last_V[ids["<|endoftext|>"]] = -torch.inf
        scores.append(float(last_V.log_softmax(0).max()))
        prompt.append(int(last_V.argmax()))
    assert transcript.num_tokens == MAX_TOKENS
    assert transcript.mean_log_probability == pytest.approx(sum(scores) / MAX_TOKENS, rel=1e-4)


def test_the_mean_counts_the_end_of_the_text_and_no_pads(tmp_path: Path) -> None:
    recognizer: Any = SpeechRecognizer(whisper_folder(tmp_path / "w"), max_tokens=MAX_TOKENS)
    decoder = recognizer._model
    end = decoder._model.generation_config.eos_token_id
    a, b = decoder._tokenizer.convert_tokens_to_ids(["a", "b"])
    transcript = decoder._transcript([a, b, end, end, end], [-0.1, -0.2, -0.6, 0.0, 0.0], "en", 0.5, 0.1)
    assert (transcript.text, transcript.num_tokens) == ("ab", 3)
    assert transcript.mean_log_probability == pytest.approx(-0.3)
