"""The section on policies: curves, rewards before and after, and the browser of rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from audiollm.evaluate.report.clips import Gallery
from audiollm.evaluate.report.statistics import share
from audiollm.files.atomic import write_jsonl
from audiollm.files.set_aside import set_aside_row
from pipelines.report.answers import _by_question
from pipelines.report.material import Material
from pipelines.report.policies import section as policies
from pipelines.report.policies.browser import NO_ROLLOUTS, AnswerSounds, signed
from pipelines.report.policies.history import FreshTraining
from pipelines.report.policies.section import policies_section
from pipelines.report.recordings import recordings_section
from tests.audiollm.rl.online.prompt_records import OWN
from tests.pipelines.report.report_run import HOSTILE, Page, Run, beep

OWN_REWARD = f"{OWN}brevity"
STAGE = f'{{samples: "${{compose.samples}}", start: AUDIO, rewards: {{accuracy: 2.0, "{OWN_REWARD}": 0.5}}, kl: KL}}'
KL = "{controller: {name: proportional, coefficient: 0.1, target: 2.0}}"
RECIPE = f"""
name: reasoner
stages:
  - compose: {{segments: AUDIO}}
  - name: first
    train_policy: {STAGE.replace("KL", KL)}
  - name: other
    train_policy: {STAGE.replace("KL", "null")}
  - name: before
    evaluate_listening: {{model: AUDIO, samples: "${{compose.samples}}"}}
  - name: after
    evaluate_listening: {{model: "${{first.checkpoint}}", samples: "${{compose.samples}}"}}
  - report: {{}}
"""


def prompt(clip: Path, key: str = "low") -> list[dict[str, Any]]:
    heard = {"type": "audio", "path": str(clip), "start_s": 0.0, "end_s": 0.1, "part": 0}
    return [
        {"role": "user", "content": [heard, {"type": "text", "text": f"Which one? {HOSTILE}"}]},
        {"role": "assistant", "content": [{"type": "text", "text": key}]},
    ]


def answer(clip: Path, id: str, number: int, reward: float, **more: Any) -> dict[str, Any]:
    """An answer of three tokens; its advantages are those of its reward, the last half as large."""
    advantages = [reward, reward, reward / 2]
    row = {
        "id": id, "messages": prompt(clip), "number": number, "answer": f"{HOSTILE} {number}", "tokens": 3,
        "truncated": False, "rewards": {"accuracy": float(reward > 0), OWN_REWARD: None}, "reward": reward,
        "pieces": [HOSTILE, " ", str(number)], "advantages": advantages, "behaviour": [-1.0] * 3, "old": [-1.0] * 3,
    }  # fmt: skip
    return {**row, **more}


def trained(run: Run, stage: str, right: int = 6) -> None:
    """What a stage leaves: of 8 held-out answers 2 are right before, and `right` after the training."""
    clip, folder = run.audio / "heard.wav", run.folder(stage)
    beep(clip)
    figures = {
        "reward": 1.0,
        "reward/accuracy": 0.5,
        f"reward/{OWN_REWARD}": -2.0,
        "kl": 0.5,
        "kl_weight": 0.1,
    }
    figures |= {"entropy": 1.0, "answer_length": 3.0, "clipped_low": 0.0, "clipped_high": 0.1}
    figures |= {"groups_without_variance": 0.5, "truncated": 0.25, "mismatch_kl": 1e-6, "gradient_norm": 1.0}
    write_jsonl(folder / "metrics.jsonl", [{"step": n, **figures} for n in range(10)])
    phases = {f"seconds/{name}": 1.0 for name in ("rollout", "reward", "score", "update")}
    write_jsonl(folder / "performance.jsonl", [{"step": n, **phases} for n in range(10)])
    held_out = [
        answer(clip, f"held{n}", 0, float(n < count), step=step)
        for step, count in ((0, 2), (10, right))
        for n in range(8)
    ]
    write_jsonl(folder / "answers.jsonl", held_out)
    for step in range(10):
        flat = [answer(clip, "flat", n, 1.0, step=step) for n in range(3)]
        rows = [answer(clip, "varied", n, [0.5, -1.0, 2.0][n], step=step) for n in range(3)]
        write_jsonl(folder / "rollouts" / f"{step:06d}.jsonl", [*flat, *rows])
    told = {"prompts": 40, "held_out_prompts": 8, "steps": 10, "reward": 1.5, "answer_length": 3.0}
    run.done(stage, told)


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts take most of the time: they are drawn where a test looks at them."""
    if request.node.name != "test_curves_name_what_they_show":
        monkeypatch.setattr(policies, "policy_training_charts", lambda training: [])
        monkeypatch.setattr(policies, "compared_chart", lambda *given: None)


@pytest.fixture
def whole(tmp_path: Path) -> Run:
    run = Run(tmp_path, recipe=RECIPE)
    run.done("compose", {"train_samples": 2, "test_samples": 1})
    trained(run, "first")
    trained(run, "other", right=2)
    table = {"low": 0.5, "high": 0.9, "questions": 40, "chance": 0.25}
    run.done("before", {"accuracy": 0.4, **table})
    run.done("after", {"accuracy": 0.8, **table})
    return run


