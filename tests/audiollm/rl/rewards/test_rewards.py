"""Rewards: values by hand, the defects of Ke-Omni-R, users' own functions, failures, and checks before any work."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.audio import Waveform
from audiollm.data.chat.question_prompts import answer_form, question_prompt
from audiollm.data.records.sample import Message, Sample, TextPart, write_samples
from audiollm.errors import ConfigError, StageError
from audiollm.evaluate.listening.answer_parts import read_answer
from audiollm.evaluate.listening.audio_qa import mmau_match
from audiollm.evaluate.listening.choices import read_choice
from audiollm.recipe.stages import RecipeStage, Stage, StageConfig
from audiollm.rl.rewards.batch import RewardBatch, RewardFunction, SampledAnswer
from audiollm.rl.rewards.catalog import CATALOG, RewardTerm, reward_terms, source_facts
from audiollm.rl.rewards.matching import is_right
from audiollm.rl.rewards.registry import check_rewards, load_rewards
from audiollm.rl.rewards.scoring import RewardScores, RewardSuite
from audiollm.rl.rewards.settings import RewardSettings, StepsSettings, WordsSettings
from audiollm.rl.rewards.speech import words_reward
from audiollm.rl.rewards.texts import scored_steps

VOICES = ["Man", "Woman", "Child"]
GOOD = "<think>The voice is high.</think> <answer>Woman</answer>"


def prompt(key: str | None = "Woman", id: str = "q1", **metadata: Any) -> Sample:
    messages = [Message(role="user", content=[TextPart(text="Who speaks?")])]
    if key is not None:
        messages.append(Message(role="assistant", content=[TextPart(text=key)]))
    return Sample(id=id, messages=messages, task="qa", metadata={"choices": VOICES} | metadata)


def answer(text: str, sample: Sample | None = None, **facts: Any) -> SampledAnswer:
    return SampledAnswer(sample or prompt(), text, facts.pop("num_tokens", 10), **facts)


def values_of(rewards: dict[str, Any], *answers: SampledAnswer) -> list[float | None]:
    """The values of the only reward."""
    terms = reward_terms(rewards)
    scores = RewardSuite(terms, load_rewards(terms)).score(RewardBatch(answers))
    return scores.by_name[terms[0].name]


def suite(functions: dict[str, RewardFunction], **settings: Any) -> RewardSuite:
    terms = [RewardTerm(name, 1.0, RewardSettings()) for name in functions]
    return RewardSuite(terms, functions, **settings)


def batch_of(count: int) -> RewardBatch:
    return RewardBatch([answer(f"{n}", prompt(id=f"q{n}"), number=n) for n in range(count)])


# --------------------------------------------------------------------------------------------- one reader


@pytest.mark.parametrize(
    ("reply", "thought", "said", "well"),
    [
        (GOOD, "The voice is high.", "Woman", True),
        ("Woman", "", "Woman", False),
        ("<think>a</think>\n<answer>Wo\nman</answer>\n", "a", "Wo\nman", True),
        ("<think>a</think>Woman", "a", "Woman", False),
        ("a</think>Woman", "a", "Woman", False),
        ("<think>Man? cut off", "Man? cut off", "", False),
        ("<think>a<answer>Man</answer>", "a", "Man", False),
        ("<think>a</think><answer>Man", "a", "Man", False),
        (GOOD + " and more", "The voice is high.", "Woman", False),
        ("Well: " + GOOD, "The voice is high.", "Woman", False),
        ("<think>a</think> so <answer>Man</answer>", "a", "Man", False),
        (
            GOOD + GOOD,
            "The voice is high.</think> <answer>Woman</answer><think>The voice is high.",
            "Woman",
            False,
        ),
        ("<answer>a</answer><think>b</think>", "b", "a", False),
        ("<think>a</think><answer>Woman</answer><answer>Man</answer>", "a", "Woman", False),
        (
            "<think>no <answer>Man</answer></think><answer>Woman</answer>",
            "no <answer>Man</answer>",
            "Woman",
            False,
        ),
        ("<think></think><answer>Woman</answer>", "", "Woman", False),
        ("<think>...</think><answer>Woman</answer>", "...", "Woman", False),
        ("<think>a</think><answer> </answer>", "a", "", False),
        ("<thinking>Man?</thinking>Woman", "Man?", "Woman", False),
        ("<THINK>Man?</THINK><RESPONSE>Woman</RESPONSE>", "Man?", "Woman", False),
        ("Man?</thinking>Woman", "Man?", "Woman", False),
        ("<THINK>Man? cut off", "Man? cut off", "", False),
        ("Woman<|im_end|>", "", "Woman", False),
    ],
)
def test_a_reply_is_taken_apart(reply: str, thought: str, said: str, well: bool) -> None:
    parts = read_answer(reply)
    assert (parts.thought, parts.answer, parts.thinks_well) == (thought, said, well)


def test_rewards_and_evaluation_and_mmau_read_the_same_part() -> None:
    reply = "<think>A man, (A)? The child?</think><answer>Woman</answer>"
    assert read_choice(reply, VOICES) == 1
    assert mmau_match(reply, "Woman", VOICES)
    assert values_of({"accuracy": 1}, answer(reply)) == [1.0]


# ---------------------------------------------------------------------------------- values of the built-in ones


@pytest.mark.parametrize(
    ("given", "key", "match", "right"),
    [
        ("woman.", "Woman", "auto", True),
        ("(B)", "Woman", "auto", True),
        ("Man", "Woman", "auto", False),
        ("Man or Woman", "Woman", "auto", False),
        ("woman", "Woman", "exact", False),
        ("the Dog", "The dog!", "text", True),
        ("", "", "text", False),
        ("1,200 ms", "1.2 s", "number", True),
        ("1.2", "1.2 s", "number", False),
        ("1.2 Hz", "1.2 s", "number", False),
        ("440 Hz", "0.44 kHz", "number", True),
        ("3", "3.0", "number", True),
        ("3 dogs and 4", "3", "number", False),
        (r"\frac{1}{2}", "0.5", "math", True),
        (r"$\boxed{2x+1}$", "1 + 2*x", "math", True),
        ("2x+1", "2x-1", "math", False),
        ("9**9**9**9", "1", "math", False),
        ("1e-6", "0.000001", "math", True),
        ("2e", r"2\cdot e", "math", True),
        ("__import__('os').getcwd()", "1", "math", False),
        (r"\sqrt{2}", "2^0.5", "math", True),
        ("B", "a", "math", False),
        ("h", "2b", "math", False),
        ("a*d", "d*a", "math", True),
        ("x + y", "y + x", "math", True),
        ("2x", "y", "math", False),
    ],
)
def test_the_right_answer_by_every_form(given: str, key: str, match: Any, right: bool) -> None:
    choices = VOICES if match == "auto" else []
    assert is_right(given, key, choices, match, 1e-6) is right


def test_a_number_without_options_is_compared_as_one() -> None:
    sample = prompt("1.5 s", choices=[])
    assert values_of({"accuracy": 1}, answer("<answer>1500 ms</answer>", sample)) == [1.0]


def test_an_answer_of_several_lines_is_read() -> None:
    """Ke-Omni-R's `<answer>(.*?)</answer>` stops at the end of a line, and compares the whole reply then."""
    assert values_of({"accuracy": 1}, answer("<think>x</think><answer>\nWoman\n</answer>")) == [1.0]


