"""`forked_worker` as a program that names itself among the modules of its processes, as `audiollm` does."""

from __future__ import annotations

from forked_worker import main

if __name__ == "__main__":
    main("own", "tests.pipelines.execution.forked_program")
