"""Where a figure comes from: the commit is lowtide's own, wherever somebody stands."""

import subprocess
from pathlib import Path

import pytest

import lowtide
from lowtide.bench.provenance import COMMIT, provenance


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another repository, in which somebody stands."""
    monkeypatch.delenv(COMMIT, raising=False)
    git(tmp_path, "init", "-q", ".")
    git(tmp_path, "-c", "user.email=a@b", "-c", "user.name=a", "commit", "-q", "--allow-empty", "-m", "x")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commit_is_not_that_of_the_folder_one_stands_in(elsewhere: Path) -> None:
    assert provenance("cpu")["commit"] != git(elsewhere, "rev-parse", "--short", "HEAD")


def test_a_package_inside_another_repository_has_no_commit(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a virtual environment that lies in it."""
    package = elsewhere / ".venv" / "lowtide"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(lowtide, "__file__", str(package / "__init__.py"))
    assert provenance("cpu")["commit"] is None
    git(elsewhere, "add", "-f", ".venv/lowtide/__init__.py")
    git(elsewhere, "-c", "user.email=a@b", "-c", "user.name=a", "commit", "-q", "-m", "lowtide's own")
    assert provenance("cpu")["commit"] == git(elsewhere, "describe", "--always")