TAGS_ASKED = "Who speaks? Output the final answer in <answer> </answer>."


def asked(wording: str, key: str = "Woman", **metadata: Any) -> Sample:
    """A prompt with a wording that asks for a form."""
    sample = prompt(key, **metadata)
    question = Message(role="user", content=[TextPart(text=wording)])
    return sample.model_copy(update={"messages": [question, *sample.messages[1:]]})


@pytest.mark.parametrize("name", ["ke_omni_r", "ke_omni_r_direct", "r1_aqa"])
@pytest.mark.parametrize(
    ("reply", "right"),
    [
        (GOOD, 1.0),
        ("<answer>Woman</answer>", 1.0),
        ("<answer>(B)</answer>", 1.0),
        ("<answer>b</answer>", 1.0),
        ("<answer>(B) Woman</answer>", 1.0),
        ("<answer>**B**</answer>", 1.0),
        ("<answer>Option b</answer>", 1.0),
        ("<answer>The correct answer is Woman.</answer>", 1.0),
        ("<answer>a woman</answer>", 1.0),
        ("<answer>not Woman</answer>", 0.0),
        ("<answer>the answer is Woman Man the</answer>", 0.0),
        ("<answer>Woman</answer><answer>Man</answer>", 1.0),
        ("<answer>Man</answer><answer>Woman</answer>", 0.0),
        ("<think>a <answer>Woman</answer>", 1.0),
        ("Woman", 0.0),
        ("think high Woman the the", 0.0),
        ("<think>Woman</think>", 0.0),
        ("<think>a</think>Woman", 0.0),
        ("<think>a</think><answer>Woman", 0.0),
        ("<answer>the of Woman is is the</answer>", 0.0),
        ("<answer>(B) Man</answer>", 0.0),
        ("<answer>Man or Woman</answer>", 0.0),
    ],
)
def test_accuracy_is_paid_where_the_prompt_wants_the_answer(name: str, reply: str, right: float) -> None:
    sample = asked(question_prompt("Who speaks?", VOICES, name))
    assert values_of({"accuracy": 1}, answer(reply, sample)) == [right]
    assert values_of({"cosine": 1}, answer(reply, sample, num_tokens=0)) == [1.0 if right else -1.0]


