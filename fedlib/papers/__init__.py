"""One folder a paper: its algorithm and its theory.

Beside the folders stands what several papers share: `fedavg`, the baseline of them all, and
`bound`, what a theorem returns.
"""
