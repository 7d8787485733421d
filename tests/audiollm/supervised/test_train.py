"""The stage `train`: what follows from `size`, what it saves, on one rank and on two; what it refuses; its prompts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError

from audiollm.audio import load
from audiollm.codec import codec_digest
from audiollm.data.chat.template import Template
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import Sample
from audiollm.data.records.shards import ShardWriter
from audiollm.data.text.tokenizer import TRAINED_FILE, load_text_tokenizer
from audiollm.errors import BadSample, StageError
from audiollm.families.dual_ffn.adapting import merge_adapter
from audiollm.families.dual_ffn.losses import TokenLosses
from audiollm.families.dual_ffn.planning import plan_training
from audiollm.families.dual_ffn.start import (
    COPIED_STD,
    FRAME_STD,
    start_embeddings_from_latents,
    start_from_codebooks,
    start_heads_from_embeddings,
)
from audiollm.families.prompts import with_last_message_as_answer
from audiollm.files.atomic import read_json, read_jsonl, write_jsonl
from audiollm.generation.engine.request import Limits
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.supervised.eval_audio import EvalAudio, reply_request
from audiollm.train.loop.boards import TensorBoard
from audiollm.train.supervised_settings import SIZES, TrainConfig
from tests.audiollm.supervised.train_samples import (
    SMALL,
    model_of,
    run_stage,
    settings_of,
    small_template,
    with_phrases,
    write_shards,
)
from tests.forked import run_command
from tokenizer.native.model import AudioTokenizer, TokenizerConfig


@pytest.fixture(scope="module")
def template() -> Template:
    return small_template()


def settings(**values: object) -> TrainConfig:
    return settings_of({"samples": "shards", **values})


def test_size_fills_what_is_not_set() -> None:
    config = settings(size="small", shape={"num_layers": 3})
    assert config.steps == SIZES["small"].steps and config.shape.hidden_size == SIZES["small"].hidden_size
    assert config.shape.num_layers == 3
    assert settings(minutes=2).steps is None
    tiny = settings(batch_size=10)
    assert tiny.steps is None and tiny.steps_for(100 / 10) == 10 * (SIZES["tiny"].passes or 0)
    for wrong in ({"steps": 20, "minutes": 1}, {"shape": {"hidden_size": 50, "num_heads": 4}}):
        with pytest.raises(ValidationError):
            settings(**wrong)


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_planned_parameters_are_the_real_ones(size: str) -> None:
    config = settings(size=size)
    with torch.device("meta"):
        shape = config.shape
        model = DualFFN(
            DualFFNConfig(
                SIZES[size].vocab_size,
                hidden_size=shape.hidden_size or 0,
                num_layers=shape.num_layers or 0,
                num_heads=shape.num_heads or 0,
                num_kv_heads=shape.num_heads or 0,
                head_dim=64,
                intermediate_size=shape.intermediate_size or 0,
            )
        )
    assert plan_training(config, {}).parameters == sum(p.numel() for p in model.parameters())


def test_attention_that_cannot_be_had_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    shards = str(write_shards(tmp_path / "a", 3))
    for name in ("flash_attn", "varlen"):
        with pytest.raises(ValidationError, match=f"shape.attention '{name}' needs half precision"):
            settings(shape={"attention": name}, precision="fp32")
        model = {
            **SMALL,
            "attention": name,
            "hidden_size": 300,
            "num_heads": 1,
        }  # too wide for any GPU's kernels
        with pytest.raises(StageError, match=f"shape.attention: '{name}' cannot run here") as refused:
            run_stage(tmp_path / name, shards, shape=model, precision="bf16")
        assert refused.value.exit_code == 2 and not list((tmp_path / name).iterdir())


def test_pinned_memory_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shards = str(write_shards(tmp_path / "a", 3))
    with pytest.raises(StageError, match="pin_memory is set, and there is no GPU") as refused:
        run_stage(tmp_path / "run", shards, shape=SMALL, pin_memory=True)
    assert refused.value.exit_code == 2 and not list((tmp_path / "run").iterdir())


def test_the_stage_trains_saves_and_mixes_sources(tmp_path: Path) -> None:
    first, second = write_shards(tmp_path / "a", 7), write_shards(tmp_path / "b", 5)
    sources = [{"path": str(first), "weight": 1}, {"path": str(second), "weight": 3}]
    figures = run_stage(tmp_path / "run", sources, shape=SMALL, max_tokens=128, workers=1)
    assert figures["sequences"] == 10 and figures["samples_whole"] == 12 and figures["tokens"] > 0
    few, many = figures["passes"].values()
    assert 6 * few + 4 * many == pytest.approx(12 * 3, abs=0.05) and 1 < few < 2 < many, (
        "of 6 and of 4 samples"
    )
    model = DualFFN.from_pretrained(tmp_path / "run")
    assert model.config.hidden_size == 32
    assert read_json(tmp_path / "run" / "model" / "speakers.json") == ["voice0", "voice1"]
    words = ["audio", "generate", "seven", "speaker", "theo"]
    trained = read_json(tmp_path / "run" / "model" / "trained.json")
    assert trained["words"] == words and trained["tasks"] == ["tts"]
    with pytest.raises(StageError, match="different codecs"):
        ShardWriter(tmp_path / "c", 5).close({"codec": {"num_codebooks": 2, "codebook_size": 32}})
        run_stage(tmp_path / "other", [str(first), str(tmp_path / "c")], shape=SMALL)


def test_the_codec_of_the_codes_is_kept_with_the_model_and_others_are_refused(tmp_path: Path) -> None:
    ours, theirs = (write_shards(tmp_path / name, 7, digest=name) for name in ("ours", "theirs"))
    older = write_shards(tmp_path / "older", 7)
    old, other = (write_shards(tmp_path / name, 7, fingerprint=name) for name in ("old", "other"))
    with pytest.raises(
        StageError, match="ours and .*theirs were coded by different codecs: .*'digest': 'ours'"
    ):
        run_stage(tmp_path / "refused", [str(older), str(ours), str(theirs)], shape=SMALL)
    with pytest.raises(StageError, match="old and .*other were coded by different codecs"):
        run_stage(tmp_path / "as_before", [str(old), str(other)], shape=SMALL)
    again = write_shards(tmp_path / "again", 7, digest="ours", fingerprint="saved anew")
    run_stage(tmp_path / "run", [str(ours), str(older), str(again)], shape=SMALL)
    assert read_json(tmp_path / "run" / "model" / TRAINED_FILE)["codec_digest"] == "ours"
    with pytest.raises(StageError, match="theirs: coded by another codec than the one whose codes .*run was"):
        run_stage(tmp_path / "moved", str(theirs), start=str(tmp_path / "run"))
    run_stage(tmp_path / "unknown", str(older), start=str(tmp_path / "run"))
    assert read_json(tmp_path / "unknown" / "model" / TRAINED_FILE)["codec_digest"] is None
    messages = [
        {"role": role, "content": [{"type": "text", "text": "seven"}]} for role in ("user", "assistant")
    ]
    rows = [{"id": f"w{i}", "task": "chat", "messages": messages} for i in range(7)]
    rows[-1]["metadata"] = {"split": "test"}
    write_jsonl(tmp_path / "words.jsonl", rows)
    words = {"start": str(tmp_path / "run"), "text_weight": 1.0, "keep_best": True}
    figures = run_stage(tmp_path / "words", str(tmp_path / "words.jsonl"), **words)
    assert read_json(tmp_path / "words" / "best" / "state.json")["value"] == figures["text_loss"]
    assert read_json(tmp_path / "words" / "model" / TRAINED_FILE)["codec_digest"] == "ours"


class SoundList:
    """A board that writes the names of sounds alone."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        self._file = (folder / "sounds.txt").open("w")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def text(self, step: int, key: str, text: str) -> None:
        pass

    def table(self, step: int, key: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        pass

    def audio(self, step: int, key: str, samples_1N: torch.Tensor, sample_rate: int) -> None:
        self._file.write(f"{step} {key} {sample_rate}\n")

    def close(self) -> None:
        self._file.close()


def test_prompts_are_not_spoken_with_another_codec(tmp_path: Path) -> None:
    shape: Any = {
        "mel_hidden_size": 16,
        "hidden_size": 16,
        "encoder_layers": (1, 1),
        "decoder_layers": (1, 1),
    }
    codec = AudioTokenizer(TokenizerConfig(num_codebooks=4, codebook_size=32, latent_dim=8, **shape))
    codec.save_pretrained(tmp_path / "codec")
    own, other = (write_shards(tmp_path / name, 7, digest=name) for name in (codec_digest(codec), "other"))
    with pytest.raises(StageError, match="codec is another codec than that of the shards"):
        run_stage(tmp_path / "refused", str(other), shape=SMALL, codec=str(tmp_path / "codec"))
    board = "tests.audiollm.supervised.test_train:SoundList"
    spoken = {"codec": str(tmp_path / "codec"), "evaluations": 1, "report_to": [board]}
    run_stage(tmp_path / "run", str(own), shape=SMALL, **spoken)
    assert list((tmp_path / "run" / "listening").glob("step-*/*.wav"))
    sounds = (tmp_path / "run" / "sounds.txt").read_text().splitlines()
    assert sounds and all(line.endswith(f" {codec.sample_rate}") for line in sounds)


def test_an_adapter_is_saved_by_itself_and_merged(tmp_path: Path) -> None:
    shards = str(write_shards(tmp_path / "a", 7))
    run_stage(tmp_path / "base", shards, shape=SMALL)
    tuned = tmp_path / "tuned"
    run_stage(tuned, shards, start=str(tmp_path / "base"), trained="adapter", learning_rate=0.05, ema_decay=0)
    base, merged = DualFFN.from_pretrained(tmp_path / "base"), DualFFN.from_pretrained(tuned)
    changed = {
        name
        for (name, before), after in zip(base.named_parameters(), merged.parameters(), strict=True)
        if not torch.equal(before, after)
    }
    assert changed and all(name.endswith("_proj.weight") and "self_attn" in name for name in changed)
    adapted = PeftModel.from_pretrained(DualFFN.from_pretrained(tmp_path / "base"), str(tuned / "adapter"))
    for (name, expected), found in zip(
        merged.named_parameters(), merge_adapter(adapted).parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, msg=name)


def test_only_the_audio_path_is_trained_where_asked(tmp_path: Path) -> None:
    shards = str(write_shards(tmp_path / "a", 7))
    run_stage(tmp_path / "base", shards, shape=SMALL)
    run_stage(tmp_path / "tuned", shards, start=str(tmp_path / "base"), trained="audio_ffn", ema_decay=0)
    base, tuned = (DualFFN.from_pretrained(tmp_path / name).state_dict() for name in ("base", "tuned"))
    changed = {name for name in base if not torch.equal(base[name], tuned[name])}
    assert changed and all("audio" in name for name in changed)
    assert any("audio_mlp" in name for name in changed) and any("audio_lm_head" in name for name in changed)


def test_codes_that_sound_alike_begin_alike(template: Template) -> None:
    model = model_of(template)
    vectors = torch.randn(4, 32, 8)
    vectors[:, 1] = vectors[:, 0] + 0.01
    start_from_codebooks(model, vectors)
    table = model.model.embed_audio_tokens.embed_audio_tokens.weight.unflatten(0, (4, 34))
    near = (table[:, 0] - table[:, 1]).norm(dim=-1)
    far = (table[:, 0] - table[:, 2]).norm(dim=-1)
    assert near.mean().item() < 0.9 * far.mean().item()


def test_the_embeddings_of_a_frame_add_up_to_the_codecs_latent(template: Template) -> None:
    """Latents that are alike are heard alike, whichever codes they are made of."""
    model = model_of(template)
    table = model.model.embed_audio_tokens.embed_audio_tokens.weight.unflatten(0, (4, 34))
    marks = table[:, 32:].clone()
    vectors = torch.randn(4, 32, 8) * 0.5 ** torch.arange(4)[:, None, None]
    start_embeddings_from_latents(model, vectors)
    codes_KT = torch.randint(32, (4, 500))
    latents_TD = sum(vectors[level, codes_KT[level]] for level in range(4))
    heard_TC = sum(table[level, codes_KT[level]] for level in range(4))
    found = torch.linalg.lstsq(latents_TD, heard_TC)  # type: ignore[arg-type]
    assert torch.allclose(latents_TD @ found.solution, heard_TC, atol=1e-5)  # type: ignore[operator, arg-type]
    assert heard_TC.std().item() == pytest.approx(FRAME_STD, rel=0.3)  # type: ignore[union-attr]
    assert torch.equal(table[:, 32:], marks), "the marks begin as they were"


def test_a_head_begins_as_the_embedding_of_its_code(template: Template) -> None:
    model = model_of(template)
    start_heads_from_embeddings(model)
    embed = model.model.embed_audio_tokens.embed_audio_tokens.weight
    assert torch.equal(model.audio_lm_head.weight, embed) and model.audio_lm_head.weight is not embed
    assert embed.std().item() == pytest.approx(COPIED_STD, rel=1e-4)
    seen = embed[::7]
    assert (seen @ model.audio_lm_head.weight.T).argmax(dim=1).tolist() == list(range(0, len(embed), 7))


def test_heads_are_normalised_where_that_is_asked(tmp_path: Path) -> None:
    shards = str(write_shards(tmp_path / "a", 7))
    run_stage(tmp_path / "normed", shards, shape={**SMALL, "qk_norm": True})
    model = DualFFN.from_pretrained(tmp_path / "normed")
    assert model.config.qk_norm
    gains = [
        weight
        for name, weight in model.named_parameters()
        if name.endswith(("q_norm.weight", "k_norm.weight"))
    ]
    assert len(gains) == 2 * SMALL["num_layers"] and all((gain != 1).any() for gain in gains)  # trained


def test_how_heads_begin_is_asked_of_a_model_that_begins(tmp_path: Path) -> None:
    shards = str(write_shards(tmp_path / "a", 7))
    alike = {}
    for name, heads in (("apart", "random"), ("base", "embeddings")):
        run_stage(tmp_path / name, shards, shape={**SMALL, "code_heads": heads}, learning_rate=1e-4)
        model = DualFFN.from_pretrained(tmp_path / name)
        embed = model.model.embed_audio_tokens.embed_audio_tokens.weight
        alike[name] = torch.cosine_similarity(embed, model.audio_lm_head.weight).mean().item()
    assert alike["base"] > 0.95 and abs(alike["apart"]) < 0.2
    with pytest.raises(ValidationError, match="code_heads is set, but start"):
        run_stage(tmp_path / "on", shards, start=str(tmp_path / "base"), shape={"code_heads": "embeddings"})


RECIPE = """
name: {name}
stages:
  - train:
      samples: {shards}
      steps: 12
      batch_size: 5
      max_tokens: 128
      precision: fp32
      shape: {{hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 64, dropout: 0}}
"""


def test_the_stage_on_two_ranks_is_the_stage_on_one(tmp_path: Path) -> None:
    """The command as people start it; every rank sees its own packs of the same samples."""
    shards = write_shards(tmp_path / "shards", 11)
    for name in ("one", "two"):
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(RECIPE.format(name=name, shards=shards))
        arguments = ["run", str(recipe), "--runs", str(tmp_path)]
        if name == "one":
            done = run_command(*arguments)
        else:
            command = [sys.executable, "-m", "audiollm.commands.cli", *arguments, "--launch", "2"]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
            )
        assert done.returncode == 0, done.stdout
    one, two = (DualFFN.from_pretrained(tmp_path / name / "train").state_dict() for name in ("one", "two"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=1e-4, rtol=0, msg=key)
    logs = [read_jsonl(tmp_path / name / "train" / "metrics.jsonl") for name in ("one", "two")]
    first, second = ([row for row in log if "loss" in row] for log in logs)
    for key in ("loss", "text_loss", "audio_loss", "audio_loss/3"):
        assert second[0][key] == pytest.approx(first[0][key], rel=1e-4), key
    tokens = [
        read_json(tmp_path / name / "train" / "checkpoint" / "state.json")["tokens"]
        for name in ("one", "two")
    ]
    assert tokens[0] > 0 and tokens[1] > 0


def test_the_same_prompts_are_synthesized_every_time(tmp_path: Path, template: Template) -> None:
    folder, model = write_shards(tmp_path / "shards", 4), model_of(template).eval()
    samples = [(loaded, loaded.encodings[0]) for loaded in (open_source(folder)[i] for i in (1, 2))]
    eval_audio = EvalAudio(TokenLosses(model), Tones(), template, samples, tmp_path / "out", SamplingConfig())
    board = TensorBoard(tmp_path / "out", 0)
    eval_audio.draw_on([board])
    for step in (5, 10):
        eval_audio(step)
    board.close()
    first, second = (sorted((tmp_path / "out").glob(f"step-0000{step}/*")) for step in ("05", "10"))
    assert [path.name for path in first] == ["s1.wav", "s2.wav"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes() and load(one).samples_CN.shape[1] >= 960
    assert list((tmp_path / "out" / "tensorboard").glob("events*"))
    request = reply_request(
        samples[0][0].sample, samples[0][1], 3, SamplingConfig(), Limits(max_frames=7), 25.0
    )
    assert [m.role for m in request.messages] == ["system", "user"] and not request.audio
    assert request.seed == 3 and request.limits.max_frames == 7


def test_phrases_are_trained_on_and_said_by_the_generator(tmp_path: Path, template: Template) -> None:
    """Rows are those of the layout, evaluations speak in phrases, and the model's folder tells how long they are."""
    shards = write_shards(tmp_path / "shards", 7, frames=6, change=with_phrases)
    figures = run_stage(tmp_path / "run", str(shards), shape=SMALL)
    loaded = open_source(shards)[0]
    rows = small_template().length(loaded.sample.messages, [6])
    assert read_json(tmp_path / "run" / "model" / "trained.json")["phrase_words"] == 1
    assert figures["samples_whole"] == 7 and figures["tokens"] > rows * 30
    samples = [(loaded, loaded.encodings[0])]
    model = TokenLosses(model_of(template).eval())
    EvalAudio(model, Tones(), template, samples, tmp_path / "out", SamplingConfig())(5)
    request = reply_request(loaded.sample, loaded.encodings[0], 0, SamplingConfig(), Limits(), 25.0)
    assert [phrase.text for phrase in request.phrases] == ["seven", "theo"]
    plain = write_shards(tmp_path / "plain", 7)
    run_stage(tmp_path / "plain_run", str(plain), shape=SMALL)
    assert read_json(tmp_path / "plain_run" / "model" / "trained.json")["phrase_words"] is None


def test_phonemes_of_phrases_are_words_of_the_vocabulary(tmp_path: Path) -> None:
    """And the model's folder says whose they are."""

    def with_phonemes(sample: Sample) -> Sample:
        sample = with_phrases(sample)
        last = sample.messages[-1]
        phrases = [phrase.model_copy(update={"phonemes": "θ ɹ ˈiː"}) for phrase in last.phrases]
        messages = [*sample.messages[:-1], last.model_copy(update={"phrases": phrases})]
        return sample.model_copy(
            update={"messages": messages, "metadata": {**sample.metadata, "pronunciation": "espeak:en-us"}}
        )

    shards = write_shards(tmp_path / "shards", 7, frames=6, change=with_phonemes)
    run_stage(tmp_path / "run", str(shards), shape=SMALL)
    folder = tmp_path / "run" / "model"
    assert read_json(folder / "trained.json")["pronunciation"] == "espeak:en-us"
    assert len(load_text_tokenizer(folder).encode(" θ ɹ ˈiː").ids) == 3
    loaded = open_source(shards)[0]
    request = reply_request(loaded.sample, loaded.encodings[0], 0, SamplingConfig(), Limits(), 25.0)
    assert [phrase.text for phrase in request.phrases] == ["θ ɹ ˈiː", "θ ɹ ˈiː"]


def test_policies_take_no_phrases(tmp_path: Path) -> None:
    """Their answers are single recordings, and would be said in another layout than the model has learned."""
    loaded = open_source(write_shards(tmp_path / "shards", 2, change=with_phrases))[0]
    with pytest.raises(BadSample, match="compose it without phrase_words"):
        with_last_message_as_answer(loaded)


def test_prompts_of_the_same_id_have_files_of_their_own(tmp_path: Path, template: Template) -> None:
    """Samples of two sources may have the same id."""
    loaded = open_source(write_shards(tmp_path / "shards", 4))[1]
    samples = [(loaded, loaded.encodings[0])] * 2
    model = TokenLosses(model_of(template).eval())
    EvalAudio(model, Tones(), template, samples, tmp_path / "out", SamplingConfig())(5)
    names = [row["name"] for row in read_jsonl(tmp_path / "out" / "prompts.jsonl")]
    assert names[0] == "s1" and {path.stem for path in (tmp_path / "out").glob("step-*/*")} == set(names)
    assert len(set(names)) == 2


class Tones:
    """A codec of a level a frame."""

    frame_rate, num_codebooks, codebook_size, sample_rate = 25.0, 4, 32, 24_000
    codebook_vectors_KVD = torch.zeros(4, 32, 1)

    def encode(self, samples_CN: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def decode(self, codes_KT: torch.Tensor) -> torch.Tensor:
        return (codes_KT.sum(dim=0) / 200).repeat_interleave(960)[None].float()
