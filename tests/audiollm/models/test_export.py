"""An exported model speaks in transformers, by its own classes and processor, the codes that it speaks here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from audiollm.data.chat.template import Template
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.data.records.shards import ShardWriter
from audiollm.data.text.tokenizer import (
    AUDIO_DELAY,
    FILE_NAME,
    HEADER_STYLES,
    add_special_tokens,
    header_style_of,
    load_text_tokenizer,
    train_text_tokenizer,
)
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Limits, Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.layouts import special_ids
from recipes.finetune_higgs.random_weights import BOOKS, CODES, write_tokenizer
from tests.audiollm.supervised.train_samples import SMALL, run_stage

transformers = pytest.importorskip("transformers")

WORDS = ("one", "two", "three", "four", "five", "six")
SYSTEM = "Generate audio following instruction."
# as in the published tokenizer.json of Llama 3 and Qwen 2.5
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GREEDY = SamplingConfig(temperature=0, text_guidance=1, speaker_guidance=1)


def vocabulary(kind: str) -> Tokenizer:
    """A vocabulary trained here, or one with the splits, special tokens and additions of Llama 3's or Qwen's."""
    texts = [f"system\n\n{SYSTEM} user\n\n{word} assistant\n\n" for word in WORDS]
    if kind == "own":
        return train_text_tokenizer(texts, 400)
    style = {"llama": "llama3", "qwen": "chatml"}[kind]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    marks = [*HEADER_STYLES[style].control_tokens, *([AUDIO_DELAY, "<|eom_id|>"] if kind == "llama" else [])]
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    if kind == "llama":
        begin = "<|begin_of_text|>"
        pair = [(begin, tokenizer.token_to_id(begin))]
        tokenizer.post_processor = processors.TemplateProcessing(f"{begin} $A", f"{begin} $A $B", pair)
    add_special_tokens(tokenizer, style)
    return tokenizer


def messages_of(word: str) -> list[Message]:
    return [
        Message(role="system", content=[TextPart(text=SYSTEM)]),
        Message(role="user", content=[TextPart(text=word)]),
    ]


def codes_of(number: int) -> torch.Tensor:
    return torch.randint(CODES, (BOOKS, 5 + number), generator=torch.Generator().manual_seed(number))


def export(folder: Path, kind: str, steps: int) -> Path:
    """A model that has seen six clips for so many steps, and a codec of transformers' class beside it."""
    torch.manual_seed(0)
    write_tokenizer(folder / "codec")
    (folder / "vocabulary").mkdir()
    vocabulary(kind).save(str(folder / "vocabulary" / FILE_NAME))
    writer = ShardWriter(folder / "shards", samples_per_shard=6)
    for number, word in enumerate(WORDS):
        spoken = Message(role="assistant", content=[AudioPart(path="a.wav")])
        sample = Sample(
            id=word, messages=[*messages_of(word), spoken], task="tts", metadata={"split": "train"}
        )
        writer.write(number, sample, [[codes_of(number).numpy().astype(np.int64)]])
    codec = {"num_codebooks": BOOKS, "codebook_size": CODES, "path": str(folder / "codec")}
    writer.close({"codec": codec})
    run_stage(
        folder / "run", str(folder / "shards"), shape={**SMALL, "hidden_size": 64, "dropout": 0}, steps=steps,
        batch_size=6, learning_rate=1e-2, text_dropout=0, speaker_dropout=0, corrupt_codes=0, ema_decay=0,
        text_tokenizer=str(folder / "vocabulary"),
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module", params=["own", "llama", "qwen"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp(request.param), request.param, 10)


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        pytest.param("own", marks=pytest.mark.slow),
        pytest.param("qwen", marks=pytest.mark.slow),
    ],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows six clips by heart."""
    return export(tmp_path_factory.mktemp(request.param), request.param, 160)


def chat_of(word: str) -> list[dict[str, Any]]:
    return [
        {"role": m.role, "content": [{"type": "text", "text": m.content[0].text}]}  # type: ignore[union-attr]
        for m in messages_of(word)
    ]


def test_the_processor_makes_the_prompts_of_the_template(exported: Path) -> None:
    folder = exported / "run" / "model"
    processor: Any = transformers.AutoProcessor.from_pretrained(folder)
    tokenizer = load_text_tokenizer(folder)
    template = Template(tokenizer, BOOKS, CODES, header_style_of(tokenizer))
    for word in WORDS:
        inputs = processor.apply_chat_template(
            chat_of(word), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        assert inputs["input_ids"][0].tolist() == template.prompt(messages_of(word)).text_ids_S.tolist()


def test_transformers_speaks_the_same_codes(trained: Path) -> None:
    folder = trained / "run" / "model"
    processor: Any = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.HiggsAudioV2ForConditionalGeneration.from_pretrained(folder).eval()
    ours = DualFFN.from_pretrained(folder)
    tokenizer = load_text_tokenizer(folder)
    template = Template(tokenizer, BOOKS, CODES, header_style_of(tokenizer))
    for number, word in enumerate(WORDS):
        inputs = processor.apply_chat_template(
            chat_of(word), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        asked = Request(messages_of(word), sampling=GREEDY, limits=Limits(max_frames=30))
        prompt = template.prompt(asked.messages)
        assert inputs["input_ids"][0].tolist() == prompt.text_ids_S.tolist()
        codes_KT = Engine(ours, template, 1, 160).run([asked])[0].codes_KT
        assert torch.equal(codes_KT, codes_of(number)), f"{word} was not learned by heart"
        rows_FK = model.generate(**inputs, max_new_tokens=60, do_sample=False)[0]
        start = int((rows_FK == CODES).all(-1).nonzero()[-1])
        end = int((rows_FK[start:] == CODES + 1).all(-1).nonzero()[0])
        theirs_KT = processor.revert_delay_pattern(rows_FK[start + 1 : start + end]).T
        assert torch.equal(theirs_KT, codes_KT)
        waveform = processor.batch_decode(rows_FK[None])[0]
        assert waveform.shape[-1] == 960 * codes_KT.shape[1]


def test_heard_codes_are_placed_as_the_template_places_them(exported: Path) -> None:
    folder = exported / "run" / "model"
    processor: Any = transformers.AutoProcessor.from_pretrained(folder)
    clip_N = 0.1 * torch.randn(4 * 960, generator=torch.Generator().manual_seed(0)).numpy()
    audio = {"type": "audio", "audio": clip_N}
    chat = [{"role": "user", "content": [audio, {"type": "text", "text": "six"}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=text, audio=[clip_N], return_tensors="pt", add_special_tokens=False)
    codes_KT = processor.audio_tokenizer.encode(torch.tensor(clip_N)[None, None]).audio_codes[0]
    template = Template(
        load_text_tokenizer(folder), BOOKS, CODES, header_style_of(load_text_tokenizer(folder))
    )
    part = AudioPart(path="a.wav")
    stream = template.prompt([Message(role="user", content=[part, TextPart(text="six")])], [codes_KT])
    assert inputs["input_ids"].shape[1] == len(stream.text_ids_S)
    heard_S = stream.kinds_S != 0
    assert torch.equal(inputs["audio_input_ids"][0], stream.codes_SK[heard_S])
    assert inputs["input_ids"][0][~heard_S].tolist() == stream.text_ids_S[~heard_S].tolist()


def test_the_folder_names_its_codec_and_never_takes_speech_for_its_end(exported: Path) -> None:
    described = json.loads((exported / "run" / "model" / "config.json").read_text())
    assert Path(described["audio_tokenizer_id"]) == exported / "codec"
    assert (
        len({described[f"audio_{name}_id"] for name in ("token", "delay_token", "bos_token", "in_token")})
        == 4
    )


def test_a_vocabulary_of_before_has_another_token_for_the_delay() -> None:
    """`<|AUDIO|>`, which stands in no prompt of speech: never the token of the codes themselves."""
    older = vocabulary("own").to_str().replace("reserved_special_token_6", "another")
    ids = special_ids(Tokenizer.from_str(older), 400)
    assert ids["audio_delay_token_id"] == ids["audio_in_token_id"] != ids["audio_token_id"]
