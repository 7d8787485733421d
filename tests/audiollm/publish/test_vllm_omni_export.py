"""`audiollm export --to vllm-omni`: the folder, what is refused, and the parts of vLLM-Omni that load without vLLM.

The latter runs where AUDIOLLM_VLLM_OMNI names a folder with its wheel, unpacked:
`pip download --no-deps vllm-omni==0.30.0; unzip vllm_omni-*.whl -d FOLDER`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import typer
from typer.testing import CliRunner, Result

from audiollm.data.chat.delay import delay
from audiollm.data.chat.template import Kind
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.data.text.tokenizer import AUDIO_DELAY, AUDIO_EOS, AUDIO_OUT
from audiollm.errors import ConfigError
from audiollm.generation.speaking.generator import Generator
from audiollm.publish import export_command, transformers_check, transformers_export, vllm_omni_export
from recipes.finetune_higgs.random_weights import BOOKS, CODES, write_tokenizer
from tests.audiollm.publish.test_transformers_export import write_model

WHEEL = os.environ.get("AUDIOLLM_VLLM_OMNI", "")
MODULES = Path(WHEEL) / "vllm_omni/model_executor/models/higgs_audio_v2"
needs_wheel = pytest.mark.skipif(
    not WHEEL or not MODULES.is_dir(), reason="AUDIOLLM_VLLM_OMNI names no folder with vLLM-Omni's wheel"
)
TEXTS = ("one", "two one. Good morning, 42!")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "higgs"
    torch.manual_seed(0)
    write_tokenizer(folder / "train_tokenizer" / "model")
    write_model(folder / "train" / "model")
    return folder


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "served"
    result = export(run / "train", out)
    assert result.exit_code == 0, result.exception
    assert "3 prompts equal" in result.output and "2 prompts with a reference equal" in result.output
    return out


def export(folder: Path, out: Path, *words: object) -> Result:
    app = typer.Typer()
    app.command()(export_command.export)
    return CliRunner().invoke(app, [str(folder), "--to", "vllm-omni", "-o", str(out), *map(str, words)])


def message(role: Any, text: str) -> Message:
    return Message(role=role, content=[TextPart(text=text)])


def cloning(text: str) -> list[Message]:
    spoken = Message(role="assistant", content=[AudioPart(path="reference.wav")])
    return [
        message("system", transformers_check.SYSTEM),
        message("user", "two two"),
        spoken,
        message("user", text),
    ]


def prompt_ids(generator: Generator, text: str, codes_KT: torch.Tensor) -> list[int]:
    """Our prompt with a reference, with the token of delayed rows where transformers and vLLM-Omni have it."""
    prompt = generator.template.prompt(cloning(text), [codes_KT])
    ids = prompt.text_ids_S.tolist()
    for place in (prompt.kinds_S == Kind.AUDIO_OUT).nonzero()[-(BOOKS - 1) :, 0].tolist():
        ids[place] = generator.template.tokenizer.token_to_id(AUDIO_DELAY)
    return ids


def test_the_folder_says_what_vllm_omni_would_assume_otherwise(exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    vocabulary = Generator.from_pretrained(exported).template.tokenizer
    assert config["audio_tokenizer_id"] is None  # else Boson's codec is downloaded
    assert (exported / config["audio_tokenizer_subdir"] / "model.safetensors").is_file()
    end_of_audio = vocabulary.token_to_id(AUDIO_EOS)
    assert config["audio_eos_token_id"] == end_of_audio != 128012
    generation = json.loads((exported / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [vocabulary.token_to_id("<|eot_id|>"), end_of_audio]
    assert not list(exported.rglob("*.pth"))  # vLLM-Omni prefers pickles


def test_its_readme_says_how_voices_are_cloned(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    assert (
        f"HIGGS_AUDIO_V2_TOKENIZER_PATH={exported.resolve()} vllm serve {exported.resolve()} --omni" in card
    )
    assert "the names of 1 speakers" in card and "temperature 1, top_p 0.95, top_k 50" in card


def test_transformers_clones_with_the_same_prompt(exported: Path) -> None:
    """Its chats name a recording, whose marks the template then writes."""
    processor: Any = transformers.AutoProcessor.from_pretrained(exported)
    generator = Generator.from_pretrained(exported)
    samples_N = np.random.default_rng(0).normal(size=960 * 4).astype(np.float32) / 10
    speech = {"role": "assistant", "content": [{"type": "audio", "audio": samples_N}]}
    chat = [
        {"role": part.role, "content": [{"type": "text", "text": part.content[0].text}]}
        if isinstance(part.content[0], TextPart)
        else speech
        for part in cloning("one")
    ]
    inputs = processor.apply_chat_template(
        chat,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        sampling_rate=24_000,
    )
    codes_KT = generator.codec.encode(torch.from_numpy(samples_N)[None])
    assert inputs["input_ids"][0].tolist() == prompt_ids(generator, "one", codes_KT)
    assert torch.equal(inputs["audio_input_ids"][0], delay(codes_KT, CODES, CODES + 1))


def test_our_engine_opens_the_folder(run: Path, exported: Path) -> None:
    request = [transformers_check._greedy_request(text) for text in TEXTS]
    before, after = (
        [answer.codes_KT for answer in generator.engine(request).run(request)]
        for generator in (Generator.from_pretrained(run / "train"), Generator.from_pretrained(exported))
    )
    assert all(torch.equal(first, second) for first, second in zip(before, after, strict=True))


def test_a_native_codec_is_refused_with_the_way_that_works(run: Path, tmp_path: Path) -> None:
    from tests.audiollm.publish.released_run import write_codec

    write_codec(tmp_path / "codec")
    error = export(run / "train", tmp_path / "out", "--codec", tmp_path / "codec").exception
    assert isinstance(error, ConfigError) and "audiollm_tokenizer" in error.message
    assert "audiollm serve" in error.remedy and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("num_codebooks", "8 codebooks, and the codec has 4"),
        ("delay", "no <|reserved_special_token_6|>"),
        ("stop", "id at which vLLM-Omni stops"),
        ("shards", "is in shards"),
    ],
)
def test_values_that_are_fixed_in_vllm_omni_are_refused(
    run: Path, tmp_path: Path, change: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = transformers_export.open_export_source(run / "train", None)
    vocabulary = source.generator.template.tokenizer
    codec_path = tmp_path / "codec"
    shutil.copytree(source.codec_path, codec_path)
    if change == "num_codebooks":
        monkeypatch.setattr(type(source.generator.codec), "num_codebooks", 4)
    elif change == "delay":
        monkeypatch.setattr(vllm_omni_export.tokens, "AUDIO_DELAY", "<|reserved_special_token_6|> ")
    elif change == "stop":
        monkeypatch.setattr(vllm_omni_export, "STOP_IDS", (128009, vocabulary.token_to_id(AUDIO_OUT)))
    else:
        (codec_path / "model.safetensors").rename(codec_path / "model-00001-of-00001.safetensors")
    moved = transformers_export.ExportSource(source.folder, codec_path, source.generator)
    with pytest.raises(ConfigError, match=None) as caught:
        vllm_omni_export._check_fixed_values(moved)
    assert reason in caught.value.message and caught.value.remedy


def test_prompts_that_differ_remove_the_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that marks speech itself gives vLLM-Omni's prompts the marks twice."""
    from audiollm.models.processor_files import chat_template

    monkeypatch.setattr(
        vllm_omni_export, "chat_template", lambda style, marks_bare_speech: chat_template(style)
    )
    error = export(run / "train", tmp_path / "out").exception
    assert isinstance(error, ConfigError) and "prompts with a reference" in error.message
    assert not (tmp_path / "out").exists()


