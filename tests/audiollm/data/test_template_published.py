"""The template against the published prompts of Higgs Audio V2 and against transformers' processor for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken

from audiollm.data.chat.delay import delay
from audiollm.data.chat.scene import dialogue_text, voices
from audiollm.data.chat.tasks import fill_task, load_tasks
from audiollm.data.chat.template import Kind, Template, TokenStream
from audiollm.data.records.sample import AudioPart, ContentPart, Message, TextPart
from audiollm.data.text.forms import sound_tags, without_sound_tags
from audiollm.data.text.tokenizer import train_text_tokenizer
from tests.audiollm.data.test_delay import undelay

DELAY_TOKEN = "<|reserved_special_token_6|>"
BOOKS, SIZE = 4, 64
SYSTEM = "Generate audio following instruction."
SCENE = "Audio is recorded from a quiet room."
TEXTS = [
    f"{SYSTEM}\n\n<|scene_desc_start|>\n{SCENE}\n\nSPEAKER0: masculine\n<|scene_desc_end|>",
    "system user assistant [SPEAKER1] Hello there.",
]


@pytest.fixture(scope="module")
def template() -> Template:
    return Template(train_text_tokenizer(TEXTS * 3, 400), BOOKS, SIZE)


def shown(template: Template, stream: TokenStream) -> str:
    """The stream's text with one placeholder an audio part, as prompts are published."""
    keep = [
        place
        for place in range(len(stream))
        if stream.kinds_S[place] == Kind.TEXT or stream.kinds_S[place - 1] == Kind.TEXT
    ]
    text: str = template.tokenizer.decode(stream.text_ids_S[keep].tolist(), skip_special_tokens=False)
    return text


def say(task: str, **fields: Any) -> list[Message]:
    return fill_task(load_tasks()[task], "a", fields).messages


CLIP = AudioPart(path="clip.wav")


@pytest.mark.parametrize(
    ("messages", "published"),
    [
        (  # README.md, "Get Started"
            say("tts", text="The sun rises.", audio=CLIP, scene=SCENE)[:2],
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
            "Generate audio following instruction.\n\n<|scene_desc_start|>\n"
            "Audio is recorded from a quiet room.\n<|scene_desc_end|><|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nThe sun rises.<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|>",
        ),
        (  # examples/generation.py --ref_audio belinda,chadwick --ref_audio_in_system_message
            say(
                "dialogue",
                text=dialogue_text([("belinda", "Hi."), ("chadwick", "Hello."), ("belinda", "So.")]),
                scene=SCENE,
                references=voices({"belinda": CLIP, "chadwick": CLIP}),
                audio=CLIP,
            )[:2],
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
            "Generate audio following instruction.\n\n<|scene_desc_start|>\n"
            "Audio is recorded from a quiet room.\n\n"
            "SPEAKER0: <|audio_bos|><|AUDIO|><|audio_eos|>\nSPEAKER1: <|audio_bos|><|AUDIO|><|audio_eos|>"
            "\n<|scene_desc_end|><|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n[SPEAKER0] Hi.\n[SPEAKER1] Hello.\n[SPEAKER0] So.<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|>",
        ),
        (  # the same without references: voices described
            say(
                "dialogue",
                text="[SPEAKER0] Hi.",
                voices="SPEAKER0: feminine\nSPEAKER1: masculine",
                audio=CLIP,
            )[:2],
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
            "You are an AI assistant designed to convert text into speech.\n"
            "If the user's message includes a [SPEAKER*] tag, do not read out the tag and generate speech for the "
            "following text, using the specified voice.\n"
            "If no speaker tag is present, select a suitable voice on your own.\n\n"
            "<|scene_desc_start|>\nSPEAKER0: feminine\nSPEAKER1: masculine\n<|scene_desc_end|><|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n[SPEAKER0] Hi.<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|>",
        ),
        (  # examples/generation.py --ref_audio belinda: an earlier turn
            say("clone_by_turn", reference_text="Twas.", reference=CLIP, text="Hi.", audio=CLIP)[:4],
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
            "Generate audio following instruction.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nTwas.<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|><|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi.<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|>",
        ),
    ],
    ids=["scene", "dialogue with references", "dialogue", "clone by turn"],
)
def test_published_prompts(template: Template, messages: list[Message], published: str) -> None:
    audio = sum(isinstance(part, AudioPart) for message in messages for part in message.content)
    codes = [torch.randint(SIZE, (BOOKS, 3)) for _ in range(audio)]
    assert shown(template, template.prompt(messages, codes)) == published


