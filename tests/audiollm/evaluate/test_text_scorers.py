"""Scorers of translations: sacrebleu's values, and a command that answers, dies, hangs or answers too little."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from audiollm.errors import ConfigError
from audiollm.evaluate.interpret.quality import corpus_quality
from audiollm.evaluate.judges.text_scorers import CommandScorer, Translation, choose_text_scorer

CAT = Translation("", "the cat sat on the mat", "the cat sat on a mat")
APPLE = Translation("", "我喜欢苹果", "我喜欢吃苹果")


def test_the_tokenizer_follows_the_language() -> None:
    english = corpus_quality([CAT], "en")
    assert (english.bleu, english.chrf) == pytest.approx((53.728497, 72.084832))
    chinese = corpus_quality([APPLE], "zh")
    assert (chinese.bleu, chinese.chrf) == pytest.approx((40.936538, 35.011093))
    assert corpus_quality([APPLE], "en").bleu == 0
    assert "tok:zh" in chinese.signatures["BLEU"]
    words = choose_text_scorer("word_accuracy", "de")
    said = ["zwei", "zwei drei", "eins zwei", "", "zwei zwei zwei"]
    assert words.score([Translation("", each, "zwei") for each in said]) == [100, 0, 0, 0, 0]
    assert words.score([Translation("", each, "eins zwei drei vier") for each in (*said, "eins zwei drei")]) == [
        25, 50, 50, 0, 25, 75,
    ]  # fmt: skip
    assert words.score([Translation("", "", ""), Translation("", "eins", "")]) == [100, 0]
    assert choose_text_scorer("word_accuracy", "zh").score([Translation("", "你好", "你们 好")])[
        0
    ] == pytest.approx(200 / 3)
    assert choose_text_scorer("chrf", "zh").score([APPLE, Translation("", "", "")]) == [
        pytest.approx(35.011093),
        0,
    ]


SCRIPT = """
import json, sys, time
mode = sys.argv[1]
count = 0
for line in sys.stdin:
    if not line.strip():
        if mode == "few": sys.exit(0)
        continue
    row = json.loads(line)
    count += 1
    if mode == "dies" and count == 2: sys.exit(3)
    if mode == "hangs" and count == 2: time.sleep(60)
    if mode == "few" and count == 2: continue
    if mode == "nonsense" and count == 2: print("NaN", flush=True); continue
    if mode == "closes" and count == 2: import os; os.close(1); time.sleep(60)
    if mode == "many" and count == 3: print(0.25, flush=True)
    print(json.dumps({"score": len(row["mt"]) / len(row["ref"])}), flush=True)
"""


THREE = [Translation("s", "ab", "abcd"), Translation("s", "", "x"), Translation("s", "abc", "abc")]


@pytest.mark.parametrize(
    ("mode", "timeout_s", "reason", "kept"),
    [
        ("dies", 60, "ended with code 3 after 1 of 3", [0.5]),
        ("hangs", 0.5, "no answer within 0.5 s", []),
        ("few", 60, "ended with code 0 after 2 of 3", []),  # of the third, which came second
        ("nonsense", 60, "'NaN', which is no score", [0.5]),
        ("closes", 1.5, "closed its output after 1 of 3 answers, and did not end", []),
    ],
)
def test_a_command_that_fails_costs_its_batch_alone(
    tmp_path: Path, mode: str, timeout_s: float, reason: str, kept: list[float]
) -> None:
    """No translation is given the score of another: what surely belongs to the first ones is kept."""
    script = tmp_path / "score.py"
    script.write_text(SCRIPT)
    three = THREE
    scorer = CommandScorer(f"{sys.executable} {script} fine")
    assert scorer.score(three) == [0.5, 0.0, 1.0]
    assert scorer.score(three[:1]) == [0.5]  # the same process
    scorer.close()
    scorer = CommandScorer(f"{sys.executable} {script} {mode}", timeout_s)
    for _ in range(2):  # it is started again for the next batch
        scores = scorer.score(three)
        assert scores[: len(kept)] == kept
        assert len(scores) == 3
        assert all(reason in str(score) for score in scores[len(kept) :])
    scorer.close()


def test_an_answer_too_many_is_given_to_no_translation_of_the_next_batch(tmp_path: Path) -> None:
    script = tmp_path / "score.py"
    script.write_text(SCRIPT)
    scorer = CommandScorer(f"{sys.executable} {script} many")
    assert scorer.score(THREE) == [0.5, 0.0, 0.25]  # of these nobody can tell which is the one too many
    while scorer._process._lines.empty():  # the last line comes a moment later
        time.sleep(0.01)
    (reason,) = scorer.score(THREE[:1])
    assert "beside its answers: one line for each question" in str(reason)
    assert scorer.score(THREE[:1]) == [0.5]  # started again
    scorer.close()


def test_a_scorer_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'chrf'"):
        choose_text_scorer("chrF", "en")
    with pytest.raises(ConfigError, match="cannot be started"):
        choose_text_scorer("command:/nonexistent/python x.py", "en").score([CAT])
    with pytest.raises(ConfigError, match="names no program"):
        choose_text_scorer("command:", "en")
    with pytest.raises(ConfigError, match="similarity .*No closing quotation"):
        choose_text_scorer("command:python 'x.py", "en", setting="similarity")


def test_a_corpus_has_intervals_and_a_single_output_none() -> None:
    """Draws of wrong outputs alone score 0; the score and its signature are those without an interval."""
    wrong = Translation("", "no", CAT.reference)
    both = corpus_quality([CAT, wrong, CAT, wrong], "en")
    for name, score in (("BLEU", both.bleu), ("chrF", both.chrf)):
        low, high = both.intervals[name]
        assert 0 <= low < score < high <= 100
    assert corpus_quality([CAT], "en").intervals == {} and "bs:" not in both.signatures["BLEU"]
    assert corpus_quality([CAT] * 4, "en").intervals["BLEU"] == pytest.approx(
        [corpus_quality([CAT], "en").bleu] * 2
    )
