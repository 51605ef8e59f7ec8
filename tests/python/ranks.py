"""Runs a function as several ranks: processes with gloo and a deadline."""

import io
import multiprocessing
import os
import signal
import tempfile
import time
import traceback

import torch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.tensor"])


class RankFailed(AssertionError):
    """A rank raised, died, or was not done in time."""


def _dump(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data):
    return torch.load(io.BytesIO(data), weights_only=False)


def _main(pipe, function, rank, ranks, store, arguments, settings):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        import mok
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        if settings is not None:
            mok.init(**settings)
        result = function(rank, *arguments)
        pipe.send_bytes(_dump((True, result)))
        if os.environ.get("MOK_TEST_NO_DESTROY") is None:
            dist.destroy_process_group()
    except BaseException as error:
        pipe.send_bytes(_dump((False, (type(error).__name__, str(error), traceback.format_exc()))))


def start(ranks, function, *arguments, settings=None):
    """Starts the ranks; [(process, pipe)]. `settings` go to mok.init (None: not called)."""
    store = tempfile.mktemp(prefix="mok-test-")
    started = []
    for rank in range(ranks):
        mine, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(
            target=_main,
            args=(theirs, function, rank, ranks, store, arguments, settings),
            daemon=True,
        )
        process.start()
        theirs.close()
        started.append((process, mine))
    return started


def collect(started, timeout=60.0, may_die=()):
    """Results by rank; a rank's exception is a tuple (type name, message, traceback)."""
    deadline = time.monotonic() + timeout
    outcome = []
    try:
        for rank, (process, pipe) in enumerate(started):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RankFailed(f"rank {rank} was not done within {timeout} s")
            try:
                outcome.append(_load(pipe.recv_bytes()))
            except EOFError:
                if rank not in may_die:
                    raise RankFailed(f"rank {rank} died, exit code {process.exitcode}") from None
                outcome.append((True, None))
        for process, _ in started:
            process.join(max(1.0, deadline - time.monotonic()))
            if process.is_alive():
                raise RankFailed("a rank does not exit")
    finally:
        for process, _ in started:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
    return outcome


def run(ranks, function, *arguments, max_tokens=64, timeout=60.0, **settings):
    """function(rank, *arguments) on each rank after mok.init; the results by rank."""
    settings = {"max_tokens": max_tokens, "arrival_timeout": 40, "progress_timeout": 20, **settings}
    results = []
    for rank, (good, value) in enumerate(
        collect(start(ranks, function, *arguments, settings=settings), timeout)
    ):
        if not good:
            raise RankFailed(f"rank {rank} raised {value[2]}")
        results.append(value)
    return results
