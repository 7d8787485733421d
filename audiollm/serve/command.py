"""The command `serve`."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from audiollm.errors import ConfigError
from audiollm.hub_models.options import Download, folder_option
from audiollm.models.frozen.formats import GenerationFormat
from audiollm.serve.limits import ServeLimits

if TYPE_CHECKING:
    from audiollm.serve.ray_replicas import ReplicaShare, ServedFolders

KEY_VARIABLE = "AUDIOLLM_SERVE_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SHORTEST_KEY = 16
DEFAULTS = ServeLimits()
RAY_PANEL = "Several machines"


def serve_models(
    folders: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]FOLDER...",
            help="Models: the folder of a train stage, of a saved model, or a name on the hub.",
            show_default=False,
        ),
    ],
    codec: Annotated[
        Path | None, folder_option("The codec's folder; by default the run's own train_tokenizer.")
    ] = None,
    dtype: Annotated[
        GenerationFormat, typer.Option(help="How the layers of models that speak are held in memory.")
    ] = "fp32",
    voices: Annotated[
        Path | None,
        typer.Option(help="Where added voices stay.", show_default="in memory, until the server ends"),
    ] = None,
    aligner: Annotated[
        Path | None,
        folder_option(
            "A CTC model of transformers for the times of words; by default Pocketsphinx, for English."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but 127.0.0.1 needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    key_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the key that callers send; else the variable {KEY_VARIABLE}."),
    ] = None,
    hostname: Annotated[
        list[str] | None,
        typer.Option(help="A further name under which callers know the server; may be repeated."),
    ] = None,
    wyoming: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port for Home Assistant and others that speak Wyoming, on this machine alone; 0: any free one.",
        ),
    ] = None,
    wyoming_languages: Annotated[
        str, typer.Option(help="Languages that Wyoming's clients are offered: en,pt.")
    ] = "en",
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="REPLICAS",
            help="Serve by replicas on a Ray cluster: 2, or 1-4 for as many as the requests need.",
            rich_help_panel=RAY_PANEL,
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="A running cluster: auto, or ray://HOST:PORT.",
            show_default="one on this machine",
            rich_help_panel=RAY_PANEL,
        ),
    ] = None,
    replica_cpus: Annotated[
        float, typer.Option(min=0.1, help="CPUs of a replica.", rich_help_panel=RAY_PANEL)
    ] = 1.0,
    replica_gpus: Annotated[
        float, typer.Option(min=0, help="GPUs of a replica, or the share of one.", rich_help_panel=RAY_PANEL)
    ] = 0.0,
    queue: Annotated[
        int, typer.Option(min=1, help="Requests that run or wait; others get 429.")
    ] = DEFAULTS.queue,
    streams: Annotated[int, typer.Option(min=1, help="Streamed answers at a time.")] = DEFAULTS.streams,
    slots: Annotated[
        int, typer.Option(min=1, help="Answers side by side; a branch of guidance takes one, too.")
    ] = DEFAULTS.slots,
    text_characters: Annotated[
        int, typer.Option(min=1, help="Characters of the longest text.")
    ] = DEFAULTS.text_characters,
    speech_s: Annotated[
        float, typer.Option(min=1, max=600, help="Seconds of the longest speech.")
    ] = DEFAULTS.speech_s,
    recording_s: Annotated[
        float, typer.Option(min=1, max=600, help="Seconds of the longest recording.")
    ] = DEFAULTS.recording_s,
    upload_mb: Annotated[
        float, typer.Option(min=0.1, help="Megabytes of the largest request.")
    ] = DEFAULTS.upload_mb,
    request_s: Annotated[
        float, typer.Option(min=1, help="Seconds that an answer may take.")
    ] = DEFAULTS.request_s,
    stall_s: Annotated[
        float, typer.Option(min=1, help="Seconds after which a reader who takes nothing is left.")
    ] = DEFAULTS.stall_s,
    drain_s: Annotated[
        float, typer.Option(min=0, help="Seconds that answers under way have after SIGTERM.")
    ] = DEFAULTS.drain_s,
    download: Download = False,
) -> None:
    """Serve models to clients of OpenAI's kind: speech, transcripts, chats.

    It answers on this machine alone, unless --host says otherwise. Ctrl-C ends it when all answers are sent, a second
    one at once.

    Examples:

    audiollm serve runs/quickstart/train

    audiollm serve voice=runs/mine/train ears=runs/understanding-tiny/train --voices voices

    audiollm serve runs/mine/train --wyoming 10200

    audiollm serve runs/mine/train --ray 1-4 --ray-address auto --replica-gpus 1
    """
    packages = {
        "fastapi": "fastapi",
        "uvicorn": "uvicorn",
        "python_multipart": "python-multipart",
        "websockets": "websockets",
    }
    for package, name in (packages | ({} if wyoming is None else {"wyoming": "wyoming"})).items():
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"the server needs {name}", "", "pip install 'audiollm[serve]'")
    key = read_key(key_file, host)
    limits = ServeLimits(
        queue=queue, streams=streams, slots=slots, text_characters=text_characters, speech_s=speech_s,
        recording_s=recording_s, upload_mb=upload_mb, request_s=request_s, stall_s=stall_s, drain_s=drain_s,
    )  # fmt: skip

    if ray is not None:
        if wyoming is not None:
            raise ConfigError(
                "replicas have no port of their own", "--wyoming", "leave out --ray or --wyoming"
            )
        from audiollm.serve.ray_replicas import ServedFolders, parse_replicas

        paths = {"codec": codec, "voices": voices, "aligner": aligner}
        served = ServedFolders(folders, limits, host, key, tuple(hostname or ()), paths, dtype)
        _serve_replicas(served, parse_replicas(ray, replica_cpus, replica_gpus), ray_address, port)
        return

    from audiollm.serve.gate import ServerState, log
    from audiollm.serve.load import load_state
    from audiollm.serve.server import Wyoming, bound_listener, make_server

    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    console = Console()
    with bound_listener(host, port) as listener:
        with console.status("loading models"):
            state = load_state(
                folders,
                limits,
                codec=codec,
                dtype=dtype,
                voices=voices,
                aligner=aligner,
                server=ServerState(host, key, tuple(hostname or ())),
            )
        listener.listen()  # callers who read the address may come before the server takes them
        place = f"[{host}]" if ":" in host else host
        console.print(f"http://{place}:{listener.getsockname()[1]}/v1", style="bold", highlight=False)
        for model in state.models.values():
            abilities = [name for name, can in (("speaks", model.speaks), ("hears", model.hears)) if can]
            console.print(
                f"  {model.name}: {', '.join(['writes', *abilities])}", highlight=False, markup=False
            )
        for name in state.interpreters:
            console.print(f"  {name}: interprets", highlight=False, markup=False)
        home = None
        if wyoming is not None:
            languages = [code.strip() for code in wyoming_languages.split(",") if code.strip()]
            home = Wyoming(bound_listener(LOOPBACK[0], wyoming), languages)
            console.print(f"tcp://{LOOPBACK[0]}:{home.listener.getsockname()[1]} (Wyoming)", highlight=False)
        make_server(state, home).run(sockets=[listener])
        state.service.close()


def _serve_replicas(served: ServedFolders, share: ReplicaShare, address: str | None, port: int) -> None:
    from audiollm.serve.ray_replicas import RayServer

    console = Console()
    with console.status(f"loading models in {share.most} replicas"):
        server = RayServer(served, share, address, port)
    place = f"[{served.host}]" if ":" in served.host else served.host
    console.print(f"http://{place}:{port}/v1", style="bold", highlight=False)
    try:
        server.wait()
    finally:
        server.close()


def read_key(key_file: Path | None, host: str) -> str | None:
    """Read the key from its file, or from the environment.

    Raises:
        ConfigError: it cannot be read or is too short, or there is none for an address that others reach.
    """
    remedy = f"write at least {SHORTEST_KEY} characters into a file for --key-file, or set {KEY_VARIABLE}"
    key = os.environ.get(KEY_VARIABLE)
    if key_file is not None:
        try:
            key = key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{key_file}: cannot be read ({error})", "--key-file", remedy) from None
    if key is not None and len(key) < SHORTEST_KEY:
        raise ConfigError(f"the key has {len(key)} characters", "--key-file", remedy)
    if key is None and host not in LOOPBACK:
        raise ConfigError(f"{host} can be reached by others, and there is no key", "--host", remedy)
    return key
