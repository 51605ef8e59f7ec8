"""The expert-parallel (EP) group, and the workspaces that its ranks share."""

import math
import os
import secrets
import socket
import weakref
from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist

from mok import _library, _symmetric
from mok.precision import QUANTIZED

_PRECISIONS = {torch.bfloat16: 0, torch.float32: 1, torch.float64: 2, "mxfp8": 3, "fp8": 4}


def _check_integer(name: str, value, least: int, optional: bool = False) -> None:
    """Raises TypeError or ValueError, which names the argument."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {value!r} is not an integer")
    if value < least:
        raise ValueError(f"{name}: {value} is {'negative' if least == 0 else f'below {least}'}")


def _check_seconds(name: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: {value!r} is not a number of seconds")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}: {value} is negative or not finite (0 = for ever)")


@dataclass(frozen=True)
class Options:
    """How the work is done; never what comes out. The same on all ranks.

    Attributes:
        ring_rows: rows of x and hidden in flight; 0 = what fits the expected rows.
        minibatch_rows: rows between two interleavings of the two products; 0 = the default.
        saved_rows: rows of gate and up that forward keeps for backward; -1 = the expected share of
            a rank and a quarter more. Rows beyond are recomputed.
        compute_workers: CPU threads per rank; 0 = cores / ranks of this machine.
        comm_workers: CPU threads per rank that fetch rows; 0 = the default.
        delay_seed: not 0: random delays before tasks (tests).
        comm_blocks: thread blocks of a GPU that fetch rows; 0 = all.
        sm_reserve: SMs of a GPU that are left to other kernels.
    """

    ring_rows: int = 0
    minibatch_rows: int = 0
    saved_rows: int = -1
    compute_workers: int = 0
    comm_workers: int = 0
    delay_seed: int = 0
    comm_blocks: int = 0
    sm_reserve: int = 0

    def __post_init__(self):
        for field in fields(self):
            least = -1 if field.name == "saved_rows" else 0
            _check_integer(field.name, getattr(self, field.name), least)
        if self.delay_seed >= 2**64:
            raise ValueError(f"delay_seed: {self.delay_seed} has more than 64 bits")


@dataclass(frozen=True)
class Shape:
    """What a workspace is made for (mok::LayerShape and a precision)."""

    hidden: int
    intermediate: int
    experts: int
    topk: int
    shared_intermediate: int
    shared_gate: bool
    swiglu_limit: float | None
    precision: torch.dtype | str  # the weights' dtype, or "mxfp8" or "fp8"


class Group:
    """One rank's membership of an EP group; made by :func:`init` or :func:`new_group`.

    Attributes:
        rank, ranks: this rank, and how many there are.
        max_tokens: T_max, the most tokens on any rank in any call; None (single rank only): what
            each call needs.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        ranks: int,
        max_tokens: int | None,
        arrival_timeout: float,
        progress_timeout: float,
        options: Options,
        process_group,
    ):
        self.rank = rank
        self.ranks = ranks
        self.max_tokens = max_tokens
        self.options = options
        self._process_group = process_group
        handle = _library.create_group(name, rank, ranks, arrival_timeout, progress_timeout)
        self._handle = handle
        self._generation = 0
        # What mok.moe looks up: the handle and saved rows for its arguments' sizes.
        self.found: dict[tuple, tuple[int, int]] = {}
        # (handle, rows saved for backward, what its memory hangs on)
        self._workspaces: dict[tuple[Shape, int, torch.device], tuple[int, int, object]] = {}
        # Runs at exit too, before the interpreter ends. Waits for nobody.
        self._closer = weakref.finalize(self, _close, os.getpid(), self._workspaces, handle)
        self._set_key()

    @property
    def process_group(self):
        """The torch.distributed process group that it was made of; None: this process alone."""
        return self._process_group

    def _set_key(self) -> None:
        # A string, so that a compiled graph is guarded by it: new workspaces, new graph.
        self.key = f"{self._handle}.{self._generation}"
        _groups[self.key] = self

    def reserve(self, max_tokens: int) -> None:
        """Raises T_max. Collective, and the ranks need not agree beforehand: the largest counts.

        Workspaces are given up and made anew at the next call, so no forward may be waiting for its
        backward.

        Raises:
            TypeError: max_tokens is not an integer.
            ValueError: it is negative; or a rank's was refused.
        """
        wrong = _error_of(_check_integer, "max_tokens", max_tokens, 0)
        largest = max(_agree(self._process_group if self.ranks > 1 else None, max_tokens, wrong))
        if self.max_tokens is not None and largest <= self.max_tokens:
            return
        self.max_tokens = largest
        self.found.clear()
        _destroy_all(self._workspaces)
        _groups.pop(self.key, None)
        self._generation += 1
        self._set_key()

    def close(self) -> None:
        """Gives the memory back. Never waits for peers; at exit it happens by itself."""
        _groups.pop(self.key, None)
        self.found.clear()
        self._closer()

    def memory_bytes(self) -> int:
        """Memory of this rank's workspaces, symmetric and local."""
        return sum(
            _library.workspace_info(handle)["memory_bytes"]
            for handle, *_ in self._workspaces.values()
        )

    def synchronize(self) -> None:
        """As :func:`synchronize`."""
        for handle, *_ in list(self._workspaces.values()):
            _library.synchronize_workspace(handle)

    def capacity(self, tokens: int) -> int:
        """T_max of the workspace for a call with that many tokens. Raises ValueError beyond it."""
        if self.max_tokens is not None:
            if tokens > self.max_tokens:
                raise ValueError(
                    f"x: {tokens} tokens, but max_tokens is {self.max_tokens}; "
                    "all ranks must call mok.reserve(max_tokens) first"
                )
            return self.max_tokens
        capacity = 64
        while capacity < tokens:
            capacity *= 2
        return capacity

    def _workspace(self, shape: Shape, capacity: int, device: torch.device) -> tuple[int, int]:
        """(handle, rows saved for backward); made at the first call, which is collective."""
        found = self._workspaces.get((shape, capacity, device))
        if found is None:
            found = self._create_workspace(shape, capacity, device)
            self._workspaces[shape, capacity, device] = found
        return found[:2]

    def _create_workspace(
        self, shape: Shape, capacity: int, device: torch.device
    ) -> tuple[int, int, object]:
        options = self.options
        request = _library.WorkspaceRequest(
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            experts=shape.experts,
            topk=shape.topk,
            shared_intermediate=shape.shared_intermediate,
            shared_gate=int(shape.shared_gate),
            swiglu_limit=math.inf if shape.swiglu_limit is None else shape.swiglu_limit,
            precision=_PRECISIONS[shape.precision],
            max_tokens=capacity,
            ring_rows=options.ring_rows,
            minibatch_rows=options.minibatch_rows,
            saved_rows=options.saved_rows,
            compute_workers=options.compute_workers,
            comm_workers=options.comm_workers,
            delay_seed=options.delay_seed,
            comm_blocks=options.comm_blocks,
            sm_reserve=options.sm_reserve,
        )
        memory = None
        if device.type == "cpu":
            handle = _library.create_workspace(self._handle, request, device)
        else:
            handle, memory = self._create_on_gpu(shape, request, device)
        return handle, _library.workspace_info(handle)["saved_rows"], memory

    def _create_on_gpu(self, shape: Shape, request, device: torch.device) -> tuple[int, object]:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "mok: the first call of a configuration takes memory, which cannot be done while a "
                "CUDA graph is captured; make one call before"
            )
        with torch.cuda.device(device):
            torch.cuda.empty_cache()  # what PyTorch holds without need may be what is needed here

            def size():
                _library.check_gpu(device.index)
                if shape.precision not in (torch.bfloat16, "mxfp8", "fp8"):
                    raise TypeError(
                        f"w_down: dtype {shape.precision}; on a GPU the layer computes in "
                        "torch.bfloat16 (MoELayer's compute_dtype converts weights)"
                    )
                return _library.symmetric_bytes(self._handle, request)

            if self.ranks == 1:
                size()
                return _library.create_workspace(self._handle, request, device), None
            settings = {**asdict(shape), "max_tokens": request.max_tokens}
            blocks, memory = _symmetric.allocate(self._process_group, device, settings, size)
            handle = _symmetric.create(
                self._process_group,
                lambda: _library.create_workspace(self._handle, request, device, blocks),
            )
            return handle, memory

    def __deepcopy__(self, memo):
        return self  # copies of a module share its group

    def __reduce__(self):
        raise TypeError("mok.Group cannot be pickled: it is this process's membership of a group")

    def __repr__(self) -> str:
        return f"mok.Group(rank={self.rank}, ranks={self.ranks}, max_tokens={self.max_tokens})"