def test_the_form_of_an_answer_is_told_by_prompt_and_key_or_by_the_setting() -> None:
    assert answer_form(asked("Who?")) == "free"
    assert answer_form(asked(TAGS_ASKED)) == answer_form(asked("Who?", "<answer>Woman</answer>")) == "tags"
    boxed = asked(r"Who? Put the answer in \boxed{}.")
    assert answer_form(boxed) == "boxed"
    replies = [r"\boxed{Woman}", "Woman", r"\boxed{Man} no, \boxed{\text{Woman}}", r"\boxed{Woman"]
    assert values_of({"accuracy": 1}, *(answer(reply, boxed) for reply in replies)) == [1.0, 0.0, 1.0, 0.0]
    loose, strict = answer("Woman", asked(TAGS_ASKED)), answer("Woman", asked("Who?"))
    assert values_of({"accuracy": {"form": "free"}}, loose) == [1.0]
    assert values_of({"accuracy": {"form": "tags"}}, strict) == [0.0]


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("<think>a high voice</think><answer>Woman</answer>", 1.0),
        ("<think></think><answer>Woman</answer>", 0.0),
        ("<think> \n</think><answer>Woman</answer>", 0.0),
        ("<think>...</think><answer>Woman</answer>", 0.0),
        ("<think>a high voice", 0.0),
        ("<think>a high voice<answer>Woman</answer>", 0.0),
        ("<answer>Woman</answer>", 0.0),
    ],
)
def test_a_thought_counts_where_it_is_closed_and_holds_a_word(reply: str, value: float) -> None:
    text = Path("recipes/audio_reasoner/README.md").read_text()
    example: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], example)
    assert values_of({"think": 1}, answer(reply)) == values_of({"format": 1}, answer(reply)) == [value]
    assert example["brevity"](RewardBatch([answer(reply)])) == [value]


def test_an_answer_that_was_cut_off_is_paid_nothing_for_its_thought() -> None:
    text = Path("recipes/audio_reasoner/README.md").read_text()
    example: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], example)
    cut = answer("<think>a high voice</think>zero.</.</.six six six", is_truncated=True)
    whole = answer("<think>a high voice</think>zero.</.</.six six six")
    assert values_of({"think": 1}, cut, whole) == [0.0, 1.0]
    assert values_of({"format": 1}, cut, whole) == [0.0, 0.0]
    assert example["brevity"](RewardBatch([cut, whole, answer(GOOD)])) == [0.0, 0.0, 1.0]


