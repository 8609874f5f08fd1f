"""Dev evaluation: the one order, pool or whole corpus in blocks, and nothing of training disturbed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from condenser.errors import RunFailed, UserError
from eval.evaluation import evaluate
from retrieval import dev
from retrieval.collections import Collection, open_collection
from retrieval.dev import DevPairs, DevSearch
from retrieval.encoder import Encoder

TOPICS = ["cat", "dog", "bird", "river", "bank", "king", "queen", "fever", "heart", "blood", "cell", "water"]


def write_collection(folder: Path, passages: dict[str, str], queries: dict[str, str], qrels: list[str]) -> Collection:
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", passages), ("queries", queries)):
        lines = [json.dumps({"_id": one, "text": text}) + "\n" for one, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "qrels" / "dev.tsv").write_text("".join(f"{line}\n" for line in qrels))
    return open_collection(folder)


@pytest.fixture()
def collection(tmp_path: Path) -> Collection:
    """Twelve topics with two passages each, and a query for each topic."""
    passages = {f"p{i}": f"the {topic} is in the city" for i, topic in enumerate(TOPICS)}
    passages |= {f"x{i}": f"old {topic} and new" for i, topic in enumerate(TOPICS)}
    queries = {f"q{i}": f"where is the {topic}?" for i, topic in enumerate(TOPICS)}
    qrels = [*(f"q{i}\tp{i}\t1" for i in range(12)), "q0\tx0\t2", "q2\tx2\t0"]
    return write_collection(tmp_path / "topics", passages, queries, qrels)


@pytest.fixture(scope="module")
def encoder(tiny_bert: Path) -> Encoder:
    return Encoder.load(tiny_bert, pooling="mean", normalize=True)


def naive(collection: Collection, encoder: Encoder, ids: list[str] | None = None) -> dict[str, float]:
    """Search by nested dicts, in which `eval` finds the order itself."""
    passages = [passage for passage in collection.passages() if ids is None or passage.id in ids]
    queries = list(collection.queries("dev"))
    scores = encoder.encode_queries([query.text for query in queries]) @ encoder.encode_passages(passages).T
    run = {
        query.id: {passage.id: float(score) for passage, score in zip(passages, line, strict=True)}
        for query, line in zip(queries, scores, strict=True)
    }
    return evaluate(collection.qrels("dev"), run, ("MRR@10", "R@100")).means


def test_whole_corpus_equals_a_search_by_dicts(collection: Collection, encoder: Encoder) -> None:
    expected = naive(collection, encoder)
    found = DevSearch(collection, "dev", pool=0, seed=1)(encoder)
    assert found == {"dev_mrr@10": expected["MRR@10"], "dev_recall@100": expected["R@100"]}


def test_blocks_and_the_depth_do_not_change_the_figures(
    collection: Collection, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of the corpus at a time, and no more hits kept than the figures need."""
    expected = naive(collection, encoder)["MRR@10"]
    monkeypatch.setattr(dev, "_PASSAGES_AT_ONCE", 5)
    monkeypatch.setattr(dev, "_QUERIES_AT_ONCE", 7)
    monkeypatch.setattr(dev, "_RECALL_CUTOFF", 10)
    assert DevSearch(collection, "dev", pool=0, seed=1)(encoder)["dev_mrr@10"] == pytest.approx(expected)


def test_a_tie_does_not_count_for_the_positive(tmp_path: Path, tiny_bert: Path) -> None:
    """Case B52: an encoder whose vectors are all equal; ids decide, the last by bytes first."""
    collapsed = Encoder.load(tiny_bert, projection=4)
    with torch.no_grad():
        for parameter in collapsed.head.parameters():
            parameter.fill_(0.0 if parameter.ndim > 1 else 1.0)
    for positive, expected in (("a", 1 / 3), ("b", 1 / 2), ("c", 1.0)):
        passages = {"a": "the cat", "b": "a dog", "c": "old river"}
        collection = write_collection(tmp_path / positive, passages, {"q": "cat"}, [f"q\t{positive}\t1"])
        assert DevSearch(collection, "dev", pool=0, seed=1)(collapsed)["dev_mrr@10"] == pytest.approx(expected)


def test_a_pool_holds_all_positives_and_a_seeded_sample(collection: Collection, encoder: Encoder) -> None:
    searches = [DevSearch(collection, "dev", pool=20, seed=seed) for seed in (1, 1, 2)]
    pools = [set(search._sorted_ids) for search in searches]
    assert pools[0] == pools[1] != pools[2]
    assert all(len(pool) == 20 and {*(f"p{i}" for i in range(12)), "x0"} <= pool for pool in pools)
    expected = naive(collection, encoder, searches[0]._sorted_ids)
    assert searches[0](encoder) == {
        "dev_pool_mrr@10": pytest.approx(expected["MRR@10"]),
        "dev_pool_recall@100": pytest.approx(expected["R@100"]),
    }
    assert len(DevSearch(collection, "dev", pool=3, seed=1)._sorted_ids) == 13, "the positives alone are more"


