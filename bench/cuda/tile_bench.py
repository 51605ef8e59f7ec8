"""Checks and times the tile core (tile_bench.cu) against float64 and torch._grouped_mm.

    bench/cuda/build_tile_bench.sh && python3 bench/cuda/tile_bench.py build/gpu/tile_bench.so

Several libraries are checked one after the other and timed in turns.
"""

import ctypes
import statistics
import sys
import time

import numpy as np
import torch

TILE_M, TILE_N, TILE_K = 128, 256, 64
GATE_UP, DOWN = 1, 2
MINIBATCH_TILES = 32
INF = float("inf")

TASK = np.dtype(
    [("kind", "i2"), ("product", "i2")]
    + [
        (name, "i4")
        for name in (
            "steps rows cols row0 col0 save_row0 save_rows expert "
            "wait_counter wait_target done_counter"
        ).split()
    ]
)


class TileBench(ctypes.Structure):
    _fields_ = (
        [
            (name, ctypes.c_void_p)
            for name in (
                "x w_gate w_up w_down hidden gate up row_destination tasks control counters".split()
            )
        ]
        + [
            (name, ctypes.c_int64)
            for name in (
                "rows experts hidden_size intermediate gate_expert_stride task_count counter_count"
            ).split()
        ]
        + [("limit", ctypes.c_float), ("blocks", ctypes.c_int32)]
    )


