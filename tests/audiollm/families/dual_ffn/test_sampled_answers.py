"""Answers as they were sampled: the engine's log-probabilities are those of the training's forward pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.data.records.sample import TextPart
from audiollm.data.text import tokenizer as tokens
from audiollm.errors import BadSample
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.prompts import AnswerContent, PromptedContents
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Answer, AnswerKind, Finished, Limits, Request, SampledTokens
from audiollm.generation.engine.sampling import SamplingConfig
from tests.audiollm.families.dual_ffn.packed_samples import load, prompted, samples, save_model
from tests.audiollm.supervised.heard_samples import BOOKS

LIMITS = Limits(max_frames=9, max_text_tokens=30)
SHORT = Limits(max_frames=3, max_text_tokens=4)
KINDS: tuple[AnswerKind, ...] = ("text", "audio", "any")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DualFFNPolicy]:
    """In float32; text opens speech and ends now and then."""
    made = Path(tmp_path_factory.mktemp("models"))
    return {hears: talkative(load(save_model(made / hears, hears), dtype=torch.float32)) for hears in HEARS}


HEARS = ("features", "codes")


def talkative(policy: DualFFNPolicy) -> DualFFNPolicy:
    policy.root.eval()
    known = policy.template.tokenizer.token_to_id
    model = policy.root.model
    with torch.no_grad():
        for head in (model.text_lm_head, model.audio_lm_head):
            head.weight *= 2
        for token, factor in ((tokens.AUDIO_OUT_BOS, 4), (tokens.END_OF_TURN, 1.5)):
            model.text_lm_head.weight[known(token)] *= factor
    model.weights_changed()
    return policy


def asked(one: PromptedContents, kind: AnswerKind, number: int, **changes: Any) -> Request:
    sampling = SamplingConfig(temperature=changes.pop("temperature", 1.0), top_p=1.0)
    return Request(one.prompt, number, one.audio, sampling, changes.pop("limits", LIMITS), kind, True)


def answered(policy: DualFFNPolicy, requests: list[Request]) -> list[Answer]:
    return Engine(policy.root.model, policy.template, slots=8, max_length=256).run(requests)


def recorded(answer: Answer) -> SampledTokens:
    assert answer.tokens is not None
    return answer.tokens


def trained(
    policy: DualFFNPolicy, one: PromptedContents, sampled: list[SampledTokens], temperature: float = 1.0
) -> list[Tensor]:
    """Log-probabilities of each answer in the training's pass."""
    batch = policy.batch(policy.encode_sampled(one, sampled))
    request = TokenRequest(reference=False, temperature=temperature)
    answers = policy.answer_logprobs(policy.root, batch, request)
    return [answers.policy_T[answers.answer_T == number].detach() for number in range(len(sampled))]


