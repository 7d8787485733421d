"""Log-probabilities of prompts: `log_softmax` of dense logits, and every other figure as it was without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from audiollm.data.chat.template import Kind
from audiollm.data.packing import pack
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import PromptedAnswers
from audiollm.models.audio_llms.inputs import placeholder_ids, processor_inputs
from tests.audiollm.families.dual_ffn.packed_samples import load, samples, save_model
from tests.audiollm.families.listener.test_transformers_policy import sound
from tests.audiollm.models.tiny_audio_llms import save_tiny

PROMPTS = TokenRequest(prompts=True, kl=True, contrast_k=2)


def check_unchanged(found: AnswerLogprobs, plain: AnswerLogprobs) -> None:
    for name in ("policy_T", "answer_T", "reference_T", "kl_T", "contrast_T", "draw_T"):
        torch.testing.assert_close(found.required(name), plain.required(name), rtol=0, atol=1e-12)
    assert found.num_answers == plain.num_answers and plain.prompt_sum_A is None


def test_prompts_of_transformers(tmp_path: Path) -> None:
    save_tiny("qwen2_audio", tmp_path)
    policy = ListenerPolicy.load(tmp_path, dtype=torch.float64)
    prompted = [
        PromptedAnswers("a", [("user", ["What is said?", sound(1, 0.7)])], ["yes", "no, never"]),
        PromptedAnswers("b", [("system", ["Be brief."]), ("user", ["Hello."])], ["hi"]),
    ]
    batch = policy.batch([answer for each in prompted for answer in policy.encode(each)])
    draw_T = torch.rand(len(batch.answer_T), generator=torch.Generator().manual_seed(0)).double()
    found = policy.answer_logprobs(policy.root, batch, PROMPTS, draw_T)
    plain_request = TokenRequest(kl=True, contrast_k=2)
    check_unchanged(found, policy.answer_logprobs(policy.root, batch, plain_request, draw_T))
    expected, lengths = [], []
    for each in prompted:
        inputs = processor_inputs(policy.processor, each.prompt, True)
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        with torch.no_grad():
            log_probs_LV = policy.root.model(**inputs).logits[0].log_softmax(-1)
        ids, sounds = inputs["input_ids"][0].tolist(), placeholder_ids(policy.root.model.config)
        scored = [log_probs_LV[n - 1, id] for n, id in enumerate(ids) if n and id not in sounds]
        expected += [torch.stack(scored).sum()] * len(each.answers)
        lengths += [len(scored)] * len(each.answers)
    torch.testing.assert_close(found.required("prompt_sum_A"), torch.stack(expected), rtol=0, atol=1e-9)
    assert found.required("prompt_length_A").tolist() == lengths == policy.prompt_lengths(batch).tolist()
    found.required("prompt_sum_A").sum().backward()
    assert float(policy.root.model.get_output_embeddings().weight.grad.abs().sum()) > 0


@pytest.mark.parametrize("hears", ["features", "codes"])
def test_prompts_of_a_dual_ffn(tmp_path: Path, hears: str) -> None:
    policy = load(save_model(tmp_path / hears, hears))
    streams = [stream for each in samples(hears) for stream in policy.encode(each)]
    batch = policy.batch(streams)
    draw_T = torch.rand(len(batch.answer_T), generator=torch.Generator().manual_seed(0)).double()
    found = policy.answer_logprobs(policy.root, batch, PROMPTS, draw_T)
    plain_request = TokenRequest(kl=True, contrast_k=2)
    check_unchanged(found, policy.answer_logprobs(policy.root, batch, plain_request, draw_T))
    expected: list[Tensor] = []
    lengths = []
    for stream in streams:
        alone = pack([stream])
        with torch.no_grad():
            hidden_SC = policy.root.model(alone)[alone.row_of_S][: len(stream)]
            log_probs_SV = policy.root.model.text_logits(hidden_SC).log_softmax(-1)
        is_target = (stream.text_targets_S >= 0) | (stream.audio_targets_SK >= 0).any(1)
        first = int(is_target.nonzero()[0])  # of the answer
        texts = [n for n in range(1, first) if stream.kinds_S[n] == Kind.TEXT]
        expected.append(torch.stack([log_probs_SV[n - 1, stream.text_ids_S[n]] for n in texts]).sum())
        lengths.append(len(texts))
    torch.testing.assert_close(found.required("prompt_sum_A"), torch.stack(expected), rtol=0, atol=1e-9)
    assert found.required("prompt_length_A").tolist() == lengths == policy.prompt_lengths(batch).tolist()
    assert len(set(lengths)) > 1
    found.required("prompt_sum_A").sum().backward()
    assert float(policy.root.model.text_lm_head.weight.grad.abs().sum()) > 0
