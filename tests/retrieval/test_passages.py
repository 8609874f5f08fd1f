"""The store finds every passage, keeps no text in memory, and names both lines of an id that stands twice."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path

import pytest

from condenser.errors import UserError
from retrieval import passages as module
from retrieval.passages import FirstLines, PassageStore, hash64
from retrieval.readers import passage_file, read_passages
from retrieval.records import Passage


def corpus(path: Path, rows: list[tuple[str, str, str]]) -> Path:
    text = "".join(json.dumps({"_id": i, "title": title, "text": text}) + "\n" for i, title, text in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_store_is_the_dict_of_all_passages(tmp_path: Path, name: str) -> None:
    draw = random.Random(0)
    ids = [str(number) for number in draw.sample(range(10**9), 500)] + ["007", "7", "doc x", "ü"]
    path = corpus(tmp_path / name, [(i, f"title {i}" if len(i) % 2 else "", f"text of\n{i} 한국") for i in ids])
    expected = {passage.id: passage for passage in read_passages(path)}
    store = PassageStore([passage_file(path)])
    assert dict(store) == expected
    assert list(store) == list(expected)
    assert list(store.in_order()) == list(expected.values())
    assert len(store) == len(expected)
    for passage_id in draw.sample(ids, 50):
        assert store[passage_id] == expected[passage_id]
    assert sorted(store.row(passage_id) for passage_id in ids) == list(range(len(ids)))
    assert "missing" not in store and store.get("missing") is None and 7 not in store
    with pytest.raises(KeyError):
        store.row("missing")


def test_rows_are_the_same_whenever_the_file_is_opened(tmp_path: Path) -> None:
    path = corpus(tmp_path / "a.jsonl", [(str(i), "", "x") for i in range(100)])
    first, second = PassageStore([passage_file(path)]), PassageStore([passage_file(path)])
    assert [first.row(str(i)) for i in range(100)] == [second.row(str(i)) for i in range(100)]


def test_header_of_column_names_counts_for_later_look_ups(tmp_path: Path) -> None:
    path = tmp_path / "psgs.tsv"
    path.write_text('id\ttext\ttitle\n1\t"quoted"\tT\n2\tother\tU\n')
    store = PassageStore([passage_file(path)])
    assert store["2"] == Passage("2", "U", "other")
    assert store["1"] == Passage("1", "T", '"quoted"')
    assert store.where("2") == f"{path}:3"


def test_id_that_stands_twice_names_both_lines(tmp_path: Path) -> None:
    """Case B11, R4."""
    path = corpus(tmp_path / "a.jsonl", [("d1", "", "one"), ("d2", "", "x"), ("d1", "", "one")])
    with pytest.raises(UserError, match=r"a\.jsonl:3: passage id 'd1' stands already on line 1$"):
        PassageStore([passage_file(path)])
    skipped: list[UserError] = []
    store = PassageStore([passage_file(path)], on_bad=skipped.append)
    assert len(store) == 2 and len(skipped) == 1


def test_blank_passages_are_known(tmp_path: Path) -> None:
    """Of two with one id it is the kept one that counts."""
    rows = [("a", "", " \u3000"), ("b", "t", ""), ("c", "", ""), ("d", "", "x"), ("d", "", "")]
    store = PassageStore([passage_file(corpus(tmp_path / "a.jsonl", rows))], on_bad=lambda error: None)
    assert [one for one in store if store.is_blank(one)] == ["a", "c"]
    assert not store.is_blank("missing")


def test_id_that_stands_in_two_files_names_both(tmp_path: Path) -> None:
    first, second = corpus(tmp_path / "a.jsonl", [("d1", "", "x")]), corpus(tmp_path / "b.jsonl", [("d1", "", "x")])
    with pytest.raises(UserError, match=r"b\.jsonl:1: passage id 'd1' stands already on .*a\.jsonl:1$"):
        PassageStore([passage_file(first), passage_file(second)])


def test_merging_keeps_one_of_equal_passages_and_refuses_others(tmp_path: Path) -> None:
    rows = [("d1", "", "one"), ("d2", "", "x"), ("d1", "", "one"), ("d1", "", "one")]
    path = corpus(tmp_path / "a.jsonl", rows)
    store = PassageStore([passage_file(path)], merge=True)
    assert list(store) == ["d1", "d2"] and store.merged == 2 and store.where("d1") == f"{path}:1"
    corpus(path, [*rows, ("d1", "", "another")])
    with pytest.raises(UserError, match=r"a\.jsonl:5: passage id 'd1' stands with another title or text on line 1$"):
        PassageStore([passage_file(path)], merge=True)


@pytest.mark.parametrize("merge", [False, True])
def test_equal_hashes_of_different_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merge: bool) -> None:
    """64 bits do collide in the end: here all ids with the same first letter do."""
    monkeypatch.setattr(module, "hash64", lambda text: hash64(text) if "\0" in text else ord(text[0]))
    ids = ["b1", "a1", "a2", "b2", "a3", "c"]
    path = corpus(tmp_path / "a.jsonl", [(i, "", f"text {i}") for i in ids])
    store = PassageStore([passage_file(path)], merge=merge)
    assert {i: store[i].text for i in ids} == {i: f"text {i}" for i in ids}
    assert len({store.row(i) for i in ids}) == len(ids)
    assert "a4" not in store and "d" not in store
    corpus(path, [(i, "", "text") for i in [*ids, "a2"]])
    if merge:
        assert len(PassageStore([passage_file(path)], merge=True)) == len(ids)
    else:
        with pytest.raises(UserError, match=r"a\.jsonl:7: passage id 'a2' stands already on line 3$"):
            PassageStore([passage_file(path)])


def test_no_text_stays_in_memory(tmp_path: Path) -> None:
    path = corpus(tmp_path / "a.jsonl", [(str(i), "", "word " * 200) for i in range(20_000)])
    tracemalloc.start()
    store = PassageStore([passage_file(path)])
    held = sum(len(store[str(i)].text) for i in range(0, 20_000, 50))
    assert sum(1 for _ in store.in_order()) == 20_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held == 400 * 1000
    assert peak < path.stat().st_size / 5  # 22 bytes a passage, some of them twice while they are sorted


def test_first_lines_are_those_of_a_dict() -> None:
    """Growing, too: 5000 ids do not fit into the first table."""
    draw = random.Random(1)
    names = [str(draw.randrange(4000)) for _ in range(10_000)]
    table, expected = FirstLines(), dict[str, int]()
    for line, name in enumerate(names, start=1):
        assert table.setdefault(name, line) == expected.setdefault(name, line)
    assert len(table) == len(expected)


def test_hash_is_fixed() -> None:
    """Rows hang on it: this is BLAKE2b of 64 bits over nothing, e4a6a0577479b2b4, read from its low byte up."""
    assert hash64("") == 0xB4B2797457A0A6E4
