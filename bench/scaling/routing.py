"""The experts of each token, as a file that the layer and its yardstick both read."""

import numpy as np

ROWS_AT_ONCE = 8192  # keeps the scores of all tokens out of memory


def name(text):
    """`text`, if it names a routing that can be drawn."""
    exponent(text)
    return text


def exponent(text):
    kind, colon, number = text.partition(":")
    if kind not in ("uniform", "zipf") or (kind == "zipf") != bool(colon):
        raise ValueError(f"'{text}' is neither uniform nor zipf:A")
    return float(number) if colon else 0.0


def topk_ids(tokens, experts, topk, routing, seed=1):
    """int32 [tokens, topk]: distinct experts for each token, drawn one after the other, all with
    the same weight (uniform) or with 1 / n^A for the n-th of a random order (zipf:A), as by
    `mok --routing`.

    Taking the topk largest of log(weight) + Gumbel noise is that distribution (Yellott 1977)."""
    g = np.random.default_rng(seed)
    log_weight = -exponent(routing) * np.log(g.permutation(experts) + 1.0)
    ids = np.empty((tokens, topk), np.int32)
    for begin in range(0, tokens, ROWS_AT_ONCE):
        part = ids[begin : begin + ROWS_AT_ONCE]
        scores = log_weight + g.gumbel(size=(len(part), experts))
        part[:] = np.argpartition(-scores, topk - 1, axis=1)[:, :topk]
    return ids