def of_wheel(name: str) -> ModuleType:
    """A module of vLLM-Omni's model, without its package, which imports vLLM."""
    spec = importlib.util.spec_from_file_location(name, MODULES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@needs_wheel
def test_vllm_omni_reads_our_settings(exported: Path) -> None:
    settings = of_wheel("configuration_higgs_audio_v2").HiggsAudioV2Config
    config = settings(**transformers.AutoConfig.from_pretrained(exported).to_dict())
    vocabulary = Generator.from_pretrained(exported).template.tokenizer
    assert config.audio_tokenizer_id is None and config.audio_tokenizer_subdir == "audio_tokenizer"
    assert config.audio_eos_token_id == vocabulary.token_to_id(AUDIO_EOS)
    assert config.audio_token_id == vocabulary.token_to_id(AUDIO_OUT)
    assert config.audio_delay_token_id == vocabulary.token_to_id(AUDIO_DELAY)
    assert (config.num_real_codes, config.num_codebooks, config.codebook_size) == (CODES, BOOKS, CODES + 2)
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (32, 2, 16)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500_000.0}


@needs_wheel
@torch.inference_mode()
def test_vllm_omni_decodes_our_codes_to_our_sound(exported: Path) -> None:
    quantizer, linear, decoder, settings = of_wheel("higgs_audio_decoder").load_higgs_audio_codec(
        str(exported / "audio_tokenizer"), torch.device("cpu")
    )
    codes_KT = torch.randint(CODES, (BOOKS, 40), generator=torch.Generator().manual_seed(1))
    latents_1DT = quantizer.decode(codes_KT[:, None])
    theirs_1N = decoder(linear(latents_1DT.transpose(1, 2)).transpose(1, 2)).reshape(1, -1)
    ours_1N = Generator.from_pretrained(exported).codec.decode(codes_KT)
    assert theirs_1N.shape == ours_1N.shape == (1, 40 * 960)
    assert float((theirs_1N - ours_1N).abs().max()) < 1e-4 * max(1.0, float(ours_1N.abs().max()))
    assert float(ours_1N.abs().max()) > 1e-3 and settings["sample_rate"] == 24_000


@needs_wheel
def test_vllm_omni_writes_the_prompts_of_our_training(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts alone, and with a reference, which it encodes with the codec that the README's variable names."""
    platforms = ModuleType("vllm_omni.platforms")
    platforms.current_omni_platform = type("CPU", (), {"get_torch_device": lambda self: "cpu"})()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_omni", ModuleType("vllm_omni"))
    monkeypatch.setitem(sys.modules, "vllm_omni.platforms", platforms)
    monkeypatch.setenv("HIGGS_AUDIO_V2_TOKENIZER_PATH", str(exported))
    builder = of_wheel("higgs_audio_v2_tokenizer")
    processor: Any = transformers.AutoProcessor.from_pretrained(exported)
    generator = Generator.from_pretrained(exported)
    samples_N = np.random.default_rng(0).normal(size=960 * 7).astype(np.float32) / 10
    codes_KT = generator.codec.encode(torch.from_numpy(samples_N)[None])
    for text in TEXTS:
        plain = builder.input_ids_to_python_list(builder.build_plain_text_prompt(processor, text))
        messages = [message("system", transformers_check.SYSTEM), message("user", text)]
        assert plain == generator.template.prompt(messages).text_ids_S.tolist()
        cloned = builder.build_voice_clone_prompt(processor, text, samples_N, 24_000, "two two")
        assert torch.equal(cloned["audio_input_ids"], delay(codes_KT, CODES, CODES + 1))
        assert cloned["prompt_token_ids"] == prompt_ids(generator, text, codes_KT)
        words = processor.tokenizer
        assert cloned["prompt_token_ids"] == vllm_omni_export.clone_prompt(words, "two two", text, 7, BOOKS)