def test_a_written_answer_as_in_the_published_example(template: Template) -> None:
    """The docstring of `extract_generation_prompt_from_input_tokens` in boson-ai/higgs-audio."""
    question = [
        TextPart(text="What words do you hear from the provided audio? Write it down for me."),
        CLIP,
    ]
    asked = Message(role="user", content=question)
    codes = [torch.zeros(BOOKS, 2, dtype=torch.long)]
    prompt = (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"
        "What words do you hear from the provided audio? Write it down for me."
        "<|audio_bos|><|AUDIO|><|audio_eos|><|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert shown(template, template.text_prompt([asked], codes)) == prompt
    answer = Message(role="assistant", content=[TextPart(text="At first they went by quick.")])
    assert shown(template, template.compile([asked, answer], codes)) == (
        prompt + "At first they went by quick.<|eot_id|>"
    )


@pytest.fixture(scope="module")
def processor() -> Any:
    """transformers' own, over a vocabulary that we trained and a tiny audio tokenizer with random weights."""
    tokenizer = train_text_tokenizer(TEXTS * 3, 400)
    tokenizer.add_special_tokens([AddedToken(DELAY_TOKEN, special=True)])
    torch.manual_seed(0)
    audio = transformers.HiggsAudioV2TokenizerModel(
        transformers.HiggsAudioV2TokenizerConfig(
            target_bandwidths=[0.15, 0.6],
            codebook_size=SIZE,
            codebook_dim=8,
            acoustic_model_config=transformers.DacConfig(
                encoder_hidden_size=4,
                downsampling_ratios=[8, 5, 4, 2, 3],
                decoder_hidden_size=64,
                upsampling_ratios=[8, 5, 4, 2, 3],
                hidden_size=16,
            ),
            semantic_model_config=transformers.HubertConfig(
                hidden_size=32,
                num_hidden_layers=1,
                num_attention_heads=4,
                intermediate_size=48,
                conv_dim=[16] * 7,
                num_conv_pos_embeddings=16,
                num_conv_pos_embedding_groups=4,
            ),
        )
    ).eval()
    for quantizer in audio.quantizer.quantizers:
        quantizer.codebook.embed.normal_()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin_of_text|>", pad_token="<|end_of_text|>"
    )
    return transformers.HiggsAudioV2Processor(
        transformers.DacFeatureExtractor(sampling_rate=24_000, hop_length=1),
        fast,
        audio,
        audio_stream_bos_id=SIZE,
        audio_stream_eos_id=SIZE + 1,
    )


def written(turns: Sequence[tuple[str, str]], opened: bool = False) -> str:
    """The conversation as the processor wants it written; `audio` stands for a recording that is spoken."""
    text, recording = "<|begin_of_text|>", "<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|>"
    for place, (role, said) in enumerate(turns):
        if role == "scene":
            text += f"\n\n<|scene_desc_start|>\n{said}\n<|scene_desc_end|><|eot_id|>"
            continue
        text += f"<|start_header_id|>{role}<|end_header_id|>\n\n{recording if said == 'audio' else said}"
        text += "" if "scene" in [role for role, _ in turns[place + 1 : place + 2]] else "<|eot_id|>"
    return text + "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|>" * opened


def chat(turns: Sequence[tuple[str, str]]) -> list[Message]:
    """The same conversation as our messages."""
    messages: list[Message] = []
    for role, text in turns:
        if role == "scene":
            scene = TextPart(text=f"\n\n<|scene_desc_start|>\n{text}\n<|scene_desc_end|>")
            messages[-1] = Message(role="system", content=[*messages[-1].content, scene])
        else:
            part: ContentPart = CLIP if text == "audio" else TextPart(text=text)
            messages.append(Message.model_validate({"role": role, "content": [part.model_dump()]}))
    return messages


