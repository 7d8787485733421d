"""Rollouts in a process of its own, which samples while this one trains; weights lie in memory that both see."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor, nn

from audiollm.errors import BadSample, ConfigError, StageError, error_line
from audiollm.families.rollout import Prompted, Rollout, RolloutEngine, RolloutSettings
from audiollm.processes import end_with_parent, interrupts_held_back

LoadEngine = Callable[[], tuple[nn.Module, RolloutEngine[Any]]]
"""Loads a plain model and the engine that samples from it. Pickled: a function of a module, or a `partial` of one."""
ALIGNMENT_BYTES = 64


class _Place(NamedTuple):
    """Where a tensor lies in the shared memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


class SharedTensors:
    """Tensors by name in memory that this process shares with those that it is handed to as they start."""

    def __init__(self, places: Mapping[str, _Place], file: int) -> None:
        """Map the memory behind a file descriptor, which this object owns from now on."""
        self._places, self._file = dict(places), file
        memory = mmap.mmap(file, 0)
        self.by_name = {name: _view(memory, place) for name, place in places.items()}
        """The tensors; writing into them is seen by the other processes."""

    @classmethod
    def like(cls, tensors: Mapping[str, Tensor]) -> SharedTensors:
        """Make room for tensors of these shapes and dtypes; their values are 0."""
        places, size = {}, 0
        for name, tensor in tensors.items():
            places[name] = _Place(tuple(tensor.shape), tensor.dtype, size)
            size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        file = _anonymous_file()
        os.ftruncate(file, max(1, size))
        return cls(places, file)

    @property
    def path(self) -> str:
        """Where other processes of this user open the memory, until `close`."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def entries(self) -> list[tuple[str, list[int], str, int]]:
        """Name, shape, name of the dtype and first byte of each tensor: for processes without this module."""
        return [
            (name, list(place.shape), str(place.dtype).removeprefix("torch."), place.offset)
            for name, place in self._places.items()
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return _map_shared, (self._places, DupFd(self._file))

    def close(self) -> None:
        """Let go of the file; the memory goes with the last tensor."""
        os.close(self._file)


class ProcessRollouts(Generic[Prompted]):
    """A `RolloutEngine` whose model is in a process of its own. `start` lets it sample while this one does other work.

    Args:
        load: called in the process.
        like: tensors of the shapes and dtypes of the model's weights, by name: parameters and persistent buffers.
        threads: of the process.
        gpu: number of the GPU that it takes; None: it has none.
    """

    def __init__(
        self, load: LoadEngine, like: Mapping[str, Tensor], threads: int, gpu: int | None = None
    ) -> None:
        self._shared = SharedTensors.like(like)
        self.weights = self._shared.by_name
        """The weights that it samples from, on the CPU; to be written before the first call of `sample`."""
        self._version = 0
        self._started: deque[tuple[Any, ...]] = deque()
        context = multiprocessing.get_context("forkserver")
        loads: Any = getattr(load, "func", load)
        context.set_forkserver_preload(["audiollm.fork_server", loads.__module__])
        self._connection, child_connection = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child_connection, load, self._shared, threads, gpu), daemon=True
        )
        with interrupts_held_back():
            self._process.start()
        child_connection.close()

    def start(
        self, prompts: Sequence[Prompted], numbers: Sequence[Sequence[int]], settings: RolloutSettings
    ) -> None:
        """Begin to sample; a call of `sample` with the same prompts, numbers and settings gives the outcome.

        Begun calls are answered in their order. The weights must not be written before the last one is answered.
        """
        self._send(
            (self._version, list(prompts), [list(group_numbers) for group_numbers in numbers], settings)
        )
        self._started.append(self._key(prompts, numbers, settings))

    def sample(
        self, prompts: Sequence[Prompted], numbers: Sequence[Sequence[int]], settings: RolloutSettings
    ) -> list[list[Rollout]]:
        """See `RolloutEngine.sample`.

        Raises:
            StageError: the process ended, or failed for another reason than a prompt.
        """
        if not self._started or self._started[0] != self._key(prompts, numbers, settings):
            self._drop_started()
            self.start(prompts, numbers, settings)
        self._started.popleft()
        reply = self._receive()
        if isinstance(reply, Exception):
            raise reply
        return list(reply)

    def weights_changed(self) -> None:
        """See `RolloutEngine.weights_changed`."""
        self._version += 1

    def forget(self) -> None:
        """Drop what was begun, and take the weights as others: they may have been written in the meantime."""
        self._drop_started()
        self._version += 1

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._connection.close()
        self._shared.close()

    def _key(
        self, prompts: Sequence[Any], numbers: Sequence[Sequence[int]], settings: Any
    ) -> tuple[Any, ...]:
        ids = tuple(prompt.id for prompt in prompts)
        return self._version, ids, tuple(tuple(group_numbers) for group_numbers in numbers), settings

    def _drop_started(self) -> None:
        while self._started:
            self._started.popleft()
            self._receive()

    def _send(self, request: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):  # it ended: `_receive` finds out
            self._connection.send_bytes(pickle.dumps(request))

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise StageError(
                f"the process that samples ended (exit code {self._process.exitcode})",
                "free memory for a second copy of the model, or set ahead: 0",
            ) from None


def _serve(
    connection: Connection, load: LoadEngine, shared: SharedTensors, threads: int, gpu: int | None
) -> None:
    """Sample as asked, until the connection or the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    torch.set_num_threads(threads)
    if gpu is not None:
        torch.cuda.set_device(gpu)
    failure: Exception | None = None
    try:
        model, engine = load()
        weights = model.state_dict(keep_vars=True)
        _share_on_cpu(weights, shared.by_name)
    except Exception as error:
        failure = StageError(f"the model that samples cannot be loaded: {error_line(error)}")
    loaded_version = None
    requests = SimpleQueue[Any]()
    threading.Thread(target=_read_requests, args=(connection, requests), daemon=True).start()
    with contextlib.suppress(OSError):
        while (request := requests.get()) is not None:
            version, prompts, numbers, settings = request
            reply: Any = failure
            if failure is None:
                if version != loaded_version:
                    _copy_to_device(weights, shared.by_name)
                    engine.weights_changed()
                    loaded_version = version
                reply = _sampled(engine, prompts, numbers, settings)
            connection.send_bytes(pickle.dumps(reply))


