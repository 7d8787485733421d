"""Two ranks over gloo are one: DDP, FSDP2, ZeRO; a run goes on at another number of ranks; who a process is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, multiprocessing, nn

from audiollm.data.delay import IGNORE
from audiollm.data.packing import PackedBatch, pack
from audiollm.data.template import Kind, TokenStream
from audiollm.files import read_json, read_jsonl, write_json
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.recipe import Recipe
from audiollm.runner import Context, StageError
from audiollm.train.checkpoint import consolidate, trained_weights
from audiollm.train.distributed import ALONE, Ranks, first_host, join, leave, rank_environment
from audiollm.train.loop import LoopConfig, Update, step_generator, train
from audiollm.train.losses import TokenLosses
from audiollm.train.strategy import choose_strategy

CPU = torch.device("cpu")
STEPS, SAMPLES, MICRO = 6, 8, 2
ENDED = "ended.json"


class Killed(Exception):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.layer(self.norm(hidden)))


class TwoBranches(nn.Module):
    """Rows are of one of two kinds and go through the branch of theirs, as text and audio do."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.text, self.audio = nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, rows: Tensor, is_audio: Tensor) -> Tensor:
        hidden = self.embed(rows)
        for block in self.blocks:
            hidden = block(hidden)
        out = torch.zeros_like(rows[:, 0])
        out[is_audio] = self.audio(hidden[is_audio])[:, 0].to(out.dtype)
        out[~is_audio] = self.text(hidden[~is_audio])[:, 0].to(out.dtype)
        return out


class Mixed:
    """Even samples are text and odd ones audio: of two ranks, one has text alone and the other audio alone."""

    def __init__(self, dtype: torch.dtype = torch.float64, kill_at: int = -1) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = TwoBranches().to(dtype)
        self.wrapped, self.dtype, self.kill_at, self.ranks = self.model, dtype, kill_at, ALONE

    def modules(self) -> dict[str, nn.Module]:
        return {"model": self.model}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        self.wrapped = modules["model"]

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["model"]}

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> list[Tensor]:
        if step == self.kill_at:
            raise Killed
        self.ranks = ranks
        rows = torch.randn(SAMPLES, 7, generator=step_generator(0, step, "rows"), dtype=torch.float64)
        is_audio = torch.arange(SAMPLES)[:, None] % 2
        table = torch.cat([rows.to(self.dtype), is_audio], dim=1)[ranks.rank :: ranks.world]
        return list(table.split(MICRO))

    def updates(self, batch: list[Tensor], step: int, steps: int) -> Iterator[Update]:
        total = int(self.ranks.sum(torch.tensor(sum(len(part) for part in batch))))
        assert total == SAMPLES
        figures: dict[str, float] = {"tokens": float(MICRO * len(batch))}
        yield Update(self._losses(batch, total), figures, losses=len(batch))

    def _losses(self, batch: list[Tensor], total: int) -> Iterable[Tensor]:
        for part in batch:
            made = self.wrapped(part[:, :6], part[:, 7] > 0)
            yield (made - part[:, 6]).square().sum() / total

    def evaluate(self, step: int) -> Mapping[str, float]:
        rows = torch.ones(2, 6, dtype=self.dtype)
        return {"ones": float(self.wrapped(rows, torch.tensor([True, False])).sum())}

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        return {}


class Game(Mixed):
    """A generator and a discriminator, each with its optimizer; the discriminator is called twice an update."""

    def __init__(self) -> None:
        super().__init__()
        self.critic: nn.Module = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.judge = self.critic

    def modules(self) -> dict[str, nn.Module]:
        return {"model": self.model, "critic": self.critic}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        self.wrapped, self.judge = modules["model"], modules["critic"]

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["model"], "critic": ["critic"]}

    def updates(self, batch: list[Tensor], step: int, steps: int) -> Iterator[Update]:
        rows = torch.cat(batch)
        made = self.wrapped(rows[:, :6], rows[:, 7] > 0)
        self.critic.requires_grad_(False)
        loss = -self.critic(made[:, None]).sum() / SAMPLES
        self.critic.requires_grad_(True)
        yield Update(loss, {})
        real, fake = self.judge(rows[:, 6:7]), self.judge(made.detach()[:, None])
        yield Update(((1 - real).relu().sum() + (1 + fake).relu().sum()) / SAMPLES, {}, "critic")


