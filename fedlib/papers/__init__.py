"""One folder a paper: its algorithm, its theory, and the studies that its chapter runs.

Beside the folders stands what several papers share: `fedavg`, the baseline of them all; `bound`,
what a theorem returns; `job`, what a study is given and returns; `trials`, what a device is tried
with.
"""
