"""Tasks: inputs in batches, and the loss and metrics of a model on them."""

from symmerge.errors import DataError
from symmerge.evaluation.tasks.base import Batch, Readout, Task, batched
from symmerge.evaluation.tasks.catalog import SELF_SOURCES, TASKS, make_task, task_of

__all__ = [
    "SELF_SOURCES",
    "TASKS",
    "Batch",
    "DataError",
    "Readout",
    "Task",
    "batched",
    "make_task",
    "task_of",
]
