"""The edges of a fabric: what it needs from transports, drives, owners elsewhere and the membership store.

Each port has a contract class under ``tests/contract``; an adapter is done when it inherits it and is green.
"""