def test_doubled_tags_are_no_form() -> None:
    """Ke-Omni-R's pattern accepts them."""
    doubled = "<think>a</think><answer>Woman</answer><think>b</think><answer>Woman</answer>"
    nested = "<think><think>a</think></think><answer>Woman</answer>"
    assert values_of({"format": 1}, answer(GOOD), answer(doubled), answer(nested)) == [1.0, 0.0, 0.0]


def test_the_form_without_a_thought() -> None:
    bare = answer("<answer>Woman</answer>")
    assert values_of({"format": {"think": False}}, bare, answer(GOOD)) == [1.0, 0.0]
    assert values_of({"format": 1}, bare) == [0.0]


def test_the_longest_thought_counts_words_and_its_setting_is_used() -> None:
    """Ke-Omni-R's `think_max_len` never arrives where it is used."""
    long_words = " ".join(["extraordinarily"] * 50)
    exact, over = answer(f"<think>{long_words}</think>x"), answer(f"<think>{long_words} one</think>x")
    assert values_of({"think": 1}, exact, over, answer("x")) == [1.0, 0.0, 0.0]
    assert values_of({"think": {"max_words": 51}}, over) == [1.0]


def test_signs_of_languages_without_spaces_are_words() -> None:
    short, long = (f"<think>{'狗叫了。' * n}</think> <answer>狗</answer>" for n in (16, 17))
    assert values_of({"think": 1}, answer(short), answer(long)) == [1, 0]  # 48 signs and 51
    assert values_of({"repetition": {"ngram": 1}}, answer("狗，狗。狗！狗")) == [-0.75]


def test_cosine_and_repetition_by_hand() -> None:
    right = [answer(GOOD, num_tokens=n) for n in (0, 128, 256, 999)]
    wrong = [answer("Man", num_tokens=n) for n in (0, 256)]
    assert values_of({"cosine": 1}, *right, *wrong) == pytest.approx([1.0, 0.75, 0.5, 0.5, -1.0, -0.5])
    assert values_of({"repetition": {"ngram": 1}}, answer("a a a a"), answer("a b"), answer("")) == [
        -0.75,
        0.0,
        0.0,
    ]


def test_languages_by_script() -> None:
    sample = prompt(language="zh")
    assert values_of(
        {"language": 1}, answer("是女人", sample), answer("woman", sample), answer("", sample)
    ) == [1, 0, 0]
    assert values_of({"language": {"language": "en"}}, answer("woman", sample)) == [1]
    russian, thoughtful = prompt(language="ru"), answer("a man says 好 and leaves", prompt(language="en"))
    assert values_of({"language": 1}, answer("женщина", russian), answer("a woman", russian)) == [1, 0]
    assert values_of({"language": {"language": "en"}}, answer("женщина", russian), thoughtful) == [0, 1]
    assert values_of({"language": {"language": "Russian"}}, answer("женщина", sample)) == [1]
    assert values_of(
        {"language": {"language": "ja"}}, answer("是女人", sample), answer("女です", sample)
    ) == [0, 1]
    with pytest.raises(ConfigError, match="'und' is no language"):
        values_of({"language": {"language": "und"}}, answer("woman", sample))
    german, regional = prompt(language="de"), prompt(language="zh-CN")
    assert values_of({"language": 1}, answer("eine Frau", german), answer("是女人", german)) == [1, 0]
    assert values_of({"language": 1}, answer("是女人", regional), answer("woman", regional)) == [1, 0]


def test_steps_that_name_what_is_heard_count_once() -> None:
    sample = prompt(heard=["dog", "rain"])
    reply = answer("<think>I hear a dog. The dog barks. Then rain! So outside.</think>x", sample)
    assert [step.score for step in scored_steps(reply, StepsSettings())] == [1, 0, 1, 0]
    assert values_of({"steps": 1}, reply, answer("x", sample), answer("x")) == [0.5, 0.0, None]


