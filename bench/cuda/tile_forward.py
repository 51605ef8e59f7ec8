"""Forward of a layer by the tile core: gate_up and down, together and each alone."""

import numpy as np
import torch
from tile_layout import (
    DOWN,
    GATE_UP,
    INF,
    SMS,
    TASK,
    TILE_K,
    TILE_N,
    Rows,
    far,
    grid,
    launcher,
    product,
    same_bits,
    table,
    time_in_turns,
    worse,
)

MINIBATCH_TILES = 32
HALF_N = 128
COLUMNS = ("layer", "+save", "gu", "gu+save", "down")


def make_tasks(tiles, H, I, save_rows, kinds):
    """tiles: (expert, row0, rows) of each tile of rows. Order: GU(0), GU(1), D(0), GU(2) ..."""
    columns = {GATE_UP: -(-I // HALF_N), DOWN: -(-H // TILE_N)}

    def tasks_of(kind, batch):
        parts = []
        for expert in np.unique(tiles[batch, 0]):
            n, m = grid(np.arange(columns[kind]), batch[tiles[batch, 0] == expert])
            t = np.zeros(len(n), TASK)
            width, size = (HALF_N, I) if kind == GATE_UP else (TILE_N, H)
            t["kind"], t["product"] = kind, kind - GATE_UP
            t["steps"] = (H if kind == GATE_UP else I) // TILE_K
            t["rows"], t["row0"], t["expert"] = tiles[m, 2], tiles[m, 1], expert
            t["col0"] = n * width
            t["cols"] = np.minimum(width, size - n * width)
            t["save_row0"] = tiles[m, 1]
            if kind == GATE_UP:
                t["save_rows"] = np.clip(save_rows - tiles[m, 1], 0, tiles[m, 2])
                t["done_counter"] = m
            else:
                t["wait_counter"] = m
                t["wait_target"] = columns[GATE_UP] if GATE_UP in kinds else 0
                t["done_counter"] = len(tiles)
            parts.append(t)
        return parts

    batches = np.split(np.arange(len(tiles)), range(MINIBATCH_TILES, len(tiles), MINIBATCH_TILES))
    tasks = []
    for i in range(len(batches) + 1):
        if i < len(batches) and GATE_UP in kinds:
            tasks += tasks_of(GATE_UP, batches[i])
        if i > 0 and DOWN in kinds:
            tasks += tasks_of(DOWN, batches[i - 1])
    return np.concatenate(tasks)


class Layer(Rows):
    """Random operands of one layer."""

    def __init__(self, H, I, rows, joined=True, seed=0):
        super().__init__(H, rows, seed)
        self.I = I
        E = len(rows)
        self.x = self.draw(self.total, H)  # unpadded
        self.w_gu = self.draw(E, 2 * I, H).mul_(H**-0.5) if joined else None
        if joined:
            self.w_gate, self.w_up = self.w_gu[:, :I], self.w_gu[:, I:]
        else:
            self.w_gate, self.w_up = (self.draw(E, I, H).mul_(H**-0.5) for _ in range(2))
        self.w_down = self.draw(E, H, I).mul_(I**-0.5)
        self.x_ring = self.ring(self.x)
        self.hidden, self.gate, self.up = (self.nan(self.padded, I) for _ in range(3))
        self.counters = torch.zeros(len(self.tiles) + 1, dtype=torch.int32, device=self.x.device)

    def launcher(self, lib, limit=INF, save_rows=0, kinds=(GATE_UP, DOWN), blocks=SMS):
        maps = [self.x_ring, self.w_gate, self.w_up, self.hidden, self.w_down]
        products = [
            product(
                (0, 0), (1, 2), gu_hidden=self.hidden, gu_gate=self.gate, gu_up=self.up,
                gu_row_elements=self.I,
            ),
            product((3, 3), (4, 4), row_destination=self.destination),
        ]  # fmt: skip
        tasks = make_tasks(self.tiles, self.H, self.I, save_rows, kinds)
        return launcher(lib, maps, products, tasks, self, self.counters, limit, blocks)

    def poison(self):
        for t in (self.hidden, self.gate, self.up, self.results):
            t.fill_(float("nan"))

    def outputs(self):
        rows = [t[self.place] for t in (self.gate, self.up, self.hidden)]
        return [*rows, self.results[self.slots]]


def check(name, layer, lib, limit=INF, experts=None):
    layer.poison()
    layer.launcher(lib, limit, layer.padded)()
    layer.finish()
    gate, up, hidden, r = layer.outputs()
    worst = [0.0] * 4
    wrong = 0
    for e in range(len(layer.rows)) if experts is None else experts:
        rows = layer.of_expert(e)
        if layer.rows[e] == 0:
            continue
        x = layer.x[rows].double()
        g64, u64 = (x @ w[e].double().T for w in (layer.w_gate, layer.w_up))
        g, u = gate[rows].double(), up[rows].double()
        if limit != INF:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        h = (g / (1 + (-g).exp()) * u).bfloat16()
        wrong += (hidden[rows] != h).sum().item()
        errors = [
            far(gate[rows], g64),
            far(up[rows], u64),
            far(hidden[rows], h),
            far(r[rows], hidden[rows].double() @ layer.w_down[e].double().T),
        ]
        worst = [worse(a, b) for a, b in zip(worst, errors, strict=True)]
    # bf16 rounding is 1.7e-3 by norm; h is one rounding of fp32 values that are right to 1e-6.
    good = all(w < t for w, t in zip(worst, (4e-3, 4e-3, 2e-3, 4e-3), strict=True))
    good &= bool(torch.isnan(layer.results[-1]).all())
    padding = torch.ones(layer.padded, dtype=torch.bool, device=gate.device)
    padding[layer.place] = False
    good &= all(bool(torch.isnan(t[padding]).all()) for t in (layer.gate, layer.up, layer.hidden))
    print(
        f"{'ok  ' if good else 'FAIL'} {name:28s} g {worst[0]:.1e} u {worst[1]:.1e}"
        f" h {worst[2]:.1e} r {worst[3]:.1e} h elements off by rounding {wrong}",
        flush=True,
    )
    return good


def checks(lib, cases):
    good = True
    for name, H, I, rows, limit, joined in cases:
        layer = Layer(H, I, rows, joined, seed=len(name))
        good &= check(name, layer, lib, limit)
        first = layer.outputs()
        for blocks in (1, 7, SMS):  # one block alone must finish; who runs a task changes no bit
            layer.poison()
            layer.launcher(lib, limit, layer.padded, blocks=blocks)()
            layer.finish()
            if not same_bits(first, layer.outputs()):
                good = False
                print(f"FAIL {name}: {blocks} blocks give other bits")
        layer.poison()
        layer.launcher(lib, limit, 0)()
        layer.finish()
        good &= same_bits(first[2:], layer.outputs()[2:]) and bool(torch.isnan(layer.gate).all())
    return good


def place_check(lib):
    """A row's bits do not depend on its place in the tile."""
    base = Layer(704, 448, [300], seed=5)
    results = []
    for shift in (0, 64, 137):
        layer = Layer(704, 448, [shift + 100], seed=6)
        layer.w_gu.copy_(base.w_gu)
        layer.w_down.copy_(base.w_down)
        layer.x_ring[shift : shift + 100] = base.x[:100]
        layer.launcher(lib, INF, layer.padded)()
        layer.finish()
        results.append([t[shift:] for t in layer.outputs()])
    good = all(same_bits(results[0], r) for r in results[1:])
    print("ok   place" if good else "FAIL place: bits depend on a row's place")
    return good


def bench(libs, name, H, I, rows):
    """Checks three experts, then times; returns whether they are right, and lines."""
    layer = Layer(H, I, rows, seed=1)
    good = all(check(name, layer, lib, experts=[0, len(rows) // 2, len(rows) - 1]) for lib in libs)
    x2 = [layer.x, torch.randn_like(layer.x)]
    rings = [layer.ring(x).nan_to_num_(0) for x in x2]
    hidden = layer.hidden[layer.place].contiguous()
    hidden2 = [hidden, hidden.flip(0).contiguous()]
    layer.hidden.nan_to_num_(0)
    w_gu, w_down = layer.w_gu.transpose(1, 2), layer.w_down.transpose(1, 2)

    def ours(lib, **options):
        calls = []
        for ring in rings:
            layer.x_ring = ring
            calls.append(layer.launcher(lib, **options))
        return calls

    def torch_gu(i):
        return lambda: torch._grouped_mm(x2[i], w_gu, offs=layer.offsets)

    def torch_down(i):
        return lambda: torch._grouped_mm(hidden2[i], w_down, offs=layer.offsets)

    def torch_both(i):
        a, b = torch_gu(i), torch_down(i)
        return lambda: (a(), b())

    save = {"save_rows": layer.padded}
    runs = {}
    for i, lib in enumerate(libs):
        runs[i, "layer"] = ours(lib)
        runs[i, "+save"] = ours(lib, **save)
        runs[i, "gu"] = ours(lib, kinds=(GATE_UP,))
        runs[i, "gu+save"] = ours(lib, kinds=(GATE_UP,), **save)
        runs[i, "down"] = ours(lib, kinds=(DOWN,))
    for what, call in ("layer", torch_both), ("gu", torch_gu), ("down", torch_down):
        runs["torch", what] = [call(i) for i in range(2)]
    unit = 2 * layer.total * H * I  # of one product of I x H
    flops = dict(zip(COLUMNS, (3 * unit, 3 * unit, 2 * unit, 2 * unit, unit), strict=True))
    measured = time_in_turns(runs, 3 * unit, layer)
    lines = table(name, runs, measured, COLUMNS, flops)
    print("\n".join(lines), flush=True)
    return good, lines