def make_tasks(tiles, H, I, save_rows, kinds=(GATE_UP, DOWN)):
    """tiles: (expert, row0, rows) of each tile of rows. Order: GU(0), GU(1), D(0), GU(2) ..."""
    columns = {GATE_UP: -(-I // 128), DOWN: -(-H // TILE_N)}

    def product(kind, batch):
        parts = []
        for expert in np.unique(tiles[batch, 0]):
            m = batch[tiles[batch, 0] == expert]
            n = np.arange(columns[kind])
            nn, mm = (a.ravel() for a in np.meshgrid(n, m, indexing="ij"))  # n outer, m inner
            t = np.zeros(len(nn), TASK)
            width, size = (128, I) if kind == GATE_UP else (TILE_N, H)
            t["kind"], t["product"] = kind, kind - 1
            t["steps"] = (H if kind == GATE_UP else I) // TILE_K
            t["rows"], t["row0"], t["expert"] = tiles[mm, 2], tiles[mm, 1], expert
            t["col0"] = nn * width
            t["cols"] = np.minimum(width, size - nn * width)
            t["save_row0"] = tiles[mm, 1]
            if kind == GATE_UP:
                t["save_rows"] = np.clip(save_rows - tiles[mm, 1], 0, tiles[mm, 2])
                t["done_counter"] = mm
            else:
                t["wait_counter"] = mm
                t["wait_target"] = columns[GATE_UP] if GATE_UP in kinds else 0
                t["done_counter"] = len(tiles)
            parts.append(t)
        return parts

    batches = [
        np.arange(i, min(i + MINIBATCH_TILES, len(tiles)))
        for i in range(0, len(tiles), MINIBATCH_TILES)
    ]
    tasks = []
    for i in range(len(batches) + 1):
        if i < len(batches) and GATE_UP in kinds:
            tasks += product(GATE_UP, batches[i])
        if i > 0 and DOWN in kinds:
            tasks += product(DOWN, batches[i - 1])
    return np.concatenate(tasks)


class Layer:
    """Random operands of one layer; rows of an expert start at a tile boundary."""

    def __init__(self, H, I, rows, joined=True, seed=0):
        self.H, self.I, self.rows = H, I, rows
        E = len(rows)
        g = torch.Generator("cuda").manual_seed(seed)

        def draw(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=g)

        self.x = draw(sum(rows), H)  # unpadded
        self.w_gu = draw(E, 2 * I, H).mul_(H**-0.5) if joined else None
        if joined:
            self.w_gate, self.w_up = self.w_gu[:, :I], self.w_gu[:, I:]
        else:
            self.w_gate, self.w_up = (draw(E, I, H).mul_(H**-0.5) for _ in range(2))
        self.w_down = draw(E, H, I).mul_(I**-0.5)
        tiles, place, at = [], [], 0
        for e, n in enumerate(rows):
            tiles += [(e, at + i, min(TILE_M, n - i)) for i in range(0, n, TILE_M)]
            place.append(np.arange(at, at + n))
            at += -(-n // TILE_M) * TILE_M
        self.tiles = np.array(tiles).reshape(-1, 3)
        self.padded = at
        self.place = torch.from_numpy(np.concatenate(place)).cuda()
        self.x_ring = torch.full((at, H), float("nan"), device="cuda", dtype=torch.bfloat16)
        self.x_ring[self.place] = self.x
        self.h_ring = torch.full((at, I), float("nan"), device="cuda", dtype=torch.bfloat16)
        self.gate = torch.full_like(self.h_ring, float("nan"))
        self.up = torch.full_like(self.h_ring, float("nan"))
        self.slots = torch.randperm(sum(rows), device="cuda", generator=g)
        self.r = torch.full((sum(rows) + 1, H), float("nan"), device="cuda", dtype=torch.bfloat16)
        self.destination = torch.zeros(at, dtype=torch.int64, device="cuda")
        self.destination[self.place] = self.r.data_ptr() + self.slots * (H * 2)
        self.counters = torch.zeros(len(tiles) + 1, dtype=torch.int32, device="cuda")
        self.control = torch.zeros(4, dtype=torch.int32, device="cuda")
        self.offsets = torch.tensor(np.cumsum(rows), dtype=torch.int32, device="cuda")

    def launcher(self, lib, limit=INF, save_rows=0, kinds=(GATE_UP, DOWN), blocks=132):
        host = make_tasks(self.tiles, self.H, self.I, save_rows, kinds)
        tasks = torch.from_numpy(host.view(np.uint8)).cuda()
        b = TileBench(
            *(
                t.data_ptr()
                for t in (
                    self.x_ring, self.w_gate, self.w_up, self.w_down, self.h_ring, self.gate,
                    self.up, self.destination, tasks, self.control, self.counters,
                )
            ),
            self.padded, len(self.rows), self.H, self.I, self.w_gate.stride(0), len(host),
            len(self.counters), limit, blocks,
        )  # fmt: skip

        halves = np.where(host["rows"] > 64, 2, 1)
        wide = np.where(host["kind"] == GATE_UP, 128, TILE_N)
        width = np.where(host["cols"] * 2 <= wide, 0.5, 1)
        busy = float((host["steps"] * halves * width).sum()) * 512

        def launch(keep=tasks):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            code = lib.tile_bench_launch(ctypes.byref(b), stream)
            assert code == 0, f"launch failed: {code}"

        launch.busy = busy  # tensor-core cycles of one SM that the tasks take at least
        return launch

    def finish(self):
        torch.cuda.synchronize()
        assert self.control[1].item() == 0, "deadline passed"

    def poison(self):
        for t in (self.h_ring, self.gate, self.up, self.r):
            t.fill_(float("nan"))

    def results(self):
        return [t[self.place] for t in (self.gate, self.up, self.h_ring)] + [self.r[self.slots]]


def far(out, ref, block=64):
    """Largest relative error by norm over rows and over blocks of columns; NaN if any is NaN."""
    out, ref = out.double(), ref.double()
    d = out - ref
    by_row = d.norm(dim=1) / ref.norm(dim=1)
    columns = torch.stack([c.norm() for c in d.split(block, 1)])
    by_column = columns / torch.stack([c.norm() for c in ref.split(block, 1)])
    return max(by_row.max().item(), by_column.max().item())


def check(name, layer, lib, limit=INF, save=True, blocks=132, experts=None):
    layer.poison()
    layer.launcher(lib, limit, layer.padded if save else 0, blocks=blocks)()
    layer.finish()
    gate, up, hidden, r = layer.results()
    worst = [0.0] * 4
    wrong = 0
    ends = np.cumsum(layer.rows)
    for e in range(len(layer.rows)) if experts is None else experts:
        rows = slice(ends[e] - layer.rows[e], ends[e])
        if layer.rows[e] == 0:
            continue
        x = layer.x[rows].double()
        g64, u64 = (x @ w[e].double().T for w in (layer.w_gate, layer.w_up))
        if save:
            g, u = gate[rows], up[rows]
            errors = [far(g, g64), far(u, u64)]
        else:
            g, u, errors = g64.bfloat16(), u64.bfloat16(), [0.0, 0.0]
        gd, ud = g.double(), u.double()
        if limit != INF:
            gd, ud = gd.clamp(max=limit), ud.clamp(-limit, limit)
        h = (gd / (1 + (-gd).exp()) * ud).bfloat16()
        errors.append(far(hidden[rows], h))
        wrong += (hidden[rows] != h).sum().item() if save else 0
        errors.append(far(r[rows], hidden[rows].double() @ layer.w_down[e].double().T))
        worst = [max(a, b) if b == b else float("nan") for a, b in zip(worst, errors, strict=True)]
    # bf16 rounding is 1.7e-3 by norm; h is one rounding of fp32 values that are right to 1e-6.
    limits = (4e-3, 4e-3, 2e-3 if save else 2e-2, 4e-3)
    good = all(w < t for w, t in zip(worst, limits, strict=True))
    good &= bool(torch.isnan(layer.r[-1]).all())
    padding = torch.ones(layer.padded, dtype=torch.bool, device="cuda")
    padding[layer.place] = False
    good &= all(bool(torch.isnan(t[padding]).all()) for t in (layer.gate, layer.up, layer.h_ring))
    print(
        f"{'ok  ' if good else 'FAIL'} {name:28s} g {worst[0]:.1e} u {worst[1]:.1e}"
        f" h {worst[2]:.1e} r {worst[3]:.1e} h elements off by rounding {wrong}",
        flush=True,
    )
    return good


def same_bits(a, b):
    return all(
        torch.equal(p.view(torch.int16), q.view(torch.int16)) for p, q in zip(a, b, strict=True)
    )


def checks(lib):
    good = True
    random_rows = np.random.default_rng(1).integers(0, 700, 40).tolist()
    cases = [
        ("few rows", 256, 128, [1, 63, 64, 65], INF, True),
        ("64 x 64, limit", 64, 64, [128, 0, 129, 200, 37], 0.5, False),
        ("one more than a tile", 192, 704, [300, 64, 1], INF, False),
        ("H % 256 = 64, I % 128 = 64", 2880, 2880, [130, 66], 7.0, True),
        ("H % 256 = 192", 448, 320, [257, 90], 1.0, True),
        ("H % 256 = 128", 640, 256, [128, 128, 5], INF, True),
        ("many small experts", 512, 384, list(range(1, 129)), INF, True),
        ("random rows", 1024, 768, random_rows, 2.0, True),
    ]
    for name, H, I, rows, limit, joined in cases:
        layer = Layer(H, I, rows, joined, seed=len(name))
        good &= check(name, layer, lib, limit)
        first = layer.results()
        for blocks in (1, 7, 132):  # one block alone must finish; who runs a task changes no bit
            layer.poison()
            layer.launcher(lib, limit, layer.padded, blocks=blocks)()
            layer.finish()
            if not same_bits(first, layer.results()):
                good = False
                print(f"FAIL {name}: {blocks} blocks give other bits")
        layer.poison()
        layer.launcher(lib, limit, 0)()
        layer.finish()
        later = layer.results()
        good &= same_bits(first[2:], later[2:]) and bool(torch.isnan(layer.gate).all())
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
        results.append([t[shift:] for t in layer.results()])
    good = all(same_bits(results[0], r) for r in results[1:])
    print("ok   place" if good else "FAIL place: bits depend on a row's place")
    return good


def burst(run, seconds):
    """Milliseconds a call over one burst that rotates among the inputs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    n = max(2, round(seconds / run["estimate"]))
    start.record()
    for i in range(n):
        run["calls"][i % len(run["calls"])]()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / n


def multinomial(E, total, seed=3):
    rng = np.random.default_rng(seed)
    return rng.multinomial(total, rng.dirichlet(np.full(E, 8.0))).tolist()


SHAPES = [
    ("qwen3-30b 128x512", 2048, 768, [512] * 128),
    ("qwen3-30b uneven", 2048, 768, multinomial(128, 65536)),
    ("qwen3-235b 64x1024", 4096, 1536, [1024] * 64),
    ("qwen3-235b 128x512", 4096, 1536, [512] * 128),
    ("deepseek-v3 256x128 uneven", 7168, 2048, multinomial(256, 32768)),
    ("mixtral 8x2048", 4096, 14336, [2048] * 8),
    ("gpt-oss 128x256", 2880, 2880, [256] * 128),
]


def bench(libs, name, H, I, rows, seconds=0.05, rounds=3):
    """Prints a line per library: ms, TFLOP/s of real rows, share of cycles that the tensor cores
    need at least for the tasks as they are tiled."""
    layer = Layer(H, I, rows, seed=1)
    good = all(check(name, layer, lib, experts=[0, len(rows) // 2, len(rows) - 1]) for lib in libs)
    x2 = [layer.x, torch.randn_like(layer.x)]
    ring2 = [layer.x_ring.nan_to_num(0), torch.zeros_like(layer.x_ring)]
    ring2[1][layer.place] = x2[1]
    hidden = layer.h_ring[layer.place].contiguous()
    hidden2 = [hidden, hidden.flip(0).contiguous()]
    layer.h_ring.nan_to_num_(0)
    w_gu, w_down = layer.w_gu.transpose(1, 2), layer.w_down.transpose(1, 2)

    def ours(lib, **options):
        calls = []
        for ring in ring2:
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
    flops = 6 * sum(rows) * H * I
    runs = {k: {"calls": c, "estimate": flops / 6e14 + 5e-6} for k, c in runs.items()}
    for run in runs.values():
        run["estimate"] = burst(run, 0.005) / 1e3
    times = {k: [] for k in runs}
    for _ in range(rounds):
        for k, run in runs.items():
            times[k].append(burst(run, seconds))
            run["cycles"] = int(layer.control.view(torch.int64)[1])
    layer.finish()
    lines = []
    for who in [*range(len(libs)), "torch"]:
        line = f"{name:27s} {who!s:5s}"
        for what in ("layer", "+save", "gu", "gu+save", "down"):
            if (who, what) not in runs:
                line += " |" + 17 * " "
                continue
            ms = statistics.median(times[who, what])
            part = {"g": 2 / 3, "d": 1 / 3}.get(what[0], 1)
            line += f" | {ms:6.3f} {flops * part / ms / 1e9:4.0f}"
            run = runs[who, what]
            busy = 0 if who == "torch" else run["calls"][0].busy / run["cycles"] / 132
            line += f" {busy:4.0%}" if busy else 5 * " "
        lines.append(line)
    print("\n".join(lines), flush=True)
    return good, lines


def main():
    libs = [ctypes.CDLL(path) for path in sys.argv[1:]]
    assert all(lib.tile_bench_task_size() == TASK.itemsize for lib in libs)
    print(torch.cuda.get_device_name(), "shared bytes", libs[0].tile_bench_shared_size())
    start = time.time()
    good = all(checks(lib) and place_check(lib) for lib in libs)
    print(f"checks took {time.time() - start:.1f} s", flush=True)
    if not good:
        sys.exit(1)
    lines = []
    for name, H, I, rows in SHAPES:
        ok, more = bench(libs, name, H, I, rows)
        good &= ok
        lines += more
        torch.cuda.empty_cache()
    print("ms, TFLOP/s of real rows, tensor-core share: layer, layer + save, gu, gu + save, down")
    print("\n".join(lines))
    print("all checks passed" if good else "CHECKS FAILED", f"{time.time() - start:.1f} s")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