def test_a_thought_that_names_everything_scores_less_where_the_names_are_known() -> None:
    sample = prompt(heard=["dog", "rain"])
    guess = answer("<think>I hear a dog, rain, a bell and a cat.</think>x", sample)
    settings = StepsSettings(names=("dog", "rain", "bell", "cat"))
    assert [step.score for step in scored_steps(guess, StepsSettings())] == [1]
    assert [step.score for step in scored_steps(guess, settings)] == [0.5]
    reply = answer("<think>I hear a dog and rain. Then a bell. The dog barks. So outside.</think>x", sample)
    assert [step.score for step in scored_steps(reply, settings)] == [1, 0, 0, 0]


def test_length_and_end_of_speech() -> None:
    sample = prompt(None, text="one two three four five")
    heard = [Waveform(torch.zeros(1, round(seconds * 100)), 100) for seconds in (2.0, 2.5, 9.0)]
    spoken = [answer("", sample, recording=wave, is_truncated=wave.duration_s > 5) for wave in heard]
    assert values_of({"length": 1}, *spoken) == pytest.approx([1.0, 0.5, 0.0])
    assert values_of({"ends": 1}, *spoken, answer("x")) == [1.0, 1.0, 0.0, None]


def test_words_are_compared_in_the_language_of_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "german_ears.py").write_text(
        "class Ear:\n"
        "    name = 'ear'\n"
        "    def recognize(self, samples_CN, sample_rate): return 'es sind fünfundzwanzig'\n"
    )
    monkeypatch.chdir(tmp_path)
    wave = Waveform(torch.zeros(1, 1600), 16_000)
    german, unknown = (
        answer("", prompt(None, text="Es sind 25.", **facts), recording=wave)
        for facts in ({"language": "de"}, {})
    )
    words = {"words": {"recognizer": "german_ears:Ear", "form": "spoken"}}
    assert values_of(words, german, unknown) == [1.0, pytest.approx(0.5)]


def test_pocketsphinx_chooses_among_the_texts_of_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ear:
        name = "ear"

        def recognize(self, samples_CN: torch.Tensor, sample_rate: int) -> str:
            return "seven"

    grammars: list[list[str]] = []

    def choose_grammar(texts: list[str]) -> tuple[Ear, list[str], str]:
        grammars.append(texts)
        return Ear(), texts, ""

    monkeypatch.setattr("audiollm.rl.rewards.speech.choose_grammar", choose_grammar)
    samples = [
        Sample(id=text, messages=[Message(role="user", content=[TextPart(text=text)])], task="tts")
        for text in ("Three.", "seven", "three")
    ]
    write_samples(tmp_path / "samples.jsonl", samples)
    reward = words_reward(WordsSettings(texts=tmp_path / "samples.jsonl"))
    assert grammars == [["seven", "three"]]
    noise = Waveform(torch.randn(1, 16_000, generator=torch.Generator().manual_seed(0)), 16_000)
    spoken = [SampledAnswer(sample, "", 4, recording=noise) for sample in samples]
    assert [reward(answer) for answer in spoken] == [0.0, 1.0, 0.0]
    with pytest.raises(ConfigError, match=r"words\.texts"):
        words_reward(WordsSettings(texts=tmp_path / "samples.jsonl", recognizer="whisper"))