def section(run: Run) -> dict[str, Any]:
    return policies_section(Material(run.recipe, run.results), Gallery(players=False))


def test_rewards_before_and_after_have_intervals(whole: Run) -> None:
    first, other = section(whole)["stages"]
    accuracy, total = first["scores"]  # the other reward has no value
    before, after = (cell["share"] for cell in accuracy["cells"])
    wilson = share([True] * 6 + [False] * 2)
    assert (before["value"], after["value"]) == (0.25, 0.75)
    assert (after["low"], after["high"], after["n"]) == (wilson["low"], wilson["high"], 8)
    # 4 of 8 answers became right: mean 0.5, standard deviation sqrt(2/7), 1.96 sd / sqrt(8)
    half = 196 * (2 / 7) ** 0.5 / 8**0.5
    assert accuracy["gain"] == f"+50.0 points (+{50 - half:.1f} to +{50 + half:.1f})"
    assert total["name"] == "weighted sum" and other["scores"][0]["gain"] == "+0.0 points (+0.0 to +0.0)"
    evaluated = first["evaluated"]
    assert [cell["value"] for when in ("before", "after") for cell in evaluated[when]] == [0.4, 0.8]
    assert not other["evaluated"]["after"]


def test_the_model_that_is_handed_over_has_the_figure_of_its_step(whole: Run) -> None:
    """The start was the best: nothing was gained, whatever the last evaluation says."""
    figures = whole.results["first"].figures
    assert figures is not None
    figures["best_step"] = 0
    accuracy = section(whole)["stages"][0]["scores"][0]
    assert [cell["share"]["value"] for cell in accuracy["cells"]] == [0.25, 0.25]
    assert accuracy["gain"] == "+0.0 points (+0.0 to +0.0)"


def test_a_model_that_is_worse_than_its_start_is_at_the_head_of_the_page(whole: Run) -> None:
    figures = whole.results["first"].figures
    assert figures is not None
    figures["warnings"] = [f"the model handed over is worse than its start {HOSTILE}"]
    html, summary = whole.report(players=False)
    assert summary["warnings"] == [{"stage": "first", "text": figures["warnings"][0]}]
    assert HOSTILE not in html
    assert (
        0 < html.index("the model handed over is worse than its start &lt;img") < html.index('class="tiles"')
    )


def test_what_a_policy_set_aside_is_named(whole: Run) -> None:
    aside = set_aside_row(
        "train_policy", "questions.jsonl [3]", "cannot be read", "no such file: door.wav", "q3"
    )
    write_jsonl(whole.folder("first") / "set_aside.jsonl", [aside])
    rows = recordings_section(Material(whole.recipe, whole.results), Gallery(players=False))["set_aside"][
        "rows"
    ]
    assert [(row["id"], row["stage"], row["reason"]) for row in rows] == [
        ("q3", "train_policy", "no such file: door.wav")
    ]


def test_curves_name_what_they_show(whole: Run) -> None:
    first, other = section(whole)["stages"]
    titles = [chart["title"] for chart in first["charts"]]
    assert titles == [
        "Reward", "Reward by function, training", "Reward by function, held out", "KL from the reference",
        "Weight of the KL", "Entropy", "Length of answers", "Clipped ratios", "Groups and answers",
        "Sampling against training", "Gradient norm", "Time by phase",
    ]  # fmt: skip
    shown = {chart["title"]: str(chart["svg"]) for chart in first["charts"]}
    assert "target" in shown["KL from the reference"] and "rollout" in shown["Time by phase"]
    assert "target" not in str(
        {chart["title"]: chart["svg"] for chart in other["charts"]}["KL from the reference"]
    )
    assert dict(first["facts"])["rewards, by weight"] == "accuracy 2, brevity 0.5"
    assert dict(first["facts"])["method"] == "grpo"


def test_the_browser_shows_best_and_worst_with_the_advantage_of_each_token(whole: Run) -> None:
    browser = section(whole)["stages"][0]["browser"]
    assert [step["step"] for step in browser["steps"]] == [0, 4, 9] and browser["num_steps"] == 10
    varied, flat = browser["steps"][0]["groups"]
    assert (varied["id"], flat["id"]) == ("varied", "flat")
    best, worst = varied["ends"]
    assert (best["number"], best["reward"], worst["number"], worst["reward"]) == (2, 2.0, 1, -1.0)
    assert [piece["share"] for piece in best["pieces"]] == [1.0, 1.0, 0.5]  # against the largest of the step
    assert [piece["up"] for piece in worst["pieces"]] == [False] * 3
    assert "advantage +2.00, log-probability when sampled −1.00" in best["pieces"][0]["title"]
    assert best["advantage"] == "+1.00 to +2.00 by token" and varied["key"]["text"] == "low"
    assert [line["number"] for line in varied["all"]] == [2, 0, 1] and len(flat["ends"]) == 1
    assert varied["asked"]["clips"][0].duration_s == pytest.approx(0.1)


