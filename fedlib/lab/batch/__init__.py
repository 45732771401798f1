"""Batches: hundreds of runs, on one machine or many, that can be stopped and taken up again."""

from fedlib.lab.batch.grid import BatchJob, read_grid
from fedlib.lab.batch.spread import run
from fedlib.lab.batch.store import collect, plot, status
from fedlib.lab.batch.units import Unit, plan

__all__ = ["BatchJob", "Unit", "collect", "plan", "plot", "read_grid", "run", "status"]
