"""Log-probabilities of a DualFFN's packed answers: exact, from every recording, saved whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from audiollm.data.chat.conditions import Conditions
from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import TokenStream
from audiollm.data.packing import pack, pad_streams
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.data.text.tokenizer import SPEAKERS_FILE, TRAINED_FILE, add_special_tokens
from audiollm.errors import BadSample, ConfigError
from audiollm.families.dual_ffn.losses import token_losses
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.prompts import AnswerContent, PromptedContents
from audiollm.files.atomic import read_json
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.model_card import ModelCard
from audiollm.train.settings import Trained
from tests.audiollm.families.dual_ffn.packed_samples import (
    LORA,
    TRAINED,
    codes,
    heard,
    load,
    prompted,
    samples,
    save_model,
    speech,
    text,
)
from tests.audiollm.families.dual_ffn.test_start import plain_vocabulary

transformers = pytest.importorskip("transformers")
HEARS = ("features", "codes")
PLAIN = TokenRequest()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = Path(tmp_path_factory.mktemp("models"))
    return {hears: save_model(made / hears, hears) for hears in HEARS}


def encoded(policy: DualFFNPolicy, given: list[PromptedContents]) -> list[TokenStream]:
    return [stream for one in given for stream in policy.encode(one)]


def logprobs(
    policy: DualFFNPolicy, streams: list[TokenStream], request: TokenRequest = PLAIN
) -> AnswerLogprobs:
    return policy.answer_logprobs(policy.root, policy.batch(streams), request)


def gradients(policy: DualFFNPolicy, total: Tensor) -> list[Tensor]:
    policy.root.zero_grad()
    total.backward()
    trained = [parameter for parameter in policy.root.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None for parameter in trained)
    return [parameter.grad.clone() for parameter in trained if parameter.grad is not None]


def dense(model: DualFFN, stream: TokenStream) -> Tensor:
    """One answer alone, by log_softmax of all logits, in reading order."""
    batch = pack([stream])
    hidden_SC = model(batch)[batch.row_of_S][: len(stream) - 1]
    text_SV, audio_SKV = (
        logits.log_softmax(-1) for logits in (model.text_logits(hidden_SC), model.audio_logits(hidden_SC))
    )
    found = []
    for place in range(len(stream) - 1):
        word = int(stream.text_targets_S[place + 1])
        found += [text_SV[place, word]] if word != IGNORE else []
        row = stream.audio_targets_SK[place + 1].tolist()
        found += [audio_SKV[place, book, code] for book, code in enumerate(row) if code != IGNORE]
    return torch.stack(found)


@pytest.mark.parametrize("hears", HEARS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_packed_answers_have_the_log_probabilities_of_single_ones(
    folders: dict[str, Path], hears: str, dtype: torch.dtype
) -> None:
    policy = load(folders[hears], dtype=dtype)
    streams = encoded(policy, samples(hears))
    answers = logprobs(policy, streams)
    alone = [dense(policy.root.model, stream) for stream in streams]
    assert answers.num_answers == 6 and [len(one) for one in alone] == answers.lengths_A.tolist()
    value, gradient = (1e-9, 1e-9) if dtype == torch.float64 else (1e-5, 1e-4)
    torch.testing.assert_close(answers.policy_T, torch.cat(alone), rtol=0, atol=value)
    assert torch.equal(answers.answer_T, answers.answer_T.sort().values)
    weights_T = torch.randn(len(answers.policy_T), generator=torch.Generator().manual_seed(0), dtype=dtype)
    ours = gradients(policy, (answers.policy_T * weights_T).sum())
    theirs = gradients(policy, (torch.cat(alone) * weights_T).sum())
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=gradient)


@pytest.mark.parametrize("hears", HEARS)
def test_order_padding_and_filling_change_nothing(folders: dict[str, Path], hears: str) -> None:
    policy = load(folders[hears])
    streams = encoded(policy, samples(hears))
    first = logprobs(policy, streams)
    padded = logprobs(policy, pad_streams(streams))
    filled = DualFFNPolicy(folders[hears], policy.template, policy.root, needs(policy), rows_multiple=16)
    backwards = logprobs(policy, streams[::-1])
    for other in (padded, logprobs(filled, streams)):
        torch.testing.assert_close(other.policy_T, first.policy_T, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            other.required("reference_T"), first.required("reference_T"), rtol=0, atol=1e-12
        )
    for number in range(6):
        torch.testing.assert_close(
            backwards.policy_T[backwards.answer_T == 5 - number],
            first.policy_T[first.answer_T == number],
            rtol=0,
            atol=1e-12,
        )


def needs(policy: DualFFNPolicy) -> object:
    return policy.frozen["reference"]


def test_targets_are_those_of_supervised_training(folders: dict[str, Path]) -> None:
    """Text with the end of the turn, marks, every code and one stop per codebook; nothing of the prompt."""
    policy = load(folders["codes"])
    given = samples("codes")
    streams = encoded(policy, given)
    answers = logprobs(policy, streams)
    batch = pack(streams, normalization="token", audio_reduction="sum")
    sums = token_losses(policy.root.model, policy.root.model(batch), batch)
    torch.testing.assert_close(-answers.policy_T.sum(), sums["text"] + sums["audio"], rtol=0, atol=1e-9)
    turns = [Message(role="assistant", content=list(answer.content)) for answer in given[1].answers]
    tokenizer = policy.template.tokenizer
    words = len(tokenizer.encode("high", add_special_tokens=False).ids)
    assert len(turns) == 2 and answers.lengths_A[2:4].tolist() == [3 * 5 + 3, words + 3 * 8 + 3]


def test_dropout_is_off_in_training_mode_and_kept_in_the_config(folders: dict[str, Path]) -> None:
    for trained in ("all", "adapter"):
        policy = load(folders["features"], trained)  # type: ignore[arg-type]
        streams = encoded(policy, samples("features"))
        policy.root.train()
        first, second = (logprobs(policy, streams) for _ in range(2))
        policy.root.eval()
        third = logprobs(policy, streams)
        assert torch.equal(first.policy_T, second.policy_T) and torch.equal(first.policy_T, third.policy_T)
        config = policy.root.model.config
        assert config.dropout == 0.1 and config.audio_encoder is not None
        assert config.audio_encoder.dropout == 0.1


@pytest.mark.parametrize("hears", HEARS)
@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_every_recording_counts_for_its_own_sample_alone(
    folders: dict[str, Path], hears: str, trained: Trained
) -> None:
    policy = load(folders[hears], trained)
    given = samples(hears)
    before = logprobs(policy, encoded(policy, given))
    for sample, part, seconds in ((0, 0, 0.3), (0, 1, 0.5), (1, 0, 1.4)):
        audio = list(given[sample].audio)
        audio[part] = heard(hears, seconds, 77)
        swapped = [*given[:sample], replace(given[sample], audio=audio), *given[sample + 1 :]]
        after = logprobs(policy, encoded(policy, swapped))
        own_T = before.answer_T // 2 == sample
        for field in ("policy_T", "reference_T"):
            change_T = (after.required(field) - before.required(field)).abs()
            assert bool((change_T[own_T] > 1e-9).all()), (field, sample, part)
            assert not change_T[~own_T].any(), (field, sample, part)


@pytest.mark.parametrize("encoder_trained", [True, False])
def test_the_gradient_reaches_encoder_and_projector(folders: dict[str, Path], encoder_trained: bool) -> None:
    policy = DualFFNPolicy.load(folders["features"], dtype=torch.float64, encoder_trained=encoder_trained)
    streams = encoded(policy, samples("features")[:1])
    gradients(policy, logprobs(policy, streams).policy_T.sum())
    model = policy.root.model
    for part, expected in ((model.audio_tower, encoder_trained), (model.audio_encoder_proj, True)):
        found = [p.grad is not None and bool(p.grad.any()) for p in part.parameters()]
        assert any(found) if expected else not any(found)


def test_a_shared_prompt_is_computed_once(folders: dict[str, Path]) -> None:
    policy = load(folders["features"])
    streams = encoded(policy, samples("features"))
    batch = policy.batch(streams).pack
    features = batch.features
    assert features is not None and len(features.rows) == 2 + 2  # two clips; one of two windows
    assert features.num_rows == sum(features.rows)
    assert sum(map(len, streams)) - len(batch.positions_S) > 2 * features.num_rows - sum(features.rows)


def test_an_idle_pack_gives_every_parameter_a_gradient_of_zero(folders: dict[str, Path]) -> None:
    for hears in HEARS:
        policy = load(folders[hears])
        answers = logprobs(policy, [])
        assert answers.num_answers == 0 and answers.policy_T.shape == (0,)
        assert not any(bool(each.any()) for each in gradients(policy, answers.policy_T.sum()))


@pytest.mark.parametrize("hears", HEARS)
def test_the_reference_of_an_adapter_is_the_model_as_loaded(folders: dict[str, Path], hears: str) -> None:
    policy, whole = load(folders[hears], "adapter"), load(folders[hears])
    streams = encoded(policy, samples(hears))
    trained = [name for name, p in policy.root.named_parameters() if p.requires_grad]
    answers = logprobs(policy, streams)
    expected = logprobs(whole, streams).required("reference_T")
    torch.testing.assert_close(answers.required("reference_T"), expected, rtol=0, atol=1e-12)
    assert float((answers.policy_T - expected).detach().abs().min()) > 0
    assert trained == [name for name, p in policy.root.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert all(bool(each.any()) for each in gradients(policy, answers.policy_T.sum()))


@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_kl_and_the_other_figures(folders: dict[str, Path], trained: Trained) -> None:
    policy = load(folders["codes"], trained)
    streams = encoded(policy, samples("codes"))
    batch = policy.batch(streams)
    draw_T = torch.rand(len(batch.entry_T), dtype=torch.float64)
    request = TokenRequest(temperature=1.7, kl=True, collision=True, contrast_k=3)
    answers = policy.answer_logprobs(policy.root, batch, request, draw_T)
    plain = logprobs(policy, streams, TokenRequest(temperature=1.7))
    torch.testing.assert_close(answers.policy_T, plain.policy_T, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        answers.required("reference_T"), plain.required("reference_T"), rtol=0, atol=1e-12
    )
    stream, own_T = streams[3], batch.answer_T == 3
    log_probs = []
    for reference in (False, True):
        policy_of = load(folders["codes"]) if reference else policy
        model = policy_of.frozen["reference"].model if reference else policy.root.model  # type: ignore[union-attr]
        packed = pack([stream])
        hidden_SC = model(packed)[packed.row_of_S][: len(stream) - 1]  # type: ignore[operator, index]
        log_probs.append((model.audio_logits(hidden_SC) / 1.7).log_softmax(-1))  # type: ignore[operator]
    mask = stream.audio_targets_SK[1:] != IGNORE
    kl = (log_probs[1].exp() * (log_probs[1] - log_probs[0])).sum(-1)[mask]
    spoken_T = answers.required("kl_T")[own_T]
    words = len(spoken_T) - len(kl)
    for value in kl.tolist():
        assert float((spoken_T - value).detach().abs().min()) < 1e-9
    collision = log_probs[0].exp().square().sum(-1).log()[mask]
    found = answers.required("log_collision_T")[own_T]
    assert words > 0 and all(float((found - c).detach().abs().min()) < 1e-9 for c in collision.tolist())
    assert bool((answers.required("contrast_T") < 0).all())
    gradients(policy, answers.required("kl_T").sum())


def test_a_qwen2_folder_gives_qwen2s_log_probabilities(tmp_path: Path) -> None:
    tokenizer = plain_vocabulary(tmp_path, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    add_special_tokens(tokenizer, "chatml")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    peer = transformers.Qwen2ForCausalLM(config).eval()
    for parameter in peer.parameters():
        nn.init.normal_(parameter, std=0.2)
    peer.save_pretrained(tmp_path)
    policy = DualFFNPolicy.load(tmp_path, rows_multiple=1)
    given = [prompted(f"s{n}", [], [text("seven"), text("speaker theo theo")]) for n in range(2)]
    streams = encoded(policy, given)
    answers = logprobs(policy, streams)
    expected = []
    for stream in streams:
        with torch.no_grad():
            log_probs_SV = peer(stream.text_ids_S[None]).logits[0].log_softmax(-1)
        places = (stream.text_targets_S[1:] != IGNORE).nonzero()[:, 0]
        expected.append(log_probs_SV[places, stream.text_targets_S[1:][places]])
    torch.testing.assert_close(answers.policy_T, torch.cat(expected), rtol=0, atol=1e-5)
    torch.testing.assert_close(answers.required("reference_T"), torch.cat(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("hears", HEARS)
@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_saved_folders_load_with_equal_logits(
    folders: dict[str, Path], hears: str, trained: Trained, tmp_path: Path
) -> None:
    policy = load(folders[hears], trained, torch.float32)
    streams = encoded(policy, samples(hears))
    before = logprobs(policy, streams)
    policy.save(tmp_path, ModelCard(base="x", license="apache-2.0"))
    torch.testing.assert_close(logprobs(policy, streams).policy_T, before.policy_T, rtol=0, atol=0)
    again = DualFFNPolicy.load(tmp_path, rows_multiple=1)
    torch.testing.assert_close(logprobs(again, streams).policy_T, before.policy_T, rtol=0, atol=1e-4)
    model = tmp_path / "model"
    assert read_json(model / SPEAKERS_FILE) == ["theo"] and read_json(model / TRAINED_FILE) == TRAINED
    generation = read_json(model / "generation_config.json")
    assert (generation["temperature"], generation["top_p"]) == (0.4, 0.7)
    assert "apache-2.0" in (model / "README.md").read_text()
    assert again.root.model.config == policy.root.model.config
    assert (tmp_path / "adapter").exists() == (trained == "adapter")
    if hears == "codes":  # the layout that transformers' own class has
        peer = transformers.HiggsAudioV2ForConditionalGeneration.from_pretrained(model, use_text_head=True)
        weights = again.root.model.state_dict()
        assert all(torch.equal(peer.state_dict()[key], value) for key, value in weights.items())


BAD = {
    "there is no answer": prompted("s1", [], []),
    "an answer is empty": prompted("s1", [], [text("a dog"), text(" ")]),
    "codes must be": prompted("s1", [], [AnswerContent([AudioPart(path="a.wav")], [codes(4, 0)[:2]])]),
    "codes must be 0..31": prompted("s1", [], [AnswerContent([AudioPart(path="a.wav")], [codes(4, 0) + 40])]),
    "more audio parts than codes": prompted("s1", [], [AnswerContent([AudioPart(path="a.wav")])]),
    "holds the control token": prompted("s1", [], [text("a dog<|eot_id|>")]),
    "no audio encoder": prompted("s1", [heard("features", 0.3, 0)], [text("a dog")]),
    "its 2 answers take .* positions together, a pack holds 100": prompted(
        "s1", [], [speech(40, 0), speech(50, 1)]
    ),
}


@pytest.mark.parametrize("reason", BAD)
def test_bad_samples_are_named(folders: dict[str, Path], reason: str) -> None:
    policy = DualFFNPolicy.load(folders["codes"], needs_reference=False, max_tokens=100)
    with pytest.raises(BadSample, match=reason) as caught:
        policy.encode(BAD[reason])
    assert (caught.value.place, caught.value.id) == ("list.jsonl", "s1")


def test_what_cannot_be_trained_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no parameter is named like 'nothing"):
        DualFFNPolicy.load(folders["codes"], ("nothing*",))
    with pytest.raises(ConfigError, match="the reference is the model without its adapter"):
        DualFFNPolicy.load(folders["codes"], "adapter", LORA, reference=folders["features"])
    with pytest.raises(ConfigError, match="audio encoder takes other features"):
        DualFFNPolicy.load(folders["codes"], reference=folders["features"])
    policy = DualFFNPolicy.load(folders["codes"], needs_reference=False)
    with pytest.raises(ValueError, match="loaded without a reference"):
        logprobs(policy, encoded(policy, samples("codes")))
    assert (
        logprobs(policy, encoded(policy, samples("codes")), TokenRequest(reference=False)).reference_T is None
    )


def spoken_prompt(answers: list[AnswerContent], conditions: Conditions, seed: int = 0) -> PromptedContents:
    """A reference voice that the assistant spoke before, and a text to say."""
    turns = [
        Message(role="system", content=[TextPart(text="Generate audio.\nSpeaker: theo")]),
        Message(role="user", content=[TextPart(text="the question")]),
        Message(role="assistant", content=[AudioPart(path="voice.wav")]),
        Message(role="user", content=[TextPart(text="what is it?")]),
    ]
    return PromptedContents("s1", turns, [codes(9, 3)], answers, "", conditions, seed)


def test_conditions_are_the_same_for_all_answers(folders: dict[str, Path]) -> None:
    policy = load(folders["codes"])
    pair = [speech(5, 1), speech(8, 2)]
    shown = policy.encode(spoken_prompt(pair, Conditions()))
    hidden = policy.encode(spoken_prompt(pair, Conditions(no_text=True, no_speaker=True)))
    corrupted = policy.encode(spoken_prompt(pair, Conditions(corrupted=0.9)))
    other = policy.encode(spoken_prompt(pair, Conditions(corrupted=0.9), 1))
    rows = next(iter((shown[0].audio_targets_SK != IGNORE).any(1).nonzero()[:, 0].tolist())) - 2
    assert all(len(a) < len(b) for a, b in zip(hidden, shown, strict=True))
    prompts = [[stream.codes_SK[:rows] for stream in pair] for pair in (shown, corrupted, other)]
    for first, second in prompts:
        assert torch.equal(first, second)
    assert not torch.equal(prompts[0][0], prompts[1][0]) and not torch.equal(prompts[1][0], prompts[2][0])
    for before, after in zip(shown, corrupted, strict=True):
        assert torch.equal(before.codes_SK[rows:], after.codes_SK[rows:])
        assert not (after.audio_targets_SK[:rows] != IGNORE).any()
    texts = policy.encode(spoken_prompt([text("a dog"), speech(3, 1)], Conditions(no_text=True)))
    assert len(texts[0]) > len(hidden[0])  # a question whose answer is written is no condition of a voice


def test_activation_checkpointing_changes_no_value(folders: dict[str, Path]) -> None:
    results = []
    for again in (False, True):
        policy = load(folders["features"])
        if again:
            policy.root.model.gradient_checkpointing_enable()
            policy.root.model.audio_tower.gradient_checkpointing_enable()
        answers = logprobs(policy, encoded(policy, samples("features")))
        results.append([answers.policy_T.detach(), *gradients(policy, answers.policy_T.sum())])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_autocast_takes_products_in_bfloat16(folders: dict[str, Path]) -> None:
    policy = load(folders["features"], dtype=torch.float32)
    streams = encoded(policy, samples("features"))
    exact = logprobs(policy, streams)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = logprobs(policy, streams)
    assert rounded.policy_T.dtype == torch.float32
    for field in ("policy_T", "reference_T"):
        difference_T = (rounded.required(field) - exact.required(field)).abs()
        assert 0 < float(difference_T.mean()) < 0.1
    assert all(bool(torch.isfinite(each).all()) for each in gradients(policy, rounded.policy_T.sum()))
