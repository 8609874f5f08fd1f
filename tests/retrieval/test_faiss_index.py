"""FAISS: sizes reckoned before memory is taken, GPUs that are not there, files that lie about themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from condenser.errors import RunFailed, UserError
from retrieval import faiss_index
from retrieval.faiss_build import Recipe, available_memory, check_memory, fill_index, new_index
from retrieval.faiss_index import (
    FaissVectors,
    check_gpu_memory,
    index_bytes,
    load_faiss,
    parameters_of,
    read_index,
    set_parameters,
    uses_gpu,
    write_index,
)
from retrieval.index import Index

RNG = np.random.default_rng(9)
MATRIX = RNG.normal(size=(2000, 8)).astype("f4")


def build(factory: str, **settings: int) -> object:
    recipe = Recipe(factory, **settings)  # type: ignore[arg-type]
    index = new_index(recipe, 8, len(MATRIX), Path("vectors"))
    return fill_index(index, recipe, len(MATRIX), lambda: [MATRIX[:700], MATRIX[700:]], Path("vectors"))


@pytest.mark.parametrize(
    "factory", ["IVF8,Flat", "HNSW16", "SQ8", "PQ4x4", "PCA6,IVF4,Flat", "OPQ4_8,IVF4,PQ4x4", "IVF4,PQ4x4,RFlat"]
)
def test_the_size_is_known_before_it_is_built(tmp_path: Path, factory: str) -> None:
    index = build(factory)
    write_index(index, tmp_path / "index.faiss")
    assert index_bytes(index, 2000) == pytest.approx((tmp_path / "index.faiss").stat().st_size, rel=0.15)


def test_what_does_not_fit_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case R45: needed and free are named, and what would fit."""
    with pytest.raises(UserError) as caught:
        check_memory(20 * 2**30, 3 * 2**29, "HNSW32")
    assert str(caught.value) == (
        "--factory 'HNSW32' needs 20.0 GiB of memory, 1.5 GiB are free (use Flat, which is read from the disk, "
        "or a smaller code such as IVF4096,SQ8 or OPQ32,IVF4096,PQ32)"
    )
    check_memory(20, 20, "HNSW32")
    check_memory(20, None, "HNSW32")
    assert (available_memory() or 0) > 2**26
    with pytest.raises(UserError, match=r"--factory 'HNSW32' needs [\d,.]+ GiB of memory"):
        new_index(Recipe("HNSW32"), 768, 10**10, Path("vectors"))


def test_gpu_memory_is_compared_with_what_is_free() -> None:
    """Case B49: both sizes in one line, no assertion of CUDA's."""
    check_gpu_memory(13 * 2**30, [10 * 2**30, 12 * 2**30])
    with pytest.raises(RunFailed) as caught:
        check_gpu_memory(20 * 2**30, [10 * 2**30, 12 * 2**30])
    assert str(caught.value) == (
        "the index needs 20.0 GiB on 2 GPU with 10.0 GiB free each "
        "(use --float16, a smaller code such as PQ, or --device cpu)"
    )


def test_a_faiss_without_gpus_says_so() -> None:
    """Case R30."""
    if hasattr(load_faiss(), "StandardGpuResources"):
        pytest.skip("this FAISS has them")
    index = build("IVF8,Flat")
    with pytest.raises(
        UserError, match=r"this FAISS uses no GPU \(pip install 'condenser-ir\[gpu\]', or --device auto"
    ):
        FaissVectors(index, device="cuda")


def test_graphs_are_not_brought_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    faiss = load_faiss()
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1, raising=False)
    with pytest.raises(UserError, match="graphs such as HNSW are searched on the CPU"):
        FaissVectors(build("HNSW16"), device="cuda")
    assert not uses_gpu(build("HNSW16"), "auto") and uses_gpu(build("SQ8"), "auto")


def test_more_hits_than_a_gpu_keeps_come_from_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case B46: above the limit the same hits come from the CPU, and it is said (here both are the CPU)."""
    index = build("IVF8,Flat")
    set_parameters(index, {"nprobe": 8}, "IVF8,Flat", Path("index"))
    monkeypatch.setattr(faiss_index, "GPU_MOST_HITS", 1500)
    monkeypatch.setattr(faiss_index, "uses_gpu", lambda index, device: device == "cuda")
    monkeypatch.setattr(faiss_index, "to_gpus", lambda index, float16: index)
    ids = [f"p{number}" for number in range(2000)]
    on_gpu = Index(ids, FaissVectors(index, device="cuda"))
    on_cpu = Index(ids, FaissVectors(index))
    for k in (100, 1800):
        assert on_gpu.search(MATRIX[:3], k) == on_cpu.search(MATRIX[:3], k)
    assert capsys.readouterr().err == (
        "1,816 candidates are more than the 1,500 FAISS finds on a GPU: now on the CPU\n"
    )


def test_many_hits_come_out_whole() -> None:
    """Case B46: depth 4096 over 5000 vectors."""
    matrix = RNG.normal(size=(5000, 8)).astype("f4")
    ids = [f"p{number}" for number in range(5000)]
    recipe = Recipe("IVF4,Flat")
    index = fill_index(new_index(recipe, 8, 5000, Path("v")), recipe, 5000, lambda: [matrix], Path("v"))
    set_parameters(index, {"nprobe": 4}, "IVF4,Flat", Path("v"))
    exact = Index(ids, matrix).search_rows(matrix[:2], 4096)[0]
    np.testing.assert_array_equal(
        Index(ids, FaissVectors(index)).search_rows(matrix[:2], 4096)[0][:, :4000], exact[:, :4000]
    )
    assert (exact >= 0).all() and len(set(exact[0])) == 4096


def test_parameters_are_told_and_kept_within_reason() -> None:
    """Case B50: the values in use."""
    index = build("IVF8,PQ4x4,RFlat")
    used = set_parameters(index, {"nprobe": 100, "k_factor": 4, "ef_search": None}, "IVF8,PQ4x4,RFlat", Path("index"))
    assert used == {"k_factor": 4, "nprobe": 8}
    assert {name: parameter.value for name, parameter in parameters_of(index).items()} == used
    assert parameters_of(build("HNSW16"))["ef_search"].value == 16


def test_training_takes_a_sample_and_construction_its_depth() -> None:
    few, many = build("IVF8,Flat", training_size=100), build("IVF8,Flat")
    assert few.quantizer.ntotal == many.quantizer.ntotal == 8  # type: ignore[attr-defined]
    assert index_bytes(build("HNSW16", ef_construction=7), 1) > 0
    with pytest.raises(UserError, match="--ef_construction does not apply to a SQ8 index"):
        build("SQ8", ef_construction=7)


def test_a_file_that_claims_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    """No array may be longer than the file: the size of one is raised, byte by byte of its eight."""
    file = tmp_path / "index.faiss"
    write_index(build("SQ8"), file)
    whole = file.read_bytes()
    length = (16_000).to_bytes(8, "little")  # 2,000 vectors of 8 bytes
    place = whole.index(length)
    file.write_bytes(whole[:place] + (2**40).to_bytes(8, "little") + whole[place + 8 :])
    with pytest.raises(UserError, match=r"index\.faiss: is not a whole FAISS index: "):
        read_index(file)
    assert load_faiss().get_deserialization_vector_byte_limit() > 2**30, "the limit is for this file alone"
