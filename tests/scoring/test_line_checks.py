from typing import Any

import pytest

from qknorm.errors import InputError
from qknorm.scoring.line_checks import check_parallel, name_references


@pytest.mark.parametrize(
    ("systems", "references", "message"),
    [
        ({}, [["a"]], "no translation to score"),
        ({"A": ["a"]}, [], "no reference"),
        ({"A": ["a"]}, ["a"], "wrap a single one"),
        ({"A": "a"}, [["a"]], "A must be a list of lines"),
        ({"A": []}, [["a"]], "A is empty"),
        ({"A": ["a"]}, [[]], "the reference is empty"),
        ({"A": ["a", "b"]}, [["", " "]], "only empty lines"),
        ({"A": ["a"]}, [["a", "b"]], "A has 1 line but the reference has 2 lines"),
        ({"A": ["a"] * 1200}, [["a"]], "A has 1,200 lines but the reference has 1 line"),
        ({"A": ["a", "b"]}, [["a", "b"], ["a"]], "reference 2 has 1 line but reference 1 has 2 lines"),
        ({"A": ["a", None]}, [["a", "b"]], "A, line 2: expected text, got NoneType"),
    ],
)
def test_what_cannot_stand_side_by_side_is_named(systems: Any, references: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_parallel(systems, references)


def test_file_names_stand_in_the_message() -> None:
    with pytest.raises(InputError, match=r"^out\.txt has 1 line but ref\.txt has 2 lines: "):
        check_parallel({"out.txt": ["a"]}, [["a", "b"]], ["ref.txt"])


def test_good_text_passes_with_empty_translations() -> None:
    check_parallel({"A": ["", "b"], "B": ["a", ""]}, [["a", "b"], ["c", ""]])


def test_references_without_names_get_numbers() -> None:
    assert name_references([["a"]]) == ["the reference"]
    assert name_references([["a"]], ["r.txt"]) == ["r.txt"]
    assert name_references([["a"], ["b"]], ["r.txt"]) == ["r.txt", "reference 2"]