_groups: "weakref.WeakValueDictionary[str, Group]" = weakref.WeakValueDictionary()
_default: Group | None = None


def _destroy_all(workspaces: dict) -> None:
    for handle, *_ in workspaces.values():
        _library.destroy_workspace(handle)
    workspaces.clear()


def _close(process: int, workspaces: dict, handle: int) -> None:
    if process != os.getpid():
        return  # a fork's copy: the threads are not its own
    _destroy_all(workspaces)
    _library.destroy_group(handle)


def _find_workspace(
    key: str,
    hidden: int,
    intermediate: int,
    experts: int,
    topk: int,
    shared_intermediate: int,
    shared_gate: bool,
    swiglu_limit: float | None,
    dtype: torch.dtype,
    capacity: int,
    device: torch.device,
    precision: str | None = None,
) -> tuple[int, int]:
    """(handle, rows saved for backward). While a graph is traced, its arguments are constants."""
    shape = Shape(
        hidden, intermediate, experts, topk, shared_intermediate, shared_gate, swiglu_limit,
        precision if precision in QUANTIZED else dtype,
    )  # fmt: skip
    return _groups[key]._workspace(shape, capacity, device)


# What torch.compiler.assume_constant_result does, without its import of the compiler (seconds).
_find_workspace._dynamo_marked_constant = True


