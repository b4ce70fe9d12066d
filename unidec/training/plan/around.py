"""What a training holds around its steps: data, refresh, validation, index; on the device, in host memory, on disk.

Legend: N queries of all splits, n training queries, L labels, H mined negatives a query, D width of a head, W width of
the encoder, D' width of the searched space.
"""

from __future__ import annotations

from dataclasses import replace

from unidec.training.needs import head_labels, weighs_by_propensity
from unidec.training.plan.items import STATE, Item, times
from unidec.training.plan.sizes import training_rows
from unidec.training.plan.step import BF16, FP32, INT64, Setting, state_items

INT32, FP16, FP64 = 4, 2, 8
_LISTS_OF_ONE_COPY = 1024  # unidec.retrieval.coarse.FLAT_CENTROIDS
_BLOCK, _LABELS_AT_ONCE = 512, 1 << 16  # queries and labels of a tile of scores, unidec.model.search
_CHECKED_AT_ONCE = 1 << 16  # rows looked at for finite values there
_ENCODED_AT_ONCE = 1024  # texts, UniDEC.encode
_PROJECTED_AT_ONCE = 1 << 16  # unidec.model.unidec.VECTORS_BLOCK
_TABLE_ROWS_AT_ONCE = 1 << 15  # unidec.model.unidec.START_BLOCK
_COUNTED_AT_ONCE = 1 << 16  # texts, unidec.training.start.TEXTS_AT_ONCE
_POINTS_AT_ONCE = {False: 1 << 16, True: 1 << 20}  # on a processor, on a GPU: unidec.training.clustering
_STRING = 57  # bytes of a Python string beside its characters, and of the list's pointer to it (sys.getsizeof)
_AFTER_START = ("forward", "backward", "update", "save")


def host_items(s: Setting, process: int) -> list[Item]:
    """Host memory that does not depend on the device, and what a GPU's host holds besides.

    Args:
        process: bytes of a Python process that has loaded the libraries.
    """
    items = [Item("process", "host", process, "measured: Python and its libraries as loaded now")]
    return [*items, *_data_items(s), *_start_items(s), *_refresh_items(s), *_ranking_items(s)]


def shortlist_rows(s: Setting) -> int:
    """Rows of the mined shortlist: queries of every split, with Gandalf labels too."""
    return s.sizes.num_queries + (s.sizes.num_labels if s.params.pool.gandalf else 0)


def _data_items(s: Setting) -> list[Item]:
    sizes, params, rows, listed = s.sizes, s.params, training_rows(s.params, s.sizes), shortlist_rows(s)
    texts = sizes.num_queries + sizes.num_labels
    id_bytes = 2 if sizes.vocab_size < 65536 else 4
    num_tokens = sizes.query_tokens + sizes.label_tokens
    pointers = INT64 * (sizes.num_queries + 1)
    everything = "all" in head_labels(params)
    per_label = INT32 + ((INT32 + INT64 + INT32) if everything else 0)
    per_label += FP64 * weighs_by_propensity(params)
    items = [
        Item("token ids", "host", id_bytes * num_tokens, times(num_tokens, id_bytes), spare=True),
        Item("token offsets", "host", INT64 * (texts + 2), times(texts, 8), spare=True),
        Item("relevance", "host", pointers + (INT32 + FP32) * sizes.num_pairs,
             f"{sizes.num_pairs:,} x 8 + {sizes.num_queries:,} x 8", spare=True),
        Item("filter pairs", "host", pointers + INT32 * sizes.num_filter_pairs,
             f"{sizes.num_filter_pairs:,} x 4 + {sizes.num_queries:,} x 8", spare=True),
        Item("filter flags, rows, splits", "host", sizes.num_filter_pairs + INT64 * rows + sizes.num_queries,
             f"{sizes.num_filter_pairs:,} + {rows:,} x 8 + {sizes.num_queries:,}"),
        Item("sampler", "host", per_label * sizes.num_labels, times(sizes.num_labels, per_label)),
    ]  # fmt: skip
    if params.pool.gandalf:
        pairs = sizes.num_pairs + sizes.num_graph_pairs
        items.append(Item("relevance with label texts", "host", 2 * (INT32 + FP32) * pairs + 2 * INT64 * listed,
                          f"{pairs:,} pairs x 8 x 2 (copies) + {listed:,} x 16"))  # fmt: skip
    if s.batch.negatives:
        items.append(Item("hard negatives", "host", INT32 * listed * s.batch.negatives,
                          times(listed, s.batch.negatives, 4), _AFTER_START, spare=True))  # fmt: skip
    frozen = frozen_bytes(s)
    if frozen:
        items.append(Item("frozen outputs", "host", frozen, "memory-mapped from data/cache", spare=True))
    state = checkpoint_bytes(s)
    items.append(Item("snapshot of a checkpoint", "host", state, "weights and state, written by a thread",
                      _AFTER_START, spare=True))  # fmt: skip
    return items


