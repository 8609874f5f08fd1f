"""The run: the file's own ids, best first, from texts or from stored vectors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from condenser.errors import UserError
from condenser.manifest import load_manifest
from eval.runs import load_run
from retrieval.cli import main
from retrieval.encode import encode
from retrieval.encoder import Encoder
from retrieval.index import Index
from retrieval.index_build import build_index
from retrieval.options import EncodeOptions, IndexOptions, SearchOptions
from retrieval.readers import read_passages
from retrieval.records import Passage
from retrieval.search import search
from tests import command

MakeVectors = Callable[..., Path]


@pytest.fixture(scope="module")
def encoder_folder(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder") / "encoder"
    Encoder.load(tiny_bert, normalize=True).save(folder, card="")
    return folder


@pytest.fixture(scope="module")
def index_folder(encoder_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three passages, whose ids are neither numbers from 0 nor sorted."""
    folder = tmp_path_factory.mktemp("index")
    texts = {"7": "river bank", "3": "heart blood cell", "doc-x": "what treats fever"}
    (folder / "corpus.jsonl").write_text(
        "\n".join(json.dumps({"_id": name, "text": text}) for name, text in texts.items())
    )
    vectors = encode(
        EncodeOptions(encoder=str(encoder_folder), input=str(folder / "corpus.jsonl"), output=str(folder / "vectors"))
    )
    return build_index(IndexOptions(vectors=str(vectors), output=str(folder / "index")))


@pytest.fixture()
def options(index_folder: Path, encoder_folder: Path, tmp_path: Path) -> SearchOptions:
    (tmp_path / "queries.jsonl").write_text(
        '{"_id": "q1", "text": "what treats fever"}\n{"_id": "007", "text": "heart blood cell"}\n'
    )
    return SearchOptions(
        index=str(index_folder),
        encoder=str(encoder_folder),
        queries=str(tmp_path / "queries.jsonl"),
        k=3,
        output=str(tmp_path / "run.trec"),
    )


def encode_queries(options: SearchOptions, tmp_path: Path) -> Path:
    return encode(
        EncodeOptions(
            encoder=str(options.encoder), input=str(options.queries), kind="query", output=str(tmp_path / "queries")
        )
    )


