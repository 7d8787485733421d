"""The command `doctor`: what this machine has, what it lacks, and how to mend it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from audiollm.errors import ConfigError
from audiollm.models.frozen.formats import without_downloads
from audiollm.terminal import print_table

State = Literal["ok", "missing", "warning", "optional", "note"]
STYLES = {"ok": "green", "missing": "bold red", "warning": "yellow", "optional": "dim", "note": "dim"}
TORCH_REMEDY = "pip install 'torch>=2.11,<2.15' 'torchaudio>=2.11,<2.12'"
TORCHAUDIO_NOTE = (
    "torchaudio 2.11 is built for CUDA 13.0 and loads only with the PyPI builds of torch 2.11 to 2.14 (not with"
    " torch 2.15, not with a +cpu build); until it does, transformers and peft do not import either"
)
GB = 1e9


@dataclass(frozen=True)
class Check:
    """A line of the table. Only the state `missing` makes the command fail."""

    name: str
    state: State
    finding: str
    remedy: str = ""


@dataclass(frozen=True)
class Package:
    """A distribution, the module whose import shows whether it works, and what it is for.

    Args:
        remedy: how to mend it; by default pip with the requirement that audiollm states.
        details: of the imported module: more about it; raises where it does not do what it is for.
    """

    name: str
    module: str
    purpose: str = ""
    needed: bool = True
    remedy: str = ""
    details: Callable[[Any], str] | None = None


def doctor() -> None:
    """Say what this machine has and lacks for audiollm, and how to mend it.

    The exit code is 1 when something that is needed is missing or does not load.
    """
    console = Console(file=sys.stdout)
    checks = list(_checks(console))
    rows: list[list[str | Text]] = [
        [check.name, Text(check.state, STYLES[check.state]), check.finding] for check in checks
    ]
    print_table(console, ["what", "state", "found"], rows, "audiollm doctor", figures=False, box=None)
    if remedies := [[check.name, check.remedy] for check in checks if check.remedy]:
        console.print()
        print_table(console, ["what", "remedy"], remedies, "how to mend it", figures=False, box=None)
    if missing := [check.name for check in checks if check.state == "missing"]:
        console.print(Text(f"\nneeded, and missing or not loading: {', '.join(missing)}", "bold red"))
        raise typer.Exit(1)
    console.print(Text("\nAll that is needed is here.", "green"))


def _checks(console: Console) -> Iterator[Check]:
    """All checks, one after the other, with progress; a look at the machine that fails is a warning."""
    torchaudio_loads = True
    with console.status("looking at this machine") as status:
        for package in PACKAGES:
            status.update(f"importing {package.name}")
            yield (check := _package(package, torchaudio_loads))
            torchaudio_loads &= (check.name, check.state) != ("torchaudio", "missing")
        for name, look in MACHINE.items():
            try:
                yield look()
            except Exception as error:
                yield Check(name, "warning", f"cannot be found out ({_one_line(error)})")
        status.update("loading stages and commands")
        for group in ("audiollm.stages", "audiollm.commands", "audiollm.codecs"):
            yield from _entry_points(group)


def _package(package: Package, torchaudio_loads: bool) -> Check:
    try:
        version, requirement = _stated(package.name)
    except Exception:  # without audiollm's metadata, or without `packaging`, the imports still say much
        version, requirement = "", None
    remedy = package.remedy or f"pip install '{package.name}{requirement.specifier if requirement else ''}'"
    finding, works = "not installed", False
    try:
        if version or importlib.util.find_spec(package.module.partition(".")[0]) is not None:
            finding, works = f"{version} {_quietly(lambda: _details(package))}".strip(), True
    except (Exception, SystemExit) as error:
        finding = f"{version} does not load: {_one_line(error)}".strip()
    if works and version and requirement and not requirement.specifier.contains(version, prereleases=True):
        return Check(package.name, "warning", f"{finding}; audiollm asks for {requirement.specifier}", remedy)
    if works:
        return Check(package.name, "ok", finding)
    if not package.needed:
        return Check(package.name, "optional", f"{finding} ({package.purpose})", remedy)
    if package.name == "torchaudio":
        return Check(package.name, "missing", f"{finding}. {TORCHAUDIO_NOTE}", remedy)
    return Check(package.name, "missing", finding, remedy if torchaudio_loads else "mend torchaudio first")


def _details(package: Package) -> str:
    with without_downloads():  # PEFT imports bitsandbytes, which would fetch code
        module = importlib.import_module(package.module)
    return package.details(module) if package.details else ""


def _quietly(call: Callable[[], Any]) -> Any:
    """Without what packages print when they are imported."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


