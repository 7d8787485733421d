"""What all proofs share: the command line, chains of stages with seeds and arms, scores of answers, JSON lines.

A proof runs chains of stages in a folder of `runs`; a chain is a recipe, `proofs/NAME.yaml` or `proofs/NAME_MORE.yaml`.
Its block `seeds` is repeated for every seed (`${seed}`), every other block with `each` for every arm and seed (stages
are named STAGE_ARM_SEED; an arm with `seeds`, a list or `first`, is run with these alone). Stages that are done are not
done again, and any setting is overridden by name: `first_1.steps=100`, or `first.steps=100` for all seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy import stats

from audiollm.data.records.sample import Sample, write_samples
from audiollm.evaluate.listening.audio_qa import Question, evaluate_audio_qa
from audiollm.evaluate.listening.replies import ask_all, by_answerer
from audiollm.evaluate.report.store import RowStore
from audiollm.evaluate.subjects.loading import load_answerer
from audiollm.files.atomic import read_json
from audiollm.recipe.config import apply_overrides, load_document, split_stage
from audiollm.recipe.repeat import REPEAT, expand, override_targets
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import Recipe, load_recipe

CHAINS = Path(__file__).parent / "proofs"
SEEDS = (1, 2, 3)
"""Seeds of a proof's models. Settings were chosen with seed 0, which is not among them."""

Figures = Mapping[str, Any]


def proof_parser(description: str | None, seeds: Sequence[int] | None = SEEDS) -> argparse.ArgumentParser:
    """The options of every proof.

    Args:
        seeds: by default; None: the proof takes none.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of real recordings")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    if seeds:
        parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("overrides", nargs="*", default=[], help="settings of the stages: first.steps=100")
    return parser


def check_data(data: Path, *folders: str) -> None:
    """
    Raises:
        SystemExit: one of the folders is not in `data`.
    """
    for folder in folders:
        if not (data / folder).is_dir():
            raise SystemExit(
                f"no recordings in {data / folder}: give the folder of real recordings with --data"
            )


class Proof:
    """Chains of stages in one folder of `runs`.

    Args:
        seeds: of the chains' blocks.
        overrides: settings of stages, by the user.
        chains: those that are run, for the names that overrides may have.
        threads: of torch; None: as many as it takes by itself.

    Raises:
        SystemExit: an override names a setting of no chain.
    """

    def __init__(
        self,
        folder: Path,
        seeds: Sequence[int] = (),
        overrides: Sequence[str] = (),
        chains: Sequence[str] = (),
        threads: int | None = 1,
    ) -> None:
        self.folder, self.seeds, self.console = folder.resolve(), tuple(seeds), Console(stderr=True)
        self._overrides = overrides
        if threads is not None:
            torch.set_num_threads(threads)
        names = set[str]()
        for chain in chains:
            names |= _setting_names(chain, self._block_overrides(chain, {}, None))
        for text in overrides:
            if _first_word(text) not in names:
                raise SystemExit(
                    f"{text}: no stage or key of {', '.join(f'proofs/{c}.yaml' for c in chains)}"
                )

    def run(
        self,
        chain: str,
        by_seed: Mapping[int, Figures] | None = None,
        arms: Sequence[str] | None = None,
        **values: Any,
    ) -> None:
        """Run the stages of a chain.

        Args:
            by_seed: further values of the blocks.
            arms: those that are run; None: all.
            values: of the chain's keys; `folder` is the run's.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        run_recipe(self.load(chain, by_seed, arms, **values), self.console)

    def load(
        self,
        chain: str,
        by_seed: Mapping[int, Figures] | None = None,
        arms: Sequence[str] | None = None,
        absent: list[Path] | None = None,
        **values: Any,
    ) -> Recipe:
        """A chain as a recipe that is typed.

        Args:
            absent: receives the inputs that do not exist; None: they are an error.
        """
        blocks = self._block_overrides(chain, by_seed or {}, arms)
        names = _setting_names(chain, blocks)
        values |= {"folder": self.folder} if "folder" in names else {}
        overrides = [
            *blocks,
            *(f"{key}={json.dumps(value, default=str)}" for key, value in values.items()),
            *(text for text in self._overrides if _first_word(text) in names),
        ]
        return load_recipe(
            CHAINS / f"{chain}.yaml", overrides, self.folder.name, self.folder.parent, absent=absent
        )

    def stages(self, *kinds: str) -> list[str]:
        """The names of these stages for every seed."""
        return [f"{kind}_{seed}" for seed in self.seeds for kind in kinds]

    def arm_stages(self, chain: str) -> list[str]:
        """The names of the stages of all blocks of a chain, seed after seed."""
        names = []
        for name, settings in _blocks(chain):
            inner = [parts[0] for entry in settings["stages"] if (parts := split_stage(entry))]
            names += [f"{stage}_{key}" for key in self._passes(name, settings) for stage in inner]
        return names

    def figures(self, stage: str) -> dict[str, Any]:
        """The figures that a stage ended with."""
        figures: dict[str, Any] = read_json(self.folder / stage / "stage.json")["figures"]
        return figures

    def cpu_minutes(self, stage: str) -> float:
        """CPU time that a training took."""
        return round(float(self.figures(stage)["cpu_seconds"]) / 60, 3)

    def score(self, stage: str, questions: Sequence[Question], max_tokens: int) -> dict[str, Any]:
        """Ask a model all questions, greedily, and score its answers as `audiollm evaluate audio-qa` does."""
        subject = load_answerer(str(self.folder / stage / "model"), None, max_tokens=max_tokens)
        inquiries = [question.inquiry(Path("/")) for question in questions]
        store = RowStore(self.folder / "answers" / stage / "kept.jsonl")
        replies = ask_all(by_answerer(subject), subject.fingerprint, inquiries, store, lambda _: None)
        return dict(evaluate_audio_qa(questions, replies, Path("/")).result)

    def _block_overrides(
        self, chain: str, by_seed: Mapping[int, Figures], arms: Sequence[str] | None
    ) -> list[str]:
        """The seeds, and the arms of every seed, in place of those that the chain has."""
        if not self.seeds:
            return []
        return [
            f"{name}.each={json.dumps(self._passes(name, settings, by_seed, arms))}"
            for name, settings in _blocks(chain)
        ]

    def _passes(
        self,
        block: str,
        settings: Figures,
        by_seed: Mapping[int, Figures] | None = None,
        arms: Sequence[str] | None = None,
    ) -> dict[str, Figures]:
        """Suffix of the stages of each pass of a block -> its values."""
        if block == "seeds":
            return {str(seed): {"seed": seed, **(by_seed or {}).get(seed, {})} for seed in self.seeds}
        passes: dict[str, Figures] = {}
        for seed in self.seeds:
            for arm, values in settings["each"].items():
                arm_seeds = values.get("seeds", self.seeds)
                if seed in (self.seeds[:1] if arm_seeds == "first" else arm_seeds) and arm in (arms or [arm]):
                    text = json.dumps(values).replace("${seed}", str(seed))
                    passes[f"{arm}_{seed}"] = {
                        "seed": seed,
                        **(by_seed or {}).get(seed, {}),
                        **json.loads(text),
                    }
        return passes