def test_the_run_holds_the_ids_of_the_files(options: SearchOptions, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B1."""
    run = load_run(search(options))
    assert list(run) == ["q1", "007"]
    assert set(run["q1"]) == {"7", "3", "doc-x"}
    assert max(run["q1"], key=run["q1"].__getitem__) == "doc-x"
    assert max(run["007"], key=run["007"].__getitem__) == "3"
    assert capsys.readouterr().err == (
        "searched 2 queries over 3 passages (Flat, inner product), k 3, 0 of 2 queries cut at 32 tokens\n"
    )


def test_the_command_prints_the_run_and_lowers_k(options: SearchOptions, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["search", "--index", options.index, "--queries", str(options.queries), "--output", options.output]
    assert main([*command, "--k", "100"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{options.output}\n"
    assert "k lowered from 100 to the 3 passages there are" in said.err.splitlines()
    lines = [line.split() for line in Path(options.output).read_text().splitlines()]
    assert len(lines) == 6 and [line[3] for line in lines] == ["1", "2", "3"] * 2


def test_stored_vectors_give_the_same_run_without_torch(options: SearchOptions, tmp_path: Path) -> None:
    from_texts = search(options).read_bytes()
    stored = encode_queries(options, tmp_path)
    program = (
        "import sys; from retrieval.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 7 * ('torch' in sys.modules))"
    )
    output = tmp_path / "stored.trec"
    command = ["search", "--index", options.index, "--queries", str(stored), "--k", "3", "--output", str(output)]
    root = str(Path(__file__).parents[2])
    assert subprocess.run([sys.executable, "-c", program, *command], cwd=root, check=False).returncode == 0
    assert output.read_bytes() == from_texts


def test_what_made_the_run_stands_beside_it(options: SearchOptions, encoder_folder: Path) -> None:
    search(options)
    made_by = json.loads(Path(f"{options.output}.json").read_text())
    assert made_by["encoder_fingerprint"] == Encoder.load(encoder_folder).fingerprint()
    assert (made_by["k"], made_by["factory"], made_by["passages"]) == (3, "Flat", 3)
    assert made_by["index_fingerprint"] and made_by["index"] == options.index


def test_a_collection_gives_the_queries_of_a_split(options: SearchOptions, tmp_path: Path) -> None:
    folder = tmp_path / "collection"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text('{"_id": "7", "text": "river bank"}\n')
    (folder / "queries.jsonl").write_text('{"_id": "q1", "text": "river"}\n{"_id": "q2", "text": "heart"}\n')
    (folder / "qrels" / "test.tsv").write_text("q2\t7\t1\n")
    run = search(replace(options, queries=None, collection=str(folder), split="test"))
    assert list(load_run(run)) == ["q2"]


def test_three_lines_of_python(options: SearchOptions, encoder_folder: Path) -> None:
    encoder = Encoder.load(encoder_folder)
    index = Index.load(options.index, encoder=encoder)
    assert index.search(["river bank"], k=1)[0][0].passage_id == "7"


def test_an_encoder_of_another_dimension_is_refused(
    options: SearchOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases B41 and R42: both numbers and both paths, exit code 2, no run."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    tokenizer = AutoTokenizer.from_pretrained(options.encoder)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    Encoder(BertModel(config, add_pooling_layer=False), tokenizer, Encoder.load(str(options.encoder)).config).save(
        tmp_path / "other", card=""
    )
    command = ["search", "--index", options.index, "--encoder", str(tmp_path / "other")]
    assert main([*command, "--queries", str(options.queries), "--output", options.output]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"dimension is 32 in the index (encoder {options.encoder})" in line
    assert f"but 64 in the queries (encoder {tmp_path / 'other'})" in line
    assert not list(tmp_path.glob("run.trec*"))


def test_an_encoder_with_other_settings_is_refused(options: SearchOptions, tmp_path: Path) -> None:
    """Cases B41 and R42: same weights, other pooling; the message says what differs."""
    Encoder.load(str(options.encoder), pooling="mean").save(tmp_path / "other", card="")
    with pytest.raises(UserError, match=r"pooling is 'cls' in the index \(encoder .*\) but 'mean' in the queries \(e"):
        search(replace(options, encoder=str(tmp_path / "other")))


def test_stored_queries_of_another_encoder_are_refused(
    options: SearchOptions, tmp_path: Path, make_vectors: MakeVectors
) -> None:
    """Case B41."""
    stored = make_vectors(np.ones((2, 64)), ["q1", "q2"], kind="query")
    with pytest.raises(UserError, match=r"dimension is 32 in the index .* but 64 in the queries"):
        search(replace(options, queries=str(stored), encoder=None))
    assert not Path(options.output).exists()


def test_passage_vectors_are_no_queries(options: SearchOptions, make_vectors: MakeVectors) -> None:
    stored = make_vectors(np.ones((2, 32)), ["p1", "p2"])
    with pytest.raises(UserError, match="holds passage vectors, expected queries"):
        search(replace(options, queries=str(stored), encoder=None))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"k": 0}, "--k is 0, expected 1 or more"),
        ({"queries": None}, "give one of --queries and --collection"),
        ({"collection": "medquad"}, "give one of --queries and --collection"),
        ({"split": "test"}, "--split goes with --collection"),
        ({"queries": "missing.jsonl"}, "missing.jsonl: no such file"),
        ({"index": "missing"}, "missing: no such folder; expected an index folder"),
        ({"encoder": "./missing"}, "missing: no such folder"),
        ({"nprobe": 4}, "--nprobe does not apply to a Flat index, which has none to set"),
        ({"k_factor": 4}, "--k_factor does not apply to a Flat index"),
        ({"recall_queries": -1}, "--recall_queries is -1, expected 0 or more"),
        ({"ef_search": 4}, "--ef_search does not apply to a Flat index"),
        ({"output": "run.xyz"}, "cannot tell the format"),
        ({"feedback_weight": 0.5}, "--feedback_weight goes with --feedback"),
        ({"feedback": 1, "feedback_weight": 1e7}, "--feedback_weight is 10000000.0, expected 0 to 1000000"),
        ({"float16": True, "device": "cpu"}, "--float16 is for GPUs, --device is cpu"),
    ],
)
def test_bad_options_are_refused_and_no_run_is_left(
    options: SearchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        search(replace(options, **changes))
    assert line in str(caught.value)
    assert not list(tmp_path.glob("run.*"))


def test_no_query_at_all_is_refused(options: SearchOptions, tmp_path: Path) -> None:
    """Case R43."""
    (tmp_path / "queries.jsonl").write_text("")
    with pytest.raises(UserError, match=r"queries\.jsonl: no query in this file"):
        search(options)
    assert not Path(options.output).exists()


def test_empty_and_blank_queries_are_searched(options: SearchOptions, tmp_path: Path) -> None:
    """Case B40."""
    (tmp_path / "queries.jsonl").write_text('{"_id": "q1", "text": ""}\n{"_id": "q2", "text": "   "}\n')
    run = load_run(search(options))
    assert run["q1"] == run["q2"] and len(run["q1"]) == 3


def test_the_query_itself_is_left_out_on_request(options: SearchOptions, tmp_path: Path) -> None:
    """Case B51: off by default, told in the log and beside the run; k hits remain."""
    (tmp_path / "queries.jsonl").write_text('{"_id": "7", "text": "river bank"}\n{"_id": "q", "text": "fever"}\n')
    assert next(iter(load_run(search(replace(options, k=1)))["7"])) == "7"
    assert not json.loads(Path(f"{options.output}.json").read_text())["ignore_self"]
    run = load_run(search(replace(options, k=2, ignore_self=True)))
    assert set(run["7"]) == {"3", "doc-x"} and len(run["q"]) == 2
    assert json.loads(Path(f"{options.output}.json").read_text())["ignore_self"]


def test_what_ignoring_leaves_out_is_counted(
    options: SearchOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case B51."""
    (tmp_path / "queries.jsonl").write_text('{"_id": "7", "text": "river bank"}\n{"_id": "q", "text": "fever"}\n')
    search(replace(options, ignore_self=True))
    assert capsys.readouterr().err.splitlines()[-1] == (
        "searched 2 queries over 3 passages (Flat, inner product), k 3, 1 hits left out that were the query itself, "
        "0 of 2 queries cut at 32 tokens"
    )


def test_vectors_are_searched_without_an_index(options: SearchOptions, index_folder: Path) -> None:
    from_index = search(options).read_bytes()
    vectors = load_manifest(index_folder)["facts"]["vectors"]
    assert search(replace(options, index=vectors, encoder=None)).read_bytes() == from_index


@pytest.mark.slow
def test_no_way_of_searching_shows_in_the_run(
    options: SearchOptions, tmp_path: Path, make_vectors: MakeVectors
) -> None:
    """Case R46: 1, 3 and 40 shards, 1 and 8 threads, every backend, one query at a time or all: the same bytes."""
    rng = np.random.default_rng(3)
    matrix, ids = rng.normal(size=(2000, 40)).astype("f4"), [f"p{number}" for number in range(2000)]
    matrix[1000:1010] = matrix[0]
    queries = rng.normal(size=(30, 40)).astype("f4")
    queries[0] = matrix[0]
    stored = make_vectors(queries, [f"q{number}" for number in range(30)], name="all", kind="query")
    alone = make_vectors(queries, [f"q{number}" for number in range(30)], name="alone", kind="query", shard_size=1)
    runs = set()
    for shards in (1, 3, 40):
        vectors = make_vectors(matrix, ids, name=f"in-{shards}", shard_size=-(-2000 // shards))
        for backend in ("numpy", "faiss", "torch"):
            for source in (stored, alone):
                changes = {"index": str(vectors), "queries": str(source), "backend": backend, "k": 20, "encoder": None}
                runs.add(search(replace(options, **changes)).read_bytes())
    changes = {"index": str(vectors), "queries": str(stored), "k": 20, "encoder": None}
    for threads in ("1", "8"):
        command.run("search", replace(options, **changes), OMP_NUM_THREADS=threads)
        runs.add(Path(options.output).read_bytes())
    assert len(runs) == 1


def test_an_approximate_index_says_what_it_finds(
    options: SearchOptions, tmp_path: Path, make_vectors: MakeVectors, capsys: pytest.CaptureFixture[str]
) -> None:
    """And so long as its vectors are there: else why not."""
    rng = np.random.default_rng(3)
    matrix = rng.normal(size=(400, 8)).astype("f4")
    vectors = make_vectors(matrix, [f"p{number}" for number in range(400)], shard_size=150)
    index = build_index(IndexOptions(vectors=str(vectors), factory="IVF10,Flat", output=str(tmp_path / "ivf")))
    stored = make_vectors(matrix[:50], [f"q{number}" for number in range(50)], name="queries", kind="query")
    asked = replace(options, index=str(index), queries=str(stored), encoder=None, k=10, recall_queries=20)
    said: list[list[str]] = []
    for nprobe in (1, 10):
        search(replace(asked, nprobe=nprobe))
        said.append(capsys.readouterr().err.splitlines()[-2:])
    assert said[1] == [
        "searched 50 queries over 400 passages (IVF10,Flat, inner product, nprobe 10), k 10",
        "recall of the exact top 10 on 20 queries: 1.000",
    ]
    assert said[0][1].startswith("recall of the exact top 10 on 20 queries: .")
    told = json.loads(Path(f"{options.output}.json").read_text())
    assert told["recall"] == {"value": 1.0, "k": 10, "queries": 20} and told["parameters"] == {"nprobe": 10}
    vectors.rename(tmp_path / "elsewhere")
    search(asked)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == f"warning: recall is not measured: {vectors}: the vectors that this index was made from are gone"
    assert json.loads(Path(f"{options.output}.json").read_text())["recall"] is None


def test_texts_find_their_encoder_and_their_passages(
    options: SearchOptions, index_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = index_folder.parent / "corpus.jsonl"
    index = Index.load(index_folder, corpus=read_corpus(corpus))
    hit = index.search(["river bank"], k=1)[0][0]
    assert hit == ("7", hit.score, "", "river bank") and hit.text == "river bank"  # type: ignore[union-attr]
    index.attach({})
    with pytest.raises(UserError, match=r"passage '7' is not in the attached corpus"):
        index.search(["river bank"], k=1)


def read_corpus(file: Path) -> dict[str, Passage]:
    return {passage.id: passage for passage in read_passages(file)}


def test_an_encoder_that_is_gone_is_named(options: SearchOptions, index_folder: Path) -> None:
    index = Index.load(index_folder)
    index.facts["encoder"] = "/models/gone"
    with pytest.raises(UserError) as caught:
        index.search(["river bank"], k=1)
    assert str(caught.value) == (
        "/models/gone: the encoder that made this index is gone (give one: Index.load(folder, encoder=...))"
    )


def test_ids_that_trec_cannot_carry_are_refused(options: SearchOptions, make_vectors: MakeVectors) -> None:
    vectors = make_vectors(np.ones((2, 4)), ["a b", "tab\there"], name="blanks")
    stored = make_vectors(np.ones((1, 4)), ["q"], name="queries", kind="query")
    asked = replace(options, index=str(vectors), queries=str(stored), encoder=None)
    with pytest.raises(UserError, match=r"this format carries no empty id and no blanks \(write .tsv or .json instead"):
        search(asked)
    assert not Path(options.output).exists()
    run = search(replace(asked, output=options.output.replace(".trec", ".json")))
    assert set(load_run(run)["q"]) == {"a b", "tab\there"}


def test_stored_queries_that_are_not_finite_are_refused(options: SearchOptions, make_vectors: MakeVectors) -> None:
    """Case B40: encode never writes such a vector; a file from elsewhere may hold one."""
    vectors = make_vectors(np.ones((2, 4)), ["a", "b"])
    stored = make_vectors(np.ones((2, 4)), ["q1", "q2"], name="queries", kind="query")
    matrix = np.load(stored / "vectors-00000.npy")
    matrix[1, 2] = np.nan
    np.save(stored / "vectors-00000.npy", matrix)
    with pytest.raises(UserError, match=r"query vector in row 1 is not finite \(1 of 2\)"):
        search(replace(options, index=str(vectors), queries=str(stored), encoder=None))
    assert not Path(options.output).exists()
