"""What a loss is: tasks, the data they read, and the numbers they give."""

from symmerge.errors import DataError
from symmerge.tasks.base import Batch, Readout, Task, batched
from symmerge.tasks.make import OWN, TASKS, make_task, task_of

__all__ = ["OWN", "TASKS", "Batch", "DataError", "Readout", "Task", "batched", "make_task", "task_of"]
