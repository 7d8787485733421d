"""Words: hypotheses put to the vote, written forms, syllables."""