def _error_of(check, *arguments) -> Exception | None:
    try:
        check(*arguments)
    except (TypeError, ValueError) as error:
        return error
    return None


def _agree(process_group, value, wrong: Exception | None) -> list:
    """Every rank's value, in rank order. Raises `wrong`, and ValueError where a peer was wrong.

    A process_group of None is this process alone.
    """
    everyone = [(value, None if wrong is None else str(wrong))]
    if process_group is not None:
        mine, everyone = everyone[0], [None] * dist.get_world_size(process_group)
        if wrong is not None:
            mine = None, mine[1]  # what it is may not be fit to be sent
        dist.all_gather_object(everyone, mine, group=process_group)
    if wrong is not None:
        raise wrong
    for rank, (_, message) in enumerate(everyone):
        if message is not None:
            raise ValueError(f"{message} (on rank {rank})")
    return [value for value, _ in everyone]


def _check_settings(max_tokens, arrival_timeout, progress_timeout, options) -> None:
    _check_integer("max_tokens", max_tokens, 0, optional=True)
    _check_seconds("arrival_timeout", arrival_timeout)
    _check_seconds("progress_timeout", progress_timeout)
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options: {options!r} is no mok.Options")


def checked_process_group(name: str, process_group):
    """The process group that is meant, or None for this process alone."""
    available = dist.is_available()
    if process_group is None:
        return dist.group.WORLD if available and dist.is_initialized() else None
    if available and process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{name}: this process is not a member of it")
    if not available or not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"{name}: {type(process_group).__name__}, expected a torch.distributed process group "
            "or None"
        )
    return process_group


