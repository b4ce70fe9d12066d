"""How much memory a process takes (Linux), where a benchmark ran, and its table."""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

MIB = 2**20


def status(process: int | str = "self") -> dict[str, int]:
    """Bytes by name of the kernel's figures of a process: VmHWM, VmRSS, RssAnon, RssFile, ..."""
    text = Path(f"/proc/{process}/status").read_text()
    lines = (line.split() for line in text.splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): 1024 * int(number) for name, number, _ in lines}


class Memory:
    """Peak memory of what runs within: `peak` is all that was resident (mapped files too, which the
    kernel may drop), `anonymous` what only this process holds, looked at a hundred times a second.
    """

    def __enter__(self) -> Self:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        self.begin = status()
        self.anonymous = self.begin["RssAnon"]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.end = status()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.anonymous = max(self.anonymous, status()["RssAnon"])

    def facts(self) -> dict[str, float]:
        """MiB over what the process held before: `peak_mib`, `anonymous_mib`; and `before_mib`."""
        anonymous = max(self.anonymous, self.end["RssAnon"])
        return {
            "before_mib": round(self.begin["VmRSS"] / MIB, 1),
            "peak_mib": round((self.end["VmHWM"] - self.begin["VmRSS"]) / MIB, 1),
            "anonymous_mib": round((anonymous - self.begin["RssAnon"]) / MIB, 1),
        }


def machine() -> dict[str, Any]:
    """Processor, cores, memory and versions."""
    import torch

    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(value) for value in line) + " |" for line in lines)
