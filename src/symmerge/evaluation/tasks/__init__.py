"""What a loss is: tasks, the data they read, and the numbers they give."""

from symmerge.errors import DataError
from symmerge.evaluation.tasks.base import Batch, Readout, Task, batched
from symmerge.evaluation.tasks.catalog import OWN, TASKS, make_task, task_of

__all__ = [
    "OWN",
    "TASKS",
    "Batch",
    "DataError",
    "Readout",
    "Task",
    "batched",
    "make_task",
    "task_of",
]
