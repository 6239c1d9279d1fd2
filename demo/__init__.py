"""Demo: a real transformer skips its prefill by loading the KV cache from Ostraca.

`paging` describes the cache as blocks; `model` builds the transformer and computes. Neither knows Ostraca:
the SDK takes plain lists of torch views.
"""
