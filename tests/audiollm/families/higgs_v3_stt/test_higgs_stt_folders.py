"""Folders of Higgs Audio v3 STT: opened, written back tensor by tensor, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from audiollm.errors import BadSample, ConfigError
from audiollm.families.answering import AnswerRequest
from audiollm.families.family import PolicySettings
from audiollm.families.listener.answering import ListenerAnswers
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.model_sizes import planned_parameters
from audiollm.families.policy import PromptedAnswers
from audiollm.families.registry import open_model_folder
from audiollm.models.audio_llms.higgs_v3_stt.processor import DEFAULT_PROMPT, EMPTY_THINK
from audiollm.models.audio_llms.inputs import InputsError, Turn, processor_inputs
from audiollm.models.audio_llms.loading import load_audio_llm, load_inputs, parameters_of_config
from audiollm.models.audio_llms.new_transcriber import (
    NewTranscriberConfig,
    planned_transcriber_size,
    write_transcriber,
)
from audiollm.train.settings import LoRASettings
from tests.audiollm.families.higgs_v3_stt.tiny_higgs_stt import (
    GENERATION_ONLY,
    change_config,
    noise,
    stored_weights,
    write_tiny_higgs_stt,
)

HEAD = "audio_decoder_proj.text_lm_head.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_higgs_stt(tmp_path_factory.mktemp("higgs_stt"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_saved_without_a_step_every_file_is_as_it_was(
    tmp_path: Path, dtype: torch.dtype, trained: str
) -> None:
    start = write_tiny_higgs_stt(tmp_path / "start", dtype)
    policy = open_model_folder(start).policy(PolicySettings(trained=trained, lora=LoRASettings(rank=2)))
    policy.save(tmp_path / "out")
    before, after = stored_weights(start), stored_weights(tmp_path / "out" / "model")
    assert set(before) == set(after) and {HEAD, GENERATION_ONLY} < set(after)
    for name, value in before.items():
        assert after[name].dtype == dtype and torch.equal(value, after[name]), name
    for path in start.iterdir():
        written = tmp_path / "out" / "model" / path.name
        assert written.is_file() and (path.suffix != ".json" or written.read_bytes() == path.read_bytes())
    answer = ListenerAnswers(tmp_path / "out" / "model").answer(
        [AnswerRequest([("user", [noise(0.5)])], max_tokens=4)]
    )
    assert answer[0].tokens > 4


def test_the_head_is_a_matrix_of_its_own_though_the_config_ties_it(folder: Path) -> None:
    assert json.loads((folder / "config.json").read_text())["text_config"]["tie_word_embeddings"] is True
    policy = open_model_folder(folder).policy(PolicySettings())
    model: Any = policy.root.model
    head, words = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head is not words and not torch.equal(head, words)
    assert (
        head.requires_grad
        and words.requires_grad
        and not model.audio_tower.embed_positions.weight.requires_grad
    )


def test_sizes_are_told_without_the_weights(folder: Path, tmp_path: Path) -> None:
    parameters = sum(
        value.numel() for name, value in stored_weights(folder).items() if name != GENERATION_ONLY
    )
    assert parameters_of_config(folder) == parameters
    assert planned_parameters(folder, {}) == pytest.approx(parameters, rel=0.01)
    config = NewTranscriberConfig.model_construct(
        **{name: field.default for name, field in NewTranscriberConfig.model_fields.items()}
    )
    figures = write_transcriber(tmp_path, config, [f"{n} word{'abcdefgh'[n % 8]}" for n in range(300)])
    words = config.vocabulary - figures["vocabulary"]
    assert planned_transcriber_size(config) - 2 * words * config.width == pytest.approx(
        figures["parameters"], rel=0.1
    )


def test_two_recordings_differ_in_a_new_model_from_the_first_step(tmp_path: Path) -> None:
    """Their rows differ by a part of themselves, and not by a hundredth of what the positions add."""
    from audiollm.models.audio_llms.higgs_v3_stt.model import HiggsAudio3Model

    config = NewTranscriberConfig.model_construct(
        **{name: field.default for name, field in NewTranscriberConfig.model_fields.items()}
    )
    write_transcriber(tmp_path, config, ["one two"])
    model = HiggsAudio3Model.from_pretrained(tmp_path).eval()
    generator = torch.Generator().manual_seed(0)
    features_RMF = 0.5 * torch.randn(8, 128, 48, generator=generator)
    with torch.no_grad():
        rows_ND = model.audio_rows(features_RMF, torch.ones(8, 48))
    rows_RPD = rows_ND.unflatten(0, (8, -1))
    assert rows_RPD.std(dim=0).mean() > 0.1 * rows_RPD.std()


def test_the_published_sizes_have_the_published_number_of_parameters(tmp_path: Path) -> None:
    """2.68 B by the model card of higgs-audio-v3-stt: Whisper-large-v3's encoder, Qwen3-1.7B with a head of its own."""
    text = {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 32768, "rope_theta": None, "tie_word_embeddings": True,
    }  # fmt: skip
    data = {"model_type": "higgs_audio_3", "text_config": text, "audio_encoder_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert round(parameters_of_config(tmp_path) / 1e9, 2) == 2.68
    config = AutoConfig.from_pretrained(str(tmp_path))
    assert config.rope_parameters["rope_theta"] == 1e6 and config.chunk_samples == 64_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projector_temporal_downsample": 4}, "projector_temporal_downsample"),
        ({"projector_type": "linear"}, "projector_type"),
        ({"audio_decoder_proj_num_layers": 2}, "audio_decoder_proj_num_layers"),
        ({"duplicate_audio_triplet": True}, "duplicate_audio_triplet"),
        ({"skip_audio_tower": True}, "skip_audio_tower"),
        ({"chunk_size_seconds": 31}, "chunk_size_seconds"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type"),
        (
            {"audio_encoder_config": {"model_type": "higgs_audio_encoder_xcodec"}},
            "audio_encoder_config.model_type",
        ),
        ({"text_config": {"hidden_size": 96}}, "of another shape"),
        ({"audio_encoder_config": {"encoder_layers": 3}}, "audio_tower.layers.2"),
        ({"audio_in_token_idx": 4}, "audio_in_token_idx"),
    ],
)
def test_another_shape_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_tiny_higgs_stt(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load_audio_llm(tmp_path)


@pytest.mark.parametrize("lost", [HEAD, "audio_tower.", "audio_encoder_proj.temporal.weight", "norm.weight"])
def test_a_missing_part_is_refused_by_name(tmp_path: Path, lost: str) -> None:
    from safetensors.torch import load_file, save_file

    write_tiny_higgs_stt(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        save_file(
            {n: v for n, v in load_file(path).items() if not n.startswith(lost)},
            path,
            metadata={"format": "pt"},
        )
    with pytest.raises(ConfigError, match=lost):
        load_audio_llm(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_tiny_higgs_stt(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("<|audio_bos|>", "<|audio_start|>"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match=r"no <\|audio_bos\|>"):
        load_inputs(tmp_path)


def test_sound_beyond_the_context_is_refused(tmp_path: Path) -> None:
    write_tiny_higgs_stt(tmp_path)
    change_config(tmp_path, text_config={"max_position_embeddings": 400})  # 32 s
    policy = open_model_folder(tmp_path).policy(PolicySettings())
    turns: list[Turn] = [("user", [noise(31.0), DEFAULT_PROMPT])]
    with pytest.raises(BadSample, match="hears at most 30 s"):
        policy.encode(PromptedAnswers("s", turns, ["one"], recordings=["clip.wav"]))
    twice: list[Turn] = [("user", [noise(17.0), "and", noise(17.0)])]
    with pytest.raises(BadSample, match="max_position_embeddings"):
        policy.encode(PromptedAnswers("s", twice, ["one"]))


def test_prompts_have_the_published_form(folder: Path, tmp_path: Path) -> None:
    processor = load_inputs(folder).processor

    def text(turns: list[Turn], prompting: bool = True) -> str:
        ids = processor_inputs(processor, turns, prompting)["input_ids"][0]
        return processor.tokenizer.decode(ids).replace("<|AUDIO|>" * 6, "ROWS")

    clip = noise(0.48)
    published = (
        f"<|im_start|>user\n{DEFAULT_PROMPT}<|audio_bos|>ROWS<|audio_eos|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert text([("user", [clip])]) == text([("user", [clip, DEFAULT_PROMPT])]) == published
    two = text([("user", ["a", clip, "b", clip]), ("assistant", ["one"])], False)
    rows = "<|audio_bos|>ROWS<|audio_eos|>"
    assert two == f"<|im_start|>user\na{rows}b{rows}<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
    with pytest.raises(InputsError, match="placeholder"):
        text([("user", [clip, "<|AUDIO|>"])])
    write_tiny_higgs_stt(tmp_path)
    change_config(tmp_path, answer_after_think=True)
    processor = load_inputs(tmp_path).processor
    assert text([("user", [clip])]) == published + EMPTY_THINK


def test_targets_are_the_answer_and_its_end_alone(folder: Path, tmp_path: Path) -> None:
    write_tiny_higgs_stt(tmp_path)
    change_config(tmp_path, answer_after_think=True)
    for place in (folder, tmp_path):
        policy = open_model_folder(place).policy(PolicySettings())
        assert isinstance(policy, ListenerPolicy)
        (encoded,) = policy.encode(PromptedAnswers("s", [("user", [noise(1.0)])], ["three four"]))
        targets = encoded.tokens["input_ids"][-encoded.num_answer_tokens :]
        assert policy.processor.tokenizer.decode(targets) == "three four<|im_end|>"


def test_thoughts_are_no_part_of_an_answer(folder: Path) -> None:
    processor = load_inputs(folder).processor
    for written in ("<think>\n\n</think>\none two", "<think>hm</think>one two", "<think>one two", "one two"):
        ids = processor.tokenizer(written, add_special_tokens=False)["input_ids"]
        assert processor.decode(ids, skip_special_tokens=True).strip() == "one two"
