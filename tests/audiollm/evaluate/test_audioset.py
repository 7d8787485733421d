"""AudioSet's tree: classes have the broader ones that the ontology gives them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from audiollm.evaluate.judges.audioset import abstract_classes, branch_of, broader_classes, class_depth


def test_a_class_is_a_kind_of_all_that_lie_above_it() -> None:
    assert broader_classes("Bark") == {"Dog", "Domestic animals, pets", "Animal"}
    assert broader_classes("Crackle") == {"Fire", "Natural sounds", "Onomatopoeia", "Source-ambiguous sounds"}
    assert broader_classes("Animal") == broader_classes("no class") == frozenset()
    assert branch_of("Rain") == {"Rain", "Raindrop", "Rain on surface"} and branch_of("no class") == {
        "no class"
    }


def test_depths_are_those_of_the_longest_way() -> None:
    depths = [class_depth(label) for label in ("Animal", "Dog", "Bark", "Crackle", "no class")]
    assert depths == [0, 2, 3, 2, 0]


def test_classes_that_only_hold_others_are_told() -> None:
    assert {"Respiratory sounds", "Human voice", "Onomatopoeia"} <= abstract_classes()
    assert not {"Dog", "Water", "Music", "Fire"} & abstract_classes()


def test_all_classes_of_audioset_are_in_the_tree(shared_data: Path) -> None:
    path = next((shared_data / "text_benchmarks").rglob("class_labels_indices.csv"), None)
    if path is None:
        pytest.skip("no list of AudioSet's classes")
    names = [row["display_name"] for row in csv.DictReader(path.open(encoding="utf-8"))]
    roots = {"Animal", "Music"}
    assert (
        len(names) == 527
        and [name for name in names if not broader_classes(name) and name not in roots] == []
    )