def new_group(
    process_group=None,
    *,
    max_tokens: int | None = None,
    arrival_timeout: float = 600,
    progress_timeout: float = 60,
    options: Options | None = None,
) -> Group:
    """An EP group of the ranks of a torch.distributed process group; collective among them.

    Args:
        process_group: its ranks, all of one machine, hold E / R experts each. None: all ranks if
            torch.distributed is initialised, else this process alone. Only used here and in
            ``reserve``; the layer's own traffic goes through shared memory.
        max_tokens: T_max, the most tokens on any rank in any call. Needed with more than one rank;
            where ranks differ, the largest counts.
        arrival_timeout: seconds that a rank waits in a call for a peer to come; 0 = for ever.
        progress_timeout: seconds without progress inside a call; 0 = for ever.
        options: see :class:`Options`.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: max_tokens is missing or negative, the ranks are not on one machine, there are
            more than 8, or their options differ; or a rank's arguments were refused there.
        MemoryError: shared memory (/dev/shm) is too small.
        RuntimeError: a peer did not come in time.
    """
    process_group = checked_process_group("process_group", process_group)
    ranks = dist.get_world_size(process_group) if process_group is not None else 1
    rank = dist.get_rank(process_group) if process_group is not None else 0
    if rank < 0:
        raise ValueError("process_group: this process is not a member of it")
    wrong = _error_of(_check_settings, max_tokens, arrival_timeout, progress_timeout, options)
    if wrong is not None and ranks == 1:
        raise wrong
    options = options or Options()
    name = ""
    if ranks > 1:
        mine = {
            "name": f"mok-{os.getpid()}-{secrets.token_hex(6)}",
            "host": _host(),
            "max_tokens": -1 if max_tokens is None else max_tokens,
            "settings": (options, arrival_timeout, progress_timeout),
        }
        everyone = _agree(process_group, mine, wrong)
        name = everyone[0]["name"]
        hosts = {each["host"] for each in everyone}
        if len(hosts) > 1:
            raise ValueError(
                f"process_group: its ranks are on {len(hosts)} machines; an EP group is on one"
            )
        for other, each in enumerate(everyone):
            if each["settings"] != everyone[0]["settings"]:
                raise ValueError(
                    f"options, timeouts: rank {other} has {each['settings']}, "
                    f"rank 0 {everyone[0]['settings']}"
                )
        max_tokens = max(each["max_tokens"] for each in everyone)
        if max_tokens < 0:
            raise ValueError("max_tokens: needed with more than one rank")
    return Group(
        name, rank, ranks, max_tokens, arrival_timeout, progress_timeout, options, process_group
    )


def local_group(*, max_tokens: int | None = None, options: Options | None = None) -> Group:
    """A group of this process alone, whether or not torch.distributed is initialised.

    Raises TypeError and ValueError, which name the argument.
    """
    _check_settings(max_tokens, 0, 0, options)
    return Group("", 0, 1, max_tokens, 0, 60, options or Options(), None)


def _host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def init(process_group=None, **settings) -> Group:
    """Makes :func:`new_group` (same arguments, same errors) the default of all layers.

    A second call replaces the default; layers made before keep their group.
    """
    global _default
    _default = new_group(process_group, **settings)
    return _default


def default_group() -> Group:
    """The group of :func:`init`. In a process alone, one of a single rank is made if there is none.

    Raises RuntimeError where torch.distributed has several ranks and ``init`` was not called.
    """
    global _default
    if _default is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "mok.init(process_group, max_tokens=...) was not called: it says which ranks share "
                "the experts"
            )
        _default = new_group()
    return _default


def reserve(max_tokens: int, group: Group | None = None) -> None:
    """Raises T_max of a group (default: that of ``init``), as :meth:`Group.reserve`. Collective."""
    if group is not None and not isinstance(group, Group):
        raise TypeError(f"group: {group!r} is no mok.Group")
    (group or default_group()).reserve(max_tokens)


def synchronize(group: Group | None = None) -> None:
    """Waits for this rank's calls, and raises what went wrong in them.

    On a GPU a call returns at once, and what goes wrong later (ids outside [-1, E), a peer that
    failed or did not come) is raised by the next call, or here. Replays of CUDA graphs are not
    waited for. On the CPU there is nothing to wait for.

    Args:
        group: default: all groups of this process.

    Raises: as :func:`mok.moe`.
    """
    if group is not None and not isinstance(group, Group):
        raise TypeError(f"group: {group!r} is no mok.Group")
    for each in [group] if group is not None else list(_groups.values()):
        each.synchronize()