def loop(**changes: object) -> LoopConfig:
    values: dict[str, object] = {
        "seed": 1, "steps": STEPS, "minutes": None, "learning_rate": 0.01, "warmup_steps": 2, "ema_decay": 0.9,
        "log_every": 1, "evaluate_every": 3, "checkpoint_seconds": 0.0, "precision": "fp32", "report_to": (),
        "clip_norm": 0.5,
    }  # fmt: skip
    return LoopConfig(**{**values, **changes})  # type: ignore[arg-type]


def run(folder: Path, task: Mixed, ranks: Ranks = ALONE, **changes: object) -> dict[str, Any]:
    folder.mkdir(exist_ok=True, parents=True)
    recipe = Recipe("test", Path("test.yaml"), "tiny", 0, folder, (), {})
    return train(task, loop(**changes), folder, Context(folder, recipe, Console(quiet=True), {}, ranks), CPU)


def run_killed(folder: Path, task: Mixed, ranks: Ranks = ALONE, **changes: object) -> None:
    with pytest.raises(Killed):
        run(folder, task, ranks, **changes)


def on_two_ranks(work: Callable[[Path, Ranks], None], folder: Path) -> None:
    """Run `work` in two processes. One that aborts at its end, as FSDP2 now and then does, has done its work."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    try:
        multiprocessing.spawn(_rank, (work, str(folder), port), nprocs=2)
    except multiprocessing.ProcessExitedException:
        if not all((folder / f"{rank}-{ENDED}").exists() for rank in (0, 1)):
            raise
    for rank in (0, 1):
        (folder / f"{rank}-{ENDED}").unlink()


def _rank(rank: int, work: Callable[[Path, Ranks], None], folder: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    ranks = join()
    work(Path(folder), ranks)
    write_json(Path(folder) / f"{rank}-{ENDED}", True)
    leave(ranks)


# --------------------------------------------------------------------------------------- what the ranks do


def first_work(folder: Path, ranks: Ranks) -> None:
    with pytest.raises(StageError, match="fsdp2 has one optimizer"):
        run(folder / "refused", Game(), ranks, strategy="fsdp2")
    run(folder / "ddp", Mixed(), ranks, strategy="auto", best="ones")
    run(folder / "game", Game(), ranks, strategy="ddp", ema_decay=0.0)
    run(folder / "fsdp2", Mixed(), ranks, strategy="fsdp2")
    figures = run(folder / "bf16", Mixed(torch.float32), ranks, strategy="fsdp2", precision="bf16")
    assert ranks.gather(figures["ones"]) == [figures["ones"]] * 2
    again = run(folder / "bf16", Mixed(torch.float32, 0), ranks, strategy="fsdp2", precision="bf16")
    assert again["ones"] == figures["ones"]
    run_killed(folder / "moved", Mixed(kill_at=2), ranks, strategy="fsdp2")
    torch.manual_seed(ranks.rank)  # ranks that begin differently: the first one's weights are everyone's
    for name in ("ddp", "fsdp2"):
        model = TwoBranches()
        strategy = choose_strategy(name, ranks, CPU, None, 1.0)  # type: ignore[arg-type]
        strategy.prepare({"model": model}, {"main": ["model"]}, dict)
        weight = strategy.read(model.embed.weight).sum().item()
        assert len(set(ranks.gather(weight))) == 1, name
    assert ranks.mean({"both": ranks.rank, f"own/{ranks.rank}": 5.0}) == {
        "both": 0.5,
        "own/0": 5.0,
        "own/1": 5.0,
    }


def second_work(folder: Path, ranks: Ranks) -> None:
    run(folder / "moved", Mixed(), ranks, strategy="ddp")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("ranks")
    run(folder / "one", Mixed(), best="ones")
    run(folder / "one-game", Game(), ema_decay=0.0)
    on_two_ranks(first_work, folder)
    run_killed(folder / "moved", Mixed(kill_at=4))
    assert read_json(folder / "moved" / "checkpoint" / "state.json")["step"] == 4
    on_two_ranks(second_work, folder)
    return folder


def assert_same(folder: Path, other: Path, part: str, atol: float) -> None:
    found, expected = (all_tensors(one / "checkpoint", part) for one in (folder, other))
    assert found.keys() == expected.keys() and found
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=atol, msg=f"{folder.name} {part} {key}")


def all_tensors(folder: Path, part: str) -> dict[str, Tensor]:
    return {k: v for path in folder.glob(f"{part}*.safetensors") for k, v in load_file(path).items()}


def evaluations(folder: Path) -> list[float]:
    return [r["evaluation/ones"] for r in read_jsonl(folder / "metrics.jsonl") if "evaluation/ones" in r]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(folder / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "moved"])
def test_two_ranks_end_with_the_weights_of_one(runs: Path, name: str) -> None:
    """Weights, moments and averages to 1e-9 in float64; `moved` went on from 2 ranks on 1 and on 2 again."""
    for part in ("modules", "optimizers", "ema"):
        assert_same(runs / name, runs / "one", part, 1e-9)
    assert losses(runs / name) == pytest.approx(losses(runs / "one"), abs=1e-5)
    assert len(losses(runs / name)) == STEPS
    rows = [read_jsonl(runs / one / "metrics.jsonl") for one in (name, "one")]
    assert rows[0][2]["gradient_norm"] == pytest.approx(rows[1][2]["gradient_norm"], rel=1e-5)
    assert evaluations(runs / name) == pytest.approx(evaluations(runs / "one"), rel=1e-5)
    assert read_json(runs / name / "checkpoint" / "state.json")["tokens"] == STEPS * SAMPLES


def test_both_optimizers_of_a_game_are_reduced(runs: Path) -> None:
    for part in ("modules", "optimizers"):
        assert_same(runs / "game", runs / "one-game", part, 1e-9)


def test_parts_are_written_by_all_ranks_and_read_as_one_model(runs: Path, tmp_path: Path) -> None:
    files = {path.name for path in (runs / "fsdp2" / "checkpoint").iterdir()}
    assert {f"modules-0000{n}-of-00002.safetensors" for n in (1, 2)} < files
    consolidate(runs / "fsdp2", "model", tmp_path / "model", {"model_type": "two_branches"}, "2KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1, "a large model is in several files"
    consolidate(runs / "fsdp2", "model", tmp_path / "whole")
    model = TwoBranches().double()
    model.load_state_dict(load_file(tmp_path / "whole" / "model.safetensors"))
    run(tmp_path / "one", task := Mixed())
    rows, kinds = torch.randn(5, 6, dtype=torch.float64), torch.arange(5) % 2 > 0
    torch.testing.assert_close(model(rows, kinds), task.model(rows, kinds), rtol=0, atol=1e-9)


def test_the_best_weights_are_kept_by_all_strategies(runs: Path) -> None:
    best = [read_json(runs / name / "best" / "state.json") for name in ("one", "ddp")]
    assert best[0]["step"] == best[1]["step"] and best[0]["value"] == pytest.approx(
        best[1]["value"], abs=1e-9
    )
    found, expected = (trained_weights(runs / name, "model") for name in ("ddp", "one"))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-9)


def test_bf16_follows_fp32(runs: Path) -> None:
    assert losses(runs / "bf16") == pytest.approx(losses(runs / "one"), rel=0.05)
    assert losses(runs / "bf16") != losses(runs / "one")
    ends = [evaluations(runs / name)[-1] for name in ("bf16", "one")]
    assert ends[0] == pytest.approx(ends[1], rel=0.05) and ends[0] != ends[1]
    assert {v.dtype for v in all_tensors(runs / "bf16" / "checkpoint", "modules").values()} == {torch.float32}


# ------------------------------------------------------------------------------------------------- ZeRO


def zero_work(folder: Path, ranks: Ranks) -> None:
    for stage in ("zero2", "zero3"):
        run(folder / stage, Mixed(torch.float32), ranks, strategy=stage, ema_decay=0.0)
        run_killed(folder / f"{stage}-moved", Mixed(torch.float32, 2), ranks, strategy=stage, ema_decay=0.0)
        run(
            folder / f"{stage}-bf16",
            Mixed(torch.float32),
            ranks,
            strategy=stage,
            ema_decay=0.0,
            precision="bf16",
        )
        for wrong, message in (({}, "averaged weights"), ({"minutes": 1.0, "steps": None}, "give steps")):
            with pytest.raises(StageError, match=message):
                run(
                    folder / "refused",
                    Mixed(torch.float32),
                    ranks,
                    strategy=stage,
                    **{"ema_decay": 0.0 if wrong else 0.9, **wrong},
                )


def zero_again(folder: Path, ranks: Ranks) -> None:
    for stage in ("zero2", "zero3"):
        run(folder / f"{stage}-moved", Mixed(torch.float32), ranks, strategy=stage, ema_decay=0.0)


@pytest.mark.slow
def test_zero_is_one_process_too_and_goes_on_elsewhere(tmp_path: Path) -> None:
    """Slow: DeepSpeed compiles an extension when it is first used."""
    run(tmp_path / "one", Mixed(torch.float32), ema_decay=0.0)
    on_two_ranks(zero_work, tmp_path)
    for stage in ("zero2", "zero3"):
        run_killed(tmp_path / f"{stage}-moved", Mixed(torch.float32, 4), ema_decay=0.0)
    on_two_ranks(zero_again, tmp_path)
    for name in ("zero2", "zero3", "zero2-moved", "zero3-moved"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), abs=1e-5), name
        for part in ("modules", "optimizers"):
            assert_same(tmp_path / name, tmp_path / "one", part, 1e-5)
    for name in ("zero2-bf16", "zero3-bf16"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=0.1), name


# ------------------------------------------------------------------------------------------ the decoder


class Spoken(Mixed):
    """The project's own decoder on packs: the first rank's hold text alone, the second's audio alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.model = self.wrapped = TokenLosses(DualFFN(SHAPE)).to(dtype)
        self.model._no_split_modules = ("DualFFNLayer",)  # type: ignore[assignment]

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> list[PackedBatch]:
        self.ranks = ranks
        dice = step_generator(0, step, "streams")
        streams = [stream_of(Kind.AUDIO_OUT if n % 2 else Kind.TEXT, 9 + n, dice) for n in range(4)]
        return [pack([stream]) for stream in streams[ranks.rank :: ranks.world]]

    def updates(self, batch: list[PackedBatch], step: int, steps: int) -> Iterator[Update]:
        own = torch.tensor([[pack.counts[key] for key in ("text", "audio")] for pack in batch]).sum(dim=0)
        text, audio = self.ranks.sum(own).tolist()
        losses = (self.wrapped(pack) for pack in batch)
        yield Update((each["text"] / text + each["audio"] / audio for each in losses), {}, losses=len(batch))

    def evaluate(self, step: int) -> Mapping[str, float]:
        packed = pack([stream_of(Kind.TEXT, 9, step_generator(0, 0, "held out"))])
        return {"text": self.wrapped(packed)["text"].item()}


