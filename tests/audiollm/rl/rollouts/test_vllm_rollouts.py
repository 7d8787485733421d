"""Rollouts by vLLM, with a stand-in for vLLM in the other process: weights, log-probabilities, seeds, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.audio import Waveform
from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policies import plain_model
from audiollm.families.policy import PromptedAnswers
from audiollm.families.rollout import Rollout, RolloutSettings
from audiollm.models.audio_llms.inputs import placeholder_ids
from audiollm.models.pretrained import StoredWeights
from audiollm.rl.rollouts.engines import load_engine
from audiollm.rl.rollouts.served.engine import ServedRollouts, gpu_environment, weight_buckets
from audiollm.rl.rollouts.settings import EngineChoice, vllm_version
from audiollm.train.settings import LoRASettings
from tests.audiollm.models.tiny_audio_llms import qwen2_5_omni_thinker, save_processor, save_tiny
from tests.audiollm.rl.rollouts.vllm_stand_in import save_served, use_stand_in

SETTINGS = RolloutSettings(seed=1, step=2, max_text_tokens=12)
CHOICE = EngineChoice(name="vllm", dtype="float32", bucket_mb=0.004)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen2_audio")
    save_tiny("qwen2_audio", made)
    return Path(made)


@pytest.fixture(scope="module", params=["all", "adapter"])
def policy(request: pytest.FixtureRequest, folder: Path) -> ListenerPolicy:
    torch.manual_seed(0)
    policy = ListenerPolicy.load(folder, request.param, LoRASettings(rank=2), needs_reference=False)
    change(policy)
    return policy


@pytest.fixture
def start(folder: Path) -> ListenerPolicy:
    return ListenerPolicy.load(folder, needs_reference=False)


@pytest.fixture(scope="module")
def engine(folder: Path, policy: ListenerPolicy) -> Iterator[ServedRollouts]:
    with pytest.MonkeyPatch.context() as patch:
        use_stand_in(patch)
        engine = ServedRollouts(policy.served_model(), folder, CHOICE)
    engine.weights_changed()
    yield engine
    engine.close()


def change(policy: ListenerPolicy) -> None:
    """Move what is trained, and make the end of the turn likely enough to be drawn now and then."""
    with torch.no_grad():
        for name, parameter in policy.root.named_parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2 if "lora" in name else 0.05)


def prompts() -> list[PromptedAnswers]:
    noise = 0.1 * torch.randn(1, 24_000, generator=torch.Generator().manual_seed(0))
    loud, short = Waveform(noise, 16_000), Waveform(3 * noise[:, :9_000], 8_000)
    return [
        PromptedAnswers("heard", [("user", ["What is said?", loud])], []),
        PromptedAnswers("twice", [("user", [short, "What, of all?", loud])], []),
        PromptedAnswers("read", [("user", ["Hello."])], []),
    ]


def ids_of(groups: list[list[Rollout]]) -> list[list[int]]:
    return [rollout.tokens.ids_N.tolist() for group in groups for rollout in group]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behaviour_equals_old(engine: ServedRollouts, policy: ListenerPolicy, temperature: float) -> None:
    groups = engine.sample(prompts(), [range(6)] * 3, replace(SETTINGS, temperature=temperature))
    for prompt, group in zip(prompts(), groups, strict=True):
        batch = policy.batch(policy.encode_sampled(prompt, [rollout.tokens for rollout in group]))
        request = TokenRequest(reference=False, temperature=temperature)
        old = policy.answer_logprobs(policy.root, batch, request)
        for number, rollout in enumerate(group):
            assert (rollout.prompt, rollout.number) == (prompt.id, number)
            assert rollout.truncated == (int(rollout.tokens.ids_N[-1]) not in policy.ends)
            assert not set(rollout.tokens.ids_N.tolist()) & set(
                placeholder_ids(plain_model(policy.root).config)
            )
            behaviour_A = rollout.tokens.logprob_A
            assert behaviour_A is not None
            torch.testing.assert_close(
                old.policy_T[old.answer_T == number].detach(), behaviour_A, rtol=0, atol=1e-4
            )


def test_an_answer_depends_on_its_seed_alone(engine: ServedRollouts) -> None:
    together = engine.sample(prompts(), [range(4), [2], range(3)], SETTINGS)
    (alone,) = engine.sample(prompts()[:1], [[3]], SETTINGS)
    (later,) = engine.sample(prompts()[:1], [[3]], replace(SETTINGS, step=3))
    assert ids_of([alone]) == ids_of([[together[0][3]]]) != ids_of([later])
    assert together[0][3].seed == SETTINGS.seed_of("heard", 3)
    assert len({tuple(ids) for ids in ids_of([together[0]])}) == 4


def test_pushed_weights_are_those_that_answer(engine: ServedRollouts, policy: ListenerPolicy) -> None:
    greedy = replace(SETTINGS, temperature=0.0)
    numbers = [[0]] * 3
    before = engine.sample(prompts(), numbers, greedy)
    assert before[0][0].tokens.logprob_A is None
    assert ids_of(before) == ids_of(policy.rollout_engine().sample(prompts(), numbers, greedy))
    change(policy)
    learned = ids_of(policy.rollout_engine().sample(prompts(), numbers, greedy))
    assert ids_of(engine.sample(prompts(), numbers, greedy)) == ids_of(before) != learned
    engine.weights_changed()
    assert ids_of(engine.sample(prompts(), numbers, greedy)) == learned


def test_prompts_that_do_not_fit_are_set_aside(folder: Path, start: ListenerPolicy, monkeypatch: Any) -> None:
    use_stand_in(monkeypatch)
    engine = ServedRollouts(start.served_model(), folder, CHOICE.model_copy(update={"max_length": 40}))
    with pytest.raises(BadSample, match="heard.* tokens, and vllm takes 40"):
        engine.sample(prompts()[:1], [[0]], SETTINGS)
    with pytest.raises(BadSample, match="at least 0.1 s"):
        engine.sample(
            [PromptedAnswers("x", [("user", [Waveform(torch.zeros(1, 10), 16_000)])], [])], [[0]], SETTINGS
        )
    with pytest.raises(ConfigError, match="vllm samples text"):
        engine.sample(prompts(), [[0]] * 3, replace(SETTINGS, answer="audio"))
    engine.close()


def test_what_vllm_reads_otherwise_ends_the_run(
    folder: Path, start: ListenerPolicy, monkeypatch: Any
) -> None:
    use_stand_in(monkeypatch)
    monkeypatch.setenv("STAND_IN_MISREADS", "1")
    engine = ServedRollouts(start.served_model(), folder, CHOICE)
    with pytest.raises(StageError, match="vllm reads prompt 'read' as .* tokens, other than"):
        engine.sample(prompts()[2:], [[0]], SETTINGS)
    engine.close()


def test_a_model_that_vllm_does_not_open(tmp_path: Path, start: ListenerPolicy, monkeypatch: Any) -> None:
    use_stand_in(monkeypatch)
    with pytest.raises(StageError, match="vllm: open: ValueError: no such model"):
        ServedRollouts(start.served_model(), tmp_path / "absent", CHOICE)


@pytest.mark.parametrize(
    "kind", ["audio_flamingo3", "qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"]
)
def test_weights_have_the_names_and_values_of_the_files(kind: str, tmp_path: Path) -> None:
    """Whatever transformers calls them, and however it joins experts."""
    save_served(kind, tmp_path)
    served = ListenerPolicy.load(tmp_path, needs_reference=False).served_model()
    stored = StoredWeights(tmp_path)
    names = []
    for name, tensor in served.tensors():
        names.append(name)
        torch.testing.assert_close(tensor, stored.read(name), rtol=0, atol=0)
    assert len(names) == len(set(names))
    assert {name for name in stored.names if not name.startswith(("talker.", "token2wav."))} == set(names)


def test_a_tied_table_is_sent_once(tmp_path: Path) -> None:
    model, processor = qwen2_5_omni_thinker()
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    save_processor(processor, tmp_path)
    policy = ListenerPolicy.load(tmp_path, needs_reference=False)
    model = plain_model(policy.root)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    names = [name for name, _ in policy.served_model().tensors()]
    assert sorted(names) == StoredWeights(tmp_path).names and not any("lm_head" in name for name in names)
    lora = LoRASettings(rank=2, target_modules=("lm_head",))
    with pytest.raises(ConfigError, match="lm_head.weight is tied to another table"):
        ListenerPolicy.load(tmp_path, "adapter", lora, needs_reference=False).served_model()


def test_two_tables_of_words_that_vllm_would_tie_are_refused(tmp_path: Path) -> None:
    save_tiny("qwen2_5_omni", tmp_path)  # transformers reads the ties of the thinker, vLLM those of its text
    with pytest.raises(ConfigError, match="vLLM ties the table of output words"):
        ListenerPolicy.load(tmp_path, needs_reference=False).served_model()


def test_weights_of_another_folder_are_refused(folder: Path, tmp_path: Path, start: ListenerPolicy) -> None:
    save_tiny("audio_flamingo3", tmp_path)
    elsewhere = ListenerPolicy(tmp_path, start.processor, start.root, start.ends)
    with pytest.raises(ConfigError, match="is no tensor of the folder that vLLM opens, by name and shape"):
        elsewhere.served_model()


def test_buckets_are_bounded() -> None:
    tensors = [
        ("a", torch.zeros(6)),
        ("b", torch.zeros(4)),
        ("large", torch.zeros(50)),
        ("c", torch.arange(3)),
    ]
    buckets = list(weight_buckets(tensors, torch.bfloat16, 20))
    assert [list(bucket) for bucket in buckets] == [["a", "b"], ["large"], ["c"]]
    assert buckets[0]["a"].dtype == torch.bfloat16 and buckets[2]["c"].dtype == torch.int64


def test_gpus_are_the_rank_s_own_or_behind_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpu_environment(1) == {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,4,5,6,7")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert gpu_environment(0) == {"CUDA_VISIBLE_DEVICES": "3"}
    assert gpu_environment(2) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    with pytest.raises(ConfigError, match="3 for each of 2 ranks, and 4 GPUs have no rank"):
        gpu_environment(3)


def test_an_environment_without_vllm_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip install 'vllm"):
        vllm_version(None)
    with pytest.raises(ConfigError, match="rollouts.python: cannot be started"):
        vllm_version(str(tmp_path / "python"))


def test_other_families_are_refused(folder: Path) -> None:
    class Talks:
        """A policy without `served_model`."""

    with pytest.raises(ConfigError, match="vllm samples audio LLMs of transformers"):
        load_engine(Talks(), folder, CHOICE)  # type: ignore[arg-type]
