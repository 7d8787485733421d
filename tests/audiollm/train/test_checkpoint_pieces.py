"""Checkpoints in pieces: each rank writes what it holds, no tensor is sent, and any strategy reads them bit for bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from audiollm.errors import StageError
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.train.loop import loop as loop_module
from audiollm.train.loop.checkpoint import load_part, open_part, read_state, save_checkpoint, trained_weights
from audiollm.train.loop.layout import layout_metadata
from audiollm.train.loop.optim import Averages, build_optimizer
from audiollm.train.parallel.pieces import Piece, padded_piece
from audiollm.train.parallel.strategy import Strategy, choose_strategy
from tests.audiollm.train.two_ranks import CPU, Mixed, all_tensors, on_two_ranks, run

PARTS = ("modules", "optimizers", "ema")
ZERO = ("zero2", "zero3")


class Uneven(nn.Module):
    """Parameters whose rows and elements two ranks cannot share evenly, one of a single row, one frozen; buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.three, self.one = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(1, 3))
        self.five, self.frozen = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5, 3), False)
        self.table = nn.Parameter(torch.randn(1001, 129))  # too large for ZeRO 3 to keep whole on every rank
        self.head = nn.Parameter(torch.randn(129, 3))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("average", torch.randn(3))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = (rows + self.five) @ self.three.T * self.one + rows @ self.frozen
        return torch.tanh(hidden @ self.head.T @ self.table.T).square().sum()


class FloatsSent(TorchDispatchMode):
    """Notes each collective operation on a tensor of floats. Strings and sizes, which ranks agree by, are no floats."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it becomes operations on shards, which come here in turn
        leaves = tree_leaves((args, kwargs))
        if "c10d" in func.namespace and any(isinstance(t, Tensor) and t.is_floating_point() for t in leaves):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Training:
    """A strategy with a model, its optimizer and, where it can, averaged weights."""

    def __init__(self, name: str, ranks: Ranks, seed: int = 0) -> None:
        self.name, self.ranks, self.model = name, ranks, Uneven(seed)
        self.strategy: Strategy = choose_strategy(name, ranks, CPU, None, 1.0)  # type: ignore[arg-type]
        build = lambda: {"main": build_optimizer(self.model.named_parameters(), 0.1, (0.9, 0.99))}  # noqa: E731
        self.wrapped = self.strategy.prepare({"model": self.model}, {"main": ["model"]}, build)["model"]
        averaged = () if name in ZERO else [(f"model.{k}", p) for k, p in self.model.named_parameters()]
        self.averages = Averages(averaged, 0.9, self.strategy.local)

    def tensors(self) -> dict[str, Tensor]:
        return {f"model.{key}": tensor for key, tensor in self.model.state_dict(keep_vars=True).items()}

    def step(self, number: int) -> None:
        optimizer = self.strategy.optimizers["main"]
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.zero_grad()
        rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
        self.strategy.backward(self.wrapped(rows), "main", last=True)
        self.strategy.step("main", 1.0)
        self.averages.update(number)

    def save(self, folder: Path) -> None:
        parts = {
            "modules": {name: partial(self.strategy.held, t) for name, t in self.tensors().items()},
            "optimizers": self.strategy.optimizer_state(),
            "ema": {name: partial(self.strategy.held, t) for name, t in self.averages.tensors.items()},
        }
        save_checkpoint(folder / "checkpoint", parts, {"step": 2}, self.ranks, keep_before=False)

    def load(self, folder: Path) -> None:
        load_part(folder / "checkpoint", "modules", self.tensors(), self.strategy.write)
        with open_part(folder / "checkpoint", "optimizers") as readers:
            self.strategy.restore_optimizers(readers)
        with open_part(folder / "checkpoint", "ema") as readers:
            has_averages = bool(readers)
        if has_averages and self.averages.tensors:
            load_part(folder / "checkpoint", "ema", self.averages.tensors, self.strategy.write)

    def gathered(self) -> dict[str, dict[str, Tensor]]:
        """Gather the tensors of all ranks by the libraries' own functions."""
        if self.name in ZERO:
            from deepspeed import zero
            from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

            own = self.tensors()
            with zero.GatheredParameters([self.model.frozen], enabled=self.name == "zero3"):
                frozen = {"model.frozen": self.model.frozen.detach().clone()}
            trained = {name: t for name, t in own.items() if t.requires_grad}
            return {
                "modules": own | frozen | {name: safe_get_full_fp32_param(t) for name, t in trained.items()},
                "optimizers": {
                    f"main/{name}.{key}": safe_get_full_optimizer_state(t, key)
                    for name, t in trained.items()
                    for key in ("exp_avg", "exp_avg_sq")
                },
            }
        optimizer = self.strategy.optimizers["main"]
        moments = {
            f"main/{name}.{key}": value
            for name, t in self.tensors().items()
            for key, value in optimizer.state.get(t, {}).items()
        }
        found = {"modules": self.tensors(), "optimizers": moments, "ema": self.averages.tensors}
        return {
            part: {k: t.full_tensor() if hasattr(t, "full_tensor") else t for k, t in own.items()}
            for part, own in found.items()
        }


