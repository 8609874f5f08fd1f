"""What is installed: the wheel carries the data, its licences and the command, and nothing else of the clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_dependencies_are_pinned_for_the_tests() -> None:
    """Each requirement has one version in constraints.txt, and no package has two."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    assert len(pinned) == len(lines)
    assert pinned["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *extras["cpu"], *extras["dev"]]:
        assert re.split(r"[<>=\[]", requirement)[0].lower() in pinned
    assert extras["cpu"] == ["faiss-cpu>=1.15.1"]
    assert extras["gpu"] == ["faiss-gpu>=1.15.1"]


@pytest.mark.slow
def test_wheel_carries_the_data_and_the_command_works_from_it(tmp_path: Path) -> None:
    clone, site = tmp_path / "clone", tmp_path / "site"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, clone)
    for name in ("condenser", "retrieval", "eval", "scripts"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(clone)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("condenser_ir-*.whl")

    with zipfile.ZipFile(wheel) as archive:
        about = {name.split(".dist-info/")[1]: name for name in archive.namelist() if ".dist-info/" in name}
        packed = set(archive.namelist()) - set(about.values())
        entry_points = archive.read(about["entry_points.txt"]).decode()
    sources = {
        file.relative_to(clone).as_posix()
        for package in ("condenser", "retrieval", "eval")
        for file in (clone / package).rglob("*")
        if file.is_file() and not any(part.endswith(".egg-info") for part in file.parts)
    }
    assert packed == sources
    assert {"retrieval/data/medquad/corpus.jsonl.gz", "retrieval/data/nq-qed/ATTRIBUTION.md", "eval/py.typed"} <= packed
    assert {name.split("/")[2] for name in packed if name.startswith("retrieval/data/")} == {"medquad", "nq-qed"}
    assert {"licenses/LICENSE", "licenses/NOTICE"} <= about.keys()
    assert "condenser = retrieval.cli:main" in entry_points

    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], check=True)
    listing = subprocess.run(
        [sys.executable, "-m", "retrieval.cli", "data"],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert [line.split()[:2] for line in listing[1:]] == [["medquad", "15,780"], ["nq-qed", "7,957"]]
