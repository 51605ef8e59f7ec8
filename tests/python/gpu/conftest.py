"""All tests of this folder need a GPU; `two` is a pair of processes with a GPU each."""

import pytest
import torch
from mok import _library


def why_not(gpus: int) -> str | None:
    if "cuda" not in _library.DEVICES:
        return "the library was built without CUDA"
    if not torch.cuda.is_available() or torch.cuda.device_count() < gpus:
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return f"{gpus} GPU(s) needed, {found} found"
    try:
        _library.check_gpu(0)
    except RuntimeError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            reason = why_not(2 if "two" in item.fixturenames else 1)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def two():
    from pool import Pool

    pool = Pool(2)
    yield pool
    pool.close()
