"""CSM against transformers' own class: loss, gradients, greedy speech, folders."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CsmForConditionalGeneration

from audiollm.codec import load_codec
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.errors import BadSample, ConfigError
from audiollm.families.csm.kind import CsmKind
from audiollm.families.family import PolicySettings
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.prompts import AnswerContent, PromptedContents
from audiollm.families.registry import open_model_folder
from audiollm.families.talkers.decoding import speak_to_end
from audiollm.families.talkers.drawing import Speaking
from audiollm.families.talkers.kind import TalkerSampling
from audiollm.families.talkers.policy import TalkerPolicy, load_talker
from audiollm.families.talkers.turns import read_speech_prompt
from audiollm.train.settings import LoRASettings, PromptMix
from tests.audiollm.families.talkers.tiny_csm import BOOKS, CODES, write_tiny_csm

SPEECH = AudioPart(path="speech.wav")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_csm(tmp_path_factory.mktemp("csm"))


def codes_of(frames: int, seed: int = 0) -> Tensor:
    return torch.randint(1, CODES - 3, (BOOKS, frames), generator=torch.Generator().manual_seed(seed))


def prompted(text: str, codes_KT: Tensor, before: tuple[tuple[str, Tensor], ...] = ()) -> PromptedContents:
    messages, audio = [], []
    for earlier, earlier_KT in before:
        messages.append(Message(role="user", content=[TextPart(text=earlier)]))
        messages.append(Message(role="assistant", content=[SPEECH]))
        audio.append(earlier_KT)
    messages.append(Message(role="user", content=[TextPart(text=text)]))
    return PromptedContents(text, messages, audio, [AnswerContent([SPEECH], [codes_KT])])


CLIPS = [
    prompted("[SPEAKER1] one two", codes_of(5, 1)),
    prompted("[SPEAKER0] three", codes_of(9, 2), (("[SPEAKER1] four", codes_of(3, 3)),)),
]


def theirs(
    folder: Path, clip: PromptedContents, dtype: torch.dtype, learned_turns: tuple[int, ...] = (-1,)
) -> tuple[Any, dict[str, Any]]:
    """transformers' class, and its inputs for a clip: ids by its chat template, labels for some turns alone."""
    model = CsmForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
    turns = [*clip.audio, clip.answers[0].codes[0]]
    texts = [part.text for message in clip.prompt for part in message.content if isinstance(part, TextPart)]
    ids, labels = [], []
    for number, (text, codes_KT) in enumerate(zip(texts, turns, strict=True)):
        speaker, said = text.removeprefix("[SPEAKER").split("] ", 1)
        kind = CsmKind(folder)
        text_ids = kind.text.marked_ids(f"<|begin_of_text|>[{speaker}]{said}<|end_of_text|>")
        frames = torch.cat([codes_KT.T, torch.zeros(1, BOOKS, dtype=torch.long)])
        ids += [torch.tensor(text_ids)[:, None].expand(-1, BOOKS), frames]
        learned = number in learned_turns or number - len(texts) in learned_turns
        labels += [
            torch.full((len(text_ids), BOOKS), -100),
            frames if learned else torch.full_like(frames, -100),
        ]
    is_frame = torch.cat([torch.full((len(block),), number % 2) for number, block in enumerate(ids)]).bool()
    ids_LK, labels_LK = torch.cat(ids), torch.cat(labels)
    embeds = model.embed_text_tokens(ids_LK[:, 0].clamp_max(259))
    frames_embeds = model.backbone_model.embed_tokens(ids_LK.clamp_max(CODES - 1)[None])[0]
    return model, {
        "inputs_embeds": torch.where(is_frame[:, None], frames_embeds, embeds)[None],
        "labels": labels_LK[None],
    }


def loss_of(policy: TalkerPolicy, clips: list[PromptedContents]) -> Tensor:
    """The backbone's mean and the depth decoder's, as transformers adds them."""
    batch = policy.batch([rows for clip in clips for rows in policy.encode(clip)])
    logprobs = policy.answer_logprobs(policy.root, batch, TokenRequest(reference=False))
    is_first_T = logprobs.codebook_T == 0
    return -logprobs.policy_T[is_first_T].mean() - logprobs.policy_T[~is_first_T].mean()


CONVERSATION = prompted(
    "[SPEAKER0] three",
    codes_of(9, 2),
    (("[SPEAKER1] four", codes_of(3, 3)), ("[SPEAKER0] five", codes_of(4, 4))),
)


