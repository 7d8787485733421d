"""The shared layer of pipelines of steps: steps by level, ledger keys, workers, rows on disk, and their page."""
