"""Data that many tests share: a small synthetic set, a slice of the real one. Read-only: copy
before damaging.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import re
import shutil
import sqlite3
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from helpers import shared_prefect, tiny_training, warm_python_process
from helpers.operated_project import OperatedProject
from helpers.tiny_data import make_raw, tiny_transformer

from unidec.config import Params
from unidec.data.dataset import XMCDataset, write_dataset
from unidec.data.formats import read_raw
from unidec.data.raw import RawData, make_slice
from unidec.data.tokens import TokenCache, build_token_cache

ROOT = Path(__file__).resolve().parent.parent
# of the `make test` that runs these tests
for variable in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES"):
    os.environ.pop(variable, None)  # the tests' own `make` must print what a user's does
# some containers set it: each of hundreds of child processes would compile the package again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# files and folders with the longest tests: they start first, so that no worker is left alone with
# them at the end
SLOWEST = (
    "operations",  # begins with a project that no other test has used
    "flows/test_shards.py",
    "test_recipes.py",
    "test_dvc.py",
    "flows",
    "faults",
    "comparison",
    "tracking",
    "pipeline",
    "validation",
    "training",
    "serving",
    "cli",
    "ranking",
    "bundle",
    "test_cli.py",
    "test_api.py",
    "test_house.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by `SLOWEST`; pytest-xdist hands out whole files in this order."""

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(ROOT / "tests")
        return next(
            (i for i, name in enumerate(SLOWEST) if path.is_relative_to(name)), len(SLOWEST)
        )

    items.sort(key=place)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU where there is none."""
    if item.get_closest_marker("cuda") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


@pytest.fixture(scope="module", autouse=True)
def garbage_of_this_file() -> None:
    """Garbage collections in a file's tests scan only what these tests made, and not the millions
    of objects of all modules that the process has imported: swaps of a model collect each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A seed for each test, moved for all of them by UNIDEC_TEST_SEED."""
    seed = int(os.environ.get("UNIDEC_TEST_SEED", 0))
    # tests/ranking and tests/bundle keep the seeds of their former folder: with about one seed in
    # twenty, two scores of tests/ranking/test_word_scores.py are equal but for rounding
    test = re.sub("^tests/(ranking|bundle)/", "tests/retrieval/", request.node.nodeid)
    return np.random.default_rng([zlib.crc32(test.encode()), seed])


@pytest.fixture
def every_step_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """history.jsonl gets a line for each step."""
    monkeypatch.setattr("unidec.training.trainer.LOG_EVERY", 1)


@pytest.fixture
def stub_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles load the stub of `tiny_bundle` in place of UniDEC."""
    from helpers.tiny_bundle import StubModel

    monkeypatch.setattr("unidec.bundle.bundle._load_model", lambda path, device: StubModel(path))
    monkeypatch.setattr("unidec.bundle.bundle.ModelConfig.read", StubModel)


@pytest.fixture(scope="session")
def tiny_raw() -> RawData:
    return make_raw()


@pytest.fixture(scope="session")
def tiny_dataset(tiny_raw: RawData, tmp_path_factory: pytest.TempPathFactory) -> XMCDataset:
    """60 queries x 40 labels, split 43 / 5 / 12."""
    return write_dataset(
        tmp_path_factory.mktemp("tiny") / "dataset", tiny_raw, validation_share=0.1
    )


@pytest.fixture(scope="session")
def lf_debian_path() -> Path:
    """The default data set as shipped."""
    return ROOT / "data" / "raw" / "lf-debian"


@pytest.fixture(scope="session")
def lf_debian(lf_debian_path: Path) -> RawData:
    """The whole of it, read once."""
    return read_raw(lf_debian_path)


@pytest.fixture(scope="session")
def slice_raw(lf_debian: RawData) -> RawData:
    """The first 2,000 training and 500 test queries of lf-debian."""
    return make_slice(lf_debian, 2000, 500)


