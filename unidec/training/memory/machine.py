"""What memory this machine has, and how much this process has taken."""

from __future__ import annotations

import re
import resource
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unidec.errors import ConfigError
from unidec.training.memory.estimate import Place

_UNITS = {"": 1, "k": 10, "m": 20, "g": 30, "t": 40}
_CGROUPS = (  # limit and use of the process's own group, version 2 then 1
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory.stat")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.stat"),
    ),
)


@dataclass(frozen=True)
class Machine:
    """Bytes that are free for a training.

    Attributes:
        device: of the GPU; None: there is none, or it is not known.
        host: of host memory. disk: of the folder that runs are written to.
        device_name: for people.
    """

    device: int | None
    host: int | None
    disk: int | None
    device_name: str = ""

    @classmethod
    def here(cls, cuda: bool, folder: Path = Path(), given: Mapping[str, int | None] | None = None) -> Machine:
        """This machine, with what is `given` ("device", "host", "disk") in place of what is measured.

        What this process holds counts as free: a plan names it too ("process").
        """
        given = {k: v for k, v in (given or {}).items() if v is not None}
        device: int | None = None
        name = ""
        if cuda and "device" not in given:
            import torch

            if torch.cuda.is_available():
                device, _ = torch.cuda.mem_get_info()
                device += torch.cuda.memory_reserved()  # free for tensors, though taken from the driver
                name = torch.cuda.get_device_name()
        host = given.get("host") or available_host() + resident()
        disk = given.get("disk") or shutil.disk_usage(_existing(folder)).free
        return cls(given.get("device", device), host, disk, name)

    def free(self, place: Place) -> int | None:
        """Bytes at a place; None: not known."""
        return {"device": self.device, "host": self.host, "disk": self.disk}[place]


def available_host() -> int:
    """Bytes of host memory that can still be taken: of the machine, and of the control group (container) it runs in."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit_file, used_file, stat_file in _CGROUPS:
        try:
            limit, used = limit_file.read_text().strip(), int(used_file.read_text())
            cached = re.search(r"^inactive_file (\d+)", stat_file.read_text(), re.MULTILINE)
        except (OSError, ValueError):
            continue
        if limit != "max":
            free = min(free, int(limit) - used + (int(cached.group(1)) if cached else 0))
    return max(free, 0)


def resident() -> int:
    """Bytes of this process in memory now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def host_peak() -> int:
    """The most bytes this process has had in memory at once."""
    status = Path("/proc/self/status")
    if status.is_file():
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return int(found.group(1)) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, kilobytes elsewhere


def device_peak() -> int | None:
    """The most bytes that tensors took on the GPU at once; None without one."""
    import torch

    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None


def parse_bytes(text: str, where: str) -> int:
    """ "16GiB", "1.5 TB", "800M" -> bytes; KiB and K are 1,024, KB is 1,000.

    Raises:
        ConfigError: anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)\s*", text, re.IGNORECASE)
    if not found or (found.group(3).lower() == "i") or (not found.group(2) and "i" in found.group(3).lower()):
        raise ConfigError("not a size of memory", where=where, got=text, expected="e.g. 16GiB, 141GB, 800M")
    number, unit, suffix = float(found.group(1)), found.group(2).lower(), found.group(3).lower()
    power = _UNITS[unit]
    return int(number * (1000 ** (power // 10) if suffix == "b" and unit else 1 << power)) if unit else int(number)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return folder if folder.exists() else _existing(folder.parent)
