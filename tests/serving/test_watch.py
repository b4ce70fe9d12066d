"""The process that asks the registry: what it answers, what it refuses, and that it is ended in time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unidec.data.storage import folder_sha256
from unidec.errors import ArtifactError, ConfigError
from unidec.serving import watch as module
from unidec.serving.watch import Found, RegistryAway, Watch, _answer, _Asked, stored_bytes
from unidec.tracking.fetch import Address, fetch_bundle, parse_address
from unidec.tracking.store import open_client

NAME = "unidec"


def store(folder: Path) -> str:
    return f"sqlite:///{folder / 'store' / 'mlflow.db'}"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, helper: Callable[[str], Any]) -> SimpleNamespace:
    """A registry of four versions: two good ones, one with another's hash, one without a bundle."""
    root = tmp_path_factory.mktemp("shop")
    client = open_client(store(root))
    stored = helper("tracking/stored_versions")
    for what in ("one", "two", "three"):
        stored.store_version(client, NAME, root / what, what, **{"dataset.sha256": "d" * 64})
    client.set_model_version_tag(NAME, "3", "bundle.sha256", "0" * 64)
    (root / "empty").mkdir()
    (root / "empty" / "notes.txt").write_text("no bundle")
    client.create_model_version(NAME, source=(root / "empty").as_uri(), tags={"bundle.sha256": "1" * 64})
    client.set_registered_model_alias(NAME, "champion", "1")
    return SimpleNamespace(root=root, client=client, uri=store(root))


def asked(shop: SimpleNamespace, copies: Path, **address: Any) -> _Asked:
    return _Asked(shop.uri, str(copies), NAME, **({"alias": "champion", "version": None} | address))


def test_what_the_child_finds(shop, tmp_path):
    sha256 = folder_sha256(shop.root / "one" / "artifacts" / "bundle")
    found = {"found": {"version": "1", "sha256": sha256, "data": "d" * 64}}
    assert _answer(asked(shop, tmp_path), {"do": "look"}) == found
    assert _answer(asked(shop, tmp_path, alias=None, version="1"), {"do": "look"}) == found
    for nothing in ({"alias": "nobody"}, {"alias": None, "version": "99"}):
        answer = _answer(asked(shop, tmp_path, **nothing), {"do": "look"})
        assert answer["found"] is None and "alias champion (version 1); versions 1, 2, 3, 4" in answer["missing"]
    other = _Asked(shop.uri, str(tmp_path), "no-such-model", "champion", None)
    answer = _answer(other, {"do": "look"})
    assert answer["found"] is None and "no such model" in answer["missing"] and NAME in answer["missing"]


def test_what_the_child_fetches(shop, tmp_path):
    child = asked(shop, tmp_path)
    sha256 = folder_sha256(shop.root / "two" / "artifacts" / "bundle")
    first = _answer(child, {"do": "fetch", "version": "2", "max_bytes": 1 << 20})
    assert first == {"folder": str(tmp_path / sha256[:16]), "fetched": True}
    assert (tmp_path / sha256[:16] / "labels.json").read_text() == '["two"]'
    assert _answer(child, {"do": "fetch", "version": "2", "max_bytes": 1 << 20})["fetched"] is False


@pytest.mark.parametrize(
    ("version", "max_bytes", "why"),
    [("1", 10, "too large"), ("3", 1 << 20, "another bundle"), ("4", 1 << 20, "no bundle"), ("99", 1 << 20, "")],
)
def test_what_the_child_refuses(shop, tmp_path, version, max_bytes, why):
    answer = _answer(asked(shop, tmp_path), {"do": "fetch", "version": version, "max_bytes": max_bytes})
    assert set(answer) <= {"refused", "away"} and why in str(answer)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")], "nothing is left"


def test_a_damaged_file_is_refused(shop, tmp_path, helper):
    helper("tracking/stored_versions").store_version(shop.client, "damaged", shop.root / "damaged", "whole")
    file = shop.root / "damaged" / "artifacts" / "bundle" / "labels.json"
    file.write_text(file.read_text().replace("whole", "whale"))
    child = _Asked(shop.uri, str(tmp_path), "damaged", "champion", None)
    assert "damaged" in _answer(child, {"do": "fetch", "version": "1", "max_bytes": 1 << 20})["refused"]


def test_a_link_in_a_stored_bundle_is_not_followed(shop, tmp_path, helper):
    helper("tracking/stored_versions").store_version(shop.client, "link", shop.root / "link", "one")
    (shop.root / "link" / "artifacts" / "bundle" / "more.json").symlink_to("/etc/hostname")
    child = _Asked(shop.uri, str(tmp_path), "link", "champion", None)
    assert "more.json" in _answer(child, {"do": "fetch", "version": "1", "max_bytes": 1 << 20})["refused"]
    assert not list(tmp_path.rglob("more.json"))


def test_a_version_whose_files_are_gone_is_refused_and_a_registry_that_is_gone_is_away(shop, tmp_path, helper):
    helper("tracking/stored_versions").store_version(shop.client, "gone", shop.root / "gone", "one")
    (shop.root / "gone" / "artifacts").rename(shop.root / "gone" / "elsewhere")
    child = _Asked(shop.uri, str(tmp_path), "gone", "champion", None)
    request = {"do": "fetch", "version": "1", "max_bytes": 1 << 20}
    assert set(_answer(child, dict(request))) == {"refused"}

    def lost(*args: Any) -> Any:
        raise OSError("connection refused")

    child.fetch = child.look = lost  # type: ignore[method-assign]
    assert set(_answer(child, dict(request))) == set(_answer(child, {"do": "look"})) == {"away"}


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of the system")
def test_a_file_that_gets_too_long_is_cut_off(tmp_path):
    with module._bounded_files(1000), pytest.raises(OSError, match="too large"), (tmp_path / "a").open("wb") as file:
        file.write(b"x" * 2000)
    (tmp_path / "b").write_bytes(b"x" * 2000)


