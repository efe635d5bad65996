"""How much CPU memory there is, read from trees of files as Linux shows them."""

from pathlib import Path

import pytest

from lowtide.runtime import host_memory as module
from lowtide.runtime.host_memory import HostMemory, host_memory

GIB = 2**30
NO_LIMIT_IN_V1 = str(2**63 - 4096)
MEMINFO = f"""MemTotal:       {64 * 2**20} kB
MemFree:         1234567 kB
MemAvailable:   {40 * 2**20} kB
HugePages_Total:       0
"""


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of 64 GiB, 40 of them free, in no control group."""
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "groups").write_text("")
    monkeypatch.setattr(module, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(module, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(module, "_ROOT", tmp_path / "cgroup")
    return tmp_path


def group(tree: Path, path: str, **files: str | int) -> None:
    """A control group's folder; names of files with a double underscore for the dot."""
    folder = tree / "cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_machine_alone(tree: Path) -> None:
    assert host_memory() == HostMemory(64 * GIB, 40 * GIB)


def test_a_group_of_version_2_binds(tree: Path) -> None:
    (tree / "groups").write_text("0::/user.slice/job\n")
    group(tree, "user.slice/job", memory__max=16 * GIB, memory__current=10 * GIB)
    assert host_memory() == HostMemory(16 * GIB, 6 * GIB)


def test_the_kernels_cache_of_files_counts_as_free(tree: Path) -> None:
    (tree / "groups").write_text("0::/job\n")
    group(tree, "job", memory__max=16 * GIB, memory__current=10 * GIB)
    (tree / "cgroup/job/memory.stat").write_text(f"anon 1\nfile {8 * GIB}\ninactive_file {4 * GIB}\nactive_file 5\n")
    assert host_memory() == HostMemory(16 * GIB, 10 * GIB)


def test_a_parents_limit_binds_too(tree: Path) -> None:
    (tree / "groups").write_text("0::/a/b/c\n")
    group(tree, "a/b/c", memory__max="max", memory__current=GIB)
    group(tree, "a/b", memory__max=32 * GIB, memory__current=30 * GIB)
    group(tree, "a", memory__max=8 * GIB, memory__current=2 * GIB)
    assert host_memory() == HostMemory(8 * GIB, 2 * GIB)


def test_without_a_limit_the_machine_counts(tree: Path) -> None:
    (tree / "groups").write_text("0::/a\n")
    group(tree, "a", memory__max="max", memory__current=GIB)
    assert host_memory() == HostMemory(64 * GIB, 40 * GIB)


@pytest.mark.parametrize("shown", ["0::/\n", "0::/docker/0123\n", "0::/../outside\n"])
def test_in_a_container_the_groups_folder_is_the_root(tree: Path, shown: str) -> None:
    (tree / "groups").write_text(shown)
    group(tree, ".", memory__max=4 * GIB, memory__current=GIB)
    assert host_memory() == HostMemory(4 * GIB, 3 * GIB)


@pytest.mark.parametrize("folder", ["memory/docker/0123", "memory"])
def test_a_group_of_version_1_binds(tree: Path, folder: str) -> None:
    (tree / "groups").write_text("9:cpu,cpuacct:/docker/other\n5:memory:/docker/0123\n1:name=systemd:/init.scope\n")
    group(tree, folder, memory__limit_in_bytes=12 * GIB, memory__usage_in_bytes=5 * GIB)
    (tree / "cgroup" / folder / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {GIB}\n")
    found = host_memory()
    assert found is not None and found.limit_bytes == 12 * GIB
    assert found.available_bytes >= 7 * GIB


def test_version_1_counts_the_cache_of_the_groups_below(tree: Path) -> None:
    """memory.usage_in_bytes is of the whole hierarchy, and so is what is called total_ in memory.stat."""
    (tree / "groups").write_text("5:memory:/job\n")
    group(tree, "memory/job", memory__limit_in_bytes=12 * GIB, memory__usage_in_bytes=5 * GIB)
    (tree / "cgroup/memory/job/memory.stat").write_text(f"inactive_file {GIB}\ntotal_inactive_file {3 * GIB}\n")
    assert host_memory() == HostMemory(12 * GIB, 10 * GIB)


def test_version_1_without_a_limit(tree: Path) -> None:
    (tree / "groups").write_text("5:memory:/\n")
    group(tree, "memory", memory__limit_in_bytes=NO_LIMIT_IN_V1, memory__usage_in_bytes=5 * GIB)
    assert host_memory() == HostMemory(64 * GIB, 40 * GIB)


def test_other_controllers_say_nothing_of_memory(tree: Path) -> None:
    (tree / "groups").write_text("9:cpu:/small\n")
    group(tree, "small", memory__max=GIB, memory__current=0)
    assert host_memory() == HostMemory(64 * GIB, 40 * GIB)


def test_a_group_that_uses_more_than_its_limit_leaves_nothing(tree: Path) -> None:
    (tree / "groups").write_text("0::/a\n")
    group(tree, "a", memory__max=GIB, memory__current=2 * GIB)
    assert host_memory() == HostMemory(GIB, 0)


def test_a_group_that_is_gone_is_passed_over(tree: Path) -> None:
    (tree / "groups").write_text("0::/gone/away\n")
    assert host_memory() == HostMemory(64 * GIB, 40 * GIB)


def test_without_meminfo_the_system_is_asked(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "meminfo").unlink()
    answers = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000, "SC_AVPHYS_PAGES": 600}
    monkeypatch.setattr(module.os, "sysconf", answers.__getitem__)
    assert host_memory() == HostMemory(4_096_000, 2_457_600)


def test_a_system_that_says_nothing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "meminfo").unlink()

    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(module.os, "sysconf", unknown)
    assert host_memory() is None


def test_this_machine() -> None:
    found = host_memory()
    assert found is None or 0 <= found.available_bytes <= found.limit_bytes
