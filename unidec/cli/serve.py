"""`unidec serve`: a bundle over HTTP."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from unidec.cli.options import DEFAULT_BUNDLE, DEFAULT_PARAMS, Assignments, ParamsFile, load_if_there

# numpy's products for one query are small: threads of its own would cost more than they bring, and take the cores from
# the encoder and the search, which have `serve.threads`. Read once, when numpy is imported.
_QUIET_THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def serve(
    source: Annotated[
        str, typer.Argument(metavar="[BUNDLE]", help="folder, models:/name@alias (followed) or models:/name/version")
    ] = str(DEFAULT_BUNDLE),
    host: Annotated[str | None, typer.Option(help="address to listen at; default serve.host, 127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="0: any free one; default serve.port, 8080")] = None,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
) -> None:
    """Answer queries over HTTP, with a page to try it at /; SIGTERM or Ctrl-C ends it when all is answered.

    When an alias moves, the new version is loaded beside the old and takes over without a failed request
    (docs/serving.md). The environment variable UNIDEC_API_KEY holds the key that clients must send; without it none is
    required.
    """
    from unidec.serving.memory import share_one_heap

    share_one_heap()  # before anything starts a thread
    for name, value in _QUIET_THREADS.items():
        os.environ.setdefault(name, value)
    given = {"serve.host": host, "serve.port": port}
    extra = [f"{key}={value}" for key, value in given.items() if value is not None]
    settings = load_if_there(params, [*(assignments or []), *extra]).serve
    from unidec.serving.run import serve as run

    run(source, settings)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    examples = "unidec serve  |  unidec serve models:/unidec@champion --port 9000  |  unidec serve --set serve.max_k=20"
    app.command("serve", epilog=f"Examples: {examples}")(serve)
