"""The last module that a fork server imports: sets up the worker that its processes share.

It is a module of its own because a worker can be unpickled only once `local_pool`, which workers may import, is loaded.
"""

from __future__ import annotations

from pipelines.execution.local_pool import set_up_worker

set_up_worker()