@pytest.mark.parametrize(
    ("clip", "mix", "learned_turns"),
    [(clip, None, (-1,)) for clip in CLIPS] + [(CONVERSATION, PromptMix(learned_turns=1.0), (0, 1, 2))],
)
def test_loss_and_gradients_are_those_of_transformers(
    folder: Path, clip: PromptedContents, mix: PromptMix | None, learned_turns: tuple[int, ...]
) -> None:
    policy = TalkerPolicy(CsmKind(folder), PolicySettings(prompt_mix=mix))
    policy.root.double()
    model, inputs = theirs(folder, clip, torch.float64, learned_turns)
    loss = loss_of(policy, [clip])
    output = model(**inputs)
    assert float(loss) == pytest.approx(float(output.loss), rel=1e-6)  # theirs is made of logits in float32
    loss.backward()
    output.loss.backward()
    ours = dict(policy.root.model.named_parameters())
    pairs = [
        (name, ours[name].grad, parameter.grad)
        for name, parameter in model.named_parameters()
        if not name.startswith("codec_model")
    ]
    assert len(pairs) == len(list(policy.root.model.parameters())) > 20
    squared = [
        (float((mine - other).square().sum()), float(other.square().sum())) for _, mine, other in pairs
    ]
    assert sum(error for error, _ in squared) ** 0.5 < 1e-6 * sum(size for _, size in squared) ** 0.5
    for (name, _, _), (error, size) in zip(pairs, squared, strict=True):
        assert error**0.5 < 1e-5 * size**0.5, name


def test_turns_of_weight_0_are_read_alone(folder: Path) -> None:
    """And so are all turns, but for the share of the samples that the mix draws by their ids."""
    weighed = [
        message.model_copy(update={"weight": 0}) if message.role == "assistant" and number == 1 else message
        for number, message in enumerate(CONVERSATION.prompt)
    ]
    policy = TalkerPolicy(CsmKind(folder), PolicySettings(prompt_mix=PromptMix(learned_turns=1.0)))
    frames = {
        "all": len(policy.encode(CONVERSATION)[0].target_F),
        "weighed": len(policy.encode(replace(CONVERSATION, prompt=weighed))[0].target_F),
    }
    assert frames == {"all": 10 + 4 + 5, "weighed": 10 + 5}
    policy = TalkerPolicy(CsmKind(folder), PolicySettings(prompt_mix=PromptMix(learned_turns=0.5)))
    lengths = [len(policy.encode(replace(CONVERSATION, id=str(n)))[0].target_F) for n in range(200)]
    assert set(lengths) == {10, 19} and 70 < lengths.count(19) < 130


def test_other_forms_of_prompts_are_refused(folder: Path) -> None:
    policy = TalkerPolicy(CsmKind(folder), PolicySettings(prompt_mix=PromptMix(no_voice=0.5)))
    with pytest.raises(BadSample, match="give learned_turns alone"):
        policy.encode(CONVERSATION)


def test_packed_is_as_alone(folder: Path) -> None:
    policy = TalkerPolicy(CsmKind(folder), PolicySettings())
    policy.root.double()
    encoded = [policy.encode(clip)[0] for clip in CLIPS]
    request = TokenRequest(reference=False)
    packed = policy.answer_logprobs(policy.root, policy.batch(encoded), request)
    alone = [policy.answer_logprobs(policy.root, policy.batch([rows]), request).policy_T for rows in encoded]
    torch.testing.assert_close(packed.policy_T, torch.cat(alone), rtol=0, atol=1e-12)
    assert packed.answer_T.tolist() == [0] * len(alone[0]) + [1] * len(alone[1])


