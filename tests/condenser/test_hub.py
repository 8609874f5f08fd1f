"""Finding a model by path or name: what looks like a path is never asked of the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from condenser.errors import UserError
from condenser.hub import local_folder, position_limit


@pytest.mark.parametrize(
    "name", ["nowhere/at/all", "./nowhere", "/nowhere", "tests/nowhere", "nowhere", "no such name"]
)
def test_a_missing_folder_is_no_network_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*address: object) -> None:
        raise AssertionError("asked the network")

    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(UserError, match="no such folder"):
        local_folder(name)


def test_a_near_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "encoder").mkdir()
    with pytest.raises(UserError, match=r"did you mean .*encoder"):
        local_folder(tmp_path / "encodr")


def test_positions_that_start_behind_the_pad_token_are_fewer() -> None:
    from transformers import BertConfig, RobertaConfig

    assert position_limit(BertConfig(max_position_embeddings=512)) == 512
    assert position_limit(RobertaConfig(max_position_embeddings=514, pad_token_id=1)) == 512


def test_pickled_weights_are_fetched_only_on_wish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose configuration is in the cache already, but not its weights."""
    asked: list[tuple[bool, bool]] = []

    def download(name: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        asked.append(("*.bin" in allow_patterns, local_files_only))
        if not local_files_only and "*.bin" in allow_patterns:
            (tmp_path / "pytorch_model.bin").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert local_folder("owner/name") == tmp_path
    assert local_folder("owner/name", also="*.bin") == tmp_path
    assert local_folder("owner/name", also="*.bin") == tmp_path
    assert asked == [(False, True), (True, True), (True, False), (True, True)]


def test_what_a_model_needs_is_fetched_from_its_subfolders_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The towers of an untied encoder, and what sentence-transformers keeps beside the weights."""
    from huggingface_hub.utils import filter_repo_objects

    asked: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    local_folder("owner/name")
    needed = ["query/model.safetensors", "passage/2_Dense/config.json", "1_Pooling/config.json", "2_Dense/weights.bin"]
    others = ["pytorch_model.bin", "onnx/model.onnx", "query/pytorch_model.bin", "tf_model.h5"]
    assert list(filter_repo_objects(needed + others, allow_patterns=asked[0])) == needed
