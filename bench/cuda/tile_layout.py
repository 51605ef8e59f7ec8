"""What tile_bench.cu and src/cuda/tile_types.cuh declare, for Python; rows of a layer; timing."""

import ctypes
import statistics

import numpy as np
import torch

DEVICE = "cuda"
TILE_M, TILE_N, TILE_K, GROUP_N = 128, 256, 64, 64
TILE_INTER_GRAD = 192  # columns of a d_hidden tile
MOST_MAPS, MOST_PRODUCTS = 8, 4
SMS = 132
INF = float("inf")

GATE_UP, DOWN, D_HIDDEN, D_INPUT, WEIGHT_GRAD = range(1, 6)  # TaskKind
STORAGE, SUM, ACCUMULATE = range(1, 4)  # GradMode


def _struct(size, **fields):
    """A structured dtype from name = (format, offset)."""
    formats, offsets = zip(*fields.values(), strict=True)
    return np.dtype(
        {"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": size}
    )


TASK = _struct(
    48,
    kind=("i2", 0), product=("i2", 2), steps=("i4", 4), rows=("i4", 8), cols=("i4", 12),
    row0=("i4", 16), col0=("i4", 20), save_row0=("i4", 24), save_rows=("i4", 28),
    expert=("i4", 32), wait_counter=("i4", 36), wait_target=("i4", 40), done_counter=("i4", 44),
)  # fmt: skip

# Product: a head, then a union; the fields of its members overlap.
PRODUCT = _struct(
    80,
    a=("(2,)i1", 0), b=("(2,)i1", 2), gate_in_ring=("?", 4), mode=("i4", 8),
    gu_hidden=("u8", 16), gu_gate=("u8", 24), gu_up=("u8", 32), gu_row_elements=("i8", 40),
    row_destination=("u8", 16),
    dh_gate=("u8", 16), dh_up=("u8", 24), dh_d_gate=("u8", 32), dh_d_up=("u8", 40),
    dh_hidden=("u8", 48), dh_row_weight=("u8", 56), dh_partials=("u8", 64),
    dh_row_elements=("i4", 72), dh_partial_columns=("i4", 76),
    wg_out=("u8", 16), wg_row_elements=("i8", 24), wg_expert_elements=("i8", 32),
    wg_carry=("u8", 40), wg_carry_elements=("i4", 48),
)  # fmt: skip


class BenchTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [
        (name, ctypes.c_int64) for name in "columns rows experts row_stride expert_stride".split()
    ]


class TileBench(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in "tensors products tasks control counters".split()]
        + [
            (name, ctypes.c_int64)
            for name in "tensor_count product_count task_count counter_count".split()
        ]
        + [("limit", ctypes.c_float), ("blocks", ctypes.c_int32), ("backward", ctypes.c_int32)]
    )


def load(path):
    lib = ctypes.CDLL(path)
    lib.tile_bench_launch.argtypes = [ctypes.POINTER(TileBench), ctypes.c_void_p]
    for have, want in (
        (lib.tile_bench_task_size(), TASK.itemsize),
        (lib.tile_bench_product_size(), PRODUCT.itemsize),
    ):
        assert have == want, f"{path}: a struct of {have} bytes, {want} here"
    return lib


def boxed(t):
    """bf16 [rows, columns] or [experts, rows, columns], rows contiguous, as a map reads it."""
    experts, rows, columns = t.shape if t.dim() == 3 else (1, *t.shape)
    row_stride = t.stride(-2)
    expert_stride = t.stride(0) if t.dim() == 3 else rows * row_stride
    assert t.dtype == torch.bfloat16 and t.stride(-1) == 1
    return BenchTensor(t.data_ptr(), columns, rows, experts, row_stride, expert_stride)


def product(a, b, **fields):
    """a, b: maps, one or two of each; tensors stand for their addresses."""
    p = np.zeros((), PRODUCT)
    p["a"], p["b"] = a, b
    for name, value in fields.items():
        p[name] = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return p


