from __future__ import annotations

from pathlib import Path

import pytest

from condenser.errors import UserError
from eval.msmarco import official_mrr
from tests.reference_numbers import golden_json

CASES = golden_json("msmarco_mrr.json")["cases"]


def write(folder: Path, qrels: str, run: str) -> tuple[Path, Path]:
    paths = folder / "qrels.tsv", folder / "run.tsv"
    for path, text in zip(paths, (qrels, run), strict=True):
        path.write_text(text)
    return paths


@pytest.mark.parametrize("name", CASES)
def test_the_official_script_says_the_same(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    paths = write(tmp_path, case["qrels"], case["run"])
    if "error" in case:
        with pytest.raises(UserError) as caught:
            official_mrr(*paths)
        assert caught.value.what == case["message"]
    else:
        score = official_mrr(*paths)
        assert {"MRR @10": score.mrr_at_10, "QueriesRanked": score.queries_ranked} == case["result"]


@pytest.mark.parametrize(
    ("qrels", "run", "warnings"),
    [
        ("1\t0\t11\t1\n", "1\t5\t1\n1\t11\t2\n", []),
        (
            "1\t0\t11\t1\n",
            "1\t5\t1\n1\t5\t2\n",
            ["a passage stands more than once in the ranking of 1 query ('1'); the script scores it all the same"],
        ),
        (
            "1\t0\t11\t1\n2\t0\t11\t1\n",
            "1\t5\t1\n1\t6\t1\n2\t5\t2\n",
            ["ranks have gaps or repeat for 2 queries ('1', '2'); the last line wins, an empty place is passage 0"],
        ),
        (
            "1\t0\t0\t1\n",
            "1\t5\t1\n",
            ["passage 0 is relevant to 1 query ('1'); the script takes it for retrieved wherever a place is empty"],
        ),
    ],
)
def test_quirks_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], qrels: str, run: str, warnings: list[str]
) -> None:
    assert official_mrr(*write(tmp_path, qrels, run)).quirks == warnings
    assert capsys.readouterr().err == "".join(f"warning: {line}\n" for line in warnings)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    qrels, run = write(tmp_path, "1\t0\t11\t1\n", "1\t11\t1\n1\t12\t1001\n")
    with pytest.raises(UserError) as caught:
        official_mrr(qrels, run)
    assert str(caught.value) == f"{run}:2: \"['1', '12', '1001']\" is not valid format (rank 1001 is above 1000)"
