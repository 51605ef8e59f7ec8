"""Backward of a layer by the tile core: d_hidden, d_input and weight gradients, together and each
alone.

Gate and up stand side by side in one tensor, and so do their gradients, which makes one product of
both weight gradients: A is d_gate and d_up [rows, 2I], the result [E, 2I, H].
"""

import numpy as np
import torch
from tile_layout import (
    ACCUMULATE,
    D_HIDDEN,
    D_INPUT,
    INF,
    SMS,
    STORAGE,
    SUM,
    TASK,
    TILE_INTER_GRAD,
    TILE_K,
    TILE_M,
    TILE_N,
    WEIGHT_GRAD,
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

BATCH_TILES = 32
KINDS = (D_HIDDEN, D_INPUT, WEIGHT_GRAD)
P_D_HIDDEN, P_D_INPUT, P_GRAD_GATE_UP, P_GRAD_DOWN = range(4)
M_D_Y, M_DOWN, M_D_GATE_UP, M_D_UP, M_GATE, M_UP, M_X, M_HIDDEN = range(8)
COLUMNS = ("all", "d_hidden", "d_input", "grad", "grad sum", "grad acc")


def round_up(n, step):
    return -(-n // step) * step


def make_tasks(layer, kinds):
    """All of d_hidden of a batch of experts, then d_input and the weight gradients of the batch
    before. Whatever reads d_hidden's results waits for all its tiles of the expert: counter e."""
    H, I, tiles = layer.H, layer.I, layer.tiles
    columns = {D_HIDDEN: -(-I // TILE_INTER_GRAD), D_INPUT: -(-H // TILE_N)}
    idle = len(layer.rows)  # a counter that nobody waits for

    def wait_for(t, expert):
        count = int((tiles[:, 0] == expert).sum())
        t["wait_counter"] = expert
        t["wait_target"] = count * columns[D_HIDDEN] if D_HIDDEN in kinds else 0
        t["done_counter"] = idle

    def of_rows(kind, expert):
        n, m = grid(np.arange(columns[kind]), np.flatnonzero(tiles[:, 0] == expert))
        t = np.zeros(len(n), TASK)
        width, size = (TILE_INTER_GRAD, I) if kind == D_HIDDEN else (TILE_N, H)
        t["kind"] = kind
        t["product"] = P_D_HIDDEN if kind == D_HIDDEN else P_D_INPUT
        t["steps"] = (H if kind == D_HIDDEN else 2 * I) // TILE_K
        t["rows"], t["row0"], t["save_row0"] = tiles[m, 2], tiles[m, 1], tiles[m, 1]
        t["expert"] = expert
        t["col0"] = n * width
        t["cols"] = np.minimum(width, size - n * width)
        if kind == D_HIDDEN:
            t["save_rows"] = round_up(tiles[m, 2], TILE_K)
            t["done_counter"] = expert
        else:
            wait_for(t, expert)
        return t

    def of_weights(which, expert):
        height, width = (2 * I, H) if which == P_GRAD_GATE_UP else (H, I)
        n, m = grid(np.arange(-(-width // TILE_N)), np.arange(-(-height // TILE_M)))
        t = np.zeros(len(n), TASK)
        t["kind"], t["product"] = WEIGHT_GRAD, which
        t["steps"] = -(-layer.rows[expert] // TILE_K)
        t["row0"], t["col0"] = m * TILE_M, n * TILE_N
        t["rows"] = np.minimum(TILE_M, height - t["row0"])
        t["cols"] = np.minimum(TILE_N, width - t["col0"])
        t["save_row0"] = layer.start[expert]
        t["expert"] = expert
        wait_for(t, expert)
        return t

    batches, held = [[]], 0
    for e, n in enumerate(layer.rows):
        if held >= BATCH_TILES:
            batches.append([])
            held = 0
        batches[-1].append(e)
        held += -(-n // TILE_M)
    tasks = [np.zeros(0, TASK)]
    for before, batch in zip([[], *batches], [*batches, []], strict=True):
        if D_HIDDEN in kinds:
            tasks += [of_rows(D_HIDDEN, e) for e in batch]
        for e in before:
            if D_INPUT in kinds:
                tasks.append(of_rows(D_INPUT, e))
            if WEIGHT_GRAD in kinds:
                tasks += [of_weights(P_GRAD_GATE_UP, e), of_weights(P_GRAD_DOWN, e)]
    return np.concatenate(tasks)


class Backward(Rows):
    """Random operands of one layer's backward. `weighted`: with router weights and their
    gradient's partial sums, as routed experts have."""

    def __init__(self, H, I, rows, weighted=True, seed=0):
        super().__init__(H, rows, seed)
        self.I, self.weighted = I, weighted
        E = len(rows)
        self.x, self.d_y = self.draw(self.total, H), self.draw(self.total, H)  # unpadded
        self.w_gu = self.draw(E, 2 * I, H).mul_(H**-0.5)
        self.w_down = self.draw(E, H, I).mul_(I**-0.5)
        # The contraction of a weight gradient ends at a whole step: zeros up to there.
        in_steps = torch.zeros(self.padded, dtype=torch.bool, device=self.x.device)
        for start, n in zip(self.start, rows, strict=True):
            in_steps[start : start + round_up(n, TILE_K)] = True
        self.zeroed = in_steps.clone()
        self.zeroed[self.place] = False
        self.untouched = ~in_steps
        self.x_ring, self.d_y_ring = self.ring(self.x), self.ring(self.d_y)
        self.x_ring[self.zeroed] = 0
        self.d_y_ring[self.zeroed] = 0
        self.gate_up = self.ring(self.draw(self.total, 2 * I))
        self.weight = torch.rand(self.padded, device=self.x.device, generator=self.generator)
        self.d_gate_up = self.nan(self.padded, 2 * I)
        self.hidden = self.nan(self.padded, 2 * I)  # w * h in the first I columns
        self.partials = self.nan(self.padded, -(-I // TILE_INTER_GRAD), dtype=torch.float32)
        # Gradients in fp32; bf16 ones take half of the place.
        self.grad_gate_up = self.nan(E, 2 * I, H, dtype=torch.float32)
        self.grad_down = self.nan(E, H, I, dtype=torch.float32)
        self.counters = torch.zeros(E + 1, dtype=torch.int32, device=self.x.device)

    def grads(self, mode):
        """Gradients as that mode leaves them: gate and up, down."""
        both = (self.grad_gate_up, self.grad_down)
        if mode != STORAGE:
            return both
        return tuple(g.view(-1).view(torch.bfloat16)[: g.numel()].view(g.shape) for g in both)

    def launcher(self, lib, limit=INF, kinds=KINDS, mode=STORAGE, blocks=SMS):
        I = self.I
        maps = [None] * 8
        maps[M_D_Y], maps[M_DOWN] = self.d_y_ring, self.w_down
        maps[M_D_GATE_UP], maps[M_D_UP] = self.d_gate_up, self.d_gate_up[:, I:]
        maps[M_GATE], maps[M_UP] = self.w_gu[:, :I], self.w_gu[:, I:]
        maps[M_X], maps[M_HIDDEN] = self.x_ring, self.hidden[:, :I]

        def grad(a, b, out):
            return product(
                (a, a), (b, b), mode=mode, wg_out=out, wg_row_elements=out.stride(1),
                wg_expert_elements=out.stride(0),
            )  # fmt: skip

        grad_gate_up, grad_down = self.grads(mode)
        d_hidden = product(
            (M_D_Y, M_D_Y), (M_DOWN, M_DOWN), dh_gate=self.gate_up, dh_up=self.gate_up[:, I:],
            dh_d_gate=self.d_gate_up, dh_d_up=self.d_gate_up[:, I:], dh_hidden=self.hidden,
            dh_row_weight=self.weight if self.weighted else 0,
            dh_partials=self.partials if self.weighted else 0,
            dh_row_elements=2 * I, dh_partial_columns=self.partials.shape[1],
        )  # fmt: skip
        # The map of d_gate holds d_up behind its I columns, which no step of d_gate reaches.
        d_input = product((M_D_GATE_UP, M_D_UP), (M_GATE, M_UP), row_destination=self.destination)
        products = [
            d_hidden, d_input, grad(M_D_GATE_UP, M_X, grad_gate_up),
            grad(M_D_Y, M_HIDDEN, grad_down),
        ]  # fmt: skip
        tasks = make_tasks(self, kinds)
        return launcher(
            lib, maps, products, tasks, self, self.counters, limit, blocks, backward=True
        )

    def poison(self):
        for t in (self.d_gate_up, self.hidden, self.partials, self.results):
            t.fill_(float("nan"))
        for t in (self.grad_gate_up, self.grad_down):
            t.fill_(float("nan"))

    def outputs(self):
        """Of d_hidden and d_input."""
        rows = [self.d_gate_up[self.place], self.hidden[self.place, : self.I]]
        if self.weighted:
            rows.append(self.partials[self.place])
        return [*rows, self.results[self.slots]]


def d_hidden_errors(layer, e, limit):
    """d_gate and d_up, w * h, and the router gradient's partial sums of expert e, in float64 from
    the same roundings: (error, bound) of each."""
    I, at = layer.I, layer.place[layer.of_expert(e)]
    d_y = layer.d_y[layer.of_expert(e)].double()
    d_h = (d_y @ layer.w_down[e].double()).bfloat16().double()
    g_raw, u_raw = layer.gate_up[at].double().split(I, 1)
    g, u = g_raw.clamp(max=limit), u_raw.clamp(-limit, limit)
    w = layer.weight[at].double()[:, None] if layer.weighted else 1.0
    s = torch.sigmoid(g)
    h = (g * s * u).bfloat16().double()
    d_g = (w * d_h * u * s * (1 + g * (1 - s))).where(g_raw <= limit, torch.zeros_like(g))
    d_u = (w * d_h * g * s).where(u_raw.abs() <= limit, torch.zeros_like(u))
    got_g, got_u = layer.d_gate_up[at].split(I, 1)
    pairs = [(got_g, d_g, 5e-3), (got_u, d_u, 5e-3), (layer.hidden[at, :I], w * h, 5e-3)]
    errors = [(far(got, want), bound) for got, want, bound in pairs]
    if layer.weighted:
        # The terms of a sum may cancel: against the norm of its terms.
        terms = torch.stack([p.norm(dim=1) for p in (d_h * h).split(TILE_INTER_GRAD, 1)], dim=1)
        sums = torch.stack([p.sum(1) for p in (d_h * h).split(TILE_INTER_GRAD, 1)], dim=1)
        off = (layer.partials[at].double() - sums).abs() / terms
        errors.append((off.max().item(), 2e-2))
    return errors


def check(name, layer, lib, limit=INF, experts=None):
    layer.poison()
    layer.launcher(lib, limit, mode=SUM)()
    layer.finish()
    I, r = layer.I, layer.results[layer.slots]
    d_hidden, d_input, grad = 0.0, 0.0, 0.0
    good = True
    sums = []
    experts = range(len(layer.rows)) if experts is None else experts
    for e in experts:
        rows = layer.of_expert(e)
        sums.append((layer.grad_gate_up[e].clone(), layer.grad_down[e].clone()))
        if layer.rows[e] == 0:
            good &= all(not s.any() for s in sums[-1])  # NaN is something
            continue
        at = layer.place[rows]
        for error, bound in d_hidden_errors(layer, e, limit):
            good &= error < bound
            d_hidden = worse(d_hidden, error)
        d_gu, hidden = layer.d_gate_up[at].double(), layer.hidden[at, :I].double()
        d_input = worse(d_input, far(r[rows], d_gu @ layer.w_gu[e].double()))
        x, d_y = layer.x[rows].double(), layer.d_y[rows].double()
        wanted = (d_gu.T @ x, d_y.T @ hidden)
        for got, want in zip(sums[-1], wanted, strict=True):
            # Against the norm of the gradient: a row of d_gate's beyond the limit is all zeros.
            grad = worse(grad, ((got.double() - want).norm() / want.norm()).item())
            good &= bool((got[(want == 0).all(1)] == 0).all())
    good &= d_input < 4e-3 and grad < 5e-5
    # Padding: zeros up to a whole step, nothing behind.
    for t in (layer.d_gate_up, layer.hidden[:, :I]):
        good &= not bool(t[layer.zeroed].any())
        good &= bool(torch.isnan(t[layer.untouched]).all())
    good &= bool(torch.isnan(layer.results[-1]).all())
    good &= check_modes(layer, lib, limit, experts, sums)
    print(
        f"{'ok  ' if good else 'FAIL'} backward {name:28s} d_hidden {d_hidden:.1e}"
        f" d_input {d_input:.1e} gradients {grad:.1e}",
        flush=True,
    )
    return good


def check_modes(layer, lib, limit, experts, sums):
    """bf16 is the sums rounded once, accumulate adds them once: bit by bit."""
    good = True
    kinds = (WEIGHT_GRAD,)  # alone, from what d_hidden left
    for g in layer.grads(ACCUMULATE):
        g.normal_(generator=layer.generator)
    before = [tuple(g[e].clone() for g in layer.grads(ACCUMULATE)) for e in experts]
    layer.launcher(lib, limit, kinds=kinds, mode=ACCUMULATE)()
    layer.finish()
    for e, old, s in zip(experts, before, sums, strict=True):
        for g, o, add in zip(layer.grads(ACCUMULATE), old, s, strict=True):
            good &= torch.equal(g[e], o + add)
    layer.launcher(lib, limit, kinds=kinds, mode=STORAGE)()
    layer.finish()
    for e, s in zip(experts, sums, strict=True):
        for g, total in zip(layer.grads(STORAGE), s, strict=True):
            good &= torch.equal(g[e], total.bfloat16())
    if not good:
        print("FAIL modes: bf16 or accumulate differ from the sums")
    return good


def checks(lib, cases):
    good = True
    for i, (name, H, I, rows, limit, _) in enumerate(cases):
        layer = Backward(H, I, rows, weighted=i % 3 != 2, seed=len(name))
        good &= check(name, layer, lib, limit)
        first = None
        for blocks in (SMS, 1, 7):  # one block alone must finish; who runs a task changes no bit
            layer.poison()
            layer.launcher(lib, limit, blocks=blocks)()
            layer.finish()
            bits = [*layer.outputs(), *(g.clone() for g in layer.grads(STORAGE))]
            first = first or bits
            if not same_bits(first, bits):
                good = False
                print(f"FAIL backward {name}: {blocks} blocks give other bits")
        layer.poison()
        for kind in KINDS:
            layer.launcher(lib, limit, kinds=(kind,))()
            layer.finish()
        if not same_bits(first, [*layer.outputs(), *layer.grads(STORAGE)]):
            good = False
            print(f"FAIL backward {name}: kinds alone give other bits")
    return good


def bench(libs, name, H, I, rows):
    """Checks three experts, then times; returns whether they are right, and lines."""
    layer = Backward(H, I, rows, seed=1)
    good = all(check(name, layer, lib, experts=[0, len(rows) // 2, len(rows) - 1]) for lib in libs)
    d_y2, x2 = ([t, torch.randn_like(t)] for t in (layer.d_y, layer.x))
    d_gu = layer.d_gate_up[layer.place].contiguous()
    hidden = layer.hidden[layer.place, :I].contiguous()
    for t in (layer.d_gate_up, layer.hidden, layer.gate_up):
        t.nan_to_num_(0)
    for g in layer.grads(SUM):
        g.zero_()
    rings = [[layer.ring(t).nan_to_num_(0) for t in pair] for pair in zip(d_y2, x2, strict=True)]
    offs, w_gu, w_down = layer.offsets, layer.w_gu, layer.w_down

    def ours(lib, **options):
        calls = []
        for layer.d_y_ring, layer.x_ring in rings:
            calls.append(layer.launcher(lib, **options))
        return calls

    def torch_d_hidden(i):
        return lambda: torch._grouped_mm(d_y2[i], w_down, offs=offs)

    def torch_d_input(_):
        return lambda: torch._grouped_mm(d_gu, w_gu, offs=offs)

    def torch_grad(i):
        def run():
            torch._grouped_mm(d_gu.t(), x2[i], offs=offs)
            torch._grouped_mm(d_y2[i].t(), hidden, offs=offs)

        return run

    def torch_all(i):
        parts = [make(i) for make in (torch_d_hidden, torch_d_input, torch_grad)]
        return lambda: [part() for part in parts]

    gradients = {"grad sum": SUM, "grad acc": ACCUMULATE, "grad": STORAGE}
    runs = {}
    for i, lib in enumerate(libs):
        runs[i, "all"] = ours(lib)
        runs[i, "d_hidden"] = ours(lib, kinds=(D_HIDDEN,))
        runs[i, "d_input"] = ours(lib, kinds=(D_INPUT,))
        for what, mode in gradients.items():
            runs[i, what] = ours(lib, kinds=(WEIGHT_GRAD,), mode=mode)
    for what, call in (
        ("all", torch_all), ("d_hidden", torch_d_hidden), ("d_input", torch_d_input),
        ("grad", torch_grad),
    ):  # fmt: skip
        runs["torch", what] = [call(i) for i in range(2)]
    unit = 2 * layer.total * H * I  # of one product of I x H
    products = dict(zip(COLUMNS, (6, 1, 2, 3, 3, 3), strict=True))
    flops = {what: n * unit for what, n in products.items()}
    measured = time_in_turns(runs, 3 * unit, layer)
    lines = table(name, runs, measured, COLUMNS, flops)
    print("\n".join(lines), flush=True)
    return good, lines
