"""Cost of the studio: from the click to playable sound in Chromium against a new process per request; a long
waveform; memory after 5 edits and after more (50 with `--full`).

A new process per request is how the page of ThinkSound's authors works; here it is our own `audiollm sound generate`.
Both use the same checkpoint of random weights. Costs are CPU-seconds of the server (without the browser) or process,
less the sampler's own; the same of the seconds that a person waits has its own line. Prints a JSON line per case. It
needs gradio, playwright (pip install playwright) and Debian's chromium.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import soundfile
import torch
from measure import bench_parser, parse_options, print_row

from audiollm.autoencoder import load_autoencoder
from audiollm.flow.generator import SoundGenerator
from audiollm.flow.model.mmdit import MMDiTConfig
from audiollm.flow.model.sampling import SamplerSettings
from audiollm.flow.service import SoundOrder, make_ordered
from audiollm.flow.sound_model import SoundModel, SoundModelConfig, condition_facts
from pipelines.studio.waveforms import measure_peaks
from tokenizer.continuous.model import AudioVAE, VAEConfig

RATE, LATENT, CLIP_S, STEPS = 16_000, 48, 3.0, 8
CAPTION = "a bell rings over rain"
CODE = "import sys; from audiollm.commands.cli import main; sys.argv[0] = 'audiollm'; main()"


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--clicks", type=int, default=2, help="sounds of either way")
    parser.add_argument("--edits", type=int, default=10, help="edits for the memory; 0: without them")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of the waveform that is drawn; 0: without it"
    )
    arguments = parse_options(parser, clicks=5, edits=50, minutes=60.0)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("no chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run = write_run(folder / "run")
        sampler_cpu_s, sampler_s = sampler_seconds(run)
        recording = folder / "rain.wav"
        noise_N = np.random.default_rng(0).normal(0, 0.1, round(CLIP_S * RATE))
        soundfile.write(recording, noise_N, RATE)
        with served(folder, run) as (url, process), opened_page(chromium, url) as page:
            open_file(page, recording)
            click_to_sound(page, process)  # what is made once
            clicks = [click_to_sound(page, process) for _ in range(arguments.clicks)]
            commands = [new_process(run, folder / "made.wav") for _ in range(arguments.clicks)]
            ours, peer = (median(cpu for _, cpu in costs) - sampler_cpu_s for costs in (clicks, commands))
            print_row("studio", "click_to_sound", ours, peer, "CPU-s")
            ours, peer = (median(wall for wall, _ in costs) - sampler_s for costs in (clicks, commands))
            print_row("studio", "click_to_sound_waited", ours, peer, "s", sampler_s=round(sampler_s, 3))
            if arguments.edits:
                show_memory(page, process, arguments.edits)
            if arguments.minutes:
                show_hour(page, folder, arguments.minutes)


def write_run(run: Path) -> Path:
    """A run as `recipes/thinksound/tiny.yaml` makes it, with random weights."""
    torch.manual_seed(0)
    config = VAEConfig(
        sample_rate=RATE, channels=1, mel_hop_samples=192, n_fft=768, num_mels=64, latent_dim=LATENT,
        mel_hidden_size=64, hidden_size=96, encoder_layers=(1, 1), decoder_layers=(1, 1),
    )  # fmt: skip
    AudioVAE(config).save_pretrained(run / "train_vae" / "model")
    autoencoder = load_autoencoder(str(run / "train_vae"))
    shape = MMDiTConfig(
        latent_dim=LATENT, latent_rate=RATE / autoencoder.hop_samples, hidden_size=128, num_heads=4,
        multi_stream_blocks=2, single_stream_blocks=2, frames_dim=0, sync_dim=0, caption_dim=64, cot_dim=64,
    )  # fmt: skip
    words = {name: condition_facts(kind="words", width=64) for name in ("caption", "cot")}
    SoundModel(
        SoundModelConfig(
            "native",
            vars(shape),
            autoencoder.digest,
            RATE,
            1,
            autoencoder.hop_samples,
            words,
            ("�", "a", "bell", "rain"),
            0.2,
            0.1,
            True,
            4.0,
        )
    ).save_pretrained(run / "train_flow" / "model")
    return run


def sampler_seconds(run: Path) -> tuple[float, float]:
    """CPU-seconds and seconds that the sampler itself takes, in a process that has done it before."""
    generator = SoundGenerator.load(run / "train_flow", str(run / "train_vae"))
    order, costs = SoundOrder(CAPTION, CLIP_S), []
    for _ in range(4):
        began, cpu_before = time.perf_counter(), time.process_time()
        make_ordered(generator, order, SamplerSettings(steps=STEPS, guidance=4.5), "0")
        costs.append((time.process_time() - cpu_before, time.perf_counter() - began))
    return median(cpu for cpu, _ in costs[1:]), median(wall for _, wall in costs[1:])


@contextmanager
def served(folder: Path, run: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The studio in a process of its own, ready to answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["studio", "--model", str(run), "--folder", str(folder / "work"), "--port", str(port)]
    process = subprocess.Popen([sys.executable, "-c", CODE, *options], stdout=subprocess.DEVNULL)
    try:
        for _ in range(3000):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def opened_page(chromium: str, url: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(300_000)
        page.goto(url)
        page.wait_for_selector("#studio[data-ready=yes]")
        yield page
        browser.close()


def open_file(page: Any, path: Path) -> float:
    """Seconds from choosing a file to its drawn waveform."""
    began = time.perf_counter()
    page.set_input_files("#st-open", str(path))
    page.wait_for_function(
        "name => document.getElementById('st-projects').selectedOptions[0].text === name", arg=path.name
    )
    page.wait_for_selector(".st-version")
    page.wait_for_function("document.getElementById('st-wave').dataset.drawn")
    return time.perf_counter() - began


def click_to_sound(page: Any, process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Seconds from the click on Generate until the browser can play the new version, and the server's CPU-seconds."""
    count = page.locator(".st-version").count()
    page.fill("#st-caption", CAPTION)
    page.evaluate(f"document.getElementById('st-steps').value = '{STEPS}'")
    began, cpu_before = time.perf_counter(), _server_cpu(process)
    page.click("#st-generate")
    page.wait_for_function(
        f"document.querySelectorAll('.st-version').length > {count}"
        " && document.getElementById('st-audio-a').readyState >= 3",
        polling=10,
    )
    return time.perf_counter() - began, _server_cpu(process) - cpu_before