def test_words_and_voice_by_plugged_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugged_ears.py").write_text(
        "import torch\n"
        "class Ear:\n"
        "    name = 'ear'\n"
        "    def recognize(self, samples_CN, sample_rate): return 'the old'\n"
        "class Deaf:\n"
        "    name = 'deaf'\n"
        "    def recognize(self, samples_CN, sample_rate): return ''\n"
        "class Voice:\n"
        "    name = 'voice'\n"
        "    def embed(self, samples_1N, sample_rate): return torch.tensor([1.0, float(samples_1N.mean() > 0.2)])\n"
    )
    monkeypatch.chdir(tmp_path)
    from audiollm.audio import save
    from audiollm.data.records.sample import AudioPart

    save(tmp_path / "voice.wav", torch.zeros(1, 1600), 16_000)
    own = Message(
        role="user", content=[AudioPart(path=str(tmp_path / "voice.wav")), TextPart(text="Say it.")]
    )
    sample = Sample(id="t", messages=[own], task="tts", metadata={"text": "The old brown dog"})
    spoken = [
        answer("", sample, recording=Waveform(torch.full((1, 1600), level), 16_000)) for level in (0.0, 0.5)
    ]
    assert values_of({"words": {"recognizer": "plugged_ears:Ear"}}, spoken[0]) == [0.5]
    both = {"words": {"recognizer": ["plugged_ears:Ear", "plugged_ears:Deaf"]}}
    assert values_of(both, spoken[0]) == [0.25], "the mean of what two recognizers score"
    with pytest.raises(ConfigError, match="each recognizer once"):
        reward_terms({"words": {"recognizer": []}})
    found = values_of({"voice": {"judge": "plugged_ears:Voice"}}, *spoken, answer("x", sample))
    assert found[2] is None
    assert found[:2] == pytest.approx([1.0, math.sqrt(0.5)])


# ------------------------------------------------------------------------------------------------ failures


def fine(batch: RewardBatch) -> list[float | None]:
    return [1.0] * len(batch)


def test_values_are_weighted_and_logged_one_by_one() -> None:
    terms = reward_terms({"accuracy": 2.0, "format": 1})
    scores = RewardSuite(terms, load_rewards(terms)).score(RewardBatch([answer(GOOD), answer("Woman")]))
    assert scores.total_A == [3.0, 2.0]
    figures = scores.figures()
    assert (figures["rewards/accuracy/mean"], figures["rewards/format/mean"]) == (1.0, 0.5)
    assert (figures["reward/mean"], figures["reward/std"], figures["rewards/left_out"]) == (2.5, 0.5, 0.0)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [(float("nan"), "gave nan"), (float("inf"), "gave inf"), (None, "gave None"), ("much", "no number")],
)
def test_a_bad_value_leaves_its_answer_out(wrong: Any, reason: str) -> None:
    def sometimes(batch: RewardBatch) -> list[Any]:
        return [wrong if each.number == 1 else 1.0 for each in batch]

    scores = suite({"fine": fine, "sometimes": sometimes}).score(batch_of(3))
    only_the_second_is_out(scores, reason)


def only_the_second_is_out(scores: RewardScores, reason: str) -> None:
    assert scores.kept_A == [True, False, True]
    assert scores.total_A == [2.0, 0.0, 2.0]
    (problem,) = scores.problems
    assert (problem.reward, problem.sample, problem.number) == ("sometimes", "q1", 1)
    assert reason in problem.reason
    assert scores.figures()["rewards/left_out"] == pytest.approx(1 / 3)


def test_a_reward_that_raises_is_named_with_its_sample() -> None:
    def sometimes(batch: RewardBatch) -> list[float | None]:
        return [1.0 / (each.number != 1) for each in batch]

    only_the_second_is_out(
        suite({"fine": fine, "sometimes": sometimes}).score(batch_of(3)), "ZeroDivisionError"
    )


def test_a_reward_that_yields_its_values_fails_like_any_other() -> None:
    end = threading.Event()

    def sometimes(batch: RewardBatch) -> Iterator[float | None]:
        for each in batch:
            yield 1.0 / (each.number != 1)

    def hanging(batch: RewardBatch) -> Iterator[float | None]:
        for each in batch:
            end.wait(20 * (each.number == 1))
            yield 1.0

    yielding: Any = {"fine": fine, "sometimes": sometimes}
    only_the_second_is_out(suite(yielding).score(batch_of(3)), "ZeroDivisionError")
    yielding = {"fine": fine, "sometimes": hanging}
    scores = suite(yielding, timeout_s=0.2).score(batch_of(2))
    end.set()
    assert scores.kept_A == [True, False] and "hangs" in scores.problems[0].reason


def test_too_few_values() -> None:
    def sometimes(batch: RewardBatch) -> list[float | None]:
        return [1.0 for each in batch if each.number != 1]

    scores = suite({"fine": fine, "sometimes": sometimes}).score(batch_of(3))
    only_the_second_is_out(scores, "returned 0 values for 1 answers")