def arms_of(chain: str, block: str) -> dict[str, Figures]:
    """The arms of a block, and the values of each."""
    arms: dict[str, Figures] = dict(_blocks(chain))[block]["each"]
    return arms


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean, spread = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = float(stats.t.ppf(0.975, len(values) - 1)) * spread
    return mean - half, mean + half


def print_line(
    bench: str,
    case: str,
    values: Sequence[float],
    *,
    peer: float | None = None,
    peer_is: str = "the bar",
    unit: str = "share",
) -> None:
    """Print a JSON line: the mean over seeds, its 95 % interval where there are several, and its ratio to a peer.

    Values that are not a number do not count; without any, `ours` is null.
    """
    numbers = [float(value) for value in values if not math.isnan(value)]
    line: dict[str, Any] = {"bench": bench, "case": case, "ours": None}
    if not numbers:
        print(json.dumps({**line, "unit": "n/a: no such case"}), flush=True)
        return
    mean = statistics.mean(numbers)
    line["ours"] = round(mean, 4)
    if peer is not None:
        line |= {"peer": round(peer, 4), "ratio": round(mean / peer, 3) if peer else None}
    line["unit"] = f"{unit} (peer: {peer_is})" if peer is not None else unit
    if (bounds := interval(numbers)) is not None:
        line["interval"] = [round(bound, 4) for bound in bounds]
    print(json.dumps({**line, "seeds": [round(value, 4) for value in numbers]}), flush=True)


def print_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; numbers have three digits."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(table)


def write_once(path: Path, samples: Sequence[Sample]) -> None:
    """Once: a training whose data were written again would start afresh."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_samples(path, samples)


def write_changed(path: Path, text: str) -> None:
    """Write it if it is new: stages that read a file that was written again start afresh."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def json_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as the text of a `.jsonl` file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _blocks(chain: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and settings of the blocks of a chain that are repeated for seeds or arms."""
    entries = map(split_stage, load_document(CHAINS / f"{chain}.yaml").data["stages"])
    return [parts[::2] for parts in entries if parts and parts[1] == REPEAT and "each" in parts[2]]


def _setting_names(chain: str, block_overrides: Sequence[str]) -> set[str]:
    """Everything that an override of a chain may begin with."""
    document = load_document(CHAINS / f"{chain}.yaml")
    apply_overrides(document, block_overrides, override_targets(document))
    names = {*document.data, *override_targets(document)}
    expand(document)
    return names | set(override_targets(document))


def _first_word(override: str) -> str:
    return override.partition("=")[0].partition(".")[0]
