"""`ListenerPolicy` on tiny models of transformers' real classes: exact log-probabilities, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.audio import Waveform
from audiollm.families.adapting import TrainedPart
from audiollm.families.listener.answering import ListenerAnswers
from audiollm.families.listener.encoding import EncodedAnswer
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import PromptedAnswers
from audiollm.models.audio_llms.inputs import Turn, processor_inputs
from audiollm.train.loop.modules import checkpoint_activations
from audiollm.train.settings import LoRASettings
from tests.audiollm.models.tiny_audio_llms import TINY, save_tiny

LORA = LoRASettings(rank=2, alpha=4, dropout=0.5)


@pytest.fixture(scope="module", params=sorted(set(TINY) - {"qwen2_5_omni"}))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, made)
    return Path(made)


def sound(seed: int, seconds: float) -> Waveform:
    """Noise of a fixed length."""
    noise = torch.randn(1, int(16_000 * seconds), generator=torch.Generator().manual_seed(seed))
    return Waveform(0.1 * noise, 16_000)


def load(
    folder: Path,
    trained: TrainedPart = "all",
    dtype: torch.dtype = torch.float64,
    needs_reference: bool = True,
) -> ListenerPolicy:
    """A policy whose experts, if it has any, are computed in float64, too: fused ones are not."""
    policy = ListenerPolicy.load(folder, trained, LORA, dtype, needs_reference=needs_reference)
    for module in (policy.root, *policy.frozen.values()):
        if dtype == torch.float64 and "moe" in folder.name:
            module.model.set_experts_implementation("eager")
    return policy


def prompts(folder: Path, swapped: int | None = None) -> list[PromptedAnswers]:
    """Three samples: one recording, two of other lengths, none; `swapped` is the recording that is another one.

    Audio Flamingo 3's processor takes one recording per prompt. The encoder of Qwen3-Omni pads a recording under 1 s
    to the longest of its batch before its convolutions, which then differ in its last frames.
    """
    lengths_s = (1.1, 1.3, 1.05) if "qwen3" in folder.name else (0.7, 1.3, 0.4)
    clips = [sound(n if n != swapped else 100 + n, seconds) for n, seconds in enumerate(lengths_s)]
    num_clips = 0 if "flamingo" in folder.name else 1
    turns: list[list[Turn]] = [
        [("user", ["What is said?", clips[0]])],
        [("system", ["Be brief."]), ("user", [clips[1], "or", *clips[2 : 2 + num_clips], "?"])],
        [("user", ["Hello."])],
    ]
    answers = (["yes", "no, never"], ["the first", "b"], ["hi there", "go"])
    return [PromptedAnswers(f"s{n}", t, a) for n, (t, a) in enumerate(zip(turns, answers, strict=True))]


def encode(policy: ListenerPolicy, prompted: Sequence[PromptedAnswers]) -> list[EncodedAnswer]:
    return [answer for one in prompted for answer in policy.encode(one)]


def logprobs(policy: ListenerPolicy, prompted: Sequence[PromptedAnswers]) -> AnswerLogprobs:
    return policy.answer_logprobs(policy.root, policy.batch(encode(policy, prompted)), TokenRequest())


def disturb(policy: ListenerPolicy) -> None:
    """Give the trained parameters other values than the reference's."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.root.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def own_logprobs(model: Any, processor: Any, prompted: PromptedAnswers, answer: str) -> Tensor:
    """Log-probabilities by transformers alone: its own forward pass over one conversation without padding."""
    prompt = processor_inputs(processor, prompted.prompt, True)["input_ids"].shape[1]
    inputs = processor_inputs(processor, [*prompted.prompt, ("assistant", [answer])], False)
    inputs = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    log_probs_LV = model(**inputs).logits[0].log_softmax(-1)
    ids = inputs["input_ids"][0]
    stop = prompt + len(answer) + 1  # a token per byte, and the end of the turn
    places = torch.arange(prompt, stop)
    return log_probs_LV[places - 1, ids[places]]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_log_probabilities_are_those_of_transformers(
    folder: Path, dtype: torch.dtype, tolerance: float
) -> None:
    policy = load(folder, dtype=dtype)
    policy.root.train()  # dropout stays off
    found = logprobs(policy, prompts(folder))
    assert found.policy_T.dtype == dtype and found.reference_T is not None
    torch.testing.assert_close(found.policy_T.detach(), found.reference_T, rtol=tolerance, atol=tolerance)
    answer = 0
    for prompted in prompts(folder):
        for text in prompted.answers:
            with torch.no_grad():
                own_T = own_logprobs(policy.root.model, policy.processor, prompted, text)
            mine_T = found.policy_T.detach()[found.answer_T == answer]
            torch.testing.assert_close(mine_T, own_T, rtol=tolerance, atol=tolerance)
            answer += 1
    assert answer == found.num_answers


