"""A project on a file system that cannot be written: each command that wants to write ends with one
message.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.raw_files import write_raw
from helpers.tiny_training import tiny_params

from unidec.data.raw import RawData
from unidec.errors import ArtifactError

pytestmark = pytest.mark.timeout(240)
MOUNT = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && cd "$1" && shift && exec "$@"'


def mounts() -> bool:
    """Whether this user may mount, in a name space of its own."""
    return (
        shutil.which("unshare") is not None
        and subprocess.run(["unshare", "-m", "true"]).returncode == 0
    )


@pytest.mark.skipif(not mounts(), reason="needs the right to mount")
def test_commands_on_a_read_only_file_system_end_with_one_message(
    tmp_path: Path, tiny_raw: RawData, tiny_bert: Path
) -> None:
    params = tiny_params(tiny_bert, **{"data.path": "raw"})
    project = tmp_path / "project"
    writable = tmp_path / "writable"
    (project / "raw").mkdir(parents=True)
    writable.mkdir()
    write_raw(tiny_raw, project / "raw", "xmc-json")
    (project / "params.json").write_text(params.model_dump_json())
    given = ["--params", "params.json"]
    commands = [
        ["data", "ingest", *given],
        ["data", "tokens", *given],
        ["train", *given],
        ["models", "start", *given],
        ["index", "build", *given],
        ["predict", "a text", "--bundle", "models:/unidec@champion"],
    ]
    # one process: importing torch takes longest
    (writable / "run.py").write_text(
        "import json, sys, traceback\nfrom unidec import cli\n"
        "def run(words):\n"
        "    sys.argv = ['unidec', *words]\n"
        "    try: cli.main()\n"
        "    except SystemExit as end: print('exit', end.code, file=sys.stderr, flush=True)\n"
        "    except BaseException: traceback.print_exc()\n"
        "for words in json.loads(sys.argv[1]): run(words)\n"
    )
    words = [sys.executable, str(writable / "run.py"), json.dumps(commands)]
    environment = os.environ | {"TMPDIR": str(writable), "HOME": str(writable)}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", MOUNT, "sh", str(project), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("error: ") == done.stderr.count("\nexit ") == len(commands), (
        done.stderr
    )
    assert done.stderr.count(f"exit {ArtifactError.exit_code}") == len(commands), done.stderr
    assert done.stderr.count("Read-only file system") >= 4, done.stderr
