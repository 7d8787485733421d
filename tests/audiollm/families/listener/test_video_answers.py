"""`ListenerPolicy` with pictures and sound of one clip in a prompt, on tiny thinkers of transformers' classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.sample import (
    AudioPart,
    Message,
    RatedAnswer,
    Region,
    Sample,
    TextPart,
    VideoPart,
    write_samples,
)
from audiollm.data.records.source import LoadedSample
from audiollm.data.records.video_clips import PictureReader, PictureSettings
from audiollm.errors import BadSample, ConfigError
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import PromptedAnswers
from audiollm.models.audio_llms.inputs import Pictures, processor_inputs
from audiollm.video.writing import write_video
from tests.audiollm.families.listener.test_transformers_policy import disturb, sound
from tests.audiollm.models.tiny_audio_llms import save_tiny

SHOWN = PictureSettings(per_second=4.0, side=56)


@pytest.fixture(scope="module", params=["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ListenerPolicy:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)
    loaded = ListenerPolicy.load(folder, dtype=torch.float64, pictures=SHOWN)
    for module in (loaded.root, *loaded.frozen.values()):
        if "moe" in request.param:
            module.model.set_experts_implementation("eager")
    disturb(loaded)
    return loaded


def pictures(seed: int, count: int, height: int, width: int, per_second: float) -> Pictures:
    dice = np.random.default_rng(seed)
    frames = tuple(dice.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(count))
    return Pictures(frames, tuple((n + 0.5) / per_second for n in range(count)))


def prompts(other_video: int | None = None, other_sound: int | None = None) -> list[PromptedAnswers]:
    """Three clips of other lengths, sizes and rates of pictures; one has its sound before its pictures."""
    shapes = [(4, 56, 56, 4.0), (7, 64, 32, 2.0), (2, 28, 84, 1.0)]
    videos = [pictures(n + 50 * (n == other_video), *shape) for n, shape in enumerate(shapes)]
    sounds = [sound(n + 50 * (n == other_sound), 1.1 + 0.2 * n) for n in range(3)]
    parts = [[videos[0], sounds[0], "What?"], ["Say.", sounds[1], videos[1]], [videos[2], sounds[2]]]
    answers = [["a bell"], ["rain, then a dog", "no"], ["a horn"]]
    return [
        PromptedAnswers(f"s{n}", [("user", own)], said)
        for n, (own, said) in enumerate(zip(parts, answers, strict=True))
    ]


def logprobs(policy: ListenerPolicy, prompted: Sequence[PromptedAnswers]) -> AnswerLogprobs:
    encoded = [answer for one in prompted for answer in policy.encode(one)]
    with torch.no_grad():
        return policy.answer_logprobs(policy.root, policy.batch(encoded), TokenRequest())


def test_exchanged_pictures_or_sounds_change_every_log_probability_of_their_own_answers_and_of_no_other(
    policy: ListenerPolicy,
) -> None:
    before = logprobs(policy, prompts())
    owner_T = torch.tensor([0, 1, 1, 2])[before.answer_T]
    assert before.reference_T is not None
    for sample in range(3):
        for changed in ({"other_video": sample}, {"other_sound": sample}):
            after = logprobs(policy, prompts(**changed))
            assert after.reference_T is not None
            for old_T, new_T in ((before.policy_T, after.policy_T), (before.reference_T, after.reference_T)):
                gap_T = (old_T - new_T).abs()
                assert (gap_T[owner_T == sample] > 1e-9).all(), (sample, changed)
                assert gap_T[owner_T != sample].max() < 1e-10, (sample, changed)


def test_a_batch_gives_what_transformers_gives_one_by_one(policy: ListenerPolicy) -> None:
    found, answer = logprobs(policy, prompts()), 0
    model: Any = policy.root.model
    for prompted in prompts():
        length = processor_inputs(policy.processor, prompted.prompt, True)["input_ids"].shape[1]
        for text in prompted.answers:
            turns = [*prompted.prompt, ("assistant", [text])]
            inputs = processor_inputs(policy.processor, turns, False)
            inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
            with torch.no_grad():
                log_probs_LV = model(**inputs).logits[0].log_softmax(-1)
            places = torch.arange(length, length + len(text) + 1)
            own_T = log_probs_LV[places - 1, inputs["input_ids"][0, places]]
            torch.testing.assert_close(found.policy_T[found.answer_T == answer], own_T, rtol=1e-9, atol=1e-9)
            answer += 1
    assert answer == found.num_answers == 4


def test_both_encoders_have_a_gradient_where_no_prompt_has_pictures(policy: ListenerPolicy) -> None:
    (encoded,) = policy.encode(PromptedAnswers("t", [("user", [sound(0, 1.1), "?"])], ["yes"]))
    for batch in (policy.batch([encoded]), policy.idle_batch()):
        policy.root.zero_grad()
        policy.answer_logprobs(policy.root, batch, TokenRequest()).policy_T.sum().backward()
        seen = [p.grad for name, p in policy.root.named_parameters() if "visual" in name]
        assert any(grad is not None for grad in seen)
        assert all(grad is None or not grad.any() for grad in seen)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> LoadedSample:
    """A clip of a film of 2 s whose left half brightens, and a region in it; paths are relative to the list."""
    folder = tmp_path_factory.mktemp("record")
    frames = [np.zeros((32, 64, 3), np.uint8) for _ in range(16)]
    for number, frame in enumerate(frames):
        frame[:, :32] = 12 * number
    write_video(folder / "film.mkv", frames, 8, sound(0, 2.0))
    box = Region(x=0, y=0, width=32, height=32)
    video = VideoPart(path="film.mkv", start_s=0.5, end_s=1.5, region=[box])
    heard = AudioPart(path="film.mkv", start_s=0.5, end_s=1.5)
    asked = Message(role="user", content=[video, heard, TextPart(text="?")])
    sample = Sample(
        id="a", task="think", messages=[asked], answers=[RatedAnswer(content=[TextPart(text="light")])]
    )
    write_samples(folder / "list.jsonl", [sample])
    return ManifestSource(folder / "list.jsonl")[0]


def test_pictures_are_those_of_the_clip_and_its_region(policy: ListenerPolicy, record: LoadedSample) -> None:
    prompted = policy.take(record, [0])
    shown, heard, _ = prompted.prompt[0][1]
    assert isinstance(shown, Pictures) and heard.duration_s == pytest.approx(1.0, abs=0.01)
    assert len(shown.frames) == 4 and shown.per_second == pytest.approx(4.0)
    levels = [float(frame.mean()) for frame in shown.frames]
    assert levels == sorted(levels) and levels[0] == pytest.approx(12 * 5, abs=8)
    assert all(frame.shape == (56, 56, 3) for frame in shown.frames)
    assert "pixel_values_videos" in policy.encode(prompted)[0].features
    reader = PictureReader(PictureSettings(per_second=2.0))
    first = reader.read(record.videos[0])
    assert reader.read(record.videos[0]) is first and first.frames[0].shape == (32, 32, 3)


def test_what_cannot_be_shown_is_named(policy: ListenerPolicy, record: LoadedSample) -> None:
    gone = record.videos[0].model_copy(update={"path": "nothing.mkv"})
    late = record.videos[0].model_copy(update={"start_s": 7.0, "end_s": 8.0})
    for videos, kind in (
        ((), "missing video"),
        ((gone,), "undecodable video"),
        ((late,), "undecodable video"),
    ):
        with pytest.raises(BadSample) as error:
            policy.take(LoadedSample(record.sample, [], record.audio, {}, videos), [0], "list.jsonl [0]")
        assert error.value.kind == kind
    policy_without = ListenerPolicy(Path(), policy.processor, policy.root, policy.ends)
    with pytest.raises(BadSample, match="video part"):
        policy_without.take(record, [0])


def test_a_model_that_hears_alone_is_refused(tmp_path: Path) -> None:
    save_tiny("qwen2_audio", tmp_path)
    with pytest.raises(ConfigError, match="takes no pictures"):
        ListenerPolicy.load(tmp_path, pictures=SHOWN)