@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_a_swapped_recording_changes_its_own_answers_and_no_others(
    folder: Path, trained: TrainedPart
) -> None:
    policy = load(folder, trained)
    disturb(policy)
    before = logprobs(policy, prompts(folder))
    assert before.reference_T is not None
    assert (before.policy_T - before.reference_T).abs().min() > 0
    for recording, sample in ((0, 0), (1, 1), (2, 1))[: 2 if "flamingo" in folder.name else 3]:
        after = logprobs(policy, prompts(folder, recording))
        assert after.reference_T is not None
        its_T = torch.isin(before.answer_T, torch.tensor([2 * sample, 2 * sample + 1]))
        for old_T, new_T in (
            (before.policy_T.detach(), after.policy_T.detach()),
            (before.reference_T, after.reference_T),
        ):
            assert ((old_T - new_T).abs()[its_T] > 1e-9).all()
            torch.testing.assert_close(old_T[~its_T], new_T[~its_T], rtol=0, atol=1e-12)


def test_tokens_are_those_of_the_whole_conversation(folder: Path) -> None:
    policy = load(folder, needs_reference=False)
    for prompted in prompts(folder):
        for text, encoded in zip(prompted.answers, policy.encode(prompted), strict=True):
            whole = processor_inputs(policy.processor, [*prompted.prompt, ("assistant", [text])], False)
            assert {*encoded.tokens, *encoded.features} == set(whole)
            for key, value in whole.items():
                if key in encoded.tokens:
                    assert torch.equal(value[0, : encoded.num_tokens], encoded.tokens[key])
                    assert value.shape[1] - encoded.num_tokens == 1, (
                        "the line break behind the end of the turn"
                    )
                else:
                    assert torch.equal(value, encoded.features[key])


def test_order_and_padding_change_nothing(folder: Path) -> None:
    policy = load(folder, needs_reference=False)
    encoded = encode(policy, prompts(folder))
    request = TokenRequest(reference=False)
    whole = policy.answer_logprobs(policy.root, policy.batch(encoded), request)
    order = [3, 0, 5, 1, 4, 2]
    mixed = policy.answer_logprobs(policy.root, policy.batch([encoded[n] for n in order]), request)
    for place, number in enumerate(order):
        alone = policy.answer_logprobs(policy.root, policy.batch([encoded[number]]), request)
        expected_T = whole.policy_T[whole.answer_T == number]
        torch.testing.assert_close(mixed.policy_T[mixed.answer_T == place], expected_T, rtol=0, atol=1e-12)
        torch.testing.assert_close(alone.policy_T, expected_T, rtol=0, atol=1e-12)
        assert len(expected_T) == encoded[number].num_answer_tokens


def test_gradients_are_those_of_single_samples_and_reach_what_hears(folder: Path) -> None:
    policy = load(folder, needs_reference=False)
    model, request = policy.root.model, TokenRequest(reference=False)
    found = policy.answer_logprobs(policy.root, policy.batch(encode(policy, prompts(folder))), request)
    weights_A = torch.arange(1.0, 7.0, dtype=torch.float64)
    (found.sums_A * weights_A).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert set(gradients) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("audio_tower.layers.0" in name and bool(g.abs().sum() > 0) for name, g in gradients.items())
    assert any(
        ("projector" in name or "audio_tower.proj" in name) and bool(g.abs().sum() > 0)
        for name, g in gradients.items()
    )
    model.zero_grad()
    answers = [(prompted, text) for prompted in prompts(folder) for text in prompted.answers]
    for weight, (prompted, text) in zip(weights_A, answers, strict=True):
        (weight * own_logprobs(model, policy.processor, prompted, text).sum()).backward()
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-9)


