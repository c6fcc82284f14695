"""Batches made one step ahead."""

import threading

import pytest
import torch
from mics.data.feed import Feed

CPU = torch.device("cpu")


def batch(samples):
    return [(torch.tensor([samples]), torch.tensor([samples + 1]))]


def test_steps_come_in_order_and_the_cursor_says_where_the_next_one_begins():
    with Feed(batch, samples=6, global_batch=4, device=CPU) as feed:
        for first in (6, 10, 14):
            assert feed.samples == first
            assert [(int(i), int(t)) for i, t in feed.next()] == [(first, first + 1)]
        assert feed.samples == 18


def test_the_next_step_is_made_while_this_one_runs():
    made = threading.Event()

    def make(samples):
        if samples == 1:
            made.set()
        return batch(samples)

    with Feed(make, samples=0, global_batch=1, device=CPU) as feed:
        feed.next()
        assert made.wait(timeout=30)  # nobody asked for it yet


def test_an_error_in_the_thread_comes_out_of_next_of_its_own_step():
    def make(samples):
        if samples == 2:
            raise OSError("the disk is gone")
        return batch(samples)

    with Feed(make, samples=0, global_batch=1, device=CPU) as feed:
        feed.next()
        feed.next()
        with pytest.raises(OSError, match="the disk is gone"):
            feed.next()


def test_closing_leaves_no_thread():
    before = threading.active_count()
    with Feed(batch, samples=0, global_batch=1, device=CPU) as feed:
        feed.next()
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_batches_are_copied_from_pinned_memory():
    with Feed(batch, samples=0, global_batch=1, device=torch.device("cuda", 0)) as feed:
        inputs, targets = feed.next()[0]
    assert inputs.is_cuda
    assert targets.tolist() == [1]
