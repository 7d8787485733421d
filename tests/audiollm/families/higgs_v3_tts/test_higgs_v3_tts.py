"""Higgs Audio v3 TTS: rows and targets, folders bit for bit, parity with mlx-audio, bad input."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from audiollm.codec import load_codec
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.errors import BadSample, ConfigError
from audiollm.families.family import PolicySettings
from audiollm.families.higgs_v3_tts.kind import MODEL_TYPE, HiggsV3Kind
from audiollm.families.higgs_v3_tts.model import CODE_HEAD, CODE_TABLE, TEXT_HEAD, TEXT_TABLE
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.prompts import AnswerContent, PromptedContents
from audiollm.families.registry import open_model_folder
from audiollm.families.talkers.decoding import speak_to_end
from audiollm.families.talkers.drawing import Speaking
from audiollm.families.talkers.inspection import speech_rows
from audiollm.families.talkers.kind import TalkerSampling
from audiollm.families.talkers.new_talker import NewTalkerConfig
from audiollm.families.talkers.policy import TalkerPolicy, load_talker
from audiollm.families.talkers.rows import NONE, SpeechRows, join_inputs
from audiollm.families.talkers.turns import SpeechPrompt, SpokenTurn
from audiollm.supervised.guards.trials import spoken_prompt
from audiollm.train.settings import LoRASettings
from tests.audiollm.families.higgs_v3_tts.tiny_higgs_v3 import (
    BOOKS,
    CODEC_WEIGHT,
    CODES,
    ask_mlx,
    change_config,
    write_tiny_higgs_v3,
)
from tests.audiollm.families.talkers.talker_runs import random_codes

BOC, EOC = CODES, CODES + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_higgs_v3(tmp_path_factory.mktemp("higgs_v3"))


def clip_of(frames: int, seed: int = 0) -> Tensor:
    return random_codes(BOOKS, CODES, frames, seed)


def policy_of(folder: Path) -> TalkerPolicy:
    policy = open_model_folder(folder).policy(PolicySettings())
    assert isinstance(policy, TalkerPolicy)
    return policy


PROMPTS = [
    SpeechPrompt("one two"),
    SpeechPrompt("three", before=(SpokenTurn("four", clip_of(3, 3)),)),
    SpeechPrompt("five", reference_KT=clip_of(2, 4), before=(SpokenTurn("six", clip_of(9, 5)),)),
]


def codes_of_rows(rows: SpeechRows) -> Tensor:
    return torch.cat([rows.first_L[:, None], rows.rest_LJ], dim=1)


@pytest.mark.parametrize("frames", [1, 3, 12])
def test_rows_of_a_clip_and_their_targets(folder: Path, frames: int) -> None:
    kind, clip_KT = HiggsV3Kind(folder), clip_of(frames)
    before = kind.prompt_rows(SpeechPrompt("one")).rows.num_rows
    answer = kind.answer_rows(SpeechPrompt("one"), clip_KT)
    rows_LK = codes_of_rows(answer)[before:]
    assert rows_LK.shape == (frames + BOOKS - 1, BOOKS)
    for book in range(BOOKS):
        expected = [*[BOC] * book, *clip_KT[book].tolist(), *[EOC] * (BOOKS - 1 - book)]
        assert rows_LK[:, book].tolist() == expected
    batch = policy_of(folder).batch([answer])
    target_T = torch.cat([batch.target_F, batch.target_DJ.flatten()])[batch.order_T]
    # each code and each end mark, chosen by the row before it; begin marks are none
    assert len(target_T) == int((rows_LK != BOC).sum()) == answer.num_targets
    assert sorted(target_T.tolist()) == sorted(rows_LK[rows_LK != BOC].tolist())
    stream_rows = speech_rows(kind, answer)
    assert len(stream_rows) == answer.num_rows
    for row, codes_K in zip(stream_rows[before:], rows_LK, strict=True):
        assert list(row.is_target) == (codes_K != BOC).tolist()
    assert sum(sum(row.weights) for row in stream_rows) == pytest.approx(1.0)
    assert stream_rows[before].codes[1:] == ("BOC",) * (BOOKS - 1)


def test_a_drawn_end_is_one_action(folder: Path) -> None:
    kind = HiggsV3Kind(folder)
    answer = kind.answer_rows(SpeechPrompt("one"), clip_of(3), is_sampled=True)
    assert answer.num_targets == 3 * BOOKS + 1
    assert int(answer.target_F[-1]) == EOC and bool((answer.target_FJ[-1] == NONE).all())
    assert kind.answer_rows(SpeechPrompt("one"), clip_of(3), ended=False).num_targets == 3 * BOOKS


def test_packed_is_as_alone(folder: Path) -> None:
    policy = policy_of(folder)
    policy.root.double()
    clips = [spoken_prompt("one", clip_of(5)), spoken_prompt("two", clip_of(2))]
    encoded = [policy.encode(clip)[0] for clip in clips]
    request = TokenRequest(reference=False)
    packed = policy.answer_logprobs(policy.root, policy.batch(encoded), request)
    alone = [policy.answer_logprobs(policy.root, policy.batch([rows]), request).policy_T for rows in encoded]
    torch.testing.assert_close(packed.policy_T, torch.cat(alone), rtol=0, atol=1e-12)


def test_logits_and_greedy_rows_are_those_of_mlx(folder: Path, tmp_path: Path) -> None:
    kind, clips = HiggsV3Kind(folder), [clip_of(frames) for frames in (3, 8, 20)]
    model, said = load_talker(kind), 14
    results = ask_mlx(folder, PROMPTS, clips, said, tmp_path)
    for prompt, clip_KT, result in zip(PROMPTS, clips, results, strict=True):
        answer = kind.answer_rows(prompt, clip_KT)
        with torch.no_grad():
            x_SC = model.embed_rows(join_inputs([answer]))
            torch.testing.assert_close(x_SC, result["rows"], atol=1e-5, rtol=1e-5)
            logits_SKV = model.logits(model.body.over_frames(x_SC[None])[0])
            torch.testing.assert_close(logits_SKV, result["logits"], atol=1e-4, rtol=1e-4)
        kind.suppressed, kind.suppressed_depth = (), ()  # their sampler draws marks among the codes
        speaking = Speaking(kind.prompt_rows(prompt), TalkerSampling.plain(0.0), said, 0)
        speak_to_end(model, kind, [speaking])
        rows_LK = torch.stack(speaking.rows)[: len(result["said"])]
        until = speaking.num_frames or said  # behind the end theirs draws what ours knows
        assert until >= BOOKS
        torch.testing.assert_close(rows_LK[:until], result["said"][:until].long())


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_without_a_step_changes_no_tensor(tmp_path: Path, dtype: torch.dtype, heads: bool) -> None:
    start = write_tiny_higgs_v3(tmp_path / "start", heads=heads, dtype=dtype)
    policy_of(start).save(tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (start, tmp_path / "out" / "model"))
    assert before.keys() == after.keys() and CODEC_WEIGHT in after and (CODE_HEAD in after) == heads
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    for path in start.glob("*.json"):
        assert path.read_bytes() == (tmp_path / "out" / "model" / path.name).read_bytes()


def test_copies_of_the_tables_follow_them(folder: Path, tmp_path: Path) -> None:
    policy = policy_of(folder)
    with torch.no_grad():
        for parameter in policy.root.parameters():
            parameter += 1
    policy.save(tmp_path)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "model"))
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name] + (name != CODEC_WEIGHT)), name
    assert torch.equal(after[CODE_HEAD], after[CODE_TABLE]) and torch.equal(
        after[TEXT_HEAD], after[TEXT_TABLE]
    )


def test_one_table_takes_the_gradients_of_both_ends(folder: Path) -> None:
    policy = policy_of(folder)
    model = policy.root.model
    batch = policy.batch(policy.encode(spoken_prompt("one", clip_of(2))))
    logprobs = policy.answer_logprobs(policy.root, batch, TokenRequest(reference=False))
    logprobs.policy_T.sum().backward()
    gradient = model.get_parameter(CODE_TABLE).grad
    assert gradient is not None
    # the begin mark of the last codebook is read, and no target: as a head it only takes what a softmax spreads
    assert bool((gradient != 0).any(dim=1).all())
    assert len(dict(model.named_parameters())) == len(model.state_dict())


def test_the_published_shape_has_the_published_weights(folder: Path, tmp_path: Path) -> None:
    """4,022 M and the table of codes, in 399 tensors (927 of the published index are 399 and the codec's 528)."""
    shutil.copytree(folder, tmp_path / "model")
    change_config(
        tmp_path / "model", "text_config", hidden_size=2560, num_hidden_layers=36, intermediate_size=9728,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151_936,
    )  # fmt: skip
    change_config(tmp_path / "model", "audio_encoder_config", out_dim=2560, vocab_size=1026)
    with torch.device("meta"):
        sizes = [value.numel() for value in HiggsV3Kind(tmp_path / "model").new_talker().parameters()]
    assert len(sizes) == 399 and sum(sizes) // 10**6 == 4_022 + 21


def test_a_small_one_has_no_decoder_over_a_frame(folder: Path) -> None:
    with pytest.raises(ValueError, match="depth_layers: higgs_multimodal_qwen3 has no decoder over a frame"):
        NewTalkerConfig(model_type=MODEL_TYPE, samples=folder, depth_layers=2)


@pytest.mark.parametrize("theta", [None, 1e6, {"rope_parameters": {"rope_theta": 1e6}}])
def test_a_theta_of_null_is_that_of_qwen3(folder: Path, tmp_path: Path, theta: object) -> None:
    shutil.copytree(folder, tmp_path / "model")
    fields = theta if isinstance(theta, dict) else {"rope_theta": theta}
    kind = HiggsV3Kind(change_config(tmp_path / "model", "text_config", **fields))
    assert kind.new_talker().body.shape.rope_theta == 1e6


@pytest.mark.parametrize(
    ("part", "field", "value", "words"),
    [
        ("text_config", "model_type", "llama", "text_config.model_type"),
        ("text_config", "hidden_act", "gelu", "hidden_act"),
        ("text_config", "use_sliding_window", True, "use_sliding_window"),
        ("text_config", "vocab_size", None, "vocab_size: None"),
        ("text_config", "hidden_size", 32, "out_dim"),
        (
            "audio_encoder_config",
            "tie_word_embeddings",
            False,
            "audio_encoder_config.tie_word_embeddings: False",
        ),
        ("audio_encoder_config", "use_delay_pattern", False, "use_delay_pattern"),
        ("audio_encoder_config", "encoder_type", "whisper", "encoder_type"),
        ("audio_encoder_config", "num_codebooks", 0, "num_codebooks: 0"),
    ],
)
def test_another_model_is_refused_by_the_field(
    folder: Path, tmp_path: Path, part: str, field: str, value: object, words: str
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    with pytest.raises(ConfigError, match=words):
        load_talker(HiggsV3Kind(change_config(tmp_path / "model", part, **{field: value})))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (CODE_HEAD, "modality_heads.0.weight and .* differ"),
        (TEXT_HEAD, "text_head.weight and .* differ"),
        ("tied.head.modality_heads.1.weight", "modality_heads.1.weight: a weight that"),
    ],
)
def test_heads_that_are_no_copies_are_refused(folder: Path, tmp_path: Path, name: str, words: str) -> None:
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    weights[name] = weights.get(name, weights[CODE_TABLE]) + 1
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=words):
        load_talker(HiggsV3Kind(tmp_path / "model"))


