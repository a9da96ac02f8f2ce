"""Shapes and types of every symmerge function are checked in the tests: jaxtyping with beartype."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from jaxtyping import install_import_hook

install_import_hook("symmerge", "beartype.beartype")
torch.set_num_threads(1)  # the suite runs two workers on two cores
