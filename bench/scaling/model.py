"""Time of a call at one EP degree from the measured time at another, usually EP 1.

Everything that follows from the plan is counted exactly (tiles, recomputed tiles, bytes on links);
the one thing that is taken from the measurement is how fast the kernel multiplies. For each rank

    products = forward   max(6 rows H I / matrix, weights / hbm)
               backward  that + recomputed gate and up
                         + 6 rows H I / matrix + weight gradients / hbm
    time     = rest + max(products / efficiency + exposed * links, links)
    rest     = schedule + reduce / hbm + (R > 1: stage / hbm)

and the slowest rank counts: all of them wait for each other before they reduce (docs/plan.md).

rows        whole tiles of 128: a tile's loads cost the same however many of its rows are real.
weights     of the rank's own experts. They are read while the products run, so the longer of the
            two counts. Where experts are small, tiles of their gradients last a few steps only,
            and the stores have little to hide under: they are added.
links       bytes that the rank sends or receives, whichever is more, over the rate of one
            direction: pulls and pushes share it.
exposed     the share of the time on links that the products become longer by.
rest        before and after the products: the schedule; staging of x (backward: and d_y), for which
            peers wait; reading the K rows of each token and writing one.
efficiency  products / (measured - rest - exposed * links) at the EP degree that was measured.

Not in the model: the schedule grows with the ids of more ranks; flags between ranks; the GPU's
backward recomputes rows in longer minibatches than those of `mok plan`.
"""

from dataclasses import dataclass, replace

TILE = 128  # rows; src/plan/geometry.h
BF16 = 2  # bytes of an element of tokens and, as `mok bench` delivers them, weight gradients


@dataclass(frozen=True)
class Rates:
    """Of one GPU, in operations and bytes a second. H200: where the figures are from stands in
    docs/measured.md, "Scaling over GPUs"."""

    matrix: float = 660e12  # bf16, sustained
    hbm: float = 4.2e12
    link: float = 350e9  # one direction, pulls and pushes together
    exposed: float = 0.13
    schedule_s: float = 45e-6


# MXFP8 is multiplied as exactly dequantised bf16, which is how its weights are read.
RATES = {"bf16": Rates(), "mxfp8": Rates(), "fp8": Rates(matrix=1160e12)}
WEIGHT_BYTES = {"bf16": 2, "mxfp8": 2, "fp8": 1}


@dataclass(frozen=True)
class Work:
    """What one rank does in one call."""

    hidden: int
    intermediate: int
    tokens: int
    topk: int
    ranks: int
    experts: int  # of this rank
    tiles: int
    link_bytes: int
    backward: bool = False
    recomputed_tiles: float = 0
    weight_bytes: float = 2  # of an element


def products_s(work, rates):
    size = work.hidden * work.intermediate
    multiply = 6 * TILE * work.tiles * size / rates.matrix
    elements = 3 * work.experts * size
    seconds = max(multiply, elements * work.weight_bytes / rates.hbm)
    if work.backward:
        seconds += 4 * TILE * work.recomputed_tiles * size / rates.matrix
        seconds += multiply + elements * BF16 / rates.hbm
    return seconds


def links_s(work, rates):
    return work.link_bytes / rates.link


def rest_s(work, rates):
    row = BF16 * work.hidden
    moved = work.tokens * (work.topk + 1) * row
    if work.ranks > 1:
        moved += 2 * work.tokens * row * (2 if work.backward else 1)
    return rates.schedule_s + moved / rates.hbm


def rank_s(work, rates, efficiency):
    products, links = products_s(work, rates) / efficiency, links_s(work, rates)
    return rest_s(work, rates) + max(products + rates.exposed * links, links)


def time_s(works, rates, efficiency):
    """Of a call: `works` is what each rank does."""
    return max(rank_s(work, rates, efficiency) for work in works)


def efficiency(works, rates, measured_s):
    """The one at which time_s gives `measured_s`; of a call that links do not bound."""
    return max(
        products_s(work, rates)
        / (measured_s - rest_s(work, rates) - rates.exposed * links_s(work, rates))
        for work in works
    )


def works_of_plan(plan, direction):
    """What each rank does, from the object that `mok plan --json` prints."""
    shape, links = plan["shape"], plan[direction]["link_bytes"]
    columns = -(-shape["intermediate"] // TILE)  # gate_up tasks of a tile
    common = Work(
        hidden=shape["hidden"],
        intermediate=shape["intermediate"],
        tokens=0,
        topk=shape["topk"],
        ranks=plan["ep"],
        experts=shape["experts"] // plan["ep"],
        tiles=0,
        link_bytes=0,
        backward=direction == "backward",
        weight_bytes=WEIGHT_BYTES[plan["precision"]],
    )
    works = []
    for rank, facts in enumerate(plan[direction]["ranks"]):
        sent, received = sum(links[rank]), sum(row[rank] for row in links)
        gate_up = facts["tasks"].get("gate_up", 0)
        works.append(
            replace(
                common,
                tokens=plan["tokens"][rank],
                tiles=facts["tiles"],
                link_bytes=max(sent, received),
                recomputed_tiles=gate_up / columns if common.backward else 0,
            )
        )
    return works
