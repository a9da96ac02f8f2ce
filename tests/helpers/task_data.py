"""Rows and text that tests of tasks and data share, and how they look at a task."""

import torch

from symmerge.verification.modules import full_module

ROWS = [
    (0, "a short one"),
    (2, "quite a bit longer, this one is"),
    (1, "b"),
    (0, "the last of them"),
    (1, "and 1 more"),
]
TEXT = "The quick brown fox jumps over the lazy dog. " * 40


def evaluate(task, model):
    return task.evaluate(full_module(model, torch.float32))


def only_batch(task):
    (batch,) = task.batches
    return batch
