"""Folders of every kind of model work as they are published: in float16 and bfloat16, too.

Oracle on a CPU: the same weights, rounded to half precision and stored in float32, give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from audiollm.audio import Waveform
from audiollm.evaluate.judges.classifier import ClassifierConfig, ClipClassifier, ClipNet
from audiollm.files import transformers_folders
from audiollm.flow.model.mmdit import MMDiT
from audiollm.flow.model.packed import pack_conditions
from audiollm.flow.model.rows import rows_of
from audiollm.flow.model.thinksound import ThinkSound
from audiollm.flow.sound_model import SoundModel, SoundModelConfig, condition_facts
from audiollm.onnx_models import package_file
from audiollm.rl.critic.model import CriticModel
from audiollm.rl.critic.settings import CriticStart
from audiollm.rl.reward_models.model import RewardModel, Scored, load_reward_model
from audiollm.train.settings import LoRASettings
from tests.audiollm.evaluate.sound.test_evaluate_sound import save_clap
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.flow import test_mmdit, test_thinksound
from tests.audiollm.flow.test_condition_encoders import CAPTION_DIM, save_clip, save_tokenizer
from tests.audiollm.half_precision import DTYPES, stored_as
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import tone
from tests.audiollm.rl.reward_models.test_reward_models import samples
from tests.pipelines.annotate.steps.tiny_recognizers import ctc_folder, whisper_folder
from tests.pipelines.audiocot.test_tracking import detector, tracker
from tests.tokenizer import test_codecs, test_continuous, test_higgs, test_mel_pca, test_model
from tests.tokenizer.test_teacher import WAVE, wav2vec2_bert, whisper
from tokenizer.continuous.model import AudioVAE
from tokenizer.native.model import AudioTokenizer

Figures = NDArray[np.float64]
RATE = 16_000
NOISE_N = np.random.default_rng(0).normal(0, 0.1, RATE).astype(np.float32)
SOUND = Waveform(torch.from_numpy(NOISE_N)[None], RATE)
PICTURES = list(np.random.default_rng(1).integers(0, 255, (3, 48, 64, 3)).astype(np.uint8))


class Kind(NamedTuple):
    """A kind of folder: how one is written, and figures of a use of it."""

    save: Callable[[Path], Any]
    use: Callable[[Path], Any]
    opened_on_gpu: bool = False
    """Whether it is opened on a GPU, where weights keep the dtype in which they are stored."""


def waveform_model(model_class: Any, **settings: Any) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        torch.manual_seed(0)
        tail = {"tdnn_dim": (8, 8, 8, 8, 8), "xvector_output_dim": 8}
        model_class(transformers.Wav2Vec2Config(**WAVE, **tail, **settings)).save_pretrained(folder)
        transformers.Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(folder)

    return save


def save_t5(folder: Path) -> None:
    torch.manual_seed(1)
    config = transformers.T5Config(
        vocab_size=16, d_model=CAPTION_DIM, d_kv=8, d_ff=16, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu"
    )  # fmt: skip
    transformers.T5EncoderModel(config).save_pretrained(folder)
    save_tokenizer(folder)


def save_hubert(folder: Path) -> None:
    torch.manual_seed(2)
    transformers.HubertModel(transformers.HubertConfig(**WAVE)).save_pretrained(folder)


def save_two(first: Callable[[Path], Any], second: Callable[[Path], Any]) -> Callable[[Path], None]:
    return lambda folder: (first(folder / "first"), second(folder / "second"))[0]


def save_codec(model_class: Any, config: Any) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        torch.manual_seed(3)
        model_class(config).save_pretrained(folder)

    return save


def save_random(name: str) -> Callable[[Path], None]:
    """A published codec with random weights, by its name in `CODECS`."""
    return lambda folder: test_codecs.make(name).save_pretrained(folder)


def save_higgs(folder: Path) -> None:
    torch.manual_seed(5)
    transformers.HiggsAudioV2TokenizerModel(test_higgs.tiny_config()).save_pretrained(folder)


def save_tokenizer_model(folder: Path) -> None:
    torch.manual_seed(6)
    AudioTokenizer(test_model.SMALL).save_pretrained(folder)


def save_vae(folder: Path) -> None:
    torch.manual_seed(7)
    AudioVAE(test_continuous.SMALL).save_pretrained(folder)


def save_flow(folder: Path) -> None:
    conditions = {"caption": condition_facts(kind="features", width=test_mmdit.CONFIG.caption_dim)}
    model = SoundModel(SoundModelConfig("native", asdict(test_mmdit.CONFIG), "toy", RATE, 1, 400, conditions))
    assert isinstance(model.transformer, MMDiT)
    test_mmdit.randomized(model.transformer)
    model.save_pretrained(folder)


def save_thinksound(folder: Path) -> None:
    test_thinksound.randomized(ThinkSound(test_thinksound.SMALL)).save_pretrained(folder)


def save_reward_model(kind: str, scored: Scored = "answers") -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        start = folder.with_name(f"{folder.name}_start")
        save_model(start, kind) if kind == "codes" else save_tiny(kind, start)
        torch.manual_seed(8)
        RewardModel.begin(start, scored=scored, bias=True).save(folder)

    return save


def save_critic(folder: Path) -> None:
    start = folder.with_name(f"{folder.name}_start")
    save_model(start, "codes")
    torch.manual_seed(9)
    CriticModel.begin(with_critic(start), 1000).save(folder)


def with_critic(folder: Path) -> Any:
    """The settings of a training that a critic is begun from."""
    return SimpleNamespace(start=folder, trained="all", lora=LoRASettings(), critic=CriticStart())


def save_classifier(folder: Path) -> None:
    torch.manual_seed(10)
    ClipClassifier(ClipNet(3, ClassifierConfig()), ("a", "b", "c"), 8000.0, ClassifierConfig()).save(folder)


def save_llama(folder: Path) -> None:
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


# ------------------------------------------------------------------------------------------------- uses


def recognize(folder: Path) -> list[float]:
    from audiollm.models.recognition.recognizer import SpeechRecognizer

    speech = SpeechRecognizer(folder, max_tokens=8).transcribe([NOISE_N])[0]
    assert len(speech.text) > 2
    return [word.confidence or 0.0 for word in speech.words]


def judge_voice(folder: Path) -> Any:
    from audiollm.evaluate.judges.choosing import choose_speaker_judge

    judge = choose_speaker_judge(str(folder))
    assert judge is not None
    return judge.judge.embed(SOUND.samples_CN, RATE)


def judge_emotion(folder: Path) -> Any:
    from audiollm.evaluate.judges.choosing import choose_emotion_judge

    judge = choose_emotion_judge(str(folder))
    assert judge is not None
    return judge.judge.embed(SOUND.samples_CN, RATE)


def classify(folder: Path) -> Any:
    from audiollm.evaluate.judges.taggers import TransformersTagger

    return TransformersTagger(folder).hear([NOISE_N]).scores_FK


def embed_sound(folder: Path) -> Any:
    from audiollm.evaluate.sound.sound_judges import ClapSpace

    space = ClapSpace(folder)
    return np.concatenate([space.embed(SOUND), space.embed_text("rain")])


def gate_description(folder: Path) -> Any:
    from pipelines.annotate.steps.description import ClapGate

    values = {"events": {"events": [{"label": "dog", "score": 0.9, "start_s": 0.0, "end_s": 1.0}]}}
    result = ClapGate(folder, 3).judge(SOUND, (), "rain", values)
    return [result.ours, result.reference]


def agree_with_pictures(folder: Path) -> Any:
    from pipelines.audiocot.steps.agreement import _ClipSpace

    return [_ClipSpace(folder).agreement(PICTURES, "a low tone")]


def encode_captions(folder: Path) -> Any:
    from audiollm.flow.conditions.pretrained import load_text_encoder

    return load_text_encoder(folder).encode_text("a low tone over a hum").values_RC


def encode_pictures(folder: Path) -> Any:
    from audiollm.flow.conditions.pretrained import load_frame_encoder

    encoder = load_frame_encoder(folder, 8.0)
    pictures = [picture[:32, :32] for picture in PICTURES]
    return encoder.encode_pictures(pictures, [0.0, 0.1, 0.2])[0]


def follow_objects(folder: Path) -> Any:
    from pipelines.audiocot.steps.tracking import ObjectFinder

    finder = ObjectFinder(folder / "first", folder / "second")
    boxes = finder.detect(PICTURES[0], ["dog"], 0.0)
    tracks = finder.track(PICTURES, 1, [(4.0, 4.0, 40.0, 40.0)])
    assert boxes and tracks
    return [boxes[0].score, *boxes[0].box]


def follow_clicks(folder: Path) -> Any:
    from pipelines.studio.regions import Sam2Tracker

    tracks = Sam2Tracker(folder).track(PICTURES, 1, [(4.0, 4.0, 40.0, 40.0)])
    return [value for box in tracks[0].values() for value in box]


def teach(folder: Path) -> Any:
    from tokenizer.teacher.model import load_teacher

    teacher = load_teacher(folder)
    teacher.std_RC.fill_(1.0)
    return teacher.features(torch.from_numpy(NOISE_N[: 10 * 960])[None])


def start_higgs(folder: Path) -> Any:
    from tokenizer.higgs.loading import load_hubert

    with torch.no_grad():
        return load_hubert(folder)(torch.from_numpy(NOISE_N)[None]).last_hidden_state


def encode_and_decode(folder: Path) -> Any:
    from audiollm.codec import load_codec

    codec = load_codec(folder)
    samples_1N = torch.from_numpy(NOISE_N)[None, : codec.sample_rate // 2]
    return codec.decode(codec.encode(samples_1N))


def encode_latents(folder: Path) -> Any:
    from audiollm.autoencoder import load_autoencoder

    autoencoder = load_autoencoder(folder)
    samples_CN = torch.from_numpy(NOISE_N)[None].expand(autoencoder.channels, -1)
    with torch.no_grad():
        latent_DT = autoencoder.encode_distribution(samples_CN).mean
        return torch.cat(
            [latent_DT.flatten(), autoencoder.decode(autoencoder.normalize(latent_DT)).flatten()]
        )


def flow_velocity(folder: Path) -> Any:
    model = SoundModel.from_pretrained(folder)
    conditions = test_mmdit.conditions_of(("caption",), 0)
    with torch.no_grad():
        packed, latents = (
            pack_conditions([conditions], torch.device("cpu")),
            rows_of([6], torch.device("cpu")),
        )
        context_LE = torch.zeros(6, test_mmdit.CONFIG.input_channels - 8)
        return model(
            torch.linspace(-1, 1, 48).reshape(6, 8), torch.tensor([0.3]), packed, latents, context_LE
        )


def released_velocity(folder: Path) -> Any:
    released, saved = (
        ThinkSound.from_released(folder, test_thinksound.SMALL),
        ThinkSound.from_pretrained(folder),
    )
    conditions = test_thinksound.small_conditions(("frames", "caption"), 20, 0)
    features = {name: each._replace(values_RC=each.values_RC.float()) for name, each in conditions.items()}
    packed = pack_conditions([features], torch.device("cpu"))
    x_LD, rows = torch.linspace(-1, 1, 160).reshape(20, 8), rows_of([20], torch.device("cpu"))
    with torch.no_grad():
        return torch.cat([model(x_LD, torch.tensor([0.3]), packed, rows) for model in (released, saved)])


def score_answers(kind: str) -> Callable[[Path], Any]:
    def use(folder: Path) -> list[float]:
        for number in range(6):
            tone(folder / f"{number}.wav", 150.0 + 90 * number)
        scores = load_reward_model(folder).score_many(samples(folder, kind))
        return [score for record in scores for score in record]

    return use


def value_tokens(folder: Path) -> Any:
    critic = CriticModel.begin(with_critic(folder), 1000)
    policy: Any = critic.policy
    encoded = policy.encode(policy.take(samples(folder, "codes")[0], [0, 1]))
    with torch.no_grad():
        return critic.root.eval()(policy.batch(encoded))


def hear_through_tower(folder: Path) -> Any:
    from audiollm.models.audio_encoder import AudioTower, encoder_config, load_tower

    tower = AudioTower(encoder_config(folder))
    load_tower(tower, folder)
    return torch.cat([weight.flatten()[:8] for weight in tower.state_dict().values()])


def build_on_llama(folder: Path) -> Any:
    from audiollm.models.dual_ffn import DualFFN

    return DualFFN.from_language_model(folder, num_codebooks=2, codebook_size=18).text_lm_head.weight


def ask(folder: Path) -> Any:
    from audiollm.evaluate.subjects.chat import FolderChat

    chat = FolderChat.load(folder, 4)
    reply = chat.reply_counted([("user", [SOUND, "What is it?"])])
    return [float(reply.tokens or 0)]


def score_policy(folder: Path) -> Any:
    from audiollm.families.listener.policy import ListenerPolicy

    policy = ListenerPolicy.load(folder, needs_reference=False)
    return torch.cat([weight.flatten()[:4] for weight in policy.root.state_dict().values()])


DAC = transformers.DacConfig(
    encoder_hidden_size=4, downsampling_ratios=[4, 4, 8, 5], decoder_hidden_size=64, upsampling_ratios=[8, 5, 4, 4],
    n_codebooks=2, codebook_size=16, codebook_dim=4, sampling_rate=RATE,
)  # fmt: skip
XVECTOR = waveform_model(transformers.Wav2Vec2ForXVector, num_labels=3)
CLASSIFIER = waveform_model(transformers.Wav2Vec2ForSequenceClassification, num_labels=3)

KINDS = {
    "whisper": Kind(whisper_folder, recognize, True),
    "ctc": Kind(ctc_folder, recognize, True),
    "speaker judge": Kind(XVECTOR, judge_voice),
    "emotion judge": Kind(CLASSIFIER, judge_emotion),
    "tagger": Kind(CLASSIFIER, classify, True),
    "clap": Kind(save_clap, embed_sound),
    "clap gate": Kind(save_clap, gate_description, True),
    "clip agreement": Kind(save_clip, agree_with_pictures),
    "clip captions": Kind(save_clip, encode_captions),
    "clip pictures": Kind(save_clip, encode_pictures),
    "t5": Kind(save_t5, encode_captions),
    "grounding dino and sam 2": Kind(save_two(detector, tracker), follow_objects, True),
    "studio tracker": Kind(tracker, follow_clicks),
    "hubert teacher": Kind(save_hubert, teach),
    "whisper teacher": Kind(whisper, teach),
    "wav2vec2-bert teacher": Kind(wav2vec2_bert, teach),
    "higgs hubert": Kind(save_hubert, start_higgs),
    "dac": Kind(save_codec(transformers.DacModel, DAC), encode_and_decode),
    "whisper tower": Kind(whisper_folder, hear_through_tower),
    "llama": Kind(save_llama, build_on_llama),
    "encodec": Kind(save_random("encodec"), encode_and_decode),
    "mimi": Kind(save_random("mimi"), encode_and_decode),
    "higgs codec": Kind(save_higgs, encode_and_decode),
    "our tokenizer": Kind(save_tokenizer_model, encode_and_decode),
    "our autoencoder": Kind(save_vae, encode_latents),
    "mel autoencoder": Kind(lambda folder: test_mel_pca.fitted().save_pretrained(folder), encode_latents),
    "flow model": Kind(save_flow, flow_velocity),
    "released flow model": Kind(save_thinksound, released_velocity),
    "reward model": Kind(save_reward_model("qwen2_audio"), score_answers("qwen2_audio")),
    "reward model of steps": Kind(save_reward_model("codes", "steps"), score_answers("codes")),
    "critic": Kind(save_critic, value_tokens),
    "speaker classifier": Kind(save_classifier, judge_voice),
    "policy": Kind(lambda folder: save_tiny("qwen2_audio", folder), score_policy),
}


def figures(result: Any) -> Figures:
    array = result.detach().float().numpy() if isinstance(result, torch.Tensor) else np.asarray(result)
    assert array.size and np.isfinite(array.astype(np.float64)).all()
    return array.astype(np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_rounded_weights_and_no_more(tmp_path: Path, kind: str, dtype: str) -> None:
    folder = tmp_path / "model"
    KINDS[kind].save(folder)
    half = stored_as(folder, dtype)
    rounded = stored_as(half, "float32")
    expected = figures(KINDS[kind].use(rounded))
    np.testing.assert_allclose(figures(KINDS[kind].use(half)), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.opened_on_gpu])
def test_inputs_fit_a_model_that_computes_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    """As on a GPU; on the CPU the same kernels are there."""
    folder = tmp_path / "model"
    KINDS[kind].save(folder)
    monkeypatch.setattr(transformers_folders, "working_dtype", lambda device: transformers_folders.STORED)
    figures(KINDS[kind].use(stored_as(folder, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen2_audio", "audio_flamingo3", "qwen2_5_omni_thinker"])
def test_audio_llms_answer_in_the_dtype_in_which_they_are_stored(
    tmp_path: Path, name: str, dtype: str
) -> None:
    save_tiny(name, tmp_path / "model")
    assert figures(ask(stored_as(tmp_path / "model", dtype)))[0] > 4


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_voice_embedder_in_half_precision_is_rounded_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    from pipelines.annotate.voice.embedders import Ge2eVoices

    stored = torch.load(package_file("resemblyzer", "pretrained.pt"), "cpu", weights_only=True)["model_state"]
    for name, target in (("half", dtype), ("rounded", torch.float32)):
        weights = {key: tensor.to(dtype).to(target) for key, tensor in stored.items()}
        torch.save({"model_state": weights}, tmp_path / f"{name}.pt")
    half, rounded = (Ge2eVoices(tmp_path / f"{name}.pt").embed([NOISE_N]) for name in ("half", "rounded"))
    np.testing.assert_array_equal(half, rounded)
