"""A family of a talker and a code predictor, as small as one can be: `docs/adding_a_model.md` explains it."""
