"""Rewards of streams as pure functions: of single actions, of whole sequences, standardised and combined."""