@pytest.mark.parametrize("hears", HEARS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behaviour_equals_the_training_pass(
    policies: dict[str, DualFFNPolicy], hears: str, kind: AnswerKind, temperature: float
) -> None:
    """For whole answers and for those that a limit cut, from prompts with recordings and without."""
    policy = policies[hears]
    compared, stretches, reasons = 0, set(), set()
    for one in samples(hears):
        requests = [
            asked(one, kind, number, temperature=temperature, limits=SHORT if number % 3 == 2 else LIMITS)
            for number in range(12)
        ]
        answers = answered(policy, requests)
        sampled = [recorded(answer) for answer in answers]
        for answer, record, ours in zip(
            answers, sampled, trained(policy, one, sampled, temperature), strict=True
        ):
            assert record.logprob_A is not None and len(ours) == record.num_actions
            torch.testing.assert_close(ours, record.logprob_A, rtol=0, atol=1e-5)
            assert torch.equal(torch.cat([torch.zeros(BOOKS, 0).long(), *record.codes], 1), answer.codes_KT)
            compared += record.num_actions
            stretches.add(len(record.codes))
            reasons.add(answer.reason)
    assert compared > 100 and reasons == {"end", "length"}
    assert stretches >= {"text": {0}, "audio": {1}, "any": {0, 1}}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_text_alone_leaves_the_audio_head_out(policies: dict[str, DualFFNPolicy], kind: AnswerKind) -> None:
    """Where nothing but text is trained; packs with codes are scored all the same."""
    policy, prompt = policies["codes"], samples("codes")[2]
    answers = answered(policy, [asked(prompt, kind, number) for number in range(12)])
    sampled, calls = [recorded(answer) for answer in answers], []
    before = trained(policy, prompt, sampled)
    hook = policy.root.model.audio_lm_head.register_forward_hook(lambda *_: calls.append(kind))
    policy.root.answers_in_text = True
    try:
        after = trained(policy, prompt, sampled)
    finally:
        policy.root.answers_in_text = False
        hook.remove()
    assert bool(calls) == any(len(record.codes) for record in sampled) == (kind != "text")
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_some_answers_speak_more_than_once(policies: dict[str, DualFFNPolicy]) -> None:
    one = samples("codes")[2]
    answers = answered(policies["codes"], [asked(one, "any", number) for number in range(40)])
    by_turns = [each for each in answers if len(recorded(each).codes) > 1]
    assert by_turns
    for answer in by_turns:
        record = recorded(answer)
        ours = trained(policies["codes"], one, [record])[0]
        assert record.logprob_A is not None
        torch.testing.assert_close(ours, record.logprob_A, rtol=0, atol=1e-5)
        marks = ~record.is_action_N
        assert int(marks.sum()) == len(record.codes) - (not record.ended[-1])  # `<|audio_eos|>` is forced


def test_recording_changes_no_answer_and_text_comes_from_the_ids(policies: dict[str, DualFFNPolicy]) -> None:
    policy, one = policies["codes"], samples("codes")[0]
    requests = [asked(one, kind, number) for kind in KINDS for number in range(6)]
    with_tokens = answered(policy, requests)
    without = answered(policy, [replace(each, record_tokens=False) for each in requests])
    decode = policy.template.tokenizer.decode
    for answer, plain in zip(with_tokens, without, strict=True):
        assert plain.tokens is None and answer.text == plain.text
        assert torch.equal(answer.codes_KT, plain.codes_KT)
        if not recorded(answer).codes:
            assert decode(recorded(answer).ids_N.tolist()) == answer.text


def test_forbidden_tokens_have_no_probability(policies: dict[str, DualFFNPolicy]) -> None:
    """The masks matter: without them the same tokens have other log-probabilities; and they have no gradient."""
    policy, one = policies["codes"], samples("codes")[2]
    sampled = [recorded(each) for each in answered(policy, [asked(one, "any", n) for n in range(8)])]
    batch = policy.batch(policy.encode_sampled(one, sampled))
    request = TokenRequest(entropy=True)
    masked = policy.answer_logprobs(policy.root, batch, request)
    unmasked = policy.answer_logprobs(
        policy.root, replace(batch, forbidden_words=None, forbidden_codes=None), request
    )
    assert (
        torch.isfinite(masked.required("reference_T")).all() and (masked.policy_T > unmasked.policy_T).any()
    )
    policy.root.zero_grad()
    masked.policy_T.sum().backward()
    gradient_KVC = policy.root.model.audio_lm_head.weight.grad
    assert gradient_KVC is not None and torch.isfinite(gradient_KVC).all()
    bos = policy.template.audio_bos
    assert not gradient_KVC.unflatten(0, (BOOKS, -1))[:, bos].any()
    policy.root.zero_grad()


@pytest.mark.parametrize("hears", HEARS)
@pytest.mark.parametrize("slots", [16, 3])
def test_a_group_has_the_answers_of_single_requests_and_prefills_once(
    policies: dict[str, DualFFNPolicy], hears: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the group does not fit into the slots at once: later answers copy from one that still runs."""
    policy = policies[hears]
    groups = [(asked(one, kind, 0), range(5)) for one in samples(hears) for kind in KINDS]
    single = [
        [answered(policy, [replace(request, seed=seed)])[0] for seed in seeds] for request, seeds in groups
    ]
    prefilled: list[int] = []
    embed = type(policy.root.model).embed_rows

    def counted(model: Any, batch: Any) -> Tensor:
        prefilled.append(int(batch.layout.cumulative_lengths[-1]))
        return embed(model, batch)

    monkeypatch.setattr(type(policy.root.model), "embed_rows", counted)
    engine = Engine(policy.root.model, policy.template, slots, max_length=256)
    together = engine.run_groups(groups)
    for alone, grouped in zip(single, together, strict=True):
        for one_answer, other in zip(map(recorded, alone), map(recorded, grouped), strict=True):
            assert torch.equal(one_answer.ids_N, other.ids_N)
            assert all(map(torch.equal, one_answer.codes, other.codes))
            assert one_answer.logprob_A is not None and other.logprob_A is not None
            torch.testing.assert_close(one_answer.logprob_A, other.logprob_A, rtol=0, atol=1e-5)
    prompts = sum(
        len(policy.template.text_prompt(request.messages, request.audio)) - (request.answer != "audio")
        for request, _ in groups
    )
    if slots == 16:
        assert sum(prefilled) <= prompts + 60 < 3 * prompts  # rows that fill up packs are few


def test_a_group_does_not_share_what_other_weights_computed(tmp_path: Path) -> None:
    policy = talkative(load(save_model(tmp_path, "codes"), dtype=torch.float32))
    model, request = policy.root.model, asked(samples("codes")[0], "text", 0)
    engine = Engine(model, policy.template, slots=1, max_length=256)
    first, second = engine.submit_group(request, [0, 0])
    engine.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.weights_changed()
    done: dict[int, Answer] = {}
    while engine.busy:
        done |= {each.request: each.answer for each in engine.step() if isinstance(each, Finished)}
    expected = recorded(answered(policy, [request])[0])
    assert first in done and torch.equal(recorded(done[second]).ids_N, expected.ids_N)
    torch.testing.assert_close(recorded(done[second]).logprob_A, expected.logprob_A, rtol=0, atol=1e-5)


def test_greedy_answers_have_tokens_and_no_log_probabilities(policies: dict[str, DualFFNPolicy]) -> None:
    one = samples("codes")[1]
    answers = answered(policies["codes"], [asked(one, kind, 0, temperature=0.0) for kind in KINDS])
    for answer in answers:
        assert recorded(answer).logprob_A is None and recorded(answer).num_actions > 0


@pytest.mark.parametrize(
    "changes",
    [{"top_p": 0.9}, {"top_k": 5}, {"text_guidance": 2.0}, {"speaker_guidance": 1.5}, {"ras_window": 7}],
)
def test_other_distributions_are_refused(policies: dict[str, DualFFNPolicy], changes: dict[str, Any]) -> None:
    request = asked(samples("codes")[2], "audio", 0)
    refused = replace(request, sampling=replace(request.sampling, **changes))
    with pytest.raises(ValueError, match=next(iter(changes))):
        answered(policies["codes"], [refused])


def test_empty_and_long_answers(policies: dict[str, DualFFNPolicy]) -> None:
    """An answer of the end of the turn alone is one; answers beyond a pack are not."""
    policy, one = policies["codes"], prompted("none", [], [AnswerContent([TextPart(text="x")])])
    end = policy.template.tokenizer.token_to_id(tokens.END_OF_TURN)
    empty = SampledTokens("text", torch.tensor([end]), torch.tensor([True]), (), (), None)
    assert len(trained(policy, one, [empty])[0]) == 1
    small = DualFFNPolicy(Path(), policy.template, policy.root, max_tokens=20)
    with pytest.raises(BadSample, match="positions together"):
        small.encode_sampled(one, [empty] * 10)
    with pytest.raises(BadSample, match="no answer"):
        small.encode_sampled(one, [])
