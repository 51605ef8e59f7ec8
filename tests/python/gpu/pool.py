"""Processes with a GPU each, started once for many tests. A failure ends them; the next run starts
new ones."""

import os
import tempfile
import time
import traceback

import torch
from ranks import CONTEXT, RankFailed, _dump, _load


def _serve(pipe, rank, ranks, store):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import mok
    import torch.distributed as dist

    torch.set_num_threads(2)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    while True:
        try:
            function, arguments, settings = _load(pipe.recv_bytes())
        except EOFError:
            break
        try:
            torch.manual_seed(1234)
            group = mok.init(**settings)
            result = function(rank, *arguments)
            group.close()
            pipe.send_bytes(_dump((True, result)))
        except BaseException:
            pipe.send_bytes(_dump((False, traceback.format_exc())))
    dist.destroy_process_group()


class Pool:
    def __init__(self, ranks: int):
        self.ranks = ranks
        self.started = []

    def _start(self):
        store = tempfile.mktemp(prefix="mok-test-")
        for rank in range(self.ranks):
            mine, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve, args=(theirs, rank, self.ranks, store), daemon=True
            )
            process.start()
            theirs.close()
            self.started.append((process, mine))

    def run(self, function, *arguments, max_tokens=64, timeout=60.0, **settings):
        """function(rank, *arguments) on each rank after mok.init; the results by rank."""
        if not self.started:
            self._start()
            timeout += 60  # PyTorch and NCCL start
        settings = {
            "max_tokens": max_tokens, "arrival_timeout": 40, "progress_timeout": 20, **settings
        }  # fmt: skip
        job = _dump((function, arguments, settings))
        for _, pipe in self.started:
            pipe.send_bytes(job)
        deadline = time.monotonic() + timeout
        outcome = []
        for process, pipe in self.started:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                outcome.append((False, f"not done within {timeout} s"))
                continue
            try:
                outcome.append(_load(pipe.recv_bytes()))
            except EOFError:
                outcome.append((False, f"died, exit code {process.exitcode}"))
        if not all(good for good, _ in outcome):
            self.close()
            raise RankFailed(
                "\n".join(f"rank {r}: {what}" for r, (good, what) in enumerate(outcome) if not good)
            )
        return [result for _, result in outcome]

    def close(self):
        for _, pipe in self.started:
            pipe.close()
        for process, _ in self.started:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)
        self.started = []
