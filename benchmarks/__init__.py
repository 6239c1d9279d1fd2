"""Measure all published figures: ratios of two quantities, measured in turns, in one run on one machine.

    python -m benchmarks              all scripts, some minutes; figures, JSON and plots in benchmarks/results
    python -m benchmarks get_from_dram import_time    single scripts
    python -m benchmarks --short      smoke test of all scripts; the figures mean nothing

``python -m benchmarks.peers`` measures Ostraca beside other stores.

The name of a script says the measured quantity; a script serves a group of target rows. Scripts share code
with ``ostraca bench``, in ``ostraca_cli.tools.bench``.
"""
