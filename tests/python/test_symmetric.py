"""The set-up checks of a group of GPUs, without any."""

from mok._symmetric import Gpu, wrong_pair

GPUS = [Gpu(0, 2, "uuid-a"), Gpu(1, 3, "uuid-b"), Gpu(2, 5, "uuid-c")]
VISIBLE = {"uuid-a": 2, "uuid-b": 3, "uuid-c": 5}


def test_all_reach_all():
    asked = []
    assert wrong_pair(GPUS, 1, VISIBLE, lambda a, b: asked.append((a, b)) or True) is None
    assert asked == [(3, 2), (3, 5)]


def test_a_pair_without_peer_access_is_named_with_a_remedy():
    message = wrong_pair(GPUS, 0, VISIBLE, lambda a, b: b != 5)
    assert message.startswith(
        "GPU 2 of rank 0 (uuid-a) cannot reach the memory of GPU 5 of rank 2 (uuid-c). Run the "
    )
    assert "NVLink" in message and "set_device" in message


def test_two_ranks_on_one_gpu():
    shared = [Gpu(0, 0, "uuid-a"), Gpu(1, 0, "uuid-a")]
    message = wrong_pair(shared, 1, {"uuid-a": 0}, lambda a, b: True)
    assert "GPU 0 of rank 1 (uuid-a) and GPU 0 of rank 0 (uuid-a) are one GPU" in message


def test_a_hidden_gpu_is_left_to_the_probe():
    assert wrong_pair(GPUS, 0, {"uuid-a": 2}, lambda a, b: False) is None
