"""The section on policies: curves, rewards before and after, and the browser of rollouts."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from audiollm.errors import ConfigError
from audiollm.evaluate.listening.report_section import group_by_question
from audiollm.evaluate.report.statistics import share
from audiollm.files.atomic import read_jsonl, write_jsonl
from audiollm.files.set_aside import set_aside_row
from audiollm.pages.run_record import RunRecord
from audiollm.pages.sections import section_names
from audiollm.recipe.plug_ins import load_catalog
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.rl.online.report import section as policies
from audiollm.rl.online.report.browser import NO_ROLLOUTS, AnswerSounds, signed
from audiollm.rl.online.report.history import FreshTraining
from audiollm.rl.online.report.section import policies_section
from audiollm.rl.report import comparison
from pipelines.report.set_aside import set_aside_section
from tests.audiollm.rl.online.prompt_records import OWN
from tests.pipelines.report.report_run import HOSTILE, Node, Page, Run, beep, section_of, tree

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
        monkeypatch.setattr(comparison, "compared_chart", lambda *given: None)


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


def stages_of(run: Run) -> list[Node]:
    """The parts of the stages in the section."""
    return section_of(run, policies_section).all("details", "stage")


def reward_rows(stage: Node) -> dict[str, list[str]]:
    """The cells of the table of rewards before and after, by name."""
    return {row[0]: row[1:] for row in stage.all("table", "scores")[0].rows()}


def facts_in(stage: Node) -> dict[str, str]:
    """Titles and values of the facts of a stage."""
    pairs = stage.all("dl", "facts")[0].all("div")
    return {pair.all("dt")[0].text: pair.all("dd")[0].text for pair in pairs}


def test_rewards_before_and_after_have_intervals(whole: Run) -> None:
    first, other = map(reward_rows, stages_of(whole))
    before, after, gain = first["accuracy"]
    wilson = share([True] * 6 + [False] * 2)
    assert before.startswith("25.0 %")
    assert after == f"75.0 % {100 * wilson['low']:.1f} % to {100 * wilson['high']:.1f} %, n = 8"
    # 4 of 8 answers became right: mean 0.5, standard deviation sqrt(2/7), 1.96 sd / sqrt(8)
    half = 196 * (2 / 7) ** 0.5 / 8**0.5
    assert gain == f"+50.0 points (+{50 - half:.1f} to +{50 + half:.1f})"
    assert "weighted sum" in first and other["accuracy"][2] == "+0.0 points (none of 8 changed)"
    (evaluated,) = (row for name, row in first.items() if name.startswith("right answers"))
    assert [cell[:6] for cell in evaluated[:2]] == ["40.0 %", "80.0 %"]
    assert not any(name.startswith("right answers") for name in other)


def test_the_model_that_is_handed_over_has_the_figure_of_its_step(whole: Run) -> None:
    """The start was the best: nothing was gained, whatever the last evaluation says."""
    figures = whole.results["first"].figures
    assert figures is not None
    figures["best_step"] = 0
    before, after, gain = reward_rows(stages_of(whole)[0])["accuracy"]
    assert before == after and before.startswith("25.0 %") and gain == "+0.0 points (none of 8 changed)"


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
    (row,) = section_of(whole, set_aside_section).all("table", "list")[0].rows()
    assert row == ["cannot be read", "1", "questions.jsonl [3] q3 no such file: door.wav"]


def test_curves_name_what_they_show(whole: Run) -> None:
    first, other = stages_of(whole)
    shown, of_other = (
        {chart.all("figcaption")[0].text: chart.text for chart in stage.all("figure")}
        for stage in (first, other)
    )
    assert list(shown) == [
        "Reward", "Reward by function, training", "Reward by function, held out", "KL from the reference",
        "Weight of the KL", "Entropy", "Length of answers", "Clipped ratios", "Groups and answers",
        "Sampling against training", "Gradient norm", "Time by phase",
    ]  # fmt: skip
    assert "target" in shown["KL from the reference"] and "rollout" in shown["Time by phase"]
    assert "target" not in of_other["KL from the reference"]
    assert facts_in(first)["rewards, by weight"] == "accuracy 2, brevity 0.5"
    assert facts_in(first)["method"] == "grpo"


def test_the_browser_shows_best_and_worst_with_the_advantage_of_each_token(whole: Run) -> None:
    stage = stages_of(whole)[0]
    steps = stage.all("section", "rollout-step")
    assert [step.attributes["data-step"] for step in steps] == [
        "0",
        "4",
        "9",
    ] and "3 of 10 steps" in stage.text
    varied, flat = steps[0].all("article", "card")
    assert [card.all("span", "file")[0].text for card in (varied, flat)] == ["varied", "flat"]
    best, worst = varied.all("div", "answer")
    assert "best of 3 reward 2.00" in best.text and "worst of 3 reward −1.00" in worst.text
    pieces = [piece.attributes for piece in best.all("span", "piece")]
    assert [piece["style"] for piece in pieces] == [  # against the largest of the step
        "--share:1.00", "--share:1.00", "--share:0.50",
    ]  # fmt: skip
    assert ["down" in piece.attributes["class"] for piece in worst.all("span", "piece")] == [True] * 3
    assert "advantage +2.00, log-probability when sampled −1.00" in pieces[0]["title"]
    assert "advantage +1.00 to +2.00 by token" in best.text
    assert varied.all("p", "key")[0].text == "right answer low" and len(flat.all("div", "answer")) == 1
    rows = varied.all("table", "lines")[0].rows()
    assert [row[1] for row in rows] == ["2.00", "0.50", "−1.00"]
    assert "0.10 s" in varied.text  # the recording of the question


def test_a_step_without_variance_gives_way_to_one_before_it(whole: Run) -> None:
    clip = whole.audio / "heard.wav"
    rows = [answer(clip, "flat", n, 1.0, step=9) for n in range(3)]
    write_jsonl(whole.folder("first") / "rollouts" / "000009.jsonl", rows)
    steps = stages_of(whole)[0].all("section", "rollout-step")
    assert [step.attributes["data-step"] for step in steps] == ["0", "4", "8"]


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
    rows = section_of(whole, policies_section).all("table", "methods")[0].rows()
    assert "accuracy 25.0 % → 75.0 %" in rows[0][2] and rows[1][3] == "0.500"


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
    (group,) = stages_of(whole)[0].all("section", "rollout-step")[-1].all("article")
    best, worst = group.all("div", "answer")
    assert "0.20 s" in best.text and "♪ speech, 11 codes" in best.text
    assert "no longer there" in worst.text


def test_speech_between_the_first_and_the_last_evaluation_is_named_without_its_sound(whole: Run) -> None:
    clip, folder = whole.audio / "heard.wav", whole.folder("first")
    rows = [answer(clip, "held0", 0, 1.0, step=step, answer="", speech=str(step)) for step in (0, 5, 10)]
    write_jsonl(folder / "answers.jsonl", rows)
    first, between, last = stages_of(whole)[0].all("dl", "steps")[0].all("dd")
    assert "no longer there" in first.text and "no longer there" in last.text
    assert between.text.startswith("speech") and "no longer there" not in between.text


def test_signs_are_read_as_they_are_written() -> None:
    assert [signed(value) for value in (0.714, -0.1, 0.001)] == ["+0.71", "−0.10", "0.00"]


def test_a_reward_that_is_no_share_has_a_mean(whole: Run) -> None:
    training = FreshTraining(RunRecord(whole.recipe, whole.results).stages("train_policy")[0])
    rows = [{**row, "reward": 3.0 * index} for index, row in enumerate(training.answers)]
    write_jsonl(whole.folder("first") / "answers.jsonl", rows)
    before, _, gain = reward_rows(stages_of(whole)[0])["weighted sum"]
    assert before.startswith("10.500") and gain.startswith("+24.00 (+24.00")


def test_questions_that_list_their_options_are_counted_by_domain_and_difficulty() -> None:
    rows = [
        {
            "question": f"Which one of {n}?", "task": "music" if n % 3 else "speech",
            "difficulty": "easy" if n % 2 else "hard", "right": n < 6, "options": 4, "asked": "a", "named": "a",
        }
        for n in range(12)
    ]  # fmt: skip
    found = group_by_question(rows)
    assert [(row["question"], row["score"]["n"], row["score"]["accuracy"]) for row in found] == [
        ("music", 8, 0.5), ("speech", 4, 0.5), ("easy", 6, 0.5), ("hard", 6, 0.5),
    ]  # fmt: skip
    assert [
        row["question"] for row in group_by_question([{**row, "question": "Which?"} for row in rows])
    ] == ["Which?"]


# ----------------------------------------------------------------------------------- sections of a user's own


def test_a_section_of_a_users_own_is_on_the_page(whole: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of `docs/extending.md`."""
    guide = (Path(__file__).parents[3] / "docs" / "extending.md").read_text(encoding="utf-8")
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", guide, flags=re.S) if "ReportContext" in block
    )
    (whole.audio / "own_sections.py").write_text(code)
    monkeypatch.chdir(whole.audio)
    page = tree(whole.report(players=False, sections=["all", "own_sections:longest_answers"])[0])
    links = [link.attributes["href"] for link in page.all("a")]
    assert links == ["#recordings", "#policies", "#answers", "#longest_answers", "#run"]
    tokens = max(row["tokens"] for row in read_jsonl(whole.folder("first") / "answers.jsonl"))
    assert f"{tokens} tokens longest answer" in page.all("div", "tiles")[0].text
    page = tree(whole.report(players=False, sections=["own_sections:longest_answers"])[0])
    assert [section.attributes["id"] for section in page.all("section")] == ["longest_answers", "run"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("polices", "sections.*'polices' is none of all, recordings, tokenizer"),
        ("no_such_module:one", "no module 'no_such_module'"),
    ],
)
def test_an_unknown_section_is_refused_before_any_work(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "recipe.yaml").write_text(f"name: r\nstages:\n  - report: {{sections: ['{name}']}}\n")
    with pytest.raises(ConfigError, match=reason):
        run_recipe(load_recipe(tmp_path / "recipe.yaml", runs=tmp_path / "runs"), Console(file=io.StringIO()))
    assert not (tmp_path / "runs" / "r" / "report").exists()


def test_sections_are_listed() -> None:
    catalog = load_catalog("sections")
    assert (
        list(catalog.entries) == section_names()
        and all(catalog.entries.values())
        and "package.module:name" in catalog.own
    )
