"""The lists of mutants are true: every entry still applies, and the tests it names exist."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
from mutant_lists import REPOSITORY, Mutant, load_mutants

MUTANTS = load_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_entry_still_applies(mutant: Mutant) -> None:
    source = REPOSITORY / "src" / "dpcsgp" / mutant.file
    ast.parse(mutant.applied(source.read_text()))


@pytest.mark.parametrize("test", sorted({test for mutant in MUTANTS for test in mutant.tests}))
def test_the_tests_named_exist(test: str) -> None:
    path, _, function = test.partition("::")
    assert f"def {function}" in (REPOSITORY / "tests" / path).read_text()


def test_names_are_unique_and_there_are_enough() -> None:
    names = Counter(mutant.name for mutant in MUTANTS)
    assert names.most_common(1)[0][1] == 1
    assert len(names) >= 60


def test_an_entry_that_moved_on_is_refused() -> None:
    mutant = Mutant("example", "privacy/noise.py", "a = 1", "a = 2", ())
    assert mutant.applied("a = 1\nb = 1") == "a = 2\nb = 1"
    for text in ("b = 1", "a = 1\na = 1"):
        with pytest.raises(ValueError, match="occurs"):
            mutant.applied(text)