def _stated(name: str) -> tuple[str, Any]:
    """The installed version, and what audiollm's metadata asks for (a `packaging` Requirement, or None)."""
    from packaging.requirements import Requirement

    stated = [Requirement(line) for line in importlib.metadata.requires("audiollm") or ()]
    requirement = next((requirement for requirement in stated if requirement.name == name), None)
    distribution = next(iter(importlib.metadata.distributions(name=name)), None)
    return distribution.version if distribution else "", requirement


def _sound_formats(soundfile: Any) -> str:
    formats = {*soundfile.available_formats(), *soundfile.available_subtypes("OGG")}
    if lacks := sorted({"MP3", "OPUS"} - formats):
        raise RuntimeError(f"libsndfile {soundfile.__libsndfile_version__} lacks {', '.join(lacks)}")
    return f"(libsndfile {soundfile.__libsndfile_version__}: WAV, FLAC, OGG, MP3, OPUS)"


def _espeak(loader: Any) -> str:
    import ctypes

    ctypes.CDLL(loader.get_library_path())
    return ""


# fmt: off
PACKAGES: tuple[Package, ...] = (
    Package("torch", "torch", remedy=TORCH_REMEDY, details=lambda torch: f"(CUDA: {torch.version.cuda or 'none'})"),
    Package("torchaudio", "torchaudio", remedy=TORCH_REMEDY),
    Package("transformers", "transformers.models.llama.modeling_llama"),
    *(Package(name, name) for name in ("accelerate", "peft", "encodec", "librosa", "webdataset")),
    Package("soundfile", "soundfile", remedy="pip install -U soundfile", details=_sound_formats),
    Package("av", "av", details=lambda av: f"(reads {av.codec.Codec('aac', 'r').long_name})"),
    Package("silero-vad", "silero_vad"),
    *(Package(name, name) for name in ("pocketsphinx", "speechmos", "pystoi", "onnxruntime", "jinja2")),
    Package("espeakng-loader", "espeakng_loader", details=_espeak),
    Package("matplotlib", "matplotlib.figure"),
    Package("deepspeed", "deepspeed", "strategy: zero2, zero3", False, "on Linux: pip install 'audiollm[deepspeed]'"),
    Package("flash-attn", "flash_attn", "faster attention on CUDA", False,
            "with a GPU and nvcc: pip install --no-build-isolation 'audiollm[flash]'"),
    Package("liger-kernel", "liger_kernel", "fused kernels on CUDA", False, "pip install 'audiollm[liger]'"),
    Package("bitsandbytes", "bitsandbytes", "frozen_weights: nf4", False, "pip install 'audiollm[nf4]'"),
    Package("ray", "ray", "annotation on a cluster", False, "pip install 'audiollm[ray]'"),
    Package("vllm", "vllm", "rollouts: vllm", False,
            "in an environment of its own: audiollm/rl/rollouts/served/README.md, rollouts.python names it"),
    Package("sglang", "sglang", "rollouts: sglang", False,
            "in an environment of its own: audiollm/rl/rollouts/served/README.md, rollouts.python names it"),
    Package("fastapi", "fastapi", "the server", False, "pip install 'audiollm[serve]'"),
    Package("uvicorn", "uvicorn", "the server", False, "pip install 'audiollm[serve]'"),
    Package("gradio", "gradio", "the studio", False, "pip install 'audiollm[studio]'"),
    Package("playwright", "playwright.sync_api", "the check of the studio", False, "pip install playwright"),
    Package("ai-edge-litert", "ai_edge_litert", "sound events", False, "pip install 'audiollm[events]'"),
    Package("faster-whisper", "faster_whisper", "a recognizer", False, "pip install 'audiollm[whisper]'"),
    Package("hibari-tts", "hibari", "spoken corpora", False, "pip install 'audiollm[voices]'"),
    Package("optuna", "optuna", "sweeps", False, "pip install 'audiollm[sweep]'"),
    Package("pesq", "pesq", "a metric", False, "with a C compiler: pip install 'audiollm[metrics]'"),
)
# fmt: on


