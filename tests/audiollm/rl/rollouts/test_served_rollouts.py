"""Rollouts by vLLM and SGLang, with a stand-in in the other process: weights, log-probabilities, seeds, refusals."""

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
from audiollm.rl.rollouts.settings import EngineChoice, server_version
from audiollm.train.settings import LoRASettings
from tests.audiollm.models.tiny_audio_llms import qwen2_5_omni_thinker, save_processor, save_tiny
from tests.audiollm.rl.rollouts.server_stand_ins import save_served, use_stand_in

SETTINGS = RolloutSettings(seed=1, step=2, max_text_tokens=12)
SERVERS = ("vllm", "sglang")
FIRST_SERVER = ("vllm", pytest.param("sglang", marks=pytest.mark.slow))
"""The other one answers the quick tests in the same way."""


def choice_of(server: str, **settings: Any) -> EngineChoice:
    return EngineChoice(name=server, dtype="float32", bucket_mb=0.004, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen2_audio")
    save_tiny("qwen2_audio", made)
    return Path(made)


@pytest.fixture(scope="module", params=["all", pytest.param("adapter", marks=pytest.mark.slow)])
def policy(request: pytest.FixtureRequest, folder: Path) -> ListenerPolicy:
    torch.manual_seed(0)
    policy = ListenerPolicy.load(folder, request.param, LoRASettings(rank=2), needs_reference=False)
    change(policy)
    return policy


@pytest.fixture
def start(folder: Path) -> ListenerPolicy:
    return ListenerPolicy.load(folder, needs_reference=False)


@pytest.fixture(scope="module", params=SERVERS)
def engine(request: pytest.FixtureRequest, folder: Path, policy: ListenerPolicy) -> Iterator[ServedRollouts]:
    with pytest.MonkeyPatch.context() as patch:
        use_stand_in(patch)
        engine = ServedRollouts(policy.served_model(), folder, choice_of(request.param))
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


def prompts_for(engine: ServedRollouts) -> list[PromptedAnswers]:
    """Those that the server takes: SGLang has one recording in a prompt."""
    return [prompt for prompt in prompts() if engine._name != "sglang" or prompt.id != "twice"]


def ids_of(groups: list[list[Rollout]]) -> list[list[int]]:
    return [rollout.tokens.ids_N.tolist() for group in groups for rollout in group]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behaviour_equals_old(engine: ServedRollouts, policy: ListenerPolicy, temperature: float) -> None:
    served_prompts = prompts_for(engine)
    groups = engine.sample(
        served_prompts, [range(6)] * len(served_prompts), replace(SETTINGS, temperature=temperature)
    )
    for prompt, group in zip(served_prompts, groups, strict=True):
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
    together = engine.sample(
        prompts_for(engine), [range(4), [2], range(3)][: len(prompts_for(engine))], SETTINGS
    )
    (alone,) = engine.sample(prompts()[:1], [[3]], SETTINGS)
    (later,) = engine.sample(prompts()[:1], [[3]], replace(SETTINGS, step=3))
    assert ids_of([alone]) == ids_of([[together[0][3]]]) != ids_of([later])
    assert together[0][3].seed == SETTINGS.seed_of("heard", 3)
    assert len({tuple(ids) for ids in ids_of([together[0]])}) == 4


def test_pushed_weights_are_those_that_answer(engine: ServedRollouts, policy: ListenerPolicy) -> None:
    greedy = replace(SETTINGS, temperature=0.0)
    sampled_prompts = prompts_for(engine)
    numbers = [[0]] * len(sampled_prompts)
    before = engine.sample(sampled_prompts, numbers, greedy)
    assert before[0][0].tokens.logprob_A is None
    assert ids_of(before) == ids_of(policy.rollout_engine().sample(sampled_prompts, numbers, greedy))
    change(policy)
    learned = ids_of(policy.rollout_engine().sample(sampled_prompts, numbers, greedy))
    assert ids_of(engine.sample(sampled_prompts, numbers, greedy)) == ids_of(before) != learned
    engine.weights_changed()
    assert ids_of(engine.sample(sampled_prompts, numbers, greedy)) == learned


@pytest.mark.parametrize("server", FIRST_SERVER)
def test_prompts_that_do_not_fit_are_set_aside(
    server: str, folder: Path, start: ListenerPolicy, monkeypatch: Any
) -> None:
    use_stand_in(monkeypatch)
    engine = ServedRollouts(start.served_model(), folder, choice_of(server, max_length=40))
    with pytest.raises(BadSample, match=f"heard.* tokens, and {server} takes 40"):
        engine.sample(prompts()[:1], [[0]], SETTINGS)
    with pytest.raises(BadSample, match="at least 0.1 s"):
        engine.sample(
            [PromptedAnswers("x", [("user", [Waveform(torch.zeros(1, 10), 16_000)])], [])], [[0]], SETTINGS
        )
    if server == "sglang":
        with pytest.raises(BadSample, match="twice.*2 recordings, and sglang takes one"):
            engine.sample(prompts()[1:2], [[0]], SETTINGS)
    with pytest.raises(ConfigError, match=f"{server} samples text"):
        engine.sample(prompts(), [[0]] * 3, replace(SETTINGS, answer="audio"))
    engine.close()


@pytest.mark.parametrize("server", FIRST_SERVER)
def test_what_a_server_reads_otherwise_ends_the_run(
    server: str, folder: Path, start: ListenerPolicy, monkeypatch: Any
) -> None:
    use_stand_in(monkeypatch)
    monkeypatch.setenv("STAND_IN_MISREADS", "1")
    engine = ServedRollouts(start.served_model(), folder, choice_of(server))
    with pytest.raises(StageError, match=f"{server} reads prompt 'read' as .* tokens, other than"):
        engine.sample(prompts()[2:], [[0]], SETTINGS)
    engine.close()


@pytest.mark.parametrize("server", FIRST_SERVER)
def test_a_model_that_a_server_does_not_open(
    server: str, tmp_path: Path, start: ListenerPolicy, monkeypatch: Any
) -> None:
    use_stand_in(monkeypatch)
    with pytest.raises(StageError, match=f"{server}: open: ValueError: no such model"):
        ServedRollouts(start.served_model(), tmp_path / "absent", choice_of(server))


def test_an_end_that_sglang_adds_ends_the_run(folder: Path, start: ListenerPolicy, monkeypatch: Any) -> None:
    """It stops at the end tokens of the model's folder, too, which training may not count among its own."""
    use_stand_in(monkeypatch)
    greedy = replace(SETTINGS, temperature=0.0)
    (answer,) = start.rollout_engine().sample(prompts()[:1], [[0]], greedy)
    monkeypatch.setenv("STAND_IN_ENDS_AT", str(int(answer[0].tokens.ids_N[0])))
    engine = ServedRollouts(start.served_model(), folder, choice_of("sglang"))
    with pytest.raises(StageError, match="an answer ended otherwise than in training"):
        engine.sample(prompts()[:1], [[0]], greedy)
    engine.close()


def test_seeds_have_no_effect_in_sglang_without_its_deterministic_mode(
    folder: Path, start: ListenerPolicy, monkeypatch: Any
) -> None:
    use_stand_in(monkeypatch)
    choice = choice_of("sglang", options={"enable_deterministic_inference": False})
    engine = ServedRollouts(start.served_model(), folder, choice)
    (answers,) = engine.sample(prompts()[:1], [range(2)], SETTINGS)
    assert ids_of([answers[:1]]) == ids_of([answers[1:]])
    engine.close()


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


def test_two_tables_of_words_that_a_server_would_tie_are_refused(tmp_path: Path) -> None:
    save_tiny(
        "qwen2_5_omni", tmp_path
    )  # transformers reads the ties of the thinker, servers those of its text
    with pytest.raises(ConfigError, match="a server ties the table of output words"):
        ListenerPolicy.load(tmp_path, needs_reference=False).served_model()


def test_weights_of_another_folder_are_refused(folder: Path, tmp_path: Path, start: ListenerPolicy) -> None:
    save_tiny("audio_flamingo3", tmp_path)
    elsewhere = ListenerPolicy(tmp_path, start.processor, start.root, start.ends)
    with pytest.raises(
        ConfigError, match="is no tensor of the folder that the server opens, by name and shape"
    ):
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


@pytest.mark.parametrize("server", FIRST_SERVER)
def test_an_environment_without_the_server_is_told(server: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"pip install '{server}"):
        server_version(server, None)
    with pytest.raises(ConfigError, match="rollouts.python: cannot be started"):
        server_version(server, str(tmp_path / "python"))


def test_other_families_are_refused(folder: Path) -> None:
    class Talks:
        """A policy without `served_model`."""

    with pytest.raises(ConfigError, match="sglang samples audio LLMs of transformers"):
        load_engine(Talks(), folder, choice_of("sglang"))  # type: ignore[arg-type]
