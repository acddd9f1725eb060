"""What can still be allocated, by /proc and by cgroups as containers and schedulers set them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.rank.free_memory import available_memory_bytes

FREE_KIB = 1000
STAT = """anon 100
inactive_file 30
active_file 20
total_inactive_file 300
total_active_file 200
"""


def node(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """Write what the kernel would show."""
    shown = {"proc/meminfo": f"MemTotal: 9999 kB\nMemAvailable: {FREE_KIB} kB\n", **files}
    if cgroup:
        shown["proc/self/cgroup"] = cgroup
    for name, text in shown.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(group: str, limit: str, used: int) -> dict[str, str]:
    path = f"sys/fs/cgroup/{group}"
    return {
        f"{path}/memory.max": f"{limit}\n",
        f"{path}/memory.current": f"{used}\n",
        f"{path}/memory.stat": STAT,
    }


def v1(group: str, limit: int, used: int) -> dict[str, str]:
    path = f"sys/fs/cgroup/memory/{group}"
    return {
        f"{path}/memory.limit_in_bytes": f"{limit}\n",
        f"{path}/memory.usage_in_bytes": f"{used}\n",
        f"{path}/memory.stat": STAT,
    }


@pytest.mark.parametrize(
    ("cgroup", "files", "wanted"),
    [
        pytest.param("", {}, FREE_KIB * 1024, id="no cgroups"),
        pytest.param("0::/\n", {}, FREE_KIB * 1024, id="no memory controller"),
        pytest.param("0::/\n", v2(".", "max", 7), FREE_KIB * 1024, id="no limit"),
        # What was read from files may be let go of.
        pytest.param("0::/\n", v2(".", "5000", 4990), 60, id="container"),
        pytest.param("0::/a/b\n", v2("a/b", "5000", 4990), 60, id="nested"),
        pytest.param(
            "0::/a/b\n", v2("a", "4000", 3995) | v2("a/b", "5000", 4990), 55, id="around it"
        ),
        pytest.param("0::/elsewhere\n", v2(".", "5000", 4990), 60, id="the mount is the group"),
        pytest.param(
            "3:cpu:/x\n9:hugetlb,memory:/job/7\n", v1("job/7", 5000, 4990), 510, id="version 1"
        ),
        pytest.param("9:memory:/x\n", v1("x", 2**63 - 4096, 4990), FREE_KIB * 1024, id="v1, none"),
        pytest.param("9:memory:/docker/1\n0::/\n", v1(".", 5000, 4990), 510, id="v1 container"),
    ],
)
def test_the_closest_limit_counts(
    tmp_path: Path, cgroup: str, files: dict[str, str], wanted: int
) -> None:
    assert available_memory_bytes(node(tmp_path, cgroup, files)) == wanted
