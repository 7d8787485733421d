"""What a policy refuses, by name; folders of whole models; Voxtral; plans of batches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from audiollm.audio import Waveform
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.errors import BadSample, ConfigError
from audiollm.evaluate.subjects.chat import ChatError, FolderChat
from audiollm.families.listener.encoding import EncodedAnswer, batches_by_length, encode_answers, pad_answers
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.listener.scorer import AnswerScorer
from audiollm.families.logprobs.token_figures import TokenFigures, TokenRequest
from audiollm.families.policy import PromptedAnswers
from audiollm.models.audio_llms.inputs import Turn, longest_recording_s, processor_inputs
from audiollm.train.settings import LoRASettings
from tests.audiollm.models.tiny_audio_llms import save_processor, save_tiny, tiny, voxtral


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Path(tmp_path_factory.mktemp("llm"))
    save_tiny("qwen2_audio", made)
    return made


def sound(seconds: float, seed: int = 0) -> Waveform:
    noise = torch.randn(1, int(16_000 * seconds), generator=torch.Generator().manual_seed(seed))
    return Waveform(0.1 * noise, 16_000)


def heard(*parts: str | Waveform, answers: tuple[str, ...] = ("yes",)) -> PromptedAnswers:
    return PromptedAnswers("s1", [("user", list(parts))], answers, ["a.wav", "b.wav"], "list.jsonl:7", parts)


NOT_FINITE = Waveform(torch.full((1, 16_000), torch.nan), 16_000)


@pytest.mark.parametrize(
    ("prompted", "reason"),
    [
        (heard("what?", sound(1.0), sound(2.5)), r"b\.wav is 2\.50 s long, and this model hears at most 2 s"),
        (heard("what?", sound(0.05)), r"a\.wav is 0\.050 s long; at least 0\.1 s"),
        (heard("what?", NOT_FINITE), r"a\.wav holds values that are not finite"),
        (heard("what is <|AUDIO|>?", sound(1.0)), r"a text contains <\|AUDIO\|>"),
        (heard("what?", sound(1.0), answers=()), "there is no answer"),
        (heard("what?", sound(1.0), answers=("yes", " ")), "an answer is empty"),
        (heard("what?", sound(1.0), answers=("yes<|im_end|>no",)), "contains the token that ends a turn"),
    ],
)
def test_bad_samples_are_named(folder: Path, prompted: PromptedAnswers, reason: str) -> None:
    policy = ListenerPolicy.load(folder, needs_reference=False)
    with pytest.raises(BadSample, match=reason) as caught:
        policy.encode(prompted)
    assert (caught.value.id, caught.value.place) == ("s1", "list.jsonl:7") and caught.value.kind


def test_templates_that_rewrite_the_prompt_or_end_no_turn_are_refused() -> None:
    _, processor = tiny("audio_flamingo3")
    ends = {processor.tokenizer.eos_token_id}
    template = processor.chat_template
    assert encode_answers(processor, ends, heard("what?"))
    processor.chat_template = "{% if not add_generation_prompt %}Answered: {% endif %}" + template
    with pytest.raises(BadSample, match="does not begin with the tokens"):
        encode_answers(processor, ends, heard("what?"))
    processor.chat_template = template
    with pytest.raises(BadSample, match="none of the tokens"):
        encode_answers(processor, {processor.tokenizer.pad_token_id}, heard("what?"))


def test_a_chat_refuses_what_would_be_cut(folder: Path) -> None:
    with pytest.raises(ChatError, match=r"recording 1 is 2\.50 s long, and this model hears at most 2 s"):
        FolderChat.load(folder, 3).ask(["what?", sound(2.5)])


def test_long_recordings_are_split_as_the_model_does_it() -> None:
    limits = {
        name: longest_recording_s(tiny(name)[1]) for name in ("qwen2_5_omni_thinker", "audio_flamingo3")
    }
    assert limits == {"qwen2_5_omni_thinker": 2.0, "audio_flamingo3": 6.0}
    for name, frames in (("audio_flamingo3", 330), ("qwen3_omni_moe_thinker", 330)):
        model, processor = tiny(name)
        inputs = processor_inputs(processor, [("user", [sound(3.3), "what?"])], True)
        mask = next(
            value for key, value in inputs.items() if key.endswith("_mask") and key != "attention_mask"
        )
        assert int(mask.sum()) == frames
        with torch.no_grad():
            assert torch.isfinite(model(**inputs).logits).all()
    with pytest.raises(Exception, match=r"recording 1 is 6\.50 s long"):
        processor_inputs(tiny("audio_flamingo3")[1], [("user", [sound(6.5), "what?"])], True)


def test_a_processor_that_cuts_on_its_own_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _, processor = tiny("qwen2_audio")
    monkeypatch.setattr("audiollm.models.audio_llms.inputs.longest_recording_s", lambda processor: None)
    with pytest.raises(Exception, match=r"the processor kept 2\.\d\d s of 2\.50 s"):
        processor_inputs(processor, [("user", [sound(2.5)])], True)


def test_samples_become_prompts() -> None:
    content: list[Any] = [TextPart(text="what?"), AudioPart(path="a.wav"), AudioPart(path="b.wav")]
    sample = Sample(id="s1", messages=[Message(role="user", content=content)], task="qa")
    answers: list[list[Any]] = [[TextPart(text="yes"), TextPart(text=", sir")], [TextPart(text="no")]]
    clips = [sound(0.2), sound(0.3)]
    prompted = PromptedAnswers.of(sample, clips, answers, "list.jsonl:7")
    turns: list[Turn] = [("user", ["what?", *clips])]
    parts = [["yes", ", sir"], ["no"]]
    assert prompted == PromptedAnswers(
        "s1", turns, ["yes, sir", "no"], ["a.wav", "b.wav"], "list.jsonl:7", parts
    )
    with pytest.raises(ValueError, match="1 recordings for 2 audio parts"):
        PromptedAnswers.of(sample, clips[:1], answers)
    with pytest.raises(BadSample, match="an answer is speech, and this policy writes text"):
        PromptedAnswers.of(sample, clips, [[AudioPart(path="spoken.wav")]])


def test_only_the_thinker_of_a_whole_omni_is_loaded(tmp_path: Path) -> None:
    whole, processor = save_tiny("qwen2_5_omni", tmp_path / "omni")
    assert any(name.startswith("talker.") for name, _ in whole.named_parameters())
    policy = ListenerPolicy.load(tmp_path / "omni", dtype=torch.float64)
    assert type(policy.root.model).__name__ == "Qwen2_5OmniThinkerForConditionalGeneration"
    for name, value in policy.root.model.state_dict().items():
        assert torch.equal(value, whole.thinker.state_dict()[name].double())
    batch = policy.batch(policy.encode(heard("what?", sound(1.0), sound(0.7))))
    assert torch.isfinite(policy.answer_logprobs(policy.root, batch, TokenRequest()).policy_T).all()
    policy.save(tmp_path / "saved")
    again = ListenerPolicy.load(tmp_path / "saved", dtype=torch.float64)
    assert (
        json.loads((tmp_path / "saved/model/config.json").read_text())["model_type"] == "qwen2_5_omni_thinker"
    )
    for name, value in again.root.model.state_dict().items():
        assert torch.equal(value, policy.root.model.state_dict()[name])
    said = FolderChat.load(tmp_path / "omni", 4).ask(["what?", sound(1.0)])
    assert said == FolderChat.load(tmp_path / "saved/model", 4).ask(["what?", sound(1.0)])
    del processor


def test_voxtral_with_its_own_processor_and_model() -> None:
    """mistral-common is another package: a stand-in writes the tokens, all else is Voxtral's own."""
    torch.manual_seed(0)
    model, processor = voxtral()
    model = model.double().eval()
    scorer, ends = AnswerScorer(model), {processor.tokenizer.eos_token_id}
    asked = [
        heard("what?", sound(1.0), sound(31.0, 1), answers=("yes", "never")),
        heard("hello", answers=("hi",)),
        heard("and", sound(0.5, 2), answers=("no",)),
    ]
    encoded = [answer for prompted in asked for answer in encode_answers(processor, ends, prompted)]
    assert [len(answer.features.get("input_features", ())) for answer in encoded] == [3, 3, 0, 1]
    figures = scorer(pad_answers(encoded, 0), TokenRequest())
    assert isinstance(figures, TokenFigures)
    expected = []
    for answer in encoded:
        inputs = {key: value[None] for key, value in answer.tokens.items()}
        inputs |= {key: value.double() for key, value in answer.features.items()}
        log_probs_LV = model(**inputs).logits[0].log_softmax(-1)
        ids = answer.tokens["input_ids"]
        places = torch.arange(len(ids) - answer.num_answer_tokens, len(ids))
        expected.append(log_probs_LV[places - 1, ids[places]])
        assert int(ids[-1]) in ends
    torch.testing.assert_close(figures.logprob_T, torch.cat(expected), rtol=0, atol=1e-9)
    assert processor.tokenizer.decode(encoded[1].tokens["input_ids"][-6:]) == "never<|im_end|>"


