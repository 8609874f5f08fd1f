"""The index: exact is exact, ties included, and an approximate one gives its hits in the same order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from condenser.errors import UserError
from retrieval.index import Index
from retrieval.index_build import build_index
from retrieval.options import IndexOptions

RNG = np.random.default_rng(7)
MakeVectors = Callable[..., Path]


def naive(matrix: np.ndarray, ids: list[str], queries: np.ndarray, k: int) -> list[list[tuple[str, float]]]:
    """Sort everything in the order of the house."""
    scores = (matrix.astype(np.float64) @ queries.astype(np.float64).T).T.astype(np.float32).tolist()
    return [
        [
            (name, score)
            for score, name in sorted(zip(row, ids, strict=True), key=lambda hit: (hit[0], hit[1].encode()))
        ][: -k - 1 : -1]
        for row in scores
    ]


def build(tmp_path: Path, vectors: Path, factory: str = "Flat") -> Path:
    return build_index(IndexOptions(vectors=str(vectors), factory=factory, output=str(tmp_path / "index")))


def names(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


def test_exact_search_equals_sorting_everything() -> None:
    matrix, queries = RNG.normal(size=(3000, 24)).astype("f4"), RNG.normal(size=(20, 24)).astype("f4")
    ids = names(3000)
    hits = Index(ids, matrix).search(queries, 50)
    expected = naive(matrix, ids, queries, 50)
    assert [[hit.passage_id for hit in row] for row in hits] == [[name for name, _ in row] for row in expected]
    found = np.array([[hit.score for hit in row] for row in hits])
    np.testing.assert_allclose(found, [[score for _, score in row] for row in expected], rtol=1e-6)


def test_ties_stand_by_id_also_where_the_cut_goes_through_them() -> None:
    """Small whole numbers have exact products and many ties, far more than the margin that is fetched."""
    matrix = RNG.integers(0, 3, size=(2000, 4)).astype("f4")
    queries = RNG.integers(0, 3, size=(30, 4)).astype("f4")
    queries[0] = 0  # ties with every passage
    ids = [f"{number}" for number in RNG.permutation(2000)]
    assert Index(ids, matrix).search(queries, 7) == naive(matrix, ids, queries, 7)


def test_ids_tie_by_utf8_bytes() -> None:
    ids = ["z", "é", "\uffff", "\U0001f600", "Z"]
    hits = Index(ids, np.ones((5, 2), "f4")).search(np.ones((1, 2), "f4"), 5)[0]
    assert [hit.passage_id for hit in hits] == sorted(ids, key=str.encode, reverse=True)


def test_equal_passages_have_equal_scores_in_every_batch() -> None:
    matrix = RNG.normal(size=(1500, 96)).astype("f4")
    matrix[[3, 700, 1499]] = matrix[11]
    queries = RNG.normal(size=(64, 96)).astype("f4")
    queries[0] = matrix[11]
    index = Index(names(1500), matrix)
    together = index.search(queries, 10)
    assert [hit.passage_id for hit in together[0][:4]] == ["p700", "p3", "p1499", "p11"]
    assert len({hit.score for hit in together[0][:4]}) == 1
    assert [index.search(queries[row : row + 1], 10)[0] for row in range(64)] == together


def test_k_above_the_collection_gives_every_passage_once(cases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cases B44 and R43: no -1, which would be the last passage in Python."""
    case = json.loads((cases / "44" / "vectors.json").read_text())
    right = json.loads((cases / "44" / "expected.json").read_text())
    index = Index(case["ids"], np.array(case["vectors"], "f4"))
    hits = index.search(np.array([case["query"]], "f4"), 10)[0]
    assert [hit.passage_id for hit in hits] == right["right_ids"] and len(hits) == right["right_rows"]
    assert capsys.readouterr().err == "k lowered from 10 to the 5 passages there are\n"


def test_the_score_is_the_inner_product_and_cosine_is_asked_for_by_normalising(cases: Path) -> None:
    """Case B47."""
    case = json.loads((cases / "47" / "vectors.json").read_text())
    right = json.loads((cases / "47" / "expected.json").read_text())
    matrix, query = np.array(case["vectors"], "f4"), np.array([case["query"]], "f4")
    assert Index(case["ids"], matrix).search(query, 2)[0] == [tuple(hit) for hit in right["inner_product"]]
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    hits = Index(case["ids"], matrix).search(query, 2)[0]
    assert [(hit.passage_id, round(hit.score, 6)) for hit in hits] == [tuple(hit) for hit in right["cosine"]]


def test_few_lists_visited_give_fewer_hits_and_no_minus_one(tmp_path: Path, make_vectors: MakeVectors) -> None:
    """Case B44 with IVF and nprobe 1."""
    matrix = np.repeat(np.eye(4, dtype="f4"), 5, axis=0) + RNG.normal(size=(20, 4)).astype("f4") / 100
    folder = build(tmp_path, make_vectors(matrix, names(20)), "IVF4,Flat")
    near = Index.load(folder, nprobe=1).search(np.eye(4, dtype="f4"), 20)
    for list_number, hits in enumerate(near):
        assert {hit.passage_id for hit in hits} == set(names(20)[5 * list_number : 5 * list_number + 5])
    everywhere = Index.load(folder, nprobe=4).search(np.eye(4, dtype="f4"), 20)
    assert [hit.passage_id for hit in everywhere[0]] == [name for name, _ in naive(matrix, names(20), np.eye(4), 20)[0]]


