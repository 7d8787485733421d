"""A server as replicas on a Ray cluster, behind Ray Serve's proxy: the same routes, gate and limits in each of them."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiollm.cluster import Cluster, ClusterError
from audiollm.errors import ConfigError
from audiollm.families.registry import open_model_folder
from audiollm.models.frozen.formats import GenerationFormat
from audiollm.serve.limits import ServeLimits
from audiollm.serve.load import split_model_name

INSTALL = "pip install 'audiollm[ray-serve]'"
NAME = "audiollm"
_REPLICAS = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class ReplicaShare:
    """Replicas and what each of them gets."""

    least: int = 1
    most: int = 1
    """More than `least`: as many as the requests need."""
    cpus: float = 1.0
    gpus: float = 0.0

    @property
    def workers(self) -> int:
        """See `Workers`: there has to be room for all of them."""
        return self.most


@dataclass(frozen=True)
class ServedFolders:
    """What each replica loads; see `load_state`."""

    folders: Sequence[str]
    limits: ServeLimits
    host: str = "127.0.0.1"
    key: str | None = None
    hostnames: Sequence[str] = ()
    paths: dict[str, Path | None] = field(default_factory=dict)
    """`codec`, `voices` and `aligner`."""
    dtype: GenerationFormat = "fp32"


def parse_replicas(text: str, cpus: float = 1.0, gpus: float = 0.0) -> ReplicaShare:
    """Read `2`, or `1-4` for as many as the requests need.

    Raises:
        ConfigError: it is neither.
    """
    match = _REPLICAS.fullmatch(text.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"{text!r} is no number of replicas", "--ray", "give a number, or two: 2, or 1-4")
    return ReplicaShare(least, most, cpus, gpus)


class RayServer:
    """Replicas that answer; `close` ends them.

    Args:
        address: of a running cluster (`ray://…`, `auto`); None: one on this machine, which ends with this object.
        port: of the proxy.

    Raises:
        ConfigError: no Ray Serve, no room, or a model that does not load.
    """

    def __init__(self, served: ServedFolders, share: ReplicaShare, address: str | None, port: int) -> None:
        try:
            from ray import serve
        except ImportError:
            raise ConfigError("Ray Serve is not installed", "--ray", INSTALL) from None
        self._serve = serve
        for text in served.folders:  # what is no model is told here, and not by each replica
            open_model_folder(split_model_name(text)[1])
        try:
            self._cluster = Cluster([share], address)
        except ClusterError as error:
            raise ConfigError(
                str(error), "--ray", "give it fewer replicas or CPUs, or join a cluster: --ray-address"
            ) from None
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            serve.start(http_options={"host": served.host, "port": port})
            serve.run(_deployment(served, share).bind(), name=NAME, route_prefix="/")
        except Exception as error:  # Ray wraps whatever a replica raised
            problem = self._problem() or str(error)
            self.close()
            raise ConfigError(problem, "--ray", "audiollm serve without --ray shows it whole") from None

    def close(self) -> None:
        """End the replicas, after the answers that are under way, and what was begun of the cluster."""
        self._serve.shutdown()
        self._cluster.leave()

    def _problem(self) -> str:
        """The last line of what a replica raised; empty where nothing is known."""
        application = self._serve.status().applications.get(NAME)
        deployments = {} if application is None else application.deployments
        lines = [line.strip() for status in deployments.values() for line in status.message.splitlines()]
        return next((line for line in reversed(lines) if "Error" in line), "")

    def wait(self) -> None:
        """Wait for SIGTERM or Ctrl-C."""
        stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        stopped.wait()


# ------------------------------------------------------------------------------------------------ private


def _deployment(served: ServedFolders, share: ReplicaShare) -> Any:
    from ray import serve

    limits = served.limits

    def build_app() -> Any:
        from audiollm.serve.gate import ServerState
        from audiollm.serve.load import load_state
        from audiollm.serve.server import serve_app

        state = load_state(
            served.folders,
            limits,
            server=ServerState(served.host, served.key, served.hostnames),
            dtype=served.dtype,
            **served.paths,
        )
        return serve_app(state)

    options: dict[str, Any] = {"num_replicas": share.most}
    if share.least < share.most:
        scaling = {"min_replicas": share.least, "max_replicas": share.most}
        options = {"autoscaling_config": {**scaling, "target_ongoing_requests": max(1, limits.slots // 2)}}
    return serve.deployment(
        serve.ingress(build_app)(),
        name=NAME,
        ray_actor_options={"num_cpus": share.cpus, "num_gpus": share.gpus},
        # a replica's own limits refuse what is too much, in OpenAI's form
        max_ongoing_requests=limits.queue + limits.streams,
        graceful_shutdown_timeout_s=limits.drain_s,
        **options,
    )