def frozen_bytes(s: Setting) -> int:
    """Of the caches of an encoder that is frozen, or of a transformer that is, wholly or in its lower layers."""
    if s.frozen:
        return FP16 * (s.sizes.num_queries + s.sizes.num_labels) * s.width
    if not s.has_transformer or (s.trained_layers == s.shape.layers and s.params.encoder.trainable_layers < 0):
        return 0
    texts = s.sizes.num_queries + s.sizes.num_labels
    rows = texts if not s.trained_layers else s.sizes.query_tokens + s.sizes.label_tokens
    lower = s.trained_layers < s.shape.layers or not s.trained_layers
    return FP16 * rows * s.shape.hidden if lower else 0


def _start_items(s: Setting) -> list[Item]:
    items = [Item("texts first encoded", "device", encoding_bytes(s, s.has_transformer), "256 texts at a time",
                  ("start",))]  # fmt: skip
    if s.has_bag:
        share = min(1.0, _COUNTED_AT_ONCE / s.sizes.num_queries)
        num_tokens = int(s.sizes.query_tokens * share)
        # ragged: place, repeated shift and their sum; ids as int64; text of each token; text and id in one number,
        # sorted and made unique
        items.append(Item("document frequencies", "host", 7 * INT64 * num_tokens,
                          f"{num_tokens:,} tokens at a time x 56", ("start",)))  # fmt: skip
    if s.params.model.heads != "de" and s.params.model.clf_init == "label_embedding":
        rows, dim = min(s.sizes.num_labels, _TABLE_ROWS_AT_ONCE), s.params.model.dim
        encoded = FP32 * rows * s.width
        items.append(Item("label vectors for the table", "host", encoded, times(rows, s.width, 4), ("start",)))
        items.append(Item("start of the table", "device", 2 * FP32 * rows * dim + (encoded if s.cuda else 0),
                          f"{rows:,} rows at a time", ("start",)))  # fmt: skip
    return items


def encoding_bytes(s: Setting, transformer: bool) -> int:
    """Of the texts that are encoded at once without gradients, through the transformer or from its cached vectors."""
    length = max(len(s.sizes.query_lengths), len(s.sizes.label_lengths)) - 1
    tokens = min(_ENCODED_AT_ONCE, 256) * min(length, s.params.tokens.max_length)
    value = BF16 if s.half else FP32
    values = tokens * (4 * s.shape.hidden + 2 * s.shape.intermediate)
    pairs = 0 if s.cuda else 3 * tokens * min(length, s.params.tokens.max_length) * s.shape.attention_heads
    return value * (values + pairs) * transformer + FP32 * _ENCODED_AT_ONCE * 3 * s.width


def _encoded(rows: int, s: Setting) -> int:
    """One head's vectors of all texts, and a block's encoder outputs with its vectors."""
    dim = s.params.model.dim
    return FP32 * (rows * dim + min(rows, _PROJECTED_AT_ONCE) * (s.width + dim))


