"""Child processes and Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import multiprocessing, signal, sys
from multiprocessing import connection
from audiollm.processes import interrupts_held_back

def send_mask(end):
    end.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))

if __name__ == "__main__":
    for method in ("forkserver", "spawn"):
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        process = context.Process(target=send_mask, args=(theirs,))
        with interrupts_held_back():
            process.start()
        print(method, ours.recv(), signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
        process.join()
"""


def test_children_are_started_without_ctrl_c_and_this_process_keeps_it(tmp_path: Path) -> None:
    """The resource tracker of multiprocessing, which the first child starts, would let the signal through again."""
    (tmp_path / "start.py").write_text(CODE)
    result = subprocess.run([sys.executable, str(tmp_path / "start.py")], capture_output=True, text=True)
    assert result.stdout.split("\n")[:2] == ["forkserver True False", "spawn True False"], result.stderr
