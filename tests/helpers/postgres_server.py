"""A real PostgreSQL on this machine, with the roles and databases that mlflow/postgres-init.sh
makes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from helpers.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SECRETS = {
    "postgres": "owner's",
    "mlflow": "for 'mlflow' only",
    "prefect": "for prefect",
    "s3": "s3's key",
}  # awkward on purpose


def binaries() -> Path | None:
    """The folder of the newest PostgreSQL that the distribution installed."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])
    )
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


class Postgres:
    """A cluster in a folder of its own, at a free port of 127.0.0.1; it refuses to run as root, so
    another user does.

    Attributes:
        port: where it listens.
        secrets: folder with the passwords, a file each.
    """

    def __init__(self) -> None:
        found = binaries()
        assert found is not None
        self._bin = found
        self.folder = Path(tempfile.mkdtemp(prefix="unidec-postgres-"))
        self._as = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        self.port = free_port()
        self.secrets = self.folder / "secrets"
        self.secrets.mkdir()
        for name, password in SECRETS.items():
            (self.secrets / name).write_text(password)

    def start(self) -> None:
        if self._as:
            shutil.chown(self.folder, "postgres")
        words = [
            "--auth=scram-sha-256",
            "--username=postgres",
            f"--pwfile={self.secrets / 'postgres'}",
            "--no-sync",
        ]
        self._run("initdb", "-D", str(self.folder / "data"), *words)
        options = (
            f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        )
        self.again(options)
        environment = os.environ | {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.port),
            "PGPASSWORD": SECRETS["postgres"],
            "SECRETS": str(self.secrets),
            "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}",
        }
        subprocess.run(
            ["sh", str(ROOT / "mlflow" / "postgres-init.sh")],
            env=environment,
            check=True,
            capture_output=True,
        )

    def create(self, name: str, owner: str) -> str:
        """Another, empty database; its address."""
        environment = os.environ | {"PGPASSWORD": SECRETS["postgres"]}
        words = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "-O", owner, name]
        subprocess.run(
            [str(self._bin / "createdb"), *words], env=environment, check=True, capture_output=True
        )
        return f"postgresql://{owner}@127.0.0.1:{self.port}/{name}"

    def again(self, options: str) -> None:
        log = self.folder / "data" / "server.log"
        self._run(
            "pg_ctl", "start", "-w", "-D", str(self.folder / "data"), "-l", str(log), "-o", options
        )

    def stop(self) -> None:
        try:
            self._run("pg_ctl", "stop", "-m", "immediate", "-D", str(self.folder / "data"))
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def uri(self, name: str) -> str:
        """Address of the database of `mlflow` or `prefect`, without a password:
        PGPASSWORD has it.
        """
        return f"postgresql://{name}@127.0.0.1:{self.port}/{name}"

    def _run(self, program: str, *words: str) -> None:
        # no pipe: the server would inherit it and keep it open
        with (self.folder / f"{program}.log").open("wb") as log:
            done = subprocess.run(
                [*self._as, str(self._bin / program), *words],
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        assert done.returncode == 0, (self.folder / f"{program}.log").read_text()