def _python() -> Check:
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    remedy = "" if supported else "make the environment with Python 3.11, 3.12 or 3.13"
    return Check("Python", "ok" if supported else "missing", platform.python_version(), remedy)


def _cpu() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text(errors="replace").split()) if info.exists() else set()
    named = {"amx_bf16": "AMX bf16", "avx512_bf16": "AVX-512 bf16", "avx512f": "AVX-512", "avx2": "AVX2"}
    fast = [title for flag, title in named.items() if flag in flags]
    bf16 = [] if "amx_bf16" in flags else ["no AMX (training in fp32)"]
    return Check("CPU", "ok", ", ".join([f"{cores} cores", *fast, *bf16]))


def _memory() -> Check:
    import psutil

    memory, limit = psutil.virtual_memory(), Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.exists() else ""
    total = min(memory.total, int(allowed)) if allowed.isdigit() else memory.total
    finding = f"{total / GB:.1f} GB, {min(memory.available, total) / GB:.1f} GB free"
    remedy = "" if total >= 5 * GB else "the quickstart takes up to 4 GB"
    return Check("memory", "warning" if remedy else "ok", finding, remedy)


def _gpu() -> Check:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        names = [f"{device.name} ({device.total_memory / GB:.0f} GB)" for device in devices]
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
        return Check("GPU", "ok", ", ".join([*names, bf16]))
    if shutil.which("nvidia-smi"):
        remedy = "update its driver (nvidia-smi shows it): PyPI's torch needs one for CUDA 13"
        return Check("GPU", "warning", "an NVIDIA driver is here, but torch sees no GPU", remedy)
    return Check("GPU", "note", "none: the CPU is used, which is enough for size tiny")


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    remedy = "" if free >= 3 * GB else "make room, or put runs elsewhere: --runs FOLDER"
    return Check("disk", "warning" if remedy else "ok", f"{free / GB:.1f} GB free here", remedy)


def _chromium() -> Check:
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    remedy = "" if executable else "Debian: apt-get install chromium"
    return Check(
        "chromium",
        "ok" if executable else "optional",
        executable or "not installed (the check of the studio)",
        remedy,
    )


def _resemblyzer() -> Check:
    """The weights alone are looked for: the package itself imports a second voice activity detector."""
    from audiollm.onnx_models import package_file

    try:
        return Check("resemblyzer", "ok", str(package_file("resemblyzer", "pretrained.pt")))
    except FileNotFoundError:
        absence = "not installed (tells speakers apart: annotate --preset emilia)"
        return Check("resemblyzer", "optional", absence, "pip install --no-deps resemblyzer")


def _yamnet() -> Check:
    from audiollm.evaluate.judges.yamnet import default_path, find_yamnet

    try:
        path = find_yamnet()
    except ConfigError as error:
        return Check("yamnet.tflite", "warning", error.message, error.remedy)
    if path is None:
        remedy = f"docs/models.md says where it is published; put it at {default_path()}"
        return Check("yamnet.tflite", "optional", "not here (names sounds: --tagger auto)", remedy)
    return Check("yamnet.tflite", "ok", f"{path} (the published file, by its SHA-256)")


MACHINE = {
    "Python": _python, "CPU": _cpu, "memory": _memory, "GPU": _gpu, "disk": _disk, "chromium": _chromium,
    "resemblyzer": _resemblyzer, "yamnet.tflite": _yamnet,
}  # fmt: skip


def _entry_points(group: str) -> Iterator[Check]:
    """Check the entry points of a group: one line for all that load, and one for each that does not."""
    names = []
    for entry in sorted(importlib.metadata.entry_points(group=group), key=lambda entry: entry.name):
        try:
            _quietly(entry.load)
            names.append(entry.name)
        except (Exception, SystemExit) as error:
            finding = f"{entry.value} does not load: {_one_line(error)}"
            owner = entry.dist.name if entry.dist else "its package"
            yield Check(f"{group}: {entry.name}", "missing", finding, f"mend or reinstall {owner}")
    if names:
        yield Check(group, "ok", ", ".join(names))
    elif group != "audiollm.codecs":
        yield Check(group, "missing", "none that loads", "install audiollm itself: pip install -e .")