def _read_requests(connection: Connection, requests: SimpleQueue[Any]) -> None:
    """Take in requests as they come, and None at the end: whoever sends one waits for no answer to an earlier one."""
    try:
        with contextlib.suppress(EOFError, OSError):
            while True:
                requests.put(connection.recv())
    finally:
        requests.put(None)


def _sampled(engine: RolloutEngine[Any], *request: Any) -> list[list[Rollout]] | Exception:
    try:
        return engine.sample(*request)
    except BadSample as bad:
        return bad.with_traceback(None)
    except ConfigError as error:
        return StageError(str(error), exit_code=2)
    except Exception as error:
        return StageError(f"sampling failed: {error_line(error)}")


def _share_on_cpu(weights: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
    """Put the shared memory behind a model's weights, where they are on the CPU."""
    for name, tensor in weights.items():
        if tensor.device.type == "cpu":
            tensor.data = shared[name]


@torch.no_grad()
def _copy_to_device(weights: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
    """Copy the shared weights to where the model's are, unless they are in the shared memory itself."""
    for name, tensor in weights.items():
        if tensor.device.type != "cpu":
            tensor.copy_(shared[name])


def _map_shared(places: Mapping[str, _Place], file: Any) -> SharedTensors:
    return SharedTensors(places, file.detach())


def _view(memory: mmap.mmap, place: _Place) -> Tensor:
    count = torch.Size(place.shape).numel()
    if not count:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset).reshape(place.shape)


def _anonymous_file() -> int:
    """A file in memory, where the system has such; else a nameless one on disk."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


_: type[RolloutEngine[Any]] = ProcessRollouts
