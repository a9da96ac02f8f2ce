"""Tasks: inputs in batches, and the loss and metrics of a model on them."""

from symmerge.evaluation.tasks.base import Batch, Readout, Task
from symmerge.evaluation.tasks.catalog import SELF_SOURCES, TASKS, make_task, task_of

__all__ = ["SELF_SOURCES", "TASKS", "Batch", "Readout", "Task", "make_task", "task_of"]