def _refresh_items(s: Setting) -> list[Item]:
    params, labels, dim = s.params, s.sizes.num_labels, s.params.model.dim
    clusters, mines = params.pool.batches == "clustered", s.batch.negatives > 0
    if not (clusters or mines):
        return []
    n = training_rows(s.params, s.sizes)
    vectors = FP32 * n * dim
    by_text = params.model.heads != "clf"  # labels are compared by their texts, else by the classifier's rows
    # of queries twice, as parts and joined
    encoded = max(_encoded(n, s), 2 * vectors, vectors + _encoded(labels, s) if mines and by_text else 0)
    items = [
        Item("vectors being encoded", "host", encoded,
             f"up to {max(2 * n, n + labels if mines and by_text else n):,} x {dim:,} x 4 and a block", ("refresh",)),
        Item("texts being encoded", "device", encoding_bytes(s, s.trained_layers > 0), "256 texts at a time",
             ("refresh", "validate")),
        Item("query vectors", "host", vectors, times(n, dim, 4), ("cluster", "mine")),
    ]  # fmt: skip
    if clusters:
        # points of the largest cluster but the first, or of many small ones thrice: all, those that move, the next ones
        copied = max(-(-n // 2), 3 * min(n, _POINTS_AT_ONCE[s.cuda])) + (n if s.cuda else 0)
        items.append(Item("clustering", "device", copied * FP32 * dim + n * 6 * INT64,
                          f"{times(copied, dim, 4)} + {n:,} x 48", ("cluster",)))  # fmt: skip
    if mines:
        block = _tile_bytes(s)
        table = 0 if by_text or s.cuda else -1
        items.append(Item("label vectors", "host", FP32 * labels * dim * (1 + table), times(labels, dim, 4), ("mine",)))
        if s.cuda:
            items.append(Item("vectors to search", "device", FP32 * (n + labels) * dim, times(n + labels, dim, 4),
                              ("mine",)))  # fmt: skip
        items.append(Item("scores of a tile", "device", block,
                          f"{_BLOCK} x {min(labels, _LABELS_AT_ONCE):,} x 4 and checks", ("mine",)))  # fmt: skip
        items.append(Item("hard negatives being mined", "host", INT32 * shortlist_rows(s) * s.batch.negatives,
                          times(shortlist_rows(s), s.batch.negatives, 4), ("mine",)))  # fmt: skip
    return items


def _tile_bytes(s: Setting) -> int:
    """Of a tile of scores, with a check for finite values before it."""
    labels = s.sizes.num_labels
    check = min(max(s.sizes.num_train, labels), _CHECKED_AT_ONCE) * s.params.model.dim
    return FP32 * _BLOCK * min(labels, _LABELS_AT_ONCE) + check


def _space_width(s: Setting) -> int:
    """D'."""
    index, model = s.params.index, s.params.model
    bias = model.clf_bias and not index.clf_normalize and index.space != "de"
    return (2 if index.space == "both" else 1) * model.dim + bool(bias)


def _ranking_items(s: Setting) -> list[Item]:
    """Validation after each round, and the index at the end: label vectors of both heads and the searched space."""
    model, index, labels = s.params.model, s.params.index, s.sizes.num_labels
    de = model.heads != "clf"
    held = FP32 * labels * model.dim if de else 0
    copied = s.cuda or model.clf_dtype == "bf16" or s.params.run.table_place != "device"
    table = FP32 * labels * model.dim if model.heads != "de" and copied else 0
    unit = FP32 * labels * model.dim if index.space != "de" and index.clf_normalize else 0
    space = _space_width(s)
    joined = FP32 * labels * space if index.space == "both" else 0
    encoding = _encoded(labels, s) if de else 0
    scores = _tile_bytes(s)
    ranking = held + table + joined + max(unit, scores)
    phases = ("validate", "index") if s.sizes.num_validation else ("index",)
    items = [
        Item("label vectors to rank", "host", max(encoding, ranking),
             f"{labels:,} x {space:,} x 4, the heads' own vectors, a block of scores", phases)
    ]  # fmt: skip
    codes, more = _index_bytes(s)
    strings = 2 * labels * _STRING + s.sizes.text_bytes
    items.append(Item("faiss index", "host", codes + more,
                      f"{index.kind}: {times(labels, codes // labels)}{f' + links or lists {more:,}' if more else ''}",
                      ("index",)))  # fmt: skip
    items.append(Item("label names", "host", strings, f"{labels:,} uids and titles, {_STRING} each and their letters",
                      ("index",)))  # fmt: skip
    return items


def _index_bytes(s: Setting) -> tuple[int, int]:
    """Of the labels' codes in the index, and of what leads to them: a graph's links, or ids and centroids of lists."""
    index, labels, space = s.params.index, s.sizes.num_labels, _space_width(s)
    code = FP32 * space
    if index.kind.endswith("sq8"):
        code = space
    elif index.kind.endswith("pq"):
        code = -(-space // (2 * index.pq_dims))
    more = 0
    if index.kind.startswith("hnsw"):
        more = labels * (2 * index.hnsw_links * INT32 + 2 * INT64)
    elif index.kind.startswith("ivf"):
        lists = index.ivf_lists or min(round(16 * labels**0.5), max(1, labels // 64))  # IndexOptions.num_lists
        copies = 2 if lists > _LISTS_OF_ONE_COPY else 1
        code, more = copies * code, copies * INT64 * labels + FP32 * space * lists
    return labels * code, more


def checkpoint_bytes(s: Setting) -> int:
    """Of one checkpoint: everything that training keeps from step to step, of all ranks."""
    s = replace(s, params=s.params.model_copy(update={"run": s.params.run.model_copy(update={"devices": 1})}))
    return sum(item.num_bytes for item in state_items(s) if item.name in STATE)


def disk_items(s: Setting) -> list[Item]:
    """Files that a training and its index leave."""
    sizes, dim = s.sizes, s.params.model.dim
    state = checkpoint_bytes(s)
    weights = sum(i.num_bytes for i in state_items(s) if i.name in STATE and not i.name.endswith(("state", "moments")))
    refresh = INT64 * training_rows(s.params, s.sizes) + INT32 * shortlist_rows(s) * s.batch.negatives
    vectors = FP32 * sizes.num_labels * dim * s.num_heads
    index = sum(_index_bytes(s))
    items = [
        Item("checkpoints", "disk", 3 * state, f"{state:,} x 3: two kept, one being written"),
        Item("refresh", "disk", 3 * refresh, f"{refresh:,} x 3: two kept, one being written"),
        Item("model and bundle", "disk", 2 * weights + vectors + index + sizes.text_bytes,
             f"weights {weights:,} x 2, label vectors {vectors:,}, index {index:,}"),
    ]  # fmt: skip
    frozen = frozen_bytes(s)
    return [*items, Item("frozen outputs", "disk", frozen, "float16, data/cache")] if frozen else items
