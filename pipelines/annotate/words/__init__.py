"""Words: hypotheses put to the vote, written forms, CTC, syllables."""