def busy_cycles(tasks):
    """Tensor-core cycles of one SM that the tasks take at least, as they are tiled: 64 rows by n
    columns by 64 take 2 n cycles."""
    halves = np.where(tasks["rows"] > TILE_M // 2, 2, 1)
    multiplied = tasks["cols"] * np.where(tasks["kind"] == GATE_UP, 2, 1)
    whole = np.where(tasks["kind"] == D_HIDDEN, TILE_INTER_GRAD, TILE_N)
    columns = np.where(multiplied <= TILE_N // 2, TILE_N // 2, whole)
    return float((tasks["steps"].astype(np.int64) * halves * columns * 2).sum())


def launcher(lib, maps, products, tasks, rows, counters, limit=INF, blocks=SMS, backward=False):
    """A function that enqueues one launch; `.busy`: see busy_cycles."""
    assert len(maps) <= MOST_MAPS and len(products) <= MOST_PRODUCTS
    assert tasks.dtype == TASK and tasks["done_counter"].max(initial=0) < len(counters)
    tensors = (BenchTensor * len(maps))(*map(boxed, maps))
    # As bytes: numpy would lay a stack of such structs out anew.
    host_products = np.frombuffer(b"".join(p.tobytes() for p in products), np.uint8)
    on_device = torch.from_numpy(tasks.view(np.uint8).copy()).to(DEVICE)
    b = TileBench(
        ctypes.addressof(tensors), host_products.ctypes.data, on_device.data_ptr(),
        rows.control.data_ptr(), counters.data_ptr(), len(maps), len(products), len(tasks),
        len(counters), limit, blocks, backward,
    )  # fmt: skip

    # Whatever a pointer in `b` leads to lives as long as the function.
    def launch(keep=(tensors, host_products, on_device, maps, counters)):
        stream = torch.cuda.current_stream().cuda_stream if DEVICE == "cuda" else 0
        code = lib.tile_bench_launch(ctypes.byref(b), stream)
        assert code == 0, f"launch failed: {code}"

    launch.busy = busy_cycles(tasks)
    return launch


class Rows:
    """Rows of experts in a ring: those of an expert start at a tile boundary."""

    def __init__(self, H, rows, seed):
        self.H, self.rows, self.total = H, list(rows), sum(rows)
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        tiles, place, start, at = [], [], [], 0
        for e, n in enumerate(rows):
            start.append(at)
            tiles += [(e, at + i, min(TILE_M, n - i)) for i in range(0, n, TILE_M)]
            place.append(np.arange(at, at + n))
            at += -(-n // TILE_M) * TILE_M
        self.tiles = np.array(tiles).reshape(-1, 3)  # expert, first row, rows
        self.start = start  # first row of each expert
        self.padded = at
        self.place = torch.from_numpy(np.concatenate(place)).to(DEVICE)
        self.ends = np.cumsum(rows)  # in unpadded rows
        self.offsets = torch.tensor(self.ends, dtype=torch.int32, device=DEVICE)
        # Row results leave the ring for places in a random order; one place more is nobody's.
        self.slots = torch.randperm(self.total, device=DEVICE, generator=self.generator)
        self.results = self.nan(self.total + 1, H)
        self.destination = torch.zeros(at, dtype=torch.int64, device=DEVICE)
        self.destination[self.place] = self.results.data_ptr() + self.slots * (H * 2)
        self.control = torch.zeros(4, dtype=torch.int32, device=DEVICE)

    def draw(self, *shape):
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16, generator=self.generator)

    def nan(self, *shape, dtype=torch.bfloat16):
        return torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)

    def ring(self, values):
        ring = self.nan(self.padded, values.shape[1])
        ring[self.place] = values
        return ring

    def of_expert(self, e):  # unpadded
        return slice(self.ends[e] - self.rows[e], self.ends[e])

    def finish(self):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        assert self.control[1].item() == 0, "deadline passed"

    def cycles(self):  # of the slowest block of the last launch
        return int(self.control.view(torch.int64)[1])


def grid(first, second):
    """Pairs, the first index outer."""
    a, b = np.meshgrid(first, second, indexing="ij")
    return a.ravel(), b.ravel()


def far(out, ref, block=64):
    """Largest relative error by norm over rows and over blocks of columns; NaN if any is NaN."""
    out, ref = out.double(), ref.double()
    d = out - ref
    by_row = d.norm(dim=1) / ref.norm(dim=1)
    columns = torch.stack([c.norm() for c in d.split(block, 1)])
    by_column = columns / torch.stack([c.norm() for c in ref.split(block, 1)])
    return max(by_row.max().item(), by_column.max().item())


def worse(a, b):
    """The larger, or NaN."""
    return b if b != b else max(a, b) if a == a else a


def same_bits(a, b):
    word = {2: torch.int16, 4: torch.int32}
    return all(
        torch.equal(p.view(word[p.element_size()]), q.view(word[q.element_size()]))
        for p, q in zip(a, b, strict=True)
    )


def burst(calls, estimate, seconds):
    """Milliseconds a call over one burst that rotates among the inputs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    n = max(2, round(seconds / estimate))
    start.record()
    for i in range(n):
        calls[i % len(calls)]()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / n


def time_in_turns(runs, flops, rows, seconds=0.05, rounds=3):
    """runs: key -> calls. Returns key -> (median ms, cycles of the last launch)."""
    estimates = {k: burst(calls, flops / 6e14 + 5e-6, 0.005) / 1e3 for k, calls in runs.items()}
    times, cycles = {k: [] for k in runs}, {}
    for _ in range(rounds):
        for k, calls in runs.items():
            times[k].append(burst(calls, estimates[k], seconds))
            cycles[k] = rows.cycles()
    rows.finish()
    return {k: (statistics.median(times[k]), cycles[k]) for k in runs}


def table(name, runs, measured, columns, flops):
    """A line for each library and one for torch: ms, TFLOP/s of real rows, busy."""
    lines = []
    for who in dict.fromkeys(who for who, _ in runs):
        line = f"{name:27s} {who!s:5s}"
        for what in columns:
            if (who, what) not in runs:
                line += " |" + 17 * " "
                continue
            ms, cycles = measured[who, what]
            line += f" | {ms:6.3f} {flops[what] / ms / 1e9:4.0f}"
            busy = getattr(runs[who, what][0], "busy", 0)
            line += f" {busy / cycles / SMS:4.0%}" if busy else 5 * " "
        lines.append(line)
    return lines


def multinomial(E, total, seed=3):
    rng = np.random.default_rng(seed)
    return rng.multinomial(total, rng.dirichlet(np.full(E, 8.0))).tolist()
