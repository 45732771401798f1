"""The command line as ``python -m fedlib``."""

from fedlib.lab.cli import main

main()
