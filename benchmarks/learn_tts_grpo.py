"""Does a model that speaks learn from rewards on what is heard? Spoken digits, six speakers.

    make -C benchmarks learn-tts-grpo DATA=../shared/data

First models, tokenizer and judges are those of learn_tts_preference.py (made there, or here where they are not there
yet). For each seed (proofs/learn_tts_grpo*.yaml has all settings):

- GRPO on the first model's own speech (`grpo`): the reward is whether Pocketsphinx hears the digit that was asked for,
  and how similar the voice is to the asked speaker's, by a classifier of speakers; the codes of the first codebook
  alone have advantages;
- the same with the rewards shuffled over each step's answers (`grpo_shuffled`), which must gain nothing.

All models then speak ten digits in six voices, fifteen times, as GRPO samples (the distribution of the model itself),
which the bars are for, and in the usual setting (guided, at a lower temperature), which is told beside. What counts is
the classifier of digits that is trained on real takes: it had no part in the reward. It hears every answer of the
training, too, with a weight of 0, so that the report shows both recognizers over training: where Pocketsphinx alone
gains, it was deceived. The asked voice is judged by another classifier of speakers (another seed) than the reward's.
The settings were chosen with seed 0, which is not among the three. Bars: a quarter fewer wrong digits; the asked voice
is right no less often than before, up to 2 points.
"""

from __future__ import annotations

import os

from heard_digits import JUDGE_VARIABLE
from learn_tts import source_of
from learn_tts_preference import (
    FIRST_CHAINS,
    judged_by,
    print_scores,
    report,
    score,
    train_firsts,
    tts_parser,
)
from proof import Proof

from audiollm.files.atomic import write_json

BENCH = "learn_tts_grpo"
KINDS = ("first", "grpo", "grpo_shuffled")
SETTINGS = {"as_sampled": "as sampled", "says": "usual setting"}
"""How models speak: the stage, and its title."""


def main() -> None:
    options = tts_parser(__doc__).parse_args()
    source = (options.source or source_of(options.runs, options.data)).resolve()
    folder = options.runs / "learn_tts_preference"
    proof = Proof(folder, options.seeds, options.overrides, (*FIRST_CHAINS, f"{BENCH}_first", BENCH))
    train_firsts(proof, source)
    proof.run(f"{BENCH}_first", source=source, judged=judged_by(proof))
    os.environ[JUDGE_VARIABLE] = str(proof.folder / "judges" / "judges" / "classifier")
    proof.run(BENCH, source=source)
    scores = {says: score(proof, KINDS, says) for says in SETTINGS}
    write_json(proof.folder / "grpo_scores.json", scores)
    for says, title in SETTINGS.items():
        print_scores(
            proof, scores[says], f"Digits that a classifier hears wrong, voices that it hears right: {title}"
        )
        report(BENCH, scores[says], "grpo" if says == "as_sampled" else None, f"{title}, ")


if __name__ == "__main__":
    main()
