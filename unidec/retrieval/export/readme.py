"""The README of an exported folder: what it is, how it is loaded, what its numbers mean."""

from __future__ import annotations

from collections.abc import Sequence

from unidec.retrieval.bundle import Bundle
from unidec.retrieval.export.heads import Scored

_SCORES = {
    "de": "cos(Phi_D(query), Phi_D(label)), the dual encoder's score",
    "clf": "the classifier's score",
    "both": "the dual encoder's score plus {weight:g} times the classifier's: what the bundle ranks by",
}


def _about(bundle: Bundle, score: Scored) -> list[str]:
    """Facts that every export shares."""
    data = bundle.info.dataset.get("name", "unknown data")
    means = _SCORES[score.head].format(weight=score.clf_weight)
    lines = [
        f"- bundle: `{bundle.sha256}`, trained on {data}, {bundle.num_labels} labels",
        f"- head: `{score.head}`, {score.width} dimensions",
        f"- the inner product with the label vectors of the same head (`unidec export vectors --head {score.head}`) is "
        f"{means}; use inner product, not cosine, in a vector database"
        + ("" if score.head != "de" else " (these vectors are of unit length: here both are the same)"),
        f"- a query is the text that the bundle was trained on (`{bundle.info.text}`), cut at "
        f"{bundle.about.max_length} tokens",
    ]
    if bundle.info.knn is not None:
        lines.append("- the bundle's votes of similar training queries are not in this: only the bundle adds them")
    return lines


def sentence_transformers(bundle: Bundle, score: Scored) -> str:
    """README of `sentence.export_sentence_transformers`."""
    lines = [
        "# Query encoder for sentence-transformers", "", *_about(bundle, score), "",
        "```python",
        "import numpy as np, pyarrow.parquet as pq",
        "from sentence_transformers import SentenceTransformer",
        "",
        'model = SentenceTransformer("FOLDER")',
        'labels = pq.read_table("labels.parquet")',
        'scores = model.encode(["a query"]) @ np.stack(labels["vector"].to_numpy()).T',
        "for row in scores[0].argsort()[::-1][:5]:",
        '    print(labels["title"][int(row)], scores[0][row])',
        "```",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def onnx(bundle: Bundle, score: Scored, outputs: Sequence[str], opset: int) -> str:
    """README of `onnx_folder.export_onnx`."""
    about = {
        "de": f"`de` float32 [B, {score.dim}]: the dual encoder's head, unit length",
        "clf": f"`clf` float32 [B, {score.dim}]: the classifier's head",
        "vector": f"`vector` float32 [B, {score.width}]: the query side of head `{score.head}`",
    }
    lines = [
        "# Query encoder and heads in ONNX", "", *_about(bundle, score),
        f"- `model.onnx`: standard operators, opset {opset}; inputs `input_ids` and `attention_mask`, int64 [B, T], "
        "padded on the right; outputs:",
        *(f"  - {about[name]}" for name in outputs),
        "- `tokenizer.json`: of the Hugging Face `tokenizers` library (Rust, Python, Node, Java), its truncation set",
        "", "```python",
        "import numpy as np, onnxruntime, pyarrow.parquet as pq",
        "from tokenizers import Tokenizer", "",
        'tokenizer = Tokenizer.from_file("FOLDER/tokenizer.json")',
        'found = tokenizer.encode_batch(["a query", "another query"])',
        'inputs = {"input_ids": np.array([one.ids for one in found]),',
        '          "attention_mask": np.array([one.attention_mask for one in found])}',
        'session = onnxruntime.InferenceSession("FOLDER/model.onnx")',
        'vector = session.run(["vector"], inputs)[0]',
        'labels = pq.read_table("labels.parquet")',
        'scores = vector @ np.stack(labels["vector"].to_numpy()).T',
        "```",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