def assert_identical(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() >= expected.keys() and expected, what
    for name, value in expected.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype, f"{what} {name}"
        assert torch.equal(found[name], value), f"{what} {name}"


def save_in_pieces(folder: Path, ranks: Ranks, names: Sequence[str]) -> None:
    for name in names:
        training = Training(name, ranks)
        for number in range(2):
            training.step(number)
        with FloatsSent() as sent:
            training.save(folder / name)
        assert not sent.names, name
        with FloatsSent() as sent:
            whole = training.gathered()
        assert sent.names, "gathering would have been seen"
        for part, tensors in whole.items():
            assert_identical(all_tensors(folder / name / "checkpoint", part), tensors, f"{name} {part}")
        ranks.barrier()


def load_and_save(folder: Path, ranks: Ranks, sources: Sequence[str], targets: Sequence[str]) -> None:
    """Under each target, go on from each source's checkpoint and save it again: nothing may change."""
    for target in targets:
        training = Training(target, ranks, seed=1)
        for source in sources:
            training.load(folder / source)
            training.save(folder / "again")
            for part in ("modules", "optimizers"):
                found, expected = (
                    all_tensors(folder / one / "checkpoint", part) for one in ("again", source)
                )
                assert_identical(found, expected, f"{source} -> {target} {part}")
            ranks.barrier()


def assert_shared_evenly(folder: Path, parts: Sequence[str]) -> None:
    for part in parts:
        sizes = [path.stat().st_size for path in sorted((folder / "checkpoint").glob(f"{part}-*"))]
        assert len(sizes) == 2 and max(sizes) < 0.51 * sum(sizes), (folder.name, part, sizes)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks under FSDP2."""
    folder: Path = tmp_path_factory.mktemp("pieces")
    on_two_ranks(partial(save_in_pieces, names=("fsdp2",)), folder)
    return folder


def test_fsdp2_ranks_write_what_they_hold_and_others_go_on_from_it(pieces: Path) -> None:
    assert_shared_evenly(pieces / "fsdp2", PARTS)
    training = Training("auto", ALONE, seed=1)
    training.load(pieces / "fsdp2")
    training.save(pieces / "one")
    for part in PARTS:
        found, expected = (all_tensors(pieces / name / "checkpoint", part) for name in ("one", "fsdp2"))
        assert_identical(found, expected, part)
    on_two_ranks(partial(load_and_save, sources=("fsdp2", "one"), targets=("ddp", "fsdp2")), pieces)


@pytest.mark.slow
def test_zero_ranks_write_what_they_hold_and_others_go_on_from_it(pieces: Path) -> None:
    """Slow: DeepSpeed compiles an extension when it is first used."""
    on_two_ranks(partial(save_in_pieces, names=ZERO), pieces)
    for name in ZERO:
        assert_shared_evenly(pieces / name, ("modules", "optimizers"))
    load_and_save(pieces, ALONE, ZERO, ("auto",))
    targets = ("ddp", "fsdp2", *ZERO)
    on_two_ranks(partial(load_and_save, sources=("fsdp2", *ZERO), targets=targets), pieces)


def whole_run(folder: Path, ranks: Ranks) -> None:
    """The loop's own saves, of checkpoints and of the best weights, send nothing either."""
    sent = FloatsSent()
    save, keep = loop_module._Run._save, loop_module.Best.keep

    def watched_save(self: Any) -> None:
        with sent:
            save(self)

    def watched_keep(self: Any, *given: Any) -> None:
        with sent:
            keep(self, *given)

    loop_module._Run._save, loop_module.Best.keep = watched_save, watched_keep  # type: ignore[method-assign]
    run(folder / "run", Mixed(), ranks, strategy="fsdp2", best="ones")
    assert not sent.names


def test_no_tensor_is_sent_when_a_run_saves(tmp_path: Path) -> None:
    on_two_ranks(whole_run, tmp_path)
    assert read_state(tmp_path / "run" / "best") and read_state(tmp_path / "run" / "checkpoint")


# ------------------------------------------------------------------------------------------ the files


def write_pieces(folder: Path, *ranks: dict[str, Piece]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, own in enumerate(ranks, 1):
        path = folder / f"modules-{number:05d}-of-{len(ranks):05d}.safetensors"
        save_file({name: piece.values.clone() for name, piece in own.items()}, path, layout_metadata(own))
    return folder


WHOLE = torch.arange(15.0).reshape(5, 3)


def piece(start: int, stop: int, shape: tuple[int, ...] = (5, 3)) -> Piece:
    return Piece(shape, start, WHOLE.flatten()[start:stop])


@pytest.mark.parametrize("cuts", [(0, 8, 15), (0, 0, 15), (0, 15, 15), (0, 1, 2, 15), (0, 7, 7, 15)])
def test_pieces_are_joined_wherever_they_are_cut(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    own = [piece(start, stop) for start, stop in pairwise(cuts)]
    for order in (own, own[::-1]):
        with open_part(write_pieces(tmp_path, *({"a": each} for each in order)), "modules") as readers:
            assert torch.equal(readers["a"](), WHOLE)


@pytest.mark.parametrize("shape", [(), (0, 4), (1,)])
def test_small_and_empty_tensors_are_joined(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = torch.ones(shape, dtype=torch.bfloat16)
    padded = torch.ones(1 if values.numel() else 0, dtype=torch.bfloat16)
    ranks = [{"a": padded_piece(shape, padded, rank)} for rank in range(3)]
    with open_part(write_pieces(tmp_path, *ranks), "modules") as readers:
        found = readers["a"]()
        assert torch.equal(found, values) and found.dtype == values.dtype and found.shape == shape


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ([piece(0, 8), piece(9, 15)], r"modules-00001-of-00002.*lack elements 8 to 8 of the 15 of model\.a"),
        (
            [piece(0, 8), piece(8, 14)],
            r"modules-00001-of-00002.*lack elements 14 to 14 of the 15 of model\.a",
        ),
        ([piece(0, 0), piece(8, 15)], r"lack elements 0 to 7 of the 15 of model\.a"),
        ([piece(0, 0), piece(0, 0)], r"lack elements 0 to 14 of the 15 of model\.a"),
        ([piece(0, 8), piece(6, 15)], r"modules-00002-of-00002.*elements 6 to 7 of model\.a are in another"),
        (
            [piece(0, 15), piece(0, 15)],
            r"modules-00002-of-00002.*elements 0 to 14 of model\.a are in another",
        ),
        ([piece(0, 8), piece(8, 15, (15,))], r"modules-00002-of-00002.*model\.a has shape \[15\].*\[5, 3\]"),
        ([piece(0, 8, (3, 3)), piece(8, 15, (3, 3))], r"modules-00002-of-00002.*more than its 9 elements"),
    ],
)
def test_pieces_that_do_not_make_up_a_tensor_are_named(
    tmp_path: Path, own: list[Piece], message: str
) -> None:
    folder = write_pieces(tmp_path / "checkpoint", *({"model.a": each} for each in own))
    with pytest.raises(StageError, match=message) as found, open_part(folder, "modules"):
        pass
    assert f"remove {folder}" in str(found.value)


def lose(file: Path, name: str) -> None:
    """Write the file without that tensor, and its size as if that had been meant."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file({key: value for key, value in load_file(file).items() if key != name}, file, metadata)
    state = json.loads((file.parent / "state.json").read_text())
    del state["sha256"], state["state_sha256"]
    state["files"][file.name] = file.stat().st_size
    (file.parent / "state.json").write_text(json.dumps(state))


def test_a_lost_piece_ends_a_resume_and_an_export(pieces: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for path in (pieces / "fsdp2" / "checkpoint").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    assert trained_weights(tmp_path, "model").keys() == {
        name.removeprefix("model.") for name in all_tensors(folder, "modules")
    }
    # one row, of which the second rank has none: even that rank's file tells that there is such a tensor
    lose(folder / "modules-00001-of-00002.safetensors", "model.one")
    message = r"modules-00002-of-00002\.safetensors .*lack elements 0 to 2 of the 3 of model\.one"
    with pytest.raises(StageError, match=message):
        trained_weights(tmp_path, "model")
    with pytest.raises(StageError, match=message):
        Training("auto", ALONE).load(tmp_path)


def test_one_rank_writes_files_without_a_layout(tmp_path: Path) -> None:
    Training("fsdp2", ALONE).save(tmp_path)
    file = tmp_path / "checkpoint" / "modules.safetensors"
    assert file.read_bytes() == save(load_file(file)), "as before there were pieces, byte for byte"


def test_files_of_whole_tensors_from_several_ranks_are_read(tmp_path: Path) -> None:
    """Checkpoints that were written before there were pieces."""
    for number, name in enumerate(("a", "b"), 1):
        save_file({name: WHOLE + number}, tmp_path / f"modules-{number:05d}-of-00002.safetensors")
    found = all_tensors(tmp_path, "modules")
    assert_identical(found, {"a": WHOLE + 1, "b": WHOLE + 2}, "whole")
