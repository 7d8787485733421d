"""The first module that a fork server imports: from then on it ends with the command, while it still loads the others.

A server looks after its command only once it has loaded all that its workers share, which takes seconds.
"""

from __future__ import annotations

import sys

from audiollm.processes import end_with_parent

if "multiprocessing.forkserver" in sys.orig_argv[-1]:
    end_with_parent()
