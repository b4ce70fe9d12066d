"""One process of a training that `unidec.pipeline.launch` started: `python -m unidec.pipeline.worker FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from unidec.data.storage import write_json
from unidec.errors import UnidecError
from unidec.pipeline.launch import as_json
from unidec.pipeline.parent_watch import watch
from unidec.pipeline.training import work_on_rank
from unidec.progress import silence
from unidec.training.distributed import LostRank, Ranks

TELL_S = 3.0  # how long a rank whose peer is gone waits for the peer's own words


def main(folder: Path) -> int:
    """A worker: run the phase of job.json on this rank; returns the exit code.

    The first rank writes result.json into the folder. An error with a fix is reported as error-<rank>.json and ends in
    0, so that torchrun does not retry it; the launcher raises it. Whatever else ends a rank (a signal, a lost peer, a
    bug) has another code.
    """
    watch(os.getppid())
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    rank = int(os.environ["RANK"])
    own_error, result = folder / f"error-{rank}.json", folder / "result.json"
    own_error.unlink(missing_ok=True)  # of the start before this one
    if rank > 0:
        silence()
    else:
        result.unlink(missing_ok=True)
    try:
        ranks = Ranks.from_environment(job["params"]["device"])
        report = work_on_rank(ranks, job)
        if ranks.is_first:
            write_json(result, report)
        ranks.barrier()
        ranks.close()
    except UnidecError as error:
        write_json(own_error, as_json(error))
        if not isinstance(error, LostRank):
            return 0
        end = time.monotonic() + TELL_S
        while time.monotonic() < end:
            if any(not json.loads(file.read_text())["lost"] for file in folder.glob("error-*.json")):
                return 0
            time.sleep(0.2)
        print(f"rank {rank}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
