"""`ListenerPolicy` of VideoLLaMA 3, which sees and does not hear: each sample has its own grids and times, and is
read without its sound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.sample import (
    AudioPart,
    ContentPart,
    Message,
    RatedAnswer,
    Sample,
    TextPart,
    VideoPart,
    write_samples,
)
from audiollm.data.records.source import LoadedSample
from audiollm.errors import BadSample, ConfigError
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import PromptedAnswers
from audiollm.models.audio_llms.inputs import Turn
from audiollm.video.writing import write_video
from tests.audiollm.families.listener.test_transformers_policy import disturb, sound
from tests.audiollm.families.listener.test_video_answers import SHOWN, pictures
from tests.audiollm.models.tiny_audio_llms import save_tiny


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> ListenerPolicy:
    folder = Path(tmp_path_factory.mktemp("video_llama3"))
    save_tiny("video_llama3", folder)
    loaded = ListenerPolicy.load(folder, dtype=torch.float64, pictures=SHOWN)
    disturb(loaded)
    return loaded


def prompts(other_video: int | None = None) -> list[PromptedAnswers]:
    """Clips of 4, 7 and 2 pictures, and a question without any."""
    shapes = [(4, 56, 56, 4.0), (7, 64, 32, 2.0), (2, 28, 84, 1.0)]
    turns: list[list[Turn]] = [
        [("user", ["Say.", pictures(n + 50 * (n == other_video), *shape)])] for n, shape in enumerate(shapes)
    ]
    turns.append([("user", ["Hello."])])
    return [PromptedAnswers(f"s{n}", turn, ["a bell"]) for n, turn in enumerate(turns)]


def logprobs(policy: ListenerPolicy, prompted: Sequence[PromptedAnswers]) -> AnswerLogprobs:
    encoded = [answer for one in prompted for answer in policy.encode(one)]
    with torch.no_grad():
        return policy.answer_logprobs(policy.root, policy.batch(encoded), TokenRequest())


def test_exchanged_pictures_change_their_own_answer_alone(policy: ListenerPolicy) -> None:
    before = logprobs(policy, prompts())
    for sample in range(3):
        after = logprobs(policy, prompts(sample))
        gap_T = (before.policy_T - after.policy_T).abs()
        assert (gap_T[before.answer_T == sample] > 1e-9).all()
        assert gap_T[before.answer_T != sample].max() < 1e-10
    alone = torch.cat([logprobs(policy, [one]).policy_T for one in prompts()])
    torch.testing.assert_close(alone, before.policy_T, rtol=1e-9, atol=1e-9)


def test_times_of_pictures_are_in_the_prompt(policy: ListenerPolicy) -> None:
    ids = policy.encode(prompts()[1])[0].tokens["input_ids"]
    text = policy.processor.tokenizer.decode(ids)
    assert "Time 0.0s:" in text and "Time 0.5s:" in text and "Time 3.0s:" in text


def test_a_reader_of_the_same_pictures_goes_with_it(policy: ListenerPolicy, tmp_path: Path) -> None:
    policy.check_reader(policy, "critic")
    save_tiny("qwen2_5_omni", tmp_path)
    with pytest.raises(ConfigError, match="is a qwen2_5_omni_thinker"):
        policy.check_reader(ListenerPolicy.load(tmp_path), "critic")


def test_a_recording_is_refused(policy: ListenerPolicy) -> None:
    with pytest.raises(BadSample, match="takes no recordings"):
        policy.encode(PromptedAnswers("s", [("user", [sound(0, 1.0)])], ["a bell"]))


def test_a_sample_is_read_without_its_sound(policy: ListenerPolicy, tmp_path: Path) -> None:
    """Pictures and words are what they are without the sound; a sample of sound alone is refused."""
    noise = sound(0, 1.0)
    frames = [np.full((56, 56, 3), 30 * n, np.uint8) for n in range(8)]
    write_video(tmp_path / "v.mkv", frames, 8, noise)
    part = {"path": "v.mkv", "start_s": 0.0, "end_s": 1.0}
    seen, heard, asked = VideoPart(**part), AudioPart(**part), TextPart(text="Say.")

    def read(content: list[ContentPart], name: str) -> LoadedSample:
        write_samples(
            tmp_path / name,
            [
                Sample(
                    id="s",
                    task="think",
                    messages=[Message(role="user", content=content)],
                    answers=[RatedAnswer(content=[TextPart(text="a bell")])],
                )
            ],
        )
        return ManifestSource(str(tmp_path / name))[0]

    both, silent = (
        policy.encode(policy.take(read(content, f"{n}.jsonl"), [0]))
        for n, content in enumerate(([seen, heard, asked], [seen, asked]))
    )
    (one,), (other,) = both, silent
    assert one.features.keys() == other.features.keys() and "pixel_values_videos" in one.features
    for group in ("tokens", "features"):
        for key, value in getattr(one, group).items():
            assert torch.equal(value, getattr(other, group)[key]), key
    with pytest.raises(BadSample, match="takes no recordings"):
        policy.encode(policy.take(read([heard, asked], "sound.jsonl"), [0]))