@pytest.mark.parametrize(
    "turns",
    [
        [("system", SYSTEM), ("user", "Hello there."), ("assistant", "audio")],
        [("system", SYSTEM), ("scene", SCENE), ("user", "Hello there."), ("assistant", "audio")],
        [
            ("system", SYSTEM),
            ("scene", "SPEAKER0: masculine\nSPEAKER1: feminine"),
            ("user", "[SPEAKER0] Hello."),
            ("assistant", "audio"),
            ("user", "[SPEAKER1] Hi."),
            ("assistant", "audio"),
        ],
    ],
    ids=["plain", "scene", "turns"],
)
def test_ids_and_codes_are_those_of_the_processor(processor: Any, turns: list[tuple[str, str]]) -> None:
    generator = torch.Generator().manual_seed(1)
    clips = [
        (torch.randn(960 * frames, generator=generator) * 0.1).numpy()
        for frames, (_, text) in zip((11, 9, 12, 5, 10, 7), turns, strict=False)
        if text == "audio"
    ]
    inputs = processor(text=written(turns), audio=clips, add_special_tokens=False, return_tensors="pt")
    with torch.inference_mode():
        codes = [
            processor.audio_tokenizer.encode(torch.from_numpy(clip)[None, None]).audio_codes[0].clone()
            for clip in clips
        ]
    template = Template(processor.tokenizer.backend_tokenizer, BOOKS, SIZE)
    stream = template.compile(chat(turns), codes)
    their_ids = inputs["input_ids"][0].clone()
    # their last K - 1 rows of an audio part bear a filler of their own in place of the placeholder
    their_ids[their_ids == processor.audio_delay_token_id] = processor.audio_token_id
    assert stream.text_ids_S.tolist() == their_ids.tolist()
    assert torch.equal(stream.codes_SK[stream.kinds_S == Kind.AUDIO_OUT], inputs["audio_input_ids"][0])
    assert len({tuple(row) for row in inputs["audio_input_ids"][0].tolist()}) > 5  # the codes say something


def test_the_generation_prompt_is_the_processors(processor: Any) -> None:
    turns = [("system", SYSTEM), ("scene", SCENE), ("user", "Hello there.")]
    template = Template(processor.tokenizer.backend_tokenizer, BOOKS, SIZE)
    assert (
        template.prompt(chat(turns)).text_ids_S.tolist()
        == processor.tokenizer(written(turns, opened=True), add_special_tokens=False).input_ids
    )


@pytest.mark.parametrize(
    ("short", "tagged"),
    [
        ("No. [laugh] Yes.", "No. <SE>[Laughter]</SE> Yes."),
        ("[music start] la [music end]", "<SE_s>[Music]</SE_s> la <SE_e>[Music]</SE_e>"),
        ("[sing start] la [Sing End]", "<SE_s>[Singing]</SE_s> la <SE_e>[Singing]</SE_e>"),
        ("[music] [applause] [cheering] [cough]",
         "<SE>[Music]</SE> <SE>[Applause]</SE> <SE>[Cheering]</SE> <SE>[Cough]</SE>"),
        ("[SPEAKER0] [laughing] stays", "[SPEAKER0] [laughing] stays"),
    ],
)  # fmt: skip
def test_sound_tags(short: str, tagged: str) -> None:
    assert sound_tags(short) == tagged == sound_tags(tagged)
    assert "<SE" not in without_sound_tags(short)


def test_words_alone() -> None:
    assert without_sound_tags("No. [laugh] <SE_s>[Music]</SE_s> Yes [1].") == "No. Yes [1]."


@pytest.mark.parametrize(("books", "frames"), [(1, 1), (2, 5), (4, 3), (8, 1), (8, 30)])
def test_delay_and_its_inverse_are_the_processors(processor: Any, books: int, frames: int) -> None:
    codes_KT = torch.randint(SIZE, (books, frames))
    framed = torch.nn.functional.pad(
        torch.nn.functional.pad(codes_KT, (1, 0), value=SIZE), (0, 1), value=SIZE + 1
    )
    theirs_FK = processor.build_delay_pattern(framed[None])[0].T
    assert torch.equal(delay(codes_KT, SIZE, SIZE + 1), theirs_FK)
    assert torch.equal(undelay(theirs_FK), processor.revert_delay_pattern(theirs_FK)[1:-1].T)
