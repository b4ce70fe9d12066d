"""A Python that has imported torch, transformers, MLflow and the pipeline already: each program is
forked from one process that all workers of a test run share, which saves it some six seconds of a
processor.

    python -m helpers.warm_python PLACE RUN     the process to fork from, until process RUN ends
    python -SE warm_python.py PLACE WORDS...    in place of `python WORDS...`

The second takes files, folder, environment and signals (but for SIGKILL, which ends both) to its
program, and ends as it does. What libraries read of the environment when they are imported is that
of the test run: programs that set OMP_NUM_THREADS, or whose start or imports are tested, need a
Python of their own, and so do those of Prefect.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

HEADER = 4  # bytes of a message's length, and of a status
# not what reads settings as it is imported, such as Prefect
IMPORTED = (
    "mlflow.pyfunc",
    "mlflow.store.model_registry.sqlalchemy_store",
    "mlflow.store.tracking.sqlalchemy_store",
    "pyarrow.parquet",
    "torch._dynamo",  # an optimiser's first step imports it
    "transformers.models.bert.modeling_bert",
    "unidec.api",
    "unidec.cli",
    "unidec.comparison.cell",
    "unidec.pipeline.data_stages",
    "unidec.pipeline.evaluation",
    "unidec.pipeline.indexing",
    "unidec.pipeline.training",
    "unidec.serving.app",
    "unidec.serving.serve",
    "unidec.tracking.registry",
    "uvicorn",
)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def call(place: str, words: list[str]) -> int:
    """Run a program; returns its status, -N if signal N ended it."""
    given = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    message = json.dumps(given).encode()
    folder, name = os.path.split(place)
    os.chdir(folder)  # a socket's address has at most a hundred characters
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(name)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    header = len(message).to_bytes(HEADER, "big")
    socket.send_fds(connection, [header], [0, 1, 2])
    connection.sendall(message)
    status = connection.recv(HEADER)
    return int.from_bytes(status, "big", signed=True)


def end_as(status: int) -> None:
    """End this process as the program ended."""
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(place: str, run: int) -> None:
    """Fork programs until the test run ends; returns in each of them, when it shall begin."""
    import gc
    import importlib
    import threading

    for name in IMPORTED:
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()
    folder, name = os.path.split(place)
    os.chdir(folder)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{name}.new")
    listener.listen(64)
    listener.settimeout(1.0)
    os.rename(f"{name}.new", name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while os.path.exists(f"/proc/{run}"):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it
            look_after(connection)
            return
        connection.close()
    os._exit(0)


def look_after(connection: socket.socket) -> None:
    """Fork a program, hand signals to it and its status to who called it; returns in the program
    alone.
    """
    import select

    connection.setblocking(True)
    header, files, _, _ = socket.recv_fds(connection, HEADER, 3)
    with connection.makefile("rb") as reader:
        given = json.loads(reader.read(int.from_bytes(header, "big")))
    program = os.fork()
    if program == 0:
        connection.close()
        become(given, files)
        return
    for file in files:
        os.close(file)
    ended = os.pidfd_open(program)
    while ended not in (ready := select.select([ended, connection], [], [])[0]):
        assert ready
        # nothing more to read: the caller was killed
        numbers = connection.recv(1) or [signal.SIGKILL]
        os.kill(program, numbers[0])
    _, status = os.waitpid(program, 0)
    code = os.waitstatus_to_exitcode(status)
    try:
        connection.sendall(code.to_bytes(HEADER, "big", signed=True))
    finally:
        os._exit(0)


def become(given: dict, files: list[int]) -> None:
    """Take over files, folder, environment and words of the caller."""
    import tempfile

    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(given["environment"])
    tempfile.tempdir = None
    os.chdir(given["folder"])
    sys.argv = given["words"]
    paths = os.environ.get("PYTHONPATH", "")
    sys.path[:1] = ["", *filter(None, paths.split(os.pathsep))]


def run_program() -> None:
    """Run the program of `sys.argv`, as `python` does."""
    import runpy
    import types

    option = sys.argv[0]
    if option not in ("-m", "-c"):
        sys.path[0] = os.path.dirname(option)
        runpy.run_path(option, run_name="__main__")
        return
    program = sys.argv.pop(1)
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    if __spec__ is None:
        end_as(call(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1], int(sys.argv[2]))
    run_program()