def test_a_step_without_variance_gives_way_to_one_before_it(whole: Run) -> None:
    clip = whole.audio / "heard.wav"
    rows = [answer(clip, "flat", n, 1.0, step=9) for n in range(3)]
    write_jsonl(whole.folder("first") / "rollouts" / "000009.jsonl", rows)
    browser = section(whole)["stages"][0]["browser"]
    assert [step["step"] for step in browser["steps"]] == [0, 4, 8]


def test_the_page_is_whole_and_escaped(whole: Run) -> None:
    html, summary = whole.report()
    page = Page(html)
    assert HOSTILE not in html and HOSTILE in page.text and page.tags["script"] == 1
    for text in (
        "right answers, held out", "best of 3", "worst of 3", "All 3 answers", "one of equal answers of 3",
        "first, advantages", "step 10", "more likely",
    ):  # fmt: skip
        assert text in page.text or text == "first, advantages", text
    assert summary["train_policy"]["first"]["reward"] == 1.5
    assert [value for tag, key, value in page.attributes if (tag, key) == ("a", "href")] == [
        "#recordings", "#policies", "#answers", "#run",
    ]  # fmt: skip
    rows = section(whole)["compared"]["rows"]
    assert rows[0]["cells"][0] == ("accuracy", "25.0 %", "75.0 %") and rows[1]["kl"] == 0.5


def test_missing_and_damaged_files_leave_sentences(whole: Run) -> None:
    for path in (whole.folder("first") / "rollouts").iterdir():
        path.write_text('{"id": "x"}\n{"broken')
    (whole.folder("first") / "answers.jsonl").unlink()
    (whole.audio / "heard.wav").unlink()
    del whole.results["other"]
    page = Page(whole.report()[0])
    assert NO_ROLLOUTS in page.text and "The stage other has not run." in page.text


def test_spoken_answers_are_decoded(whole: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubling:
        sample_rate = 24_000

        def decode(self, codes_KT: torch.Tensor) -> torch.Tensor:
            return torch.sin(
                codes_KT[:1].float().repeat_interleave(960, 1) * torch.arange(960.0).repeat(5) / 20
            )

    clip, folder = whole.audio / "heard.wav", whole.folder("first") / "rollouts"
    rows = [answer(clip, "spoken", n, float(n), step=9, pieces=[10 + n], speech=str(n)) for n in range(2)]
    write_jsonl(folder / "000009.jsonl", rows)
    monkeypatch.setattr(AnswerSounds, "_codec", Doubling())
    save_file({"1": torch.ones(2, 5, dtype=torch.int32)}, folder / "000009.safetensors")
    (group,) = section(whole)["stages"][0]["browser"]["steps"][-1]["groups"]
    best, worst = group["ends"]
    assert best["clips"][0].duration_s == pytest.approx(0.2) and best["pieces"][0]["speech"] == 11
    assert "no longer there" in worst["clips"][0].problem


def test_speech_between_the_first_and_the_last_evaluation_is_named_without_its_sound(whole: Run) -> None:
    clip, folder = whole.audio / "heard.wav", whole.folder("first")
    rows = [answer(clip, "held0", 0, 1.0, step=step, answer="", speech=str(step)) for step in (0, 5, 10)]
    write_jsonl(folder / "answers.jsonl", rows)
    (prompt,) = section(whole)["stages"][0]["prompts"]
    first, between, last = prompt["answers"]
    assert "no longer there" in first["clips"][0].problem and len(last["clips"]) == 1
    assert between["clips"] == [] and between["speaks"] and not between["text"]


def test_signs_are_read_as_they_are_written() -> None:
    assert [signed(value) for value in (0.714, -0.1, 0.001)] == ["+0.71", "−0.10", "0.00"]


def test_a_reward_that_is_no_share_has_a_mean(whole: Run) -> None:
    training = FreshTraining(Material(whole.recipe, whole.results).stages("train_policy")[0])
    rows = [{**row, "reward": 3.0 * index} for index, row in enumerate(training.answers)]
    write_jsonl(whole.folder("first") / "answers.jsonl", rows)
    total = section(whole)["stages"][0]["scores"][-1]
    assert total["cells"][0]["text"] == "10.500" and total["gain"].startswith("+24.00 (+24.00")


def test_questions_that_list_their_options_are_counted_by_domain_and_difficulty() -> None:
    rows = [
        {
            "question": f"Which one of {n}?", "task": "music" if n % 3 else "speech",
            "difficulty": "easy" if n % 2 else "hard", "right": n < 6, "options": 4, "asked": "a", "named": "a",
        }
        for n in range(12)
    ]  # fmt: skip
    found = _by_question(rows)
    assert [(row["question"], row["cell"]["n"], row["cell"]["value"]) for row in found] == [
        ("music", 8, 0.5), ("speech", 4, 0.5), ("easy", 6, 0.5), ("hard", 6, 0.5),
    ]  # fmt: skip
    assert [row["question"] for row in _by_question([{**row, "question": "Which?"} for row in rows])] == [
        "Which?"
    ]
