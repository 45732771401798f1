"""Batches: hundreds of runs, on one machine or many, that can be stopped and taken up again."""

from fedlib.batch.grid import BatchJob, read
from fedlib.batch.spread import run
from fedlib.batch.store import collect, plot, status
from fedlib.batch.units import Unit, plan

__all__ = ["BatchJob", "Unit", "collect", "plan", "plot", "read", "run", "status"]
