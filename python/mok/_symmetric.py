"""Memory of one GPU per process that all ranks of a group can reach over NVLink.

It is PyTorch's symmetric memory, without NVLink multicast. Everything here is collective, and
happens once for each configuration of a group.
"""

import contextlib
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

REMEDY = (
    "Run the ranks of an EP group on GPUs of one machine that NVLink connects, each process with "
    "torch.cuda.set_device(LOCAL_RANK) and without hiding GPUs from it (CUDA_VISIBLE_DEVICES)"
)


@dataclass(frozen=True)
class Gpu:
    """A rank's GPU, as its process sees it."""

    rank: int
    index: int
    uuid: str

    def __str__(self) -> str:
        return f"GPU {self.index} of rank {self.rank} ({self.uuid})"


def wrong_pair(gpus: list[Gpu], rank: int, visible: dict[str, int], reaches) -> str | None:
    """What keeps `rank` from reaching a peer's memory; None: nothing that can be seen.

    Args:
        gpus: of each rank.
        visible: uuid -> index of the GPUs that this process sees.
        reaches(a, b): whether GPU a can access GPU b's memory, both indices of this process.
    """
    own = gpus[rank]
    for other in gpus:
        if other.rank == rank:
            continue
        if other.uuid == own.uuid:
            return f"{own} and {other} are one GPU; each rank needs its own. {REMEDY}"
        index = visible.get(other.uuid)  # None: hidden from this process; the probe will tell
        if index is not None and not reaches(own.index, index):
            return f"{own} cannot reach the memory of {other}. {REMEDY}"
    return None


def _together(process_group, step, *arguments):
    """step(*arguments) on every rank. Where one fails, all raise, so that nobody waits for it."""
    result = wrong = None
    try:
        result = step(*arguments)
    except Exception as error:
        wrong = error
    everyone = [None] * dist.get_world_size(process_group)
    message = None if wrong is None else str(wrong)
    dist.all_gather_object(everyone, message, group=process_group)
    if wrong is not None:
        raise wrong
    for rank, message in enumerate(everyone):
        if message is not None:
            raise RuntimeError(f"{message} (on rank {rank})")
    return result


def _check_agreement(process_group, settings: dict) -> None:
    everyone = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, settings, group=process_group)
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                raise ValueError(f"{name}: {theirs[name]} on rank {rank}, but {value} on rank 0")


def _check_pairs(process_group, device: torch.device) -> list[Gpu]:
    rank = dist.get_rank(process_group)
    uuid = lambda index: str(torch.cuda.get_device_properties(index).uuid)  # noqa: E731
    gpus = [None] * dist.get_world_size(process_group)
    own = Gpu(rank, device.index, uuid(device.index))
    dist.all_gather_object(gpus, own, group=process_group)

    def check():
        visible = {uuid(index): index for index in range(torch.cuda.device_count())}
        wrong = wrong_pair(gpus, rank, visible, torch.cuda.can_device_access_peer)
        if wrong is not None:
            raise RuntimeError(f"mok: {wrong}")

    _together(process_group, check)
    return gpus


@contextlib.contextmanager
def _without_multicast():
    """It is not used here, and where the machine's fabric is not set up for it, asking can fail."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    former = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if former is None:
            del os.environ[name]
        else:
            os.environ[name] = former


def _probe(process_group, block, handle, gpus: list[Gpu]) -> None:
    """Each rank writes a word into every block, and looks for what the others wrote."""
    rank, ranks = dist.get_rank(process_group), len(gpus)
    word = lambda source, target: 0x6D6F6B0000 + ranks * source + target  # noqa: E731

    def write():
        for target in range(ranks):
            handle.get_buffer(target, (ranks,), torch.int64)[rank] = word(rank, target)
        torch.cuda.synchronize(block.device)

    def check():
        for source, seen in enumerate(block[: 8 * ranks].view(torch.int64).tolist()):
            if seen != word(source, rank):
                raise RuntimeError(
                    f"mok: what {gpus[source]} wrote into the memory of {gpus[rank]} did not "
                    f"arrive. {REMEDY}"
                )

    _together(process_group, write)
    _together(process_group, check)


def allocate(process_group, device: torch.device, settings: dict, size):
    """A block of memory on every rank's GPU, that all ranks can reach; checked.

    Args:
        settings: name -> value, to be the same on all ranks.
        size(): bytes of a block; may raise what is wrong with the settings.

    Returns: (the blocks' addresses here, by rank; what must live as long as they are used).

    Raises:
        ValueError: settings differ.
        RuntimeError: two ranks have one GPU, or a GPU does not reach another; both are named.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    _check_agreement(process_group, settings)
    gpus = _check_pairs(process_group, device)
    with _without_multicast():
        block = _together(
            process_group,
            lambda: symmetric_memory.empty(size(), dtype=torch.uint8, device=device),
        )
        handle = symmetric_memory.rendezvous(block, process_group.group_name)
    _probe(process_group, block, handle, gpus)
    return list(handle.buffer_ptrs), (block, handle)


def create(process_group, make):
    """make() on every rank, after which nobody is early: all have cleared their blocks."""
    return _together(process_group, make)