def test_a_reward_that_hangs_ends_at_its_time_out() -> None:
    end = threading.Event()

    def sometimes(batch: RewardBatch) -> list[float | None]:
        if any(each.number == 1 for each in batch):
            end.wait(20)
        return [1.0] * len(batch)

    start_s = time.monotonic()
    scores = suite({"fine": fine, "sometimes": sometimes}, timeout_s=0.2).score(batch_of(3))
    end.set()
    assert time.monotonic() - start_s < 5
    assert scores.kept_A == [True, False, False]
    assert [problem.reason for problem in scores.problems] == [
        "hangs: no value after 0.2 s",
        "not scored: hangs: no value after 0.2 s",
    ]


def test_ctrl_c_ends_the_wait_for_a_reward() -> None:
    def interrupted(batch: RewardBatch) -> list[float | None]:
        time.sleep(0.2)
        signal.raise_signal(signal.SIGINT)  # the main thread, which waits, takes it
        time.sleep(0.2)
        return [1.0] * len(batch)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            suite({"slow": interrupted}).score(batch_of(1))
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_stops_by_option() -> None:
    def broken(batch: RewardBatch) -> list[float | None]:
        raise KeyError("label")

    with pytest.raises(StageError, match=r"reward broken, sample 'q0', answer 0: raised KeyError"):
        suite({"broken": broken}, on_error="stop").score(batch_of(2))


def test_async_rewards_run_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=10)

    async def first(batch: RewardBatch) -> list[float | None]:
        await asyncio.to_thread(meeting.wait)
        return [1.0] * len(batch)

    async def second(batch: RewardBatch) -> list[float | None]:
        await asyncio.to_thread(meeting.wait)
        return [2.0] * len(batch)

    scores = suite({"first": first, "second": second}).score(batch_of(2))
    assert scores.total_A == [3.0, 3.0]
    assert not scores.problems


# ------------------------------------------------------------------------------------------- before any work


def test_a_misspelt_reward_or_setting_has_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no such reward\n.*did you mean 'accuracy'"):
        reward_terms({"acuracy": 1.0})
    with pytest.raises(ConfigError, match="no setting 'max_word'\n.*did you mean 'max_words'"):
        reward_terms({"think": {"max_word": 3}})
    for wrong in (float("nan"), "much", True):
        with pytest.raises(ConfigError, match="the weight must be a number"):
            reward_terms({"think": wrong})
    with pytest.raises(ConfigError, match="write a space behind the colon"):
        reward_terms({"accuracy:2.0": None})  # YAML's reading of {accuracy:2.0}


def test_speech_rewards_need_a_policy_that_speaks() -> None:
    for name in (name for name, entry in CATALOG.items() if entry.speech):
        given = {"judge": "x"} if name == "voice" else {}
        with pytest.raises(ConfigError, match=f"rewards.{name}: scores speech"):
            check_rewards(reward_terms({name: given}), [prompt()], speaks=False)


def test_prompts_without_a_key_are_refused_before_any_work() -> None:
    """Ke-Omni-R as released ends with a KeyError: its MusicBench rows have no solution."""
    with pytest.raises(ConfigError, match="1 prompts have no answer key, the first is 'lost'"):
        check_rewards(reward_terms({"accuracy": 1}), [prompt(), prompt(None, "lost")], speaks=False)
    with pytest.raises(ConfigError, match="'Robot' is none of its options"):
        check_rewards(reward_terms({"accuracy": 1}), [prompt("Robot")], speaks=False)
    check_rewards(reward_terms({"format": 1}), [prompt(None)], speaks=False)


def test_keys_that_would_not_be_right_as_answers_are_named_before_any_work() -> None:
    fine, signs = prompt(), [prompt("?", id, choices=["?", "Man"]) for id in ("q2", "q3")]
    message = r"of 2 prompts the answer key, given as an answer, would not be right: 'q2' \('\?'\), 'q3'"
    with pytest.raises(ConfigError, match=message):
        check_rewards(reward_terms({"accuracy": 1}), [fine, *signs], speaks=False)
    with pytest.raises(ConfigError, match=r"rewards.cosine: of 1 prompts"):
        check_rewards(reward_terms({"cosine": 1}), [fine, signs[0]], speaks=False)
    check_rewards(reward_terms({"accuracy": {"match": "exact"}}), [fine, *signs], speaks=False)