def test_keys_sort_as_rankings_do() -> None:
    scores = np.array([[-np.float32(1e30), -1.5, -0.0, 0.0, 1e-40, 1.5, 3e38]], np.float32)
    places = np.array([5, 4, 3, 2, 1, 0, 6], np.uint32)
    keys = dev._keys(scores, places)
    assert keys.argsort().tolist() == [[0, 1, 3, 2, 4, 5, 6]], "0.0 and -0.0 are equal: the greater place wins"
    found_places, found_scores = dev._places_and_scores(keys)
    np.testing.assert_array_equal(found_scores, scores)
    assert found_places.tolist() == [places.tolist()]
    assert np.sort(dev._largest(keys, 2)).tolist() == np.sort(keys[:, -2:]).tolist()


def test_random_state_and_mode_are_left_alone(collection: Collection, tiny_bert: Path) -> None:
    """Case B31."""
    trained = Encoder.load(tiny_bert)
    trained.train()
    search = DevSearch(collection, "dev", pool=0, seed=1)
    before = torch.get_rng_state()
    first = search(trained)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in trained.modules())
    assert search(trained) == first, "no dropout"


def test_what_cannot_be_found_is_said(tmp_path: Path, encoder: Encoder, capsys: pytest.CaptureFixture[str]) -> None:
    """Cases B7, B8 and R14."""
    qrels = ["q\ta\t1", "q\tgone\t1", "nothing\ta\t0", "textless\ta\t1"]
    collection = write_collection(tmp_path / "c", {"a": "cat", "b": "dog"}, {"q": "cat", "nothing": "dog"}, qrels)
    search = DevSearch(collection, "dev", pool=1000, seed=1)
    said = capsys.readouterr().err
    assert "2 queries of dev have no positive or no text and are left out" in said
    assert "1 positives of dev are not in the corpus and count as not found: 'gone'" in said
    assert search(encoder)["dev_recall@100"] == 0.5
    assert capsys.readouterr().err == "", "said once, not in each evaluation"


def test_a_split_without_positives_is_refused(tmp_path: Path) -> None:
    collection = write_collection(tmp_path / "c", {"a": "cat"}, {"q": "cat"}, ["q\ta\t0"])
    with pytest.raises(UserError, match="no query of split 'dev' has a positive"):
        DevSearch(collection, "dev", pool=0, seed=1)


def test_vectors_that_are_not_numbers_end_in_one_line(collection: Collection, tiny_bert: Path) -> None:
    broken = Encoder.load(tiny_bert)
    with torch.no_grad():
        broken.model.encoder.layer[1].output.LayerNorm.weight.fill_(torch.nan)
    with pytest.raises(RunFailed, match="vectors that are not numbers"):
        DevSearch(collection, "dev", pool=0, seed=1)(broken)


def write_pairs(path: Path, pairs: list[tuple[str, str, float]]) -> Collection:
    lines = [json.dumps({"sentence1": one, "sentence2": two, "score": score}) + "\n" for one, two, score in pairs]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines))
    return open_collection(path)


def test_scored_pairs_are_judged_by_spearman(tmp_path: Path, encoder: Encoder) -> None:
    """As scipy ranks the cosines, both texts encoded as queries."""
    from scipy.stats import spearmanr

    pairs = [("the cat", "a cat", 4.5), ("the cat", "old river", 0.5), ("king", "queen", 3.0), ("dog", "blood", 0.5)]
    collection = write_pairs(tmp_path / "dev.jsonl", pairs)
    (split,) = collection.splits()
    first, second = (encoder.encode_queries([pair[side] for pair in pairs]) for side in (0, 1))
    expected = spearmanr((first * second).sum(axis=1), [score for _, _, score in pairs]).statistic
    assert DevPairs(collection, split)(encoder) == {"dev_spearman": pytest.approx(expected)}


def test_scored_pairs_of_one_score_are_refused_before_training(tmp_path: Path) -> None:
    collection = write_pairs(tmp_path / "dev.jsonl", [("a", "b", 1.0), ("c", "d", 1.0)])
    with pytest.raises(UserError, match="has 2 scored pairs and no two scores: nothing to correlate"):
        DevPairs(collection, *collection.splits())


def test_a_question_without_a_positive_is_left_out(tmp_path: Path, encoder: Encoder) -> None:
    file = tmp_path / "nq.json"
    questions = [("who", [{"title": "", "text": "a cat", "passage_id": "1"}]), ("what", [])]
    file.write_text(json.dumps([{"question": q, "answers": [], "positive_ctxs": found} for q, found in questions]))
    assert DevSearch(open_collection(file), "train", pool=0, seed=1)(encoder) == {"dev_mrr@10": 1, "dev_recall@100": 1}