def test_parts_are_trained_by_pattern(folder: Path) -> None:
    pattern = "*audio_tower.proj*" if "omni" in folder.name else "*multi_modal_projector.*"
    policy = load(folder, [pattern], needs_reference=False)
    named = dict(policy.root.named_parameters())
    trained = {name for name, parameter in named.items() if parameter.requires_grad}
    assert trained and all(pattern.strip("*") in name for name in trained)
    found = policy.answer_logprobs(
        policy.root, policy.batch(encode(policy, prompts(folder))), TokenRequest(reference=False)
    )
    found.policy_T.sum().backward()
    assert {name for name, parameter in named.items() if parameter.grad is not None} == trained


def test_the_reference_of_an_adapter_is_the_model_without_it(folder: Path) -> None:
    adapted, plain = (load(folder, t) for t in ("adapter", "all"))
    disturb(adapted)
    trained = {name for name, p in adapted.root.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained) and not adapted.frozen
    adapted.root.train()
    found, expected = logprobs(adapted, prompts(folder)), logprobs(plain, prompts(folder))
    assert found.reference_T is not None and expected.reference_T is not None
    torch.testing.assert_close(found.reference_T, expected.reference_T, rtol=0, atol=1e-12)
    found.ratios_A.sum().backward()
    reached = {name for name, p in adapted.root.named_parameters() if p.grad is not None}
    assert reached == trained == {name for name, p in adapted.root.named_parameters() if p.requires_grad}
    again = logprobs(adapted, prompts(folder))
    torch.testing.assert_close(again.policy_T.detach(), found.policy_T.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_a_saved_policy_loads_with_the_classes_of_transformers(
    folder: Path, tmp_path: Path, trained: TrainedPart
) -> None:
    tmp_path = tmp_path / folder.name
    policy = load(folder, trained)
    disturb(policy)
    expected = logprobs(policy, prompts(folder))
    weights = {name: value.clone() for name, value in policy.root.state_dict().items()}
    policy.save(tmp_path)
    for name, value in policy.root.state_dict().items():
        assert torch.equal(value, weights[name]), "saving leaves the model as it is"
    base = policy.root.model.get_base_model() if trained == "adapter" else policy.root.model
    loaded, problems = type(base).from_pretrained(
        tmp_path / "model", dtype=torch.float64, output_loading_info=True
    )
    if "moe" in folder.name:
        loaded.set_experts_implementation("eager")
    assert not problems["missing_keys"] and not problems["unexpected_keys"]
    answers = [(prompted, text) for prompted in prompts(folder) for text in prompted.answers]
    for number, (prompted, text) in enumerate(answers):
        with torch.no_grad():
            own_T = own_logprobs(loaded.eval(), policy.processor, prompted, text)
        mine_T = expected.policy_T.detach()[expected.answer_T == number]
        torch.testing.assert_close(own_T, mine_T, rtol=0, atol=1e-9)
    again = load(tmp_path)
    torch.testing.assert_close(
        logprobs(again, prompts(folder)).policy_T.detach(), expected.policy_T.detach(), rtol=0, atol=1e-9
    )
    if trained == "adapter":
        from peft import PeftModel

        fresh = load(folder, needs_reference=False).root.model
        worn: Any = PeftModel.from_pretrained(fresh, str(tmp_path / "adapter")).eval()
        with torch.no_grad():
            own_T = own_logprobs(worn, policy.processor, *answers[0])
        torch.testing.assert_close(
            own_T, expected.policy_T.detach()[expected.answer_T == 0], rtol=0, atol=1e-9
        )


def test_answers_are_scored_as_they_are_generated(folder: Path) -> None:
    """What `generate` writes with a cache is encoded to the same tokens, with the same log-probabilities."""
    policy = load(folder, needs_reference=False)
    model, processor = policy.root.model, policy.processor
    letters = {processor.tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefgh"}
    others = [id for id in range(len(processor.tokenizer)) if id not in letters]
    for prompted in prompts(folder):
        inputs = processor_inputs(processor, prompted.prompt, True)
        inputs = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        made = model.generate(
            **inputs, max_new_tokens=6, do_sample=False, suppress_tokens=others, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        ids = made.sequences[0, inputs["input_ids"].shape[1] :]
        text = processor.tokenizer.decode(ids)
        (encoded,) = policy.encode(PromptedAnswers("x", prompted.prompt, [text]))
        end = processor.tokenizer.eos_token_id
        assert encoded.tokens["input_ids"].tolist() == [*made.sequences[0].tolist(), end]
        batch = policy.batch([encoded])
        found = policy.answer_logprobs(policy.root, batch, TokenRequest(reference=False)).policy_T.detach()
        # `generate` keeps its logits in float32
        generated = [row[0].log_softmax(-1)[id] for row, id in zip(made.logits, ids, strict=True)]
        torch.testing.assert_close(found[:-1].float(), torch.stack(generated), rtol=0, atol=1e-5)


def test_every_input_of_the_processor_reaches_every_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load(folder)
    made = processor_inputs(policy.processor, prompts(folder)[0].prompt, True)
    reference = policy.frozen["reference"]
    passes: list[tuple[Any, set[str]]] = []

    def note(module: Any, _arguments: Any, given: dict[str, Any]) -> None:
        passes.append((module, {key for key, value in given.items() if value is not None}))

    for module in (policy.root.model, reference.model):
        module.register_forward_pre_hook(note, with_kwargs=True)
    logprobs(policy, prompts(folder))
    assert [module for module, _ in passes] == [reference.model, policy.root.model]
    assert all(given == {*made, "use_cache"} for _, given in passes)


def test_a_batch_without_recordings_gives_the_encoder_a_gradient_of_zero(folder: Path) -> None:
    policy = load(folder)
    prompted = prompts(folder)[2]
    batch = policy.batch(policy.encode(prompted))
    found = policy.answer_logprobs(policy.root, batch, TokenRequest())
    assert found.num_answers == 2 and len(batch.inputs["input_ids"]) == 3
    for number, text in enumerate(prompted.answers):
        own_T = own_logprobs(policy.root.model, policy.processor, prompted, text)
        torch.testing.assert_close(found.policy_T[found.answer_T == number], own_T, rtol=0, atol=1e-9)
    found.policy_T.sum().backward()
    for name, parameter in policy.root.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
        if parameter.grad is not None:
            assert bool(parameter.grad.any()) == ("audio_tower" not in name and "projector" not in name)


def test_further_figures_per_token(folder: Path) -> None:
    policy = load(folder)
    disturb(policy)
    batch = policy.batch(encode(policy, prompts(folder)))
    draw_T = torch.rand(len(batch.target_T), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    request = TokenRequest(temperature=0.7, kl=True, collision=True, contrast_k=3, entropy=True)
    found = policy.answer_logprobs(policy.root, batch, request, draw_T)
    figures = policy.root(batch, request, reference_TV=policy.frozen["reference"](batch, None), draw_T=draw_T)
    ours_TV, theirs_TV = (
        (module(batch, None) / 0.7).log_softmax(1).detach()
        for module in (policy.root, policy.frozen["reference"])
    )
    rows = torch.arange(len(batch.target_T))
    for value, expected in (
        (found.policy_T, ours_TV[rows, batch.target_T]),
        (found.reference_T, theirs_TV[rows, batch.target_T]),
        (found.kl_T, (theirs_TV.exp() * (theirs_TV - ours_TV)).sum(1)),
        (found.log_collision_T, (ours_TV.exp() ** 2).sum(1).log()),
        (figures.entropy_T, -(ours_TV.exp() * ours_TV).sum(1)),
    ):
        assert value is not None
        torch.testing.assert_close(value.detach(), expected, rtol=0, atol=1e-9)
    assert found.contrast_T is not None and found.draw_T is draw_T
    for row, (value, target) in enumerate(zip(found.contrast_T.detach(), batch.target_T, strict=True)):
        likeliest = [n for n in ours_TV[row].argsort(descending=True).tolist() if n != int(target)][:3]
        assert any(torch.isclose(value, ours_TV[row, n], rtol=0, atol=1e-9) for n in likeliest)


@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_checkpointed_activations_change_nothing(folder: Path, trained: TrainedPart) -> None:
    """With dropout of 0.3 in the models' configs: the layers are computed twice, and not at random."""
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)  # an adapter begins at random
        policy = load(folder, trained, needs_reference=False)
        policy.root.train()
        if checkpointed:
            checkpoint_activations({"model": policy.root})
        calls: list[int] = []
        for layer in policy.root._layers:
            norm = next(part for part in layer.modules() if "Norm" in type(part).__name__)
            norm.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        batch = policy.batch(encode(policy, prompts(folder)))
        found = policy.answer_logprobs(policy.root, batch, TokenRequest(reference=False))
        found.policy_T.sum().backward()
        gradients = [p.grad for p in policy.root.parameters() if p.requires_grad]
        assert all(gradient is not None for gradient in gradients)
        results.append((found.policy_T.detach(), gradients, len(calls)))
    (plain_T, plain, once), (checkpointed_T, again, twice) = results
    assert twice == 2 * once
    torch.testing.assert_close(checkpointed_T, plain_T, rtol=0, atol=0)
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_half_precision(folder: Path) -> None:
    """bfloat16 weights, and float32 weights whose products are taken in bfloat16; figures are float32."""
    expected = logprobs(load(folder, dtype=torch.float32), prompts(folder)).policy_T.detach()
    half = logprobs(load(folder, dtype=torch.bfloat16), prompts(folder))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = logprobs(load(folder, dtype=torch.float32), prompts(folder))
    for found in (half, mixed):
        assert found.policy_T.dtype == torch.float32 and found.reference_T is not None
        torch.testing.assert_close(found.policy_T.detach(), found.reference_T, rtol=0, atol=0)
        assert 0 < (found.policy_T.detach() - expected).abs().max() < 0.5
        found.policy_T.sum().backward()


def test_recordings_that_answers_share_are_encoded_once(folder: Path) -> None:
    """Half the work of the encoder for pairs, and the values and gradients of encoding them for each answer."""
    results = []
    for shared in (True, False):
        policy = load(folder, needs_reference=False)
        encoded = encode(policy, prompts(folder))
        if not shared:
            encoded = [replace(answer, features=dict(answer.features)) for answer in encoded]
        order = [2, 0, 4, 1, 3, 5]
        work: list[int] = []
        tower = next(part for name, part in policy.root.named_modules() if name.endswith("audio_tower"))
        attention = next(part for name, part in tower.named_modules() if name.endswith("layers.0"))
        attention.register_forward_pre_hook(
            lambda _, given, work=work: work.append(given[0].shape[:-1].numel())
        )
        batch = policy.batch([encoded[n] for n in order])
        found = policy.answer_logprobs(policy.root, batch, TokenRequest(reference=False)).policy_T
        (found * found.detach().sin()).sum().backward()
        gradients = [p.grad for p in policy.root.parameters() if p.requires_grad]
        results.append((found.detach(), gradients, work[0]))
    (once_T, once, work), (twice_T, twice, more) = results
    assert more == 2 * work
    torch.testing.assert_close(once_T, twice_T, rtol=0, atol=1e-11)
    for one, other in zip(once, twice, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_likelihood_is_that_of_the_logits(folder: Path) -> None:
    """The gate of captions asks it: all tokens of the answers and their ends, with the recording or another one."""
    model, policy = ListenerAnswers(folder), load(folder, dtype=torch.float32, needs_reference=False)
    (prompted, *_), (swapped, *_) = prompts(folder), prompts(folder, swapped=0)
    scores = [
        model.log_probability([(asked.prompt, text) for text in asked.answers])
        for asked in (prompted, swapped)
    ]
    encoded = policy.encode(prompted)
    batch = policy.batch(encoded)
    with torch.no_grad():
        logits_ALV = policy.root.model(**batch.inputs, use_cache=False).logits
    logprobs_RV = logits_ALV.log_softmax(-1).flatten(0, 1)[batch.row_T]
    expected = float(logprobs_RV.gather(1, batch.target_T[:, None]).sum())
    assert scores[0] == (
        pytest.approx(expected, abs=1e-3),
        sum(answer.num_answer_tokens for answer in encoded),
    )
    assert scores[1][0] != pytest.approx(expected, abs=1e-5)
