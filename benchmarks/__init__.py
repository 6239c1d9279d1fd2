"""What backs the figures: every one a ratio of two things measured in turns, in one run, on one machine.

    python -m benchmarks              everything, some minutes; figures, JSON and plots in benchmarks/results
    python -m benchmarks d1 s9        these alone
    python -m benchmarks --short      whether everything runs; its figures mean nothing

One script per group of target rows. What they share with ``ostraca bench`` lies in ``ostraca.cli.bench``.
"""