SHAPE = DualFFNConfig(
    vocab_size=23, num_codebooks=2, codebook_size=9, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2,
    head_dim=8, intermediate_size=32,
)  # fmt: skip


def stream_of(kind: Kind, length: int, dice: torch.Generator) -> TokenStream:
    """Random tokens of one kind, every one a target."""
    ids, codes = torch.randint(23, (length,), generator=dice), torch.randint(9, (length, 2), generator=dice)
    is_text = kind == Kind.TEXT
    return TokenStream(
        text_ids_S=ids if is_text else torch.zeros_like(ids),
        codes_SK=torch.zeros_like(codes) if is_text else codes,
        kinds_S=torch.full((length,), int(kind)),
        text_targets_S=ids if is_text else torch.full_like(ids, IGNORE),
        audio_targets_SK=torch.full_like(codes, IGNORE) if is_text else codes,
    )


def decoder_work(folder: Path, ranks: Ranks) -> None:
    for name in ("ddp", "fsdp2"):
        run(folder / name, Spoken(torch.float64), ranks, strategy=name, ema_decay=0.0)
    for name in ("zero2", "zero3"):
        run(folder / name, Spoken(torch.float32), ranks, strategy=name, ema_decay=0.0)


@pytest.mark.slow
def test_the_decoder_trains_on_text_alone_and_audio_alone(tmp_path: Path) -> None:
    """Slow: DeepSpeed compiles an extension when it is first used."""
    run(tmp_path / "one", task := Spoken(torch.float64), ema_decay=0.0)
    on_two_ranks(decoder_work, tmp_path)
    for name in ("ddp", "fsdp2", "zero2", "zero3"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), abs=1e-5), name
        assert len(losses(tmp_path / name)) == STEPS
    for name in ("ddp", "fsdp2"):
        assert_same(tmp_path / name, tmp_path / "one", "modules", 1e-9)
    alone, packed = Spoken(torch.float64), task.batch(99, torch.Generator())[1]
    alone.model.load_state_dict(trained_weights(tmp_path / "fsdp2", "model"))
    hidden = alone.model.eval().model(packed) - task.model.model(packed)
    assert hidden.abs().max() < 1e-9


