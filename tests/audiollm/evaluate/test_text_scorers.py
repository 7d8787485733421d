"""Scorers of translations: sacrebleu's values, and a command that answers, dies, hangs or answers too little."""

from __future__ import annotations

import sys
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
    print(json.dumps({"score": len(row["mt"]) / len(row["ref"])}), flush=True)
"""


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("dies", "ended with code 3 after 1 of 3"),
        ("hangs", "no answer within 0.5 s"),
        ("few", "ended with code 0 after 2 of 3"),
        ("nonsense", "'NaN', which is no score"),
    ],
)
def test_a_command_that_fails_costs_its_batch_alone(tmp_path: Path, mode: str, reason: str) -> None:
    script = tmp_path / "score.py"
    script.write_text(SCRIPT)
    three = [Translation("s", "ab", "abcd"), Translation("s", "", "x"), Translation("s", "abc", "abc")]
    scorer = CommandScorer(f"{sys.executable} {script} fine")
    assert scorer.score(three) == [0.5, 0.0, 1.0]
    assert scorer.score(three[:1]) == [0.5]  # the same process
    scorer.close()
    scorer = CommandScorer(f"{sys.executable} {script} {mode}", timeout_s=0.5)
    for _ in range(2):  # it is started again for the next batch
        scores = scorer.score(three)
        kept = [score for score in scores if isinstance(score, float)]
        assert len(scores) == 3
        assert kept == [0.5, 1.0][: len(kept)]
        assert kept
        assert reason in str(scores[-1])
    scorer.close()


def test_a_scorer_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'chrf'"):
        choose_text_scorer("chrF", "en")
    with pytest.raises(ConfigError, match="cannot be started"):
        choose_text_scorer("command:/nonexistent/python x.py", "en").score([CAT])
    with pytest.raises(ConfigError, match="names no program"):
        choose_text_scorer("command:", "en")
