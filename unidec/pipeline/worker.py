"""One process of a training that `unidec.pipeline.launch` started: `python -m unidec.pipeline.worker FOLDER`.

The folder holds job.json; the first rank writes result.json into it, a rank that fails error-<rank>.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from unidec.data.storage import write_json
from unidec.errors import UnidecError
from unidec.pipeline import launch
from unidec.pipeline.parent_watch import watch
from unidec.pipeline.training import work_on_rank
from unidec.progress import silence
from unidec.training.distributed import LostRank, Ranks

TELL_S = 3.0  # how long a rank whose peer is gone waits for the peer's own words


def main(folder: Path) -> int:
    """Run the job on this rank; returns the exit code.

    An error with a fix is reported and ends in 0, so that torchrun does not retry it; the launcher raises it. Whatever
    else ends a rank (a signal, a lost peer, a bug) has another code.
    """
    watch(os.getppid())
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    rank = int(os.environ["RANK"])
    if rank > 0:
        silence()
    for file in (folder / f"error-{rank}.json", folder / "result.json"):
        if rank == 0 or file.name != "result.json":
            file.unlink(missing_ok=True)  # of the start before this one
    try:
        ranks = Ranks.from_environment(job["params"]["device"])
        result = work_on_rank(ranks, job)
        if ranks.is_first:
            write_json(folder / "result.json", result)
        ranks.barrier()
        ranks.close()
    except LostRank as error:
        write_json(folder / f"error-{rank}.json", launch.as_json(error, lost=True))
        end = time.monotonic() + TELL_S
        while time.monotonic() < end:
            if any(not json.loads(file.read_text())["lost"] for file in folder.glob("error-*.json")):
                return 0
            time.sleep(0.2)
        print(f"rank {rank}: {error}", file=sys.stderr)
        return 1
    except UnidecError as error:
        write_json(folder / f"error-{rank}.json", launch.as_json(error, lost=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
