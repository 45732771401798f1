"""Shared by all tests: one thread, so that small products are not slowed down by waiting."""

import torch

torch.set_num_threads(1)