# ----------------------------------------------------------------------------------- who am I, and --launch


def test_a_process_knows_its_rank_from_torchrun_and_from_slurm() -> None:
    assert rank_environment({}) is None
    assert rank_environment({"RANK": "0", "WORLD_SIZE": "1"}) is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert rank_environment({**torchrun, "HOME": "/"}) == torchrun
    with pytest.raises(ValueError, match="MASTER_ADDR, MASTER_PORT not"):
        rank_environment({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    batch_script = {"SLURM_JOB_ID": "123456", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"}
    assert rank_environment(batch_script) is None
    step = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
    found = rank_environment({**batch_script, **step, "SLURM_STEP_NODELIST": "gpu[03-07,12],login"})
    assert (
        found is not None and found["MASTER_ADDR"] == "gpu03" and 20_000 <= int(found["MASTER_PORT"]) < 40_000
    )
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("9", "16", "1")
    assert [first_host(nodes) for nodes in ("n1", "n1,n2", "a-[1,4]", "rack2-gpu[007-9]")] == [
        "n1", "n1", "a-1", "rack2-gpu007",
    ]  # fmt: skip


LAUNCHED = """
import os
import sys
from pathlib import Path

from rich.console import Console

from audiollm.recipe import Recipe, RecipeStage, Stage, StageConfig
from audiollm.runner import StageError, run_recipe
from audiollm.train.distributed import join, launch, leave

folder, fails = Path(sys.argv[1]), sys.argv[2]


def note(name):
    def run(config, context):
        ranks = context.ranks
        total = sum(ranks.gather(ranks.rank + 1))
        if fails == f"{name}{ranks.rank}" or fails == name:
            raise StageError(f"{name} broke on rank {ranks.rank}", "mend it", 3)
        (context.folder / f"{ranks.rank}.txt").write_text(str(total))
        return {"total": total}

    return run


stages = []
for name, all_ranks in (("prepare", False), ("train", True), ("report", False)):
    stage = Stage(name, StageConfig, note(name), {}, "notes", reads_run=name == "report", all_ranks=all_ranks)
    stages.append(RecipeStage(name, stage, StageConfig(), folder / name, (), ()))
ranks = join()
recipe = Recipe("demo", Path("demo.yaml"), "tiny", 0, folder, tuple(stages), {})
try:
    run_recipe(recipe, Console(quiet=True), ranks=ranks)
except StageError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
leave(ranks)
"""


@pytest.mark.parametrize(
    ("fails", "code", "noted"),
    [
        ("none", 0, {"prepare/0.txt": "1", "train/0.txt": "3", "train/1.txt": "3", "report/0.txt": "1"}),
        ("train", 3, {"prepare/0.txt": "1", "report/0.txt": "1"}),
        ("prepare", 3, {"report/0.txt": "1"}),
    ],
)
def test_launched_processes_share_the_training_and_a_failure_ends_all(
    tmp_path: Path, fails: str, code: int, noted: dict[str, str]
) -> None:
    """Through the elastic launcher, in processes of their own: which ranks ran what, and what is told."""
    (tmp_path / "launched.py").write_text(LAUNCHED)
    arguments = [str(tmp_path / "run"), fails]
    start = f"import sys; from audiollm.train.distributed import launch; sys.exit(launch(2, 'launched', {arguments}))"
    done = subprocess.run(
        [sys.executable, "-c", start], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    found = {str(p.relative_to(tmp_path / "run")): p.read_text() for p in (tmp_path / "run").glob("*/*.txt")}
    assert found == noted
    if code:
        assert f"{fails} broke on rank 0" in done.stderr


def test_the_launch_option_is_not_passed_on() -> None:
    from audiollm.commands import without_option

    assert without_option(["run", "a.yaml", "--launch", "8", "x=1"], "--launch") == ["run", "a.yaml", "x=1"]
    assert without_option(["run", "--launch=8", "a.yaml"], "--launch") == ["run", "a.yaml"]
