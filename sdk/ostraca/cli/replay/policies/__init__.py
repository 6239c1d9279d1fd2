"""Caches of the literature, to compare with: none of them runs in an agent.

Each file holds one. All count blocks of one size and take what they are given; what a flash cache has to pay
for that (segments, write amplification) they know nothing of.
"""
