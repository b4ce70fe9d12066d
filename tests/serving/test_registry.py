"""The registry as the server asks it: what it finds, what it fetches and refuses, and addresses
that are none.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import stored_versions
from helpers.stored_versions import store_version
from mlflow.exceptions import MlflowException

from unidec.data.storage import folder_sha256
from unidec.errors import ArtifactError, ConfigError
from unidec.serving.engine import Identity
from unidec.serving.follow import Registry, RegistryAway
from unidec.tracking.fetch import COPIES, Address, fetch_bundle, parse_address
from unidec.tracking.store import open_client

NAME = "unidec"


def store(folder: Path) -> str:
    return f"sqlite:///{folder / 'store' / 'mlflow.db'}"


@pytest.fixture(autouse=True)
def _working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def store_of_four(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A registry of four versions: two good ones, one with another's hash, one without a bundle."""
    root = tmp_path_factory.mktemp("shop")
    client = open_client(store(root))
    for what in ("one", "two", "three"):
        stored_versions.store_version(
            client, NAME, root / what, what, **{"dataset.sha256": "d" * 64}
        )
    client.set_model_version_tag(NAME, "3", "bundle.sha256", "0" * 64)
    (root / "empty").mkdir()
    (root / "empty" / "notes.txt").write_text("no bundle")
    client.create_model_version(
        NAME, source=(root / "empty").as_uri(), tags={"bundle.sha256": "1" * 64}
    )
    client.set_registered_model_alias(NAME, "champion", "1")
    return SimpleNamespace(root=root, client=client, uri=store(root))


def registry(store_of_four: SimpleNamespace, **address: Any) -> Registry:
    return Registry(
        Address(**({"name": NAME, "alias": "champion", "version": None} | address)),
        store_of_four.uri,
    )


def test_what_is_found(store_of_four):
    sha256 = folder_sha256(store_of_four.root / "one" / "artifacts" / "bundle")
    assert registry(store_of_four).find() == Identity(sha256, NAME, "1", "champion", "d" * 64)
    found = registry(store_of_four, alias=None, version="1").find()
    assert found == Identity(sha256, NAME, "1", None, "d" * 64)
    for nothing in ({"alias": "nobody"}, {"alias": None, "version": "99"}):
        with pytest.raises(ConfigError, match="one of champion, 4, 3, 2, 1"):
            registry(store_of_four, **nothing).find()
    with pytest.raises(ConfigError, match=f"(?s)no such model.*{NAME}"):
        registry(store_of_four, name="no-such-model").find()


def test_what_is_fetched(store_of_four):
    sha256 = folder_sha256(store_of_four.root / "two" / "artifacts" / "bundle")
    for _ in range(2):
        folder = registry(store_of_four).fetch(Identity(sha256, version="2"))
        assert folder == (COPIES / sha256[:16]).resolve()
        assert (folder / "labels.json").read_text() == '["two"]'


def refused(client: Registry, version: str) -> str:
    with pytest.raises(ArtifactError) as caught:
        client.fetch(Identity("", version=version))
    return str(caught.value)


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("3", "another bundle"),
        ("4", "no bundle"),
    ],
)
def test_what_is_refused(store_of_four, version, why):
    assert why in refused(registry(store_of_four), version)
    assert not [path for path in COPIES.iterdir() if not path.name.startswith(".")], (
        "nothing is left"
    )


def test_a_damaged_file_is_refused(store_of_four):
    store_version(store_of_four.client, "damaged", store_of_four.root / "damaged", "whole")
    file = store_of_four.root / "damaged" / "artifacts" / "bundle" / "labels.json"
    file.write_text(file.read_text().replace("whole", "whale"))
    assert "damaged" in refused(registry(store_of_four, name="damaged"), "1")


def test_a_link_in_a_stored_bundle_is_not_followed(store_of_four, tmp_path):
    store_version(store_of_four.client, "link", store_of_four.root / "link", "one")
    (store_of_four.root / "link" / "artifacts" / "bundle" / "more.json").symlink_to("/etc/hostname")
    assert "more.json" in refused(registry(store_of_four, name="link"), "1")
    assert not list(tmp_path.rglob("more.json"))


def test_a_version_whose_files_are_gone_is_refused_and_a_registry_that_is_gone_is_away(
    store_of_four, monkeypatch
):
    store_version(store_of_four.client, "gone", store_of_four.root / "gone", "one")
    (store_of_four.root / "gone" / "artifacts").rename(store_of_four.root / "gone" / "elsewhere")
    client = registry(store_of_four, name="gone")
    assert "cannot be fetched" in refused(client, "1") or "no bundle" in refused(client, "1")

    def lost(*args: Any, **options: Any) -> Any:
        raise MlflowException("connection refused")

    monkeypatch.setattr("unidec.tracking.promotion.version_of", lost)
    with pytest.raises(RegistryAway, match="connection refused"):
        client.find()
    monkeypatch.setattr("unidec.serving.follow.fetch_bundle", lost)
    with pytest.raises(RegistryAway):
        client.fetch(Identity("", version="1"))


@pytest.mark.parametrize(
    "text", ["models:", "models:/x", "models:/a/b/1", "model:/x@champion", "http://x/y"]
)
def test_addresses_that_are_none(text):
    with pytest.raises(ConfigError, match="not an address"):
        parse_address(text)


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        (f"models:/{NAME}@champoin", "champion"),
        (f"models:/{NAME[:-1]}@champion", NAME),
        (f"models:/{NAME}/99", None),
        ("models:/z@zzz", None),
    ],
)
def test_what_the_registry_does_not_have_is_answered_with_what_it_has(
    store_of_four, address, meant
):
    with pytest.raises(ConfigError, match="not in the registry") as caught:
        fetch_bundle(address, store_of_four.uri)
    error = caught.value
    listed = NAME if "no such model" in error.what else "champion, 4, 3, 2, 1"
    assert listed in str(error.expected)
    assert error.where == address.rpartition("@" if "@" in address else "/")[0]
    assert error.fix == f"nearest: {meant}" if meant else "`unidec models list`" in error.fix


def test_a_model_without_a_version_is_told_how_to_get_one(tmp_path):
    open_client(store(tmp_path)).create_registered_model(NAME)
    with pytest.raises(ConfigError, match="has no version yet") as caught:
        fetch_bundle(f"models:/{NAME}@champion", store(tmp_path))
    assert "unidec models register" in str(caught.value.fix)
    assert "nearest" not in str(caught.value)


def test_a_server_with_a_bad_address_ends_with_the_fix(store_of_four, tmp_path, warm_python):
    for source, code, said in (
        (f"models:/{NAME}@champoin", 2, "nearest: champion"),
        (f"model:/{NAME}@champion", 2, "models:/name@alias"),
        ("no-such-folder", 4, "no bundle here"),
    ):
        done = subprocess.run(
            [*warm_python, "-m", "unidec.cli", "serve", source, "--port", "0"],
            cwd=tmp_path,
            text=True,
            env=os.environ | {"MLFLOW_TRACKING_URI": store_of_four.uri},
            capture_output=True,
            timeout=120,
        )
        assert done.returncode == code and said in done.stderr, done
        assert not done.stdout, "neither listening nor ready"
        assert "Traceback" not in done.stderr


def test_addresses():
    assert parse_address("outputs/bundle") is None
    assert parse_address("models:/m@champion") == Address("m", "champion", None)
    assert parse_address("models:/m/7") == Address("m", None, "7")