def test_an_untied_head_of_words_goes_on_unchanged(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    weights[TEXT_HEAD] = weights[TEXT_HEAD] + 1
    save_file(weights, path, metadata={"format": "pt"})
    policy_of(change_config(tmp_path / "model", "text_config", tie_word_embeddings=False)).save(
        tmp_path / "out"
    )
    assert torch.equal(load_file(tmp_path / "out" / "model" / path.name)[TEXT_HEAD], weights[TEXT_HEAD])


def test_a_folder_without_a_codec_is_refused(tmp_path: Path) -> None:
    start = write_tiny_higgs_v3(tmp_path / "model")
    weights = load_file(start / "model.safetensors")
    del weights[CODEC_WEIGHT]
    save_file(weights, start / "model.safetensors", metadata={"format": "pt"})
    assert not HiggsV3Kind(start).has_codec
    with pytest.raises(ConfigError, match="no codec among the weights"):
        load_codec(start)


def test_a_tokenizer_without_the_marks_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    path.write_text(path.read_text().replace("<|ref_text|>", "<|other|>"))
    with pytest.raises(ConfigError, match=r"<\|ref_text\|>: no token"):
        HiggsV3Kind(tmp_path / "model").prompt_rows(SpeechPrompt("one"))


def test_controls_are_words_and_marks_are_not(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<|emotion:amusement|>"))
    kind = HiggsV3Kind(tmp_path / "model")
    assert kind.prompt_rows(SpeechPrompt("<|emotion:amusement|>Ha.")).rows.num_rows == 7
    with pytest.raises(ValueError, match="a mark of the model's own"):
        kind.prompt_rows(SpeechPrompt("one <|ref_audio|>"))


@pytest.mark.parametrize(
    ("codes_KT", "words"),
    [
        (clip_of(4)[:2], "codes of 2 codebooks, and the model speaks in 8"),
        (clip_of(4) + CODES, "the model's codebooks have 16"),
        (clip_of(0), "no frame"),
    ],
)
def test_codes_of_another_codec_are_set_aside(folder: Path, codes_KT: Tensor, words: str) -> None:
    with pytest.raises(BadSample, match=words):
        policy_of(folder).encode(spoken_prompt("one", codes_KT))


def test_a_reference_of_another_codec_is_set_aside(folder: Path) -> None:
    speech = AudioPart(path="speech.wav")
    turns = [("user", TextPart(text="one")), ("assistant", speech), ("user", TextPart(text="two"))]
    messages = [Message(role=role, content=[part]) for role, part in turns]  # type: ignore[arg-type]
    prompted = PromptedContents("id", messages, [clip_of(3) + 2], [AnswerContent([speech], [clip_of(3)])])
    with pytest.raises(BadSample, match="codes of another codec: the model reads 8 codebooks of 16"):
        policy_of(folder).encode(prompted)


def test_a_name_needs_a_recording(folder: Path) -> None:
    kind = HiggsV3Kind(folder)
    with pytest.raises(ValueError, match="speaker 'ann': this model knows voices by recordings alone"):
        kind.prompt_rows(SpeechPrompt("one", speaker="ann"))
    assert kind.prompt_rows(SpeechPrompt("one", speaker="ann", reference_KT=clip_of(2))).rows.num_rows


@pytest.mark.parametrize("name", ["embedding", "modality_embeddings", "tied", "text_embedding"])
def test_no_end_of_a_tied_table_is_trained_beside_an_adapter(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="one end of a tied table"):
        open_model_folder(folder).policy(
            PolicySettings(trained="adapter", lora=LoRASettings(trained_beside=(name,)))
        )