@pytest.fixture(scope="session")
def slice_dataset(slice_raw: RawData, tmp_path_factory: pytest.TempPathFactory) -> XMCDataset:
    """`slice_raw`, stored: 1,900 / 100 / 500 queries, 4,497 labels."""
    return write_dataset(tmp_path_factory.mktemp("slice") / "dataset", slice_raw)


@pytest.fixture(scope="session", autouse=True)
def outlined_charts() -> Iterator[Callable[[Any], Any]]:
    """Charts on pages are empty pictures with their description: matplotlib takes a quarter of a
    second to draw one. Child processes draw them, and so do tests with `drawn`. Gives the function
    that draws.
    """
    from markupsafe import Markup, escape

    from unidec.evaluation.figures import Chart

    def outline(chart: Chart) -> Markup:
        return Markup(f'<svg role="img" aria-label="{escape(chart.about)}"></svg>')

    draw = Chart.svg
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chart, "svg", outline)
        yield draw


@pytest.fixture
def drawn(outlined_charts: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are drawn, as for users."""
    monkeypatch.setattr("unidec.evaluation.figures.Chart.svg", outlined_charts)


@pytest.fixture(scope="session", autouse=True)
def compiled_loops(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The first process of a test run compiles the ranking's inner loops, if they have changed, and
    the others wait: it takes longer than a server lets a query take.
    """
    folder, _ = shared_prefect.run_folder(tmp_path_factory.getbasetemp())
    done = folder / "compiled"
    with FileLock(f"{done}.lock"):
        if not done.exists() and not _are_compiled():
            _compile_loops(tmp_path_factory.mktemp("compile") / "bundle")
        done.touch()


def _are_compiled() -> bool:
    """Whether anything was compiled since the ranking's code was changed."""
    folder = ROOT / "unidec" / "ranking"
    changed = [file.stat().st_mtime for file in folder.glob("*.py")]
    compiled = [file.stat().st_mtime for file in folder.glob("__pycache__/*.nbi")]
    return max(compiled, default=0) > max(changed)


def _compile_loops(bundle: Path) -> None:
    from helpers.tiny_bundle import StubModel, write_tiny_bundle

    from unidec.bundle.bundle import Bundle

    options = {"votes": True, "by_words": True, "fused": True, "stacked": True}
    write_tiny_bundle(bundle, np.random.default_rng(0), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unidec.bundle.bundle._load_model", lambda path, device: StubModel(path))
        Bundle.load(bundle).predict(["old house"])


@pytest.fixture(scope="session", autouse=True)
def stores_are_copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """MLflow's migrations take five seconds of a processor: a test run makes them for its first
    store alone.
    """
    from unidec.tracking import store

    create = store.create_store

    def copy(database: Path, artifacts: str) -> None:
        folder, _ = shared_prefect.run_folder(tmp_path_factory.getbasetemp())
        first = folder / "empty-store.db"
        with FileLock(f"{first}.lock"):
            if not first.exists():
                create(first.with_suffix(".new"), "file:///nowhere")
                first.with_suffix(".new").rename(first)
        shutil.copyfile(first, database)
        with contextlib.closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("UPDATE experiments SET artifact_location = ? || '/0'", (artifacts,))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "create_store", copy)
        yield


@pytest.fixture(scope="module")
def memory_registry() -> Iterator[str]:
    """Address of a registry whose database is in memory if there is such a place: hundreds of small
    commits. To a process that is killed, memory is like any disk.
    """
    from unidec.tracking.store import prepare_store

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield prepare_store(f"sqlite:///{folder}/mlflow.db")


@pytest.fixture
def raw_factory() -> Callable[..., RawData]:
    """`make_raw`: synthetic data of any size."""
    return make_raw


@pytest.fixture(scope="session")
def tiny_bert(tiny_raw: RawData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a BERT with 3 layers of 32 dimensions that knows the words of `tiny_raw`."""
    return tiny_transformer("bert", tiny_raw, tmp_path_factory.mktemp("bert") / "bert")


@pytest.fixture(scope="session")
def tiny_distilbert(tiny_raw: RawData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a DistilBERT."""
    return tiny_transformer(
        "distilbert", tiny_raw, tmp_path_factory.mktemp("distilbert") / "distilbert"
    )


@pytest.fixture(scope="session")
def tiny_encoder(
    tiny_raw: RawData, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """`tiny_encoder("t5")`: folder of an encoder of `tiny_architectures.ARCHITECTURES`."""
    root = tmp_path_factory.mktemp("architectures")

    def get(name: str) -> Path:
        from helpers.tiny_architectures import write_encoder

        titles = tiny_raw.labels["title"].to_pylist()
        return root / name if (root / name).is_dir() else write_encoder(root / name, name, titles)

    return get


@pytest.fixture(scope="session")
def tiny_tokens(
    tiny_dataset: XMCDataset, tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, TokenCache]:
    """Token caches of `tiny_dataset`'s titles: "queries" and "labels" (`tiny_distilbert` has the
    same tokenizer).
    """
    sizes = {"queries": tiny_dataset.num_queries, "labels": tiny_dataset.num_labels}
    root = tmp_path_factory.mktemp("tiny-tokens")
    return {
        name: TokenCache.open(
            build_token_cache(tiny_dataset.text_batches(name), tiny_bert, 16, root / name, size)
        )
        for name, size in sizes.items()
    }


@pytest.fixture(scope="session")
def benchmark_module() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a benchmark by name: they are programs, not a package, so their folder is put on
    sys.path.
    """
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="session")
def tiny_params(tiny_bert: Path) -> Callable[..., Params]:
    """`tiny_params(**{"pool.beta": 1})`: parameters of a training of `tiny_dataset` that takes a
    second on a CPU.
    """
    return lambda **overrides: tiny_training.tiny_params(tiny_bert, **overrides)


@pytest.fixture
def open_trainer(
    tiny_dataset: XMCDataset,
    tiny_tokens: dict[str, TokenCache],
    tiny_params: Callable[..., Params],
    tmp_path: Path,
) -> Callable[..., Any]:
    """`open_trainer("run", **{"pool.beta": 1})`: a `Trainer` of `tiny_dataset`; the same name opens
    the run again.
    """

    def open_trainer(run: str = "run", **overrides: Any) -> Any:
        from helpers.label_targets import soft_targets

        from unidec.training.trainer import Trainer, TrainingData

        params = tiny_params(**overrides)
        graph = soft_targets(tiny_dataset.relevance[tiny_dataset.rows("train")], 0.1)
        tokens = tiny_tokens.values()
        return Trainer(
            params.training,
            TrainingData(tiny_dataset, *tokens, graph),
            tmp_path / run,
            tmp_path / "cache",
        )

    return open_trainer


@pytest.fixture
def make_batches(
    tiny_dataset: XMCDataset,
    tiny_tokens: dict[str, TokenCache],
    tiny_params: Callable[..., Params],
) -> Callable[..., Any]:
    """`make_batches(ranks, graph, **overrides)`: batches of `tiny_dataset`, whose texts are
    recorded, not encoded.
    """

    def make(ranks: Any = None, graph: Any = None, cluster_L: Any = None, **overrides: Any) -> Any:
        from helpers.recorded_batches import record_batches

        params = tiny_params(**overrides)
        return record_batches(
            params, tiny_dataset, tiny_tokens, ranks=ranks, graph=graph, cluster_L=cluster_L
        )

    return make


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of a real Prefect server, for PREFECT_API_URL; all workers of
    pytest-xdist share it.
    """
    return str(shared_prefect.address(tmp_path_factory.getbasetemp()))


@pytest.fixture
def prefect_home(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tmp_path/home, for PREFECT_HOME of a process with a temporary server: its new database is
    there.
    """
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(shared_prefect.empty_database(tmp_path_factory.getbasetemp()), home)
    return home


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words in place of `sys.executable`, for programs that import torch: it takes them seconds."""
    return warm_python_process.words(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A project with a Prefect server and worker at work, shared by the tests marked
    `operations`.
    """
    with OperatedProject(tmp_path_factory.mktemp("world")) as operated:
        yield operated


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch computes with two threads during the test."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