def test_folders_and_settings_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config.json is missing"):
        ListenerPolicy.load(tmp_path)
    with pytest.raises(ConfigError, match=r"no parameter is named like '\*projektor\*'"):
        ListenerPolicy.load(folder, ["*projektor*"])
    with pytest.raises(ConfigError, match="trained: 'adaptor'\n  did you mean 'adapter'"):
        ListenerPolicy.load(folder, "adaptor")
    with pytest.raises(ConfigError, match="lora"):
        ListenerPolicy.load(folder, "adapter", LoRASettings(target_modules=("wq",)))
    model, processor = save_tiny("audio_flamingo3", tmp_path / "other")
    with pytest.raises(
        ConfigError, match="reference: its vocabulary of 260 tokens is not the policy's of 262"
    ):
        ListenerPolicy.load(folder, reference=tmp_path / "other")
    with pytest.raises(ConfigError, match="the reference is the model without its adapter"):
        ListenerPolicy.load(folder, "adapter", reference=tmp_path / "other")
    policy = ListenerPolicy.load(folder, needs_reference=False)
    batch = policy.batch(policy.encode(heard("hello")))
    with pytest.raises(ValueError, match="without a reference"):
        policy.answer_logprobs(policy.root, batch, TokenRequest())
    del model, processor


def test_folders_that_lack_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    model, _ = save_tiny("qwen2_audio", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in weights if "projector" in name)
    save_file(
        {k: v for k, v in weights.items() if k != gone}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ConfigError, match="1 weights are missing"):
        ListenerPolicy.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="no audio LLM loads"):
        ListenerPolicy.load(tmp_path)