def test_a_registry_that_lists_files_without_end_is_refused(monkeypatch):
    endless = SimpleNamespace(
        list_artifacts=lambda path: [SimpleNamespace(is_dir=True, path=f"{path}/x", file_size=None)]
    )
    monkeypatch.setattr(
        "mlflow.store.artifact.artifact_repository_registry.get_artifact_repository", lambda address: endless
    )
    with pytest.raises(ArtifactError, match="too many files"):
        stored_bytes("models:/m/1", 100)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("models:", "models:/unidec@champion"), ("models:/x", "models:/x@champion"),
        ("models:/x@", "models:/x@champion"), ("models:/x/latest", "models:/x@latest"), ("models:/a/b/1", None),
        ("models:/x@y/1", None), ("model:/x@champion", "models:/x@champion"), ("model:/x/7", "models:/x/7"),
        ("models://x@champion", "models:/x@champion"), ("models:x@7", "models:/x/7"), ("http://x/y", "models:/x@y"),
    ],
)  # fmt: skip
def test_addresses_that_are_none(text, meant):
    with pytest.raises(ConfigError, match="not an address") as caught:
        parse_address(text)
    assert caught.value.fix == (meant and f"did you mean {meant}?")


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        (f"models:/{NAME}@champoin", f"models:/{NAME}@champion"),
        ("models:/unidce@champion", f"models:/{NAME}@champion"),
        ("models:/unidce/2", f"models:/{NAME}/2"), (f"models:/{NAME}/99", None), ("models:/z@zzz", None),
    ],
)  # fmt: skip
def test_what_the_registry_does_not_have_is_answered_with_what_it_has(shop, tmp_path, address, meant):
    with pytest.raises(ConfigError, match="not in the registry") as caught:
        fetch_bundle(address, tmp_path, uri=shop.uri)
    error = caught.value
    listed = NAME if "no such model" in error.what else "alias champion (version 1); versions 1, 2, 3, 4"
    assert listed in str(error.expected) and error.where == address.rpartition("@" if "@" in address else "/")[0]
    assert error.fix == f"did you mean {meant}?" if meant else "`unidec models list`" in error.fix


def test_a_server_with_a_bad_address_never_says_that_it_listens(shop, tmp_path):
    for source, code, said in (
        (f"models:/{NAME}@champoin", 2, f"did you mean models:/{NAME}@champion?"),
        (f"model:/{NAME}@champion", 2, f"did you mean models:/{NAME}@champion?"),
        ("no-such-folder", 4, "no bundle here"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "unidec.cli", "serve", source, "--port", "0"], cwd=tmp_path, text=True,
            env=os.environ | {"MLFLOW_TRACKING_URI": shop.uri}, capture_output=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == code and said in done.stderr and "listening" not in done.stdout, done
        assert "Traceback" not in done.stderr


def test_addresses():
    assert parse_address("outputs/bundle") is None
    assert parse_address("models:/m@champion") == Address("m", "champion", None)
    assert parse_address("models:/m/7") == Address("m", None, "7")


def test_a_real_process(shop, tmp_path):
    """Asked, killed, frozen and asked again."""
    with contextlib.closing(Watch(Address(NAME, "champion", None), tmp_path, shop.uri)) as watch:
        found = watch.look()
        assert isinstance(found, Found) and found.version == "1"
        folder, is_new = watch.fetch(found, 1 << 20)
        assert is_new and folder_sha256(folder) == found.sha256
        with pytest.raises(ArtifactError, match="too large"):
            watch.fetch(found, 10)
        child = watch._child
        assert child is not None and "mlflow" not in " ".join(sys.argv)
        os.kill(child.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RegistryAway, match="does not answer"):
            watch.look(seconds=0.3)
        assert time.monotonic() - began < 3 and child.poll() is not None, "what hangs is killed"
        watch.prepare()
        assert watch._child is not None
        watch._child.kill()
        with pytest.raises(RegistryAway, match="ended"):
            watch.look()
        watch.prepare()
        child = watch._child
    assert child is not None and child.poll() is not None


PARENT = """
import sys, time
from pathlib import Path
from unidec.tracking.fetch import Address
from unidec.serving.watch import Watch
watch = Watch(Address("m", "champion", None), Path(sys.argv[1]), sys.argv[2])
watch.prepare()
print(watch._child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_the_process_ends_when_the_server_is_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tmp_path, store(tmp_path)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").is_dir() and _state(pid) != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def test_close_wakes_who_waits(tmp_path, monkeypatch):
    real = module.start_child
    words = ("timeit", "-n1", "-r1", "import time; time.sleep(60)")  # reads nothing, answers nothing
    monkeypatch.setattr(module, "start_child", lambda *_, **__: real(*words))
    watch = Watch(Address("m", "champion", None), tmp_path, store(tmp_path))
    timer = threading.Timer(0.2, watch.close)
    timer.start()
    began = time.monotonic()
    with pytest.raises(RegistryAway):
        watch.look()
    timer.join()
    assert time.monotonic() - began < 5
