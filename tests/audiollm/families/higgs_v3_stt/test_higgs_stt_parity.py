"""Higgs Audio v3 STT against `mlx-audio`'s class on the same random weights: prompts, encoder rows, logits, answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from audiollm.audio import Waveform
from audiollm.models.audio_llms.higgs_v3_stt.processor import DEFAULT_PROMPT, rows_of_frames
from audiollm.models.audio_llms.inputs import processor_inputs
from audiollm.models.audio_llms.loading import AudioLLM, load_audio_llm
from tests.audiollm.families.higgs_v3_stt.tiny_higgs_stt import ask_mlx, noise, tone, write_tiny_higgs_stt

CLIPS = (noise(4.0), noise(2.537, 1), tone(8.0, 300), noise(0.43, 2))
"""Whole chunks, and single ones that are shorter, with odd numbers of frames."""

LAST_FRAMES = {5.331: 133, 4.05: 5, 4.001: 3}
"""Seconds of recordings, and the mel frames of their last chunk; less than 3 are filled up."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, AudioLLM]:
    folder = write_tiny_higgs_stt(tmp_path_factory.mktemp("higgs_stt"))
    return folder, load_audio_llm(folder)


def inputs_of(opened: AudioLLM, clip: Waveform) -> dict[str, Tensor]:
    return processor_inputs(opened.processor, [("user", [clip, DEFAULT_PROMPT])], True)


def chunk_rows(published: dict[str, Tensor]) -> list[Tensor]:
    return [published[name] for name in sorted(published) if name.startswith("rows")]


@pytest.fixture(scope="module")
def compared(
    opened: tuple[Path, AudioLLM], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Inputs of each clip, and what mlx-audio makes of them."""
    all_inputs = [
        inputs_of(opened[1], clip) for clip in (*CLIPS, *(noise(seconds, 3) for seconds in LAST_FRAMES))
    ]
    results = ask_mlx(opened[0], all_inputs, DEFAULT_PROMPT, tmp_path_factory.mktemp("mlx"))
    return list(zip(all_inputs, results, strict=True))


@torch.no_grad()
def test_prompts_rows_logits_and_answers_are_those_of_mlx_audio(
    opened: tuple[Path, AudioLLM], compared: list[tuple[dict[str, Tensor], dict[str, Tensor]]]
) -> None:
    model, answers = opened[1].model, set()
    for inputs, published in compared[: len(CLIPS)]:
        ids_L, stand_in = inputs["input_ids"][0], model.config.audio_token_id
        # a placeholder of mlx-audio stands for a whole chunk
        texts = [[id for id in ids.tolist() if id != stand_in] for ids in (ids_L, published["ids"])]
        assert texts[0] == texts[1]
        rows_ND = model.audio_rows(inputs["input_features"], inputs["input_features_mask"])
        torch.testing.assert_close(rows_ND, torch.cat(chunk_rows(published)), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model(**inputs).logits[0], published["logits"], atol=1e-4, rtol=1e-4)
        answer = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=[])[
            0, len(ids_L) :
        ]
        assert answer.tolist() == published["greedy"].tolist()
        answers.add(tuple(answer.tolist()))
    assert len(answers) > 1


@torch.no_grad()
def test_a_last_chunk_that_is_shorter_has_the_rows_that_it_has_alone(
    opened: tuple[Path, AudioLLM], compared: list[tuple[dict[str, Tensor], dict[str, Tensor]]]
) -> None:
    for (inputs, published), frames in zip(compared[len(CLIPS) :], LAST_FRAMES.values(), strict=True):
        first_ND, last_ND = chunk_rows(published)
        rows_ND = opened[1].model.audio_rows(inputs["input_features"], inputs["input_features_mask"])
        assert (len(first_ND), len(last_ND)) == (50, rows_of_frames(frames))
        torch.testing.assert_close(rows_ND, torch.cat([first_ND, last_ND]), atol=1e-4, rtol=1e-4)