def test_batches_hold_whole_groups_of_similar_length() -> None:
    def answer(length: int) -> EncodedAnswer:
        return EncodedAnswer({"input_ids": torch.zeros(length, dtype=torch.long)}, {}, 1)

    lengths = [(5, 9), (40, 2), (8, 8), (3, 3, 3), (100, 90), (10, 1)]
    groups = [[answer(n) for n in pair] for pair in lengths]
    plan = batches_by_length(groups, 60)
    assert plan == [[4], [1], [5, 0, 2], [3]]
    assert batches_by_length([], 60) == []
    assert sorted(n for batch in batches_by_length(groups, 10_000) for n in batch) == list(range(6))


def test_features_of_other_lengths_are_padded() -> None:
    one = EncodedAnswer({"input_ids": torch.ones(3, dtype=torch.long)}, {"f": torch.ones(1, 2, 4)}, 1)
    two = replace(one, features={"f": torch.ones(2, 2, 6)})
    none = replace(one, features={})
    joined = pad_answers([one, none, two], 0).inputs["f"]
    assert joined.shape == (3, 2, 6) and float(joined[0, :, 4:].sum()) == 0 and float(joined.sum()) == 32
    with pytest.raises(ValueError, match="at least one"):
        pad_answers([], 0)


@pytest.mark.parametrize("tied", [False, True])
def test_modules_trained_beside_an_adapter_are_saved_with_it(tmp_path: Path, tied: bool) -> None:
    """Also where the output head is the table of embeddings."""
    model, processor = tiny("qwen2_5_omni_thinker")
    if tied:
        model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = True
        model = type(model)(model.config)
    model.save_pretrained(tmp_path / "llm")
    save_processor(processor, tmp_path / "llm")
    beside = LoRASettings(rank=2, trained_beside=("audio_tower.proj",))
    policy = ListenerPolicy.load(tmp_path / "llm", "adapter", beside, torch.float64)
    trained = [(name, p) for name, p in policy.root.named_parameters() if p.requires_grad]
    assert any("audio_tower.proj.modules_to_save" in name for name, _ in trained)
    batch = policy.batch(policy.encode(heard("what?", sound(1.0), answers=("yes", "no"))))
    base = policy.answer_logprobs(policy.root, batch, TokenRequest())
    assert base.reference_T is not None and torch.equal(base.policy_T.detach(), base.reference_T)
    with torch.no_grad():
        for _, parameter in trained:
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=parameter.dtype))
    found = policy.answer_logprobs(policy.root, batch, TokenRequest())
    assert found.reference_T is not None and torch.equal(found.reference_T, base.reference_T)
    policy.save(tmp_path / "saved")
    again = ListenerPolicy.load(tmp_path / "saved", dtype=torch.float64, needs_reference=False)
    loaded_T = again.answer_logprobs(again.root, batch, TokenRequest(reference=False)).policy_T
    torch.testing.assert_close(loaded_T, found.policy_T, rtol=0, atol=1e-9)
    weights = again.root.model
    assert (weights.get_output_embeddings().weight is weights.get_input_embeddings().weight) == tied