def test_options_that_are_there_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match="the option 'man' is there twice"):
        check_rewards(reward_terms({"format": 1}), [prompt(choices=["Man", "Woman", "man."])], speaks=False)


def test_keys_that_a_sharp_alone_tells_apart_are_two_options() -> None:
    """MusicBench's questions for the key: `F major` and `F# major` stand side by side."""
    keys = ["F major", "F# major", "A major"]
    sample = prompt("F# major", choices=keys)
    check_rewards(reward_terms({"accuracy": 1}), [sample], speaks=False)
    replies = [answer(f"<answer>{key}</answer>", sample) for key in keys]
    assert values_of({"accuracy": 1}, *replies) == [0.0, 1.0, 0.0]


def test_a_plug_in_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be imported: ModuleNotFoundError"):
        check_rewards(reward_terms({"no_such_module:f": 1}), [prompt()], speaks=False)


def test_users_functions_and_their_source_in_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "my_own_rewards.py"
    file.write_text("def brevity(batch):\n    return [1 / len(a.text) for a in batch]\n")
    monkeypatch.chdir(tmp_path)
    terms = reward_terms({"my_own_rewards:brevity": 0.5})
    scores = RewardSuite(terms, load_rewards(terms)).score(RewardBatch([answer("four")]))
    assert scores.total_A == [0.125]

    def fingerprint(facts: Any) -> str:
        stage = Stage("s", StageConfig, lambda config, context: {}, {}, "", facts=facts)
        return RecipeStage("s", stage, StageConfig(), tmp_path, (), ()).fingerprint({})

    before = fingerprint(lambda config: source_facts(terms))
    assert before == fingerprint(lambda config: source_facts(terms)) != fingerprint(None)
    assert fingerprint(None) == fingerprint(lambda config: [])
    file.write_text(file.read_text() + "# changed\n")
    assert fingerprint(lambda config: source_facts(terms)) != before


def test_the_catalog_loads_no_torch() -> None:
    check = "import sys, audiollm.rl.rewards.catalog; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


# --------------------------------------------------------------------------------------------------- judge


class Points(BaseHTTPRequestHandler):
    asked = 0

    def do_POST(self) -> None:
        Points.asked += 1
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        said = "I give no points." if "silent" in body else "Fine.\u2028Nice.\x85\nScore: 7"
        reply = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(500 if "refuse" in body else 200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    Points.asked = 0
    server = HTTPServer(("127.0.0.1", 0), Points)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def test_a_judge_is_not_asked_again(endpoint: str, tmp_path: Path) -> None:
    rewards = {
        "judge": {"endpoint": endpoint, "model": "m", "store": tmp_path / "verdicts.jsonl", "attempts": 1}
    }
    answers = [answer("good"), answer("silent"), answer("also good")]
    assert values_of(rewards, *answers) == [0.7, None, 0.7]
    asked = Points.asked
    assert values_of(rewards, *answers) == [0.7, None, 0.7]
    assert Points.asked == asked == 3
    assert values_of(rewards, answer("good"), answer("refuse"), answer("new")) == [0.7, None, 0.7]
    assert values_of(rewards, answer("new")) == [0.7]


def test_quality_of_noise_of_nothing_and_of_words() -> None:
    pytest.importorskip("speechmos")
    noise = 0.1 * torch.randn(1, 8000, generator=torch.Generator().manual_seed(0))
    heard = [answer("", prompt(None), recording=Waveform(wave, 8000)) for wave in (noise, torch.zeros(1, 0))]
    found = values_of({"quality": 1}, *heard, answer("x"))
    assert found[0] is not None and 0 <= found[0] < 0.6
    assert found[1:] == [0.0, None]
