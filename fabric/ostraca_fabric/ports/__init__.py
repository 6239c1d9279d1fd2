"""Ports of a fabric: transports, drives, peers, paths and the membership store.

Each port has a contract class under ``tests/contract``. An adapter is complete when a test class for the
adapter inherits the contract and passes.
"""