@pytest.mark.parametrize("clip", CLIPS)
def test_greedy_speech_is_that_of_transformers(folder: Path, clip: PromptedContents) -> None:
    kind = CsmKind(folder)
    prompt = kind.prompt_rows(read_speech_prompt(clip.prompt, clip.audio))
    kind.suppressed = kind.suppressed_depth = ()  # as theirs, which also draws what is no sound
    answers = [Speaking(prompt, TalkerSampling.plain(0.0), 12, seed) for seed in range(2)]
    speak_to_end(load_talker(kind), kind, answers)
    model, inputs = theirs(folder, clip, torch.float32)
    embeds = inputs["inputs_embeds"][:, : prompt.rows.num_rows]
    model.generation_config.max_length = None
    with torch.no_grad():
        frames_BTK = model.generate(
            inputs_embeds=embeds, max_new_tokens=12, do_sample=False, depth_decoder_do_sample=False,
            depth_decoder_min_new_tokens=BOOKS - 1, depth_decoder_max_new_tokens=BOOKS - 1,
            attention_mask=torch.ones(embeds.shape[:2], dtype=torch.long),
        )  # fmt: skip
    expected_KT = frames_BTK[0].T
    if answers[0].has_ended:
        expected_KT = expected_KT[:, :-1]
    for answer in answers:
        torch.testing.assert_close(answer.codes_KT(BOOKS), expected_KT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_without_a_step_changes_no_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    start = write_tiny_csm(tmp_path / "start", dtype=dtype)
    policy = TalkerPolicy(CsmKind(start), PolicySettings())
    policy.save(tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (start, tmp_path / "out" / "model"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    files = {path.name for path in start.iterdir()}
    assert files == {path.name for path in (tmp_path / "out" / "model").iterdir()}


def test_the_table_of_codes_is_one_tensor(folder: Path) -> None:
    policy = TalkerPolicy(CsmKind(folder), PolicySettings())
    model = policy.root.model
    tables = [model.get_parameter(name) for name in next(iter(CsmKind(folder).tied().items()))]
    assert tables[0] is tables[1]


def test_the_family_is_found(folder: Path) -> None:
    opened = open_model_folder(folder)
    assert opened.speaks
    assert isinstance(opened.policy(PolicySettings()), TalkerPolicy)


def test_it_speaks_through_its_own_codec(folder: Path) -> None:
    generator = open_model_folder(folder).generator()
    speech = generator.speak("one two", seed=3, max_duration_s=1.0)
    assert speech.sample_rate == 24_000
    assert 0 < speech.duration_s <= 1.04
    pieces = [piece.samples_CN for piece in generator.stream("one two", seed=3, max_duration_s=1.0)]
    assert sum(piece.shape[1] for piece in pieces) == speech.samples_1N.shape[1]
    with pytest.raises(ConfigError, match=r"<\|AUDIO\|>"):
        generator.speak("one <|AUDIO|> two")


def test_its_codec_is_that_of_transformers(folder: Path) -> None:
    codec = load_codec(folder)
    model = CsmForConditionalGeneration.from_pretrained(folder).eval().codec_model
    samples_1N = 0.1 * torch.randn(1, 5_000, generator=torch.Generator().manual_seed(0))
    codes_KT = codec.encode(samples_1N)
    assert codes_KT.shape == (BOOKS, 3)
    with torch.no_grad():
        torch.testing.assert_close(codes_KT, model.encode(samples_1N[None]).audio_codes[0])
        torch.testing.assert_close(
            codec.decode(codes_KT), model.decode(codes_KT[None]).audio_values[0].clamp(-1, 1)
        )


@pytest.mark.parametrize(
    ("clip", "words"),
    [
        (prompted("one", codes_of(4)[:2]), "codes of 2 codebooks, and the model speaks in 4"),
        (prompted("one", codes_of(4) + CODES), "the model's codebooks have"),
        (prompted("one", codes_of(0)), "no frame"),
        (prompted("one <|audio_eos|>", codes_of(4)), "a mark of the model's own"),
    ],
)
def test_what_cannot_be_learned_is_set_aside(folder: Path, clip: PromptedContents, words: str) -> None:
    policy = open_model_folder(folder).policy(PolicySettings())
    with pytest.raises(BadSample, match=words.replace("|", r"\|")):
        policy.encode(clip)


def test_tied_tables_that_differ_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "lies")
    path = tmp_path / "lies" / "model.safetensors"
    weights = load_file(path)
    name, other = next(iter(CsmKind(folder).tied().items()))
    present, lacking = (name, other) if name in weights else (other, name)
    save_file({**weights, lacking: weights[present] + 1}, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="one tensor"):
        load_talker(CsmKind(tmp_path / "lies"))


@pytest.mark.parametrize("name", ["embed_audio_tokens", "model.embed_tokens", "backbone_model.embed_tokens"])
def test_one_end_of_the_tied_table_is_not_trained_beside_an_adapter(folder: Path, name: str) -> None:
    lora = LoRASettings(trained_beside=(name,))
    with pytest.raises(ConfigError, match="one end of a tied table"):
        open_model_folder(folder).policy(PolicySettings(trained="adapter", lora=lora))
