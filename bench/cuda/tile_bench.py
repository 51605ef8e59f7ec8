"""Checks and times the tile core (tile_bench.cu) against float64 and torch._grouped_mm.

    bench/cuda/build_tile_bench.sh
    python3 bench/cuda/tile_bench.py build/gpu/tile_bench.so [--only forward|backward]

Several libraries are checked one after the other and timed in turns.
"""

import argparse
import sys
import time

import numpy as np
import tile_backward
import tile_forward
import torch
from tile_layout import INF, load, multinomial

RANDOM_ROWS = np.random.default_rng(1).integers(0, 700, 40).tolist()
CASES = [  # name, H, I, rows of each expert, limit, gate and up in one tensor
    ("few rows", 256, 128, [1, 63, 64, 65], INF, True),
    ("64 x 64, limit", 64, 64, [128, 0, 129, 200, 37], 0.5, False),
    ("one more than a tile", 192, 704, [300, 64, 1], INF, False),
    ("H % 256 = 64, I % 128 = 64", 2880, 2880, [130, 66], 7.0, True),
    ("H % 256 = 192", 448, 320, [257, 90], 1.0, True),
    ("H % 256 = 128", 640, 256, [128, 128, 5], INF, True),
    ("many small experts", 512, 384, list(range(1, 129)), INF, True),
    ("random rows", 1024, 768, RANDOM_ROWS, 2.0, True),
]

SHAPES = [  # name, H, I, rows of each expert
    ("qwen3-30b 128x512", 2048, 768, [512] * 128),
    ("qwen3-30b uneven", 2048, 768, multinomial(128, 65536)),
    ("qwen3-235b 64x1024", 4096, 1536, [1024] * 64),
    ("qwen3-235b 128x512", 4096, 1536, [512] * 128),
    ("deepseek-v3 256x128 uneven", 7168, 2048, multinomial(256, 32768)),
    ("mixtral 8x2048", 4096, 14336, [2048] * 8),
    ("gpt-oss 128x256", 2880, 2880, [256] * 128),
]
# fp32 gradients of 256 such experts and all else would not fit.
INSTEAD_IN_BACKWARD = {
    "deepseek-v3 256x128 uneven": (
        "deepseek-v3 64x128 uneven", 7168, 2048, multinomial(64, 8192),
    ),
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", nargs="+")
    parser.add_argument("--only", choices=["forward", "backward"])
    arguments = parser.parse_args()
    libs = [load(path) for path in arguments.libraries]
    print(torch.cuda.get_device_name(), "shared bytes", libs[0].tile_bench_shared_size())
    start = time.time()
    good = True
    for lib in libs:
        if arguments.only != "backward":
            good &= tile_forward.checks(lib, CASES) and tile_forward.place_check(lib)
        if arguments.only != "forward":
            good &= tile_backward.checks(lib, CASES)
    print(f"checks took {time.time() - start:.1f} s", flush=True)
    if not good:
        sys.exit(1)
    tables = []
    for direction in (tile_forward, tile_backward):
        if arguments.only and not direction.__name__.endswith(arguments.only):
            continue
        tables.append("ms, TFLOP/s of real rows, busy: " + ", ".join(direction.COLUMNS))
        for shape in SHAPES:
            if direction is tile_backward:
                shape = INSTEAD_IN_BACKWARD.get(shape[0], shape)
            ok, lines = direction.bench(libs, *shape)
            good &= ok
            tables += lines
            torch.cuda.empty_cache()
    print("\n".join(tables))
    print("all checks passed" if good else "CHECKS FAILED", f"{time.time() - start:.1f} s")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
