"""Stage `inputs`: writes what each result depends on besides data to files on which the other DVC
stages depend.

For example, data/inputs/training.json has the values of all parameters that determine a training,
including those of the recipe and defaults, and a hash of the code that determines it. So a stage is
out of date only if one of these changes, and dvc.yaml lists neither parameters nor modules.
"""

from __future__ import annotations

import json

from unidec.code import code_sha256
from unidec.config import RESULTS, Params, keys_deciding, leaves
from unidec.data.storage import folder_sha256, write_bytes_atomic
from unidec.pipeline import paths


def inputs(params: Params) -> dict[str, str]:
    """Write data/inputs/<result>.json for each result of the pipeline; a file that would not change
    is left alone.

    Returns:
        {"changed": the results whose file was written, or "nothing"}.
    """
    values = dict(leaves(params))
    changed = []
    for result in ("checks", *RESULTS):
        decides = {"code": code_sha256(result)}
        decides |= {key: values[key] for key in keys_deciding(result, warm=True)}
        if decides.get("teacher.bundle"):  # replace the path by a hash of the content
            decides["teacher.bundle"] = folder_sha256(params.teacher.bundle)
        content = json.dumps(decides, indent=1).encode() + b"\n"
        file = paths.INPUTS / f"{result}.json"
        if not file.is_file() or file.read_bytes() != content:
            write_bytes_atomic(file, content)
            changed.append(result)
    return {"changed": ", ".join(changed) or "nothing"}