def new_process(run: Path, out: Path) -> tuple[float, float]:
    """Seconds of a process that makes the same sound, and its CPU-seconds."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    options = ["--caption", CAPTION, "--duration", str(CLIP_S), "--steps", str(STEPS), "-o", str(out)]
    subprocess.run(
        [sys.executable, "-c", CODE, "sound", "generate", str(run), *options],
        check=True, stdout=subprocess.DEVNULL, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu_s


def _server_cpu(process: subprocess.Popen[bytes]) -> float:
    """CPU-seconds of the server and its helpers so far."""
    server = psutil.Process(process.pid)
    times = [member.cpu_times() for member in (server, *server.children(recursive=True))]
    return sum(spent.user + spent.system for spent in times)


def show_memory(page: Any, process: subprocess.Popen[bytes], edits: int) -> None:
    """Memory of the server after 5 edits and after many."""
    memory_mb = {}
    page.evaluate("document.getElementById('st-steps').value = '2'")
    for number in range(1, edits + 1):
        count = page.locator(".st-version").count()
        page.fill("#st-from", "1")
        page.fill("#st-to", "1.5")
        page.fill("#st-sound", f"bell {number}")
        page.click("#st-apply")
        page.wait_for_function(f"document.querySelectorAll('.st-version').length > {count}")
        if number in (5, edits):
            memory_mb[number] = psutil.Process(process.pid).memory_info().rss / 1e6
    growth = round(memory_mb[edits] / memory_mb[5], 3)
    print_row("studio", f"memory_after_{edits}_edits", memory_mb[edits], memory_mb[5], "MB", growth=growth)


def show_hour(page: Any, folder: Path, minutes: float) -> None:
    """Seconds to measure a long waveform, to open its file, and to draw a part of it."""
    path = folder / "hour.wav"
    generator = np.random.default_rng(1)
    with soundfile.SoundFile(path, "w", 44_100, 1, "PCM_16") as file:
        for _ in range(round(minutes)):
            file.write(generator.normal(0, 0.1, 60 * 44_100).astype(np.float32))
    began = time.perf_counter()
    measure_peaks(path)
    measured_s = time.perf_counter() - began
    opened_s = open_file(page, path)
    began = time.perf_counter()
    page.evaluate("delete document.getElementById('st-wave').dataset.drawn")
    page.click("#st-zoom-in")
    page.wait_for_function("document.getElementById('st-wave').dataset.drawn", polling=10)
    print_row(
        "studio", f"waveform_of_{minutes:g}_minutes", time.perf_counter() - began, None, "s",
        measured_s=round(measured_s, 3), opened_s=round(opened_s, 3),
    )  # fmt: skip


if __name__ == "__main__":
    main()