def test_an_approximate_index_breaks_ties_by_id(tmp_path: Path, make_vectors: MakeVectors) -> None:
    matrix = np.ones((300, 4), "f4")
    index = Index.load(build(tmp_path, make_vectors(matrix, names(300)), "SQ8"))
    found, expected = index.search(matrix[:1], 3), naive(matrix, names(300), matrix[:1], 3)
    assert found == expected


@pytest.mark.parametrize("k", [0, -1])
def test_k_below_one_is_refused(k: int) -> None:
    """Case R43."""
    with pytest.raises(UserError, match=f"k is {k}, expected 1 or more"):
        Index(["a"], np.ones((1, 2), "f4")).search(np.ones((1, 2), "f4"), k)


def test_one_query_and_no_query() -> None:
    """Case B39."""
    index = Index(names(9), RNG.normal(size=(9, 3)).astype("f4"))
    assert index.search_rows(np.ones((1, 3), "f4"), 4)[0].shape == (1, 4)
    assert index.search(np.empty((0, 3), "f4"), 4) == []


def every_other(array: np.ndarray) -> np.ndarray:
    return np.repeat(array, 2, axis=1)[:, ::2]


@pytest.mark.parametrize("convert", [np.float64, np.float16, np.asfortranarray, every_other, np.ndarray.tolist])
def test_any_kind_of_query_array_is_taken(convert: Callable[[np.ndarray], np.ndarray]) -> None:
    """Case B48."""
    queries = RNG.integers(-4, 5, size=(6, 8)).astype("f4")
    index = Index(names(40), RNG.normal(size=(40, 8)).astype("f4"))
    assert index.search(convert(queries), 5) == index.search(queries, 5)


def test_queries_that_cannot_be_searched_are_refused() -> None:
    index = Index(names(4), np.ones((4, 3), "f4"))
    with pytest.raises(UserError, match="query vector in row 1 is not finite"):
        index.search(np.array([[1, 1, 1], [1, np.nan, 1]]), 2)
    with pytest.raises(UserError, match="query vectors have shape 1 x 5, expected rows of 3"):
        index.search(np.ones((1, 5)), 2)
    with pytest.raises(UserError, match="this index was loaded without an encoder"):
        index.search(["what"], 2)


@pytest.mark.parametrize("content", ["null", "{}", '["a", 1, 2]', "[oops"])
def test_ids_of_another_shape_are_refused(tmp_path: Path, make_vectors: MakeVectors, content: str) -> None:
    """Sizes and manifest may fit all the same."""
    folder = build(tmp_path, make_vectors(np.ones((3, 2)), names(3)))
    (folder / "ids-00000.json").write_text(f'{{"cut": 0, "ids": {content}}}')
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["ids-00000.json"]["bytes"] = (folder / "ids-00000.json").stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"ids-00000\.json: (is not a|holds something else than a) list of ids"):
        Index.load(folder)


@pytest.mark.parametrize(
    ("factory", "parameters", "line"),
    [
        ("Flat", {"nprobe": 4}, "--nprobe does not apply to a Flat index, which has none to set"),
        ("IVF2,Flat", {"nprobs": 4}, "unknown parameter 'nprobs', expected one of nprobe, ef_search, k_factor"),
        ("Flat", {"usefloat16": 1}, "unknown parameter 'usefloat16', expected one of nprobe, ef_search, k_factor"),
        ("IVF2,SQ8,RFlat", {"ef_search": 4}, "not apply to a IVF2,SQ8,RFlat index, which has k_factor, nprobe"),
        ("Flat", {"ef_search": 4}, "--ef_search does not apply to a Flat index"),
        ("HNSW8", {"nprobe": 4}, "--nprobe does not apply to a HNSW8 index"),
        ("IVF2,Flat", {"ef_search": 4}, "--ef_search does not apply to a IVF2,Flat index"),
        ("IVF2,Flat", {"nprobe": 0}, "--nprobe is 0, expected 1 or more"),
    ],
)
def test_parameters_of_another_kind_of_index_are_refused(
    tmp_path: Path, make_vectors: MakeVectors, factory: str, parameters: dict[str, int], line: str
) -> None:
    """Case B50: the names that are known are listed."""
    folder = build(tmp_path, make_vectors(RNG.normal(size=(100, 4)), names(100)), factory)
    with pytest.raises(UserError, match=line):
        Index.load(folder, **parameters)


def test_a_damaged_index_is_refused(tmp_path: Path, make_vectors: MakeVectors) -> None:
    folder = build(tmp_path, make_vectors(RNG.normal(size=(100, 4)), names(100)), "HNSW8")
    file = folder / "index-00000.faiss"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(UserError, match=r"index-00000.faiss: has [\d,]+ bytes, the manifest says [\d,]+"):
        Index.load(folder)
    file.write_bytes(b"\0" * len(whole))
    with pytest.raises(UserError, match=r"index-00000.faiss: contents differ from the manifest's sha256"):
        Index.load(folder)
    with pytest.raises(UserError, match=r"index-00000.faiss: is not a whole FAISS index: Index type 0x00000000"):
        Index.load(folder, verify=False)
