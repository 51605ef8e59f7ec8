"""Finds and loads libmok_torch.so, and calls its C functions (groups and workspaces)."""

import ctypes
import os
import re
from pathlib import Path

import torch

_NAME = "libmok_torch.so"
_ERRORS = {  # mok::ErrorCode, in order
    0: ValueError,  # bad_argument
    1: TypeError,  # bad_type
    2: ValueError,  # bad_routing
    3: ValueError,  # disagreement
    4: RuntimeError,  # aborted
    5: RuntimeError,  # deadline
    6: MemoryError,  # out_of_memory
    7: RuntimeError,  # unsupported
    8: RuntimeError,  # internal
}


def find_library() -> Path:
    """The library's path: $MOK_LIBRARY, or beside this file, or the newest in build/*/."""
    asked = os.environ.get("MOK_LIBRARY")
    if asked:
        path = Path(asked)
        if not path.is_file():
            raise ImportError(f"mok: MOK_LIBRARY={asked} is no file")
        return path
    here = Path(__file__).resolve().parent
    if (here / _NAME).is_file():
        return here / _NAME
    built = list(here.parents[1].glob(f"build/*/{_NAME}"))
    if built:
        return max(built, key=lambda path: path.stat().st_mtime)
    raise ImportError(
        f"mok: {_NAME} was found neither in {here} nor in {here.parents[1]}/build/*/. "
        "In a source tree type 'make build'; elsewhere install mok, or set MOK_LIBRARY to its path."
    )


def _load() -> ctypes.CDLL:
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < (2, 10):
        raise ImportError(f"mok: PyTorch 2.10 or newer is needed, this is {torch.__version__}")
    path = find_library()
    try:
        torch.ops.load_library(str(path))
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"mok: {path} does not load under PyTorch {torch.__version__}: {error}"
        ) from None
    for name in (
        "mok_group_create",
        "mok_cuda_check",
        "mok_cuda_symmetric_bytes",
        "mok_workspace_create",
        "mok_workspace_info",
        "mok_workspace_synchronize",
    ):
        getattr(library, name).restype = ctypes.c_int64
    library.mok_error_message.restype = ctypes.c_char_p
    library.mok_version.restype = ctypes.c_char_p
    return library


class WorkspaceRequest(ctypes.Structure):
    """What a workspace is made for; mirrors MokWorkspaceRequest in csrc/handles.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("hidden", "intermediate", "experts", "topk")),
        ("shared_intermediate", ctypes.c_int64),
        ("shared_gate", ctypes.c_int64),
        ("swiglu_limit", ctypes.c_double),
        ("precision", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("max_tokens", "ring_rows", "minibatch_rows")),
        *((name, ctypes.c_int64) for name in ("saved_rows", "compute_workers", "comm_workers")),
        ("delay_seed", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("comm_blocks", "sm_reserve")),
    )


_lib = _load()

# The devices that this build has operators for.
DEVICES = ("cpu", "cuda") if _lib.mok_has_cuda() else ("cpu",)


def check_device(name: str, device: torch.device) -> None:
    """Raises ValueError for a device without operators."""
    if device.type not in DEVICES:
        raise ValueError(f"{name}: on {device}; this build works on {', '.join(DEVICES)} tensors")


def library_version() -> str:
    return _lib.mok_version().decode()


def tile_rows() -> int:
    """Rows of a tile: an expert's rows begin at a multiple of it."""
    return _lib.mok_tile_rows()


def _checked(value: int) -> int:
    if value < 0:
        message = _lib.mok_error_message().decode(errors="replace")
        raise _ERRORS.get(_lib.mok_error_code(), RuntimeError)(f"mok: {message}")
    return value


def create_group(name: str, rank: int, ranks: int, arrival: float, progress: float) -> int:
    return _checked(
        _lib.mok_group_create(
            name.encode(), rank, ranks, ctypes.c_double(arrival), ctypes.c_double(progress)
        )
    )


def destroy_group(handle: int) -> None:
    _lib.mok_group_destroy(ctypes.c_int64(handle))


def check_gpu(index: int) -> None:
    """Raises RuntimeError when the layer cannot run on that GPU."""
    _checked(_lib.mok_cuda_check(index))


def symmetric_bytes(group: int, request: WorkspaceRequest) -> int:
    """Bytes of each rank's block of symmetric memory on a GPU."""
    return _checked(_lib.mok_cuda_symmetric_bytes(ctypes.c_int64(group), ctypes.byref(request)))


def create_workspace(
    group: int, request: WorkspaceRequest, device: torch.device, blocks: list[int] | None = None
) -> int:
    """blocks: every rank's block of symmetric memory; on a GPU with several ranks."""
    index = -1 if device.type == "cpu" else device.index
    addresses = None if blocks is None else (ctypes.c_void_p * len(blocks))(*blocks)
    return _checked(
        _lib.mok_workspace_create(ctypes.c_int64(group), ctypes.byref(request), index, addresses)
    )


def workspace_info(handle: int) -> dict[str, int]:
    values = (ctypes.c_int64 * 5)()
    _checked(_lib.mok_workspace_info(ctypes.c_int64(handle), values))
    names = ("max_tokens", "saved_rows", "ring_rows", "minibatch_rows", "memory_bytes")
    return dict(zip(names, values, strict=True))


def synchronize_workspace(handle: int) -> None:
    """Waits for the last call, and raises what went wrong."""
    _checked(_lib.mok_workspace_synchronize(ctypes.c_int64(handle)))


def abort_call(handle: int) -> None:
    """Tells the peers that this rank will not make its next call; they fail at once."""
    _lib.mok_workspace_abort_call(ctypes.c_int64(handle))


def destroy_workspace(handle: int) -> None:
    _lib.mok_workspace_destroy(ctypes.c_int64(handle))
