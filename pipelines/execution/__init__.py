"""Calls on workers, with a ledger: local processes or a Ray cluster."""
